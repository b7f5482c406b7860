"""`rlflow doctor [key=value ...] [--cluster] [--json]`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rlflow.config import Config
from rlflow.doctor.check_machine import check_machine
from rlflow.doctor.check_run import check_address, check_run
from rlflow.doctor.check_software import check_software
from rlflow.doctor.facts import MachineFacts, ModelReport, Tried
from rlflow.doctor.findings import Finding
from rlflow.doctor.machine import Stopwatch, probe_machine
from rlflow.doctor.needs import needs_of
from rlflow.doctor.render import as_json, as_text, has_error
from rlflow.doctor.trials import try_all

HERE = "this machine"


def names_run(words: Sequence[str]) -> bool:
    """Whether the arguments say which run the machine is for."""
    return any(word.startswith(("recipe=", "model.", "model=")) for word in words)


def doctor(config: Config, *, is_run: bool, cluster: bool, json_wanted: bool) -> int:
    """Print what was found; the exit code is 1 when something of it is an error. Raises ConfigError."""
    facts, tried = look(config, is_run=is_run, computes=True, with_ray=True)
    places = {HERE: judge(config, facts, tried, is_run=is_run, computes=True)}
    print(json.dumps(as_json(places)) if json_wanted else as_text(places))
    return int(has_error(places))


def look(config: Config, *, is_run: bool, computes: bool, with_ray: bool) -> tuple[MachineFacts, Tried]:
    """Everything that can be found out about this machine."""
    stopwatch = Stopwatch()
    tried = asyncio.run(try_all(config, is_run=is_run, computes=computes, with_ray=with_ray))
    return probe_machine(run_folder(config), stopwatch, os.environ), tried


def judge(config: Config, facts: MachineFacts, tried: Tried, *, is_run: bool, computes: bool) -> list[Finding]:
    """Software, machine and run. Pure."""
    model = tried.model if isinstance(tried.model, ModelReport) else None
    needs = needs_of(config, model, is_run=is_run)
    findings = [*check_software(facts, tried, needs), *check_machine(facts, needs, computes=computes)]
    findings += check_address(config, facts.environment)
    return [*findings, *check_run(config, facts, tried)] if is_run else findings


def run_folder(config: Config) -> Path:
    """Where the run would write."""
    return Path(config.run.dir or f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
