"""Checkpoints on disk, made without a run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlflow.groups.sampler import SamplerState
from rlflow.rollout.payloads import load_payloads
from rlflow.rundir.store import CheckpointStore, RunState, state_to_json
from rlflow.types import EpisodePayload
from rlflow.workers.trainer.packed import TrainerBackend


def digests_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file by its path in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def load_episodes(path: Path) -> list[EpisodePayload]:
    """The payloads of a file without images."""
    loaded = load_payloads(path)
    episodes = [each for each in loaded if isinstance(each, EpisodePayload)]
    assert len(episodes) == len(loaded)
    return episodes


def commit(store: CheckpointStore, partial: Path, state: RunState) -> Path:
    return store.commit(partial, state_to_json(state), digests_of(partial))


def write_run(run: Path, model: str, trainer: TrainerBackend) -> None:
    """A run of one step whose weights are those of `trainer`."""
    store = CheckpointStore(run / "checkpoints", keep=1)
    partial = store.begin(1)
    trainer.snapshot().write(partial / "trainer")
    sampler = SamplerState(kind="uniform", tasks="", rows="", put_back=[], curriculum={})
    commit(store, partial, RunState(step=1, version=1, sampler=sampler, ready=[]))
    (run / "config.yaml").write_text(f"run:\n  steps: 2\nmodel:\n  path: {model}\n")
