"""Checkpoints on disk, made without a run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlflow.rundir.store import CheckpointStore, RunState, state_to_json


def digests_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file by its path in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def commit(store: CheckpointStore, partial: Path, state: RunState) -> Path:
    return store.commit(partial, state_to_json(state), digests_of(partial))
