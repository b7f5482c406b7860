"""Everything that can be found out about the machine that this process is on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rlflow.config import Config
from rlflow.doctor.facts import Seen
from rlflow.doctor.machine import Stopwatch, probe_machine
from rlflow.doctor.trials import try_all


def look(
    config: Config, run_dir: Path, environment: Mapping[str, str], *, is_run: bool, computes: bool, with_ray: bool
) -> Seen:
    """`is_run`: whether the settings are those of a run; `computes`: whether engines or trainers may be here;
    `with_ray`: whether to start Ray, or join it. `environment` is what the processes of a run start with."""
    stopwatch = Stopwatch()
    tried = asyncio.run(try_all(config, is_run=is_run, computes=computes, with_ray=with_ray))
    return Seen(facts=probe_machine(run_dir, stopwatch, environment), tried=tried)
