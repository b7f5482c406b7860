"""Actors that are killed when they hang, so that a hung process takes the way of a dead one, and leaves as little."""

from pathlib import Path
from typing import Any

import ray

from rlflow.config import Config
from rlflow.processes.pulse import start_pulse
from rlflow.rundir import killed
from rlflow.runtime import scratch


def watched(process: type, config: Config, *, leads_group: bool = False, **options: Any) -> Any:
    """`ray.remote` of this class, with these options of Ray; the first argument is what messages call the actor.

    With `leads_group` all that it starts is killed when it ends.
    """
    assert config.run.dir is not None, "a run has a directory before it has actors"
    log, heartbeat_s = Path(config.run.dir) / killed.NAME, config.deadlines.heartbeat_s

    def begin(self: Any, name: str, *arguments: Any, **named: Any) -> None:
        scratch.enter(name.replace(" ", "-"))
        start_pulse(name, heartbeat_s, log, leads_group=leads_group)
        process.__init__(self, *arguments, **named)

    actor: Any = type(process.__name__, (process,), {"__init__": begin, "__module__": process.__module__})
    return ray.remote(**options)(actor) if options else ray.remote(actor)
