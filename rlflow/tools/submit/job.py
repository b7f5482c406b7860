"""What a cluster is told of a run, whichever kind of cluster it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from rlflow.errors import RunError

CLAIM = PurePosixPath("/rlflow")
"""Where all pods see cluster.kubernetes.claim; also where they work, so that `reward.py:score` is a file on it."""
RUNS = CLAIM / "runs"


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    name: str
    """Of at most 45 lower-case letters, digits and hyphens, the first one a letter: RECIPE-TIME, for example."""
    run_dir: str
    """Absolute, on a file system that all machines of the cluster see. The same one makes a second job go on with the
    run of the first."""
    words: tuple[str, ...]
    """The command that the driver is started with: rlflow train recipe=... run.dir=..."""


class MaybeStarted(RunError):
    """A job was asked for, and there was no answer that says whether there is one now."""
