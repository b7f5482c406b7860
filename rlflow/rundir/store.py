"""Checkpoints on disk: written beside, then renamed into place. The last K and the best are kept, and checked before
they are used.

checkpoints/step_N/
    trainer/       the trainer's shards (its own format)
    ready          payloads of the groups that waited for the trainer
    ledger.db      a copy of the ledger
    state.json     step, version, sampler, ready groups; size and SHA-256 of every other file; a SHA-256 of all this
checkpoints/step_N.damaged/    set aside, because a file of it was not what had been written
checkpoints/best               a relative link to the step_N whose evaluation was the best so far

A file is digested by its writer while it is written. Before a checkpoint is used, all of it is read once, in threads:
a disk that gives 2 GB a second needs seven minutes for the 840 GB of a model with 70 billion parameters.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlflow.errors import CheckpointDamaged, ConfigError, RunError
from rlflow.groups.sampler import SamplerState
from rlflow.runtime.disk import sync
from rlflow.types import ReadyGroup

FORMAT = 6
BEST = "best"
_STEP_FOLDER = re.compile(r"step_(\d+)")
_NAMED = 3
"""Damaged files that a message names."""


@dataclass(kw_only=True, slots=True)
class RunState:
    """What the driver itself must remember."""

    step: int
    """Optimiser steps done, skipped updates included."""
    version: int
    """Updates applied: the version of the weights in this checkpoint."""
    sampler: SamplerState
    ready: list[ReadyGroup]
    """Without handles after a load: `payloads` and `frozen` are empty."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Found:
    """The newest whole checkpoint."""

    folder: Path
    state: RunState
    alarms: tuple[str, ...]
    """What a person must know: one for each newer checkpoint, which was damaged."""


_STATE = TypeAdapter(RunState)
_OF_STEP = {"payloads", "frozen", "values", "pictures", "log_ratios"}
"""Handles, and what a step computes anew."""


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were completed and not set aside, in order."""
        if not self.folder.is_dir():
            return []
        found = (_STEP_FOLDER.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def best(self) -> int | None:
        """The step of the checkpoint that is named the best, if there is one."""
        match = _STEP_FOLDER.fullmatch((self.folder / BEST).resolve().name)
        return int(match[1]) if match and self.path(int(match[1])).is_dir() else None

    def name_best(self, step: int) -> None:
        """Let `best` mean this checkpoint, which stays; the one before stays only if it is among the last."""
        fresh = self.folder / f".{BEST}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.path(step).name)
        fresh.replace(self.folder / BEST)
        sync(self.folder)
        self._remove_old()

    def chosen(self, run: Path, step: str | None) -> Path:
        """The checkpoint that a person asks for: a step, `best`, or None for the last one. Raises ConfigError.

        `run` is the folder that the person gave.
        """
        steps, best = self.steps(), self.best()
        if not steps:
            raise ConfigError(f"{run} has no complete checkpoint; give the directory of a run that has saved one")
        if step == BEST and best is None:
            raise ConfigError(f"{run} has no best checkpoint, because nothing was evaluated (eval.every); give a step")
        wanted = {None: steps[-1], BEST: best}.get(step) or next((each for each in steps if str(each) == step), None)
        if wanted is None:
            raise ConfigError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
        return self.path(wanted)

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into. Half-written folders of a process that died are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob("*.partial"):
            shutil.rmtree(left_over)
        partial = self.folder / f"step_{step}.partial"
        partial.mkdir()
        return partial

    def newest_whole(self) -> Found | None:
        """The newest checkpoint of which every byte is what was written; None when there is none at all.

        Damaged ones that are newer are renamed step_N.damaged, so that no later start meets them, in place of those
        that were set aside before. Raises RunError, and renames nothing, when none is whole.
        """
        damaged: list[CheckpointDamaged] = []
        for step in reversed(self.steps()):
            try:
                state = read_state(self.path(step))
            except CheckpointDamaged as error:
                damaged.append(error)
                continue
            if damaged:
                for before in self.folder.glob("step_*.damaged"):
                    shutil.rmtree(before)
            return Found(
                folder=self.path(step), state=state, alarms=tuple(_set_aside(each, state.step) for each in damaged)
            )
        if damaged:
            raise RunError(
                f"no checkpoint in {self.folder} is whole: "
                + "; ".join(f"{each.folder.name}: {each.damage}" for each in damaged)
                + "; bring the files back from a copy, or begin anew with run.on_exists=fresh or another run.dir"
            )
        return None

    def commit(
        self, partial: Path, state: dict[str, Any], digests: Mapping[str, str], *, held: int | None = None
    ) -> Path:
        """Add `state` (from `state_to_json`), sync everything, rename, and remove the oldest but for step `held`.

        `digests` has the SHA-256 of each file by its path in the folder.
        """
        for half_written in partial.rglob("*.partial"):
            half_written.unlink()  # by a process that died; another one wrote it in its place
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
        assert sizes.keys() == digests.keys(), f"{sizes.keys() ^ digests.keys()}: every file has a digest"
        files = {name: {"bytes": sizes[name], "sha256": digests[name]} for name in sorted(sizes)}
        content = {"format": FORMAT, "state": state, "files": files}
        (partial / "state.json").write_text(json.dumps({**content, "sha256": _digest_of(content)}, indent=1))
        for name in (*files, "state.json", "."):
            sync(partial / name)
        final = partial.with_suffix("")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync(self.folder)
        self._remove_old(held)
        return final

    def _remove_old(self, held: int | None = None) -> None:
        kept = (self.best(), held)
        for step in self.steps()[: -self._keep]:
            if step not in kept:
                shutil.rmtree(self.path(step))


def read_state(folder: Path) -> RunState:
    """The driver's state in a checkpoint of which every byte has been checked.

    Raises CheckpointDamaged when a file is missing, cannot be read or is not what was written, and RunError for the
    format of another rlflow.
    """
    try:
        content = json.loads((folder / "state.json").read_text())
    except OSError as error:
        raise CheckpointDamaged(folder, f"state.json cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointDamaged(folder, "state.json is not what was written") from error
    before = isinstance(content, dict) and "sizes" in content  # what format 4 had in place of digests
    if not before and (not isinstance(content, dict) or content.pop("sha256", None) != _digest_of(content)):
        raise CheckpointDamaged(folder, "state.json is not what was written")
    if before or content["format"] != FORMAT:
        raise RunError(
            f"checkpoint {folder} has format {4 if before else content['format']}, but this rlflow reads format "
            f"{FORMAT}; use the rlflow that wrote it"
        )
    if damage := _damage(folder, content["files"]):
        more = f" and {len(damage) - _NAMED} more files" if len(damage) > _NAMED else ""
        raise CheckpointDamaged(folder, ", ".join(damage[:_NAMED]) + more)
    ready = [{**group, "payloads": []} for group in content["state"]["ready"]]
    return _STATE.validate_python({**content["state"], "ready": ready})


def verify(path: Path) -> dict[str, str | None]:
    """What is wrong with each checkpoint of a run, by its folder's name, or with the one whose folder this is.

    None stands for a whole one.
    """
    found: dict[str, str | None] = {}
    path = path.resolve()
    store = CheckpointStore(path / "checkpoints", keep=1)
    for folder in [path] if path.parent.name == "checkpoints" else [store.path(step) for step in store.steps()]:
        try:
            read_state(folder)
            found[folder.name] = None
        except RunError as error:
            if folder.exists():  # a run that goes on has not removed it meanwhile
                found[folder.name] = error.damage if isinstance(error, CheckpointDamaged) else str(error)
    return found


def _damage(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with each file that is not what was written. All of them are read only if all sizes are right."""
    wrong: list[str] = []
    for name, written in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
            continue
        if size != written["bytes"]:
            wrong.append(f"{name} should have {written['bytes']} bytes, found {size}")
    if wrong:
        return wrong
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(partial(_differs, folder), files, (written["sha256"] for written in files.values()))
        return [each for each in found if each]


def _differs(folder: Path, name: str, digest: str) -> str | None:
    try:
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if found == digest else f"{name} is not what was written"


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _set_aside(error: CheckpointDamaged, whole_step: int) -> str:
    """Rename a damaged checkpoint; the alarm that says so."""
    aside = error.folder.with_name(f"{error.folder.name}.damaged")
    error.folder.rename(aside)
    again = int(error.folder.name.removeprefix("step_")) - whole_step
    return (
        f"checkpoint {error.folder.name} is damaged ({error.damage}) and is now {aside.name}; step_{whole_step} is "
        f"whole, so that {again} steps are done again"
    )


def state_to_json(state: RunState) -> dict[str, Any]:
    """The state as plain values, which share nothing with it and may be written later."""
    return _STATE.dump_python(state, mode="json", exclude={"ready": {"__all__": _OF_STEP}}, warnings=False)
