"""RayJobs as rlflow submit renders them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from composed import compose_recipe
from kubernetes_schemas import Tree

from rlflow.config import Config
from rlflow.settings.checks import check
from rlflow.tools.submit.command_words import Job, make_job
from rlflow.tools.submit.kuberay import render


def rendered(*words: str, name: str = "grpo-20260131-120000") -> Tree:
    """As `rlflow submit WORDS` does it."""
    config = checked(*words)
    return render(config, job(config, *words, name=name))


@cache
def checked(*words: str) -> Config:
    config = compose_recipe(*words)
    check(config)
    return config


def job(config: Config, *words: str, name: str = "grpo-20260131-120000") -> Job:
    return replace(make_job(config, words, "20260131"), name=name)
