"""Tries in processes of their own what may crash, hang or take long: libraries, Ray, the sandbox."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.config import Config
from rlflow.errors import ConfigError, DeadlineError, SandboxError
from rlflow.processes.child import CLUSTER_KEYS, Child
from rlflow.processes.sandbox.run import describe
from rlflow.rundir.directory import plain
from rlflow.runtime.deadlines import within
from rlflow.tools.doctor.answering import Question, topics_of
from rlflow.tools.doctor.facts import (
    Fine,
    ModelReport,
    ModelSize,
    Problem,
    RayFacts,
    Seen,
    TorchFacts,
    Tried,
    VllmFacts,
)
from rlflow.tools.doctor.machine import Stopwatch, probe_machine

TRIAL_TIMEOUT_S = 180.0
"""For each process. Importing vLLM takes up to a minute from a cold network disk."""
_MODULE = "rlflow.tools.doctor.libraries"
_TYPES = {"torch": TorchFacts, "vllm": VllmFacts, "size": ModelSize, "model": ModelReport, "ray": RayFacts}


def look(
    config: Config, run_dir: Path, environment: Mapping[str, str], *, is_run: bool, computes: bool, with_ray: bool
) -> Seen:
    """`is_run`: whether the settings are those of a run; `computes`: whether engines or trainers may be here;
    `with_ray`: whether to start Ray, or join it. `environment` is what the processes of a run start with."""
    stopwatch = Stopwatch()
    tried = asyncio.run(try_all(config, is_run=is_run, computes=computes, with_ray=with_ray))
    return Seen(facts=probe_machine(run_dir, stopwatch, environment), tried=tried)


async def try_all(config: Config, *, is_run: bool, computes: bool, with_ray: bool) -> Tried:
    """All that there is to try, at the same time."""
    topics = topics_of(config, is_run=is_run, computes=computes)
    keys = {name: os.environ[name] for name in CLUSTER_KEYS if name in os.environ}
    libraries = Question(config=plain(config), is_run=is_run, topics=topics, environment={})
    only_ray = Question(config=plain(config), is_run=is_run, topics=["ray"] if with_ray else [], environment=keys)
    of_libraries, of_ray, sandbox = await asyncio.gather(
        ask(_MODULE, "the process that tries libraries", libraries),
        ask(_MODULE, "the process that tries Ray", only_ray),
        _sandbox(),
    )
    return Tried(**of_libraries, **of_ray, sandbox=sandbox)


async def ask(module: str, name: str, question: Question) -> dict[str, Any]:
    """Topic -> answer; where the process ended before, that is the answer to the first topic that has none, and the
    others were not tried."""
    answers: dict[str, Any] = {}
    if not question["topics"]:
        return answers
    child = Child(module, name)
    problem = ""
    try:
        await child.connect()
        child.send(json.dumps(question).encode())
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            for _ in question["topics"]:
                topic, answer = json.loads(await child.receive())
                answers[topic] = _read(topic, answer)
    except (EOFError, ConnectionError):
        problem = await child.describe_death()
    except TimeoutError:
        problem = f"{name} did not answer within {TRIAL_TIMEOUT_S:g} s"
    finally:
        child.kill()
        await child.wait_until_ended()
    return answers | _unanswered([topic for topic in question["topics"] if topic not in answers], problem)


def _unanswered(topics: list[str], problem: str) -> dict[str, Problem]:
    """The process worked on the first of them when it ended."""
    untried = Problem(text="not tried: the process had ended before", is_untried=True)
    return {topic: untried if number else Problem(text=problem) for number, topic in enumerate(topics)}


def _read(topic: str, answer: dict[str, Any] | None) -> Any:
    if answer is None:
        return Fine()
    if "problem" in answer:
        return Problem(**answer["problem"])
    found = answer["found"]
    return _TYPES[topic](**{name: _tuples(value) for name, value in found.items()})


def _tuples(value: Any) -> Any:
    """JSON has lists only."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


async def _sandbox() -> str | Problem:
    try:
        return (await within("the trial of the sandbox", TRIAL_TIMEOUT_S, describe())).removeprefix("sandbox: ")
    except ConfigError as error:
        return Problem(text=str(error), is_setting=True)
    except (SandboxError, DeadlineError) as error:
        return Problem(text=str(error))
