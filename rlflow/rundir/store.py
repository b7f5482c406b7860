"""Checkpoints on disk: written beside, checked, then renamed into place. The last K are kept.

checkpoints/step_N/
    trainer/       the trainer's shards (its own format)
    ready/         payloads of the groups that waited for the trainer
    ledger.db      a copy of the ledger
    state.json     step, version, sampler, ready groups, and the size of every other file
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlflow.errors import RunError
from rlflow.groups.sampler import SamplerState
from rlflow.runtime.disk import sync
from rlflow.types import ReadyGroup

_STEP_FOLDER = re.compile(r"step_(\d+)")


@dataclass(kw_only=True, slots=True)
class RunState:
    """What the driver itself must remember."""

    step: int
    """Optimiser steps done, skipped updates included."""
    version: int
    """Updates applied: the version of the weights in this checkpoint."""
    sampler: SamplerState
    ready: list[ReadyGroup]
    """Without handles after a load: `payloads` is empty and `references` is None."""


_STATE = TypeAdapter(RunState)
_HANDLES = {"payloads", "references", "values"}


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        if not self.folder.is_dir():
            return []
        found = (_STEP_FOLDER.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def latest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into. Half-written folders of a process that died are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob("*.partial"):
            shutil.rmtree(left_over)
        partial = self.folder / f"step_{step}.partial"
        partial.mkdir()
        return partial

    def commit(self, partial: Path, state: dict[str, Any]) -> Path:
        """Add `state` (from `state_to_json`) and the files' sizes, sync everything, rename, and remove the oldest."""
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
        (partial / "state.json").write_text(json.dumps({"state": state, "sizes": sizes}, indent=1))
        for path in (*files, partial / "state.json", partial):
            sync(path)
        final = partial.with_suffix("")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync(self.folder)
        for step in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(step))
        return final


def read_state(folder: Path) -> RunState:
    """The driver's state in a checkpoint. Raises RunError when a file is missing or has another size than written."""
    try:
        content = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"checkpoint {folder} cannot be read: {error}; remove it to resume from the one before"
        ) from error
    for name, size in content["sizes"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise RunError(
                f"checkpoint {folder} is damaged: {name} should have {size} bytes, found {found}; "
                "remove the folder to resume from the one before"
            )
    ready = [{**group, "payloads": [], "references": None} for group in content["state"]["ready"]]
    return _STATE.validate_python({**content["state"], "ready": ready})


def state_to_json(state: RunState) -> dict[str, Any]:
    """The state as plain values, which share nothing with it and may be written later."""
    return _STATE.dump_python(state, mode="json", exclude={"ready": {"__all__": _HANDLES}}, warnings=False)
