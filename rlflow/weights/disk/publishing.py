"""From the files that ranks wrote to a version that readers find; and what is kept of the versions.

version_NNNNNN.part/       being written
    rank_R.safetensors
    rank_R.json            what rank R says of its file; gone when the version is complete
version_NNNNNN.old/        being removed
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from rlflow.errors import RunError
from rlflow.runtime.disk import disk_errors, sync
from rlflow.weights.disk.manifest import (
    MANIFEST,
    REMOVED,
    UNFINISHED,
    FileSum,
    Manifest,
    ParameterSpec,
    Stamp,
    rank_file,
    version_folder,
    versions_in,
)
from rlflow.weights.disk.part_files import write_part
from rlflow.weights.shape.boxes import Index, num_elements

NamedBox = tuple[str, Index, Index]
"""The name of a parameter, and where a box of it starts and stops."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Report:
    """What a rank says of its file."""

    base: int | None
    file: FileSum
    boxes: Sequence[NamedBox]
    """All that are this rank's, also where nothing in them changed."""


def write_rank(
    folder: Path, version: int, rank: int, base: int | None, boxes: Iterable[NamedBox], tensors: Mapping[str, Tensor]
) -> None:
    """Write the file of one rank, so that it lasts. Raises RunError when the disk is full, and leaves nothing of it."""
    part = version_folder(folder, version, UNFINISHED)
    path = rank_file(part, rank)
    with disk_errors("the weights", folder):
        part.mkdir(exist_ok=True)
        try:
            report = _Report(base=base, file=write_part(path, tensors), boxes=tuple(boxes))
            path.with_suffix(".json").write_text(json.dumps(asdict(report)), encoding="utf-8")
        except (OSError, SafetensorError):
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
            raise


def complete_version(
    folder: Path,
    stamp: Stamp,
    base: Stamp | None,
    parameters: Mapping[str, ParameterSpec],
    num_ranks: int,
    density: float,
) -> Manifest:
    """Give the folder that all ranks have written to the name that readers look for.

    Raises RunError when the ranks' files do not belong together or do not make up all parameters, or the disk is full.
    """
    part = version_folder(folder, stamp.version, UNFINISHED)
    with disk_errors("the weights", folder):
        reports = [_read_report(part, rank) for rank in range(num_ranks)]
        _check(stamp.version, base, reports, parameters)
        files = tuple(report.file for report in reports)
        manifest = Manifest(stamp=stamp, base=base, files=files, parameters=dict(parameters), density=density)
        manifest.write(part / MANIFEST)
        for rank in range(num_ranks):
            rank_file(part, rank).with_suffix(".json").unlink()
        sync(part / MANIFEST)
        sync(part)
        if version_folder(folder, stamp.version).exists():  # of a run that had gone on further than its checkpoint
            _remove(folder, stamp.version)
        part.rename(version_folder(folder, stamp.version))
        sync(folder)
    return manifest


def keep_only(folder: Path, kept: Sequence[Stamp]) -> None:
    """Remove all other versions, the newest first, and what failed before the last of `kept`."""
    numbers = {stamp.version for stamp in kept}
    for version in reversed(versions_in(folder)):
        if version not in numbers:
            _remove(folder, version)
    for version in versions_in(folder, UNFINISHED):
        if version < kept[-1].version:  # a rank may be writing the next already
            shutil.rmtree(version_folder(folder, version, UNFINISHED))


def remove_unfinished(folder: Path) -> None:
    """Remove what was being written or removed when its process ended."""
    for suffix in (UNFINISHED, REMOVED):
        for version in versions_in(folder, suffix):
            shutil.rmtree(version_folder(folder, version, suffix))


def _remove(folder: Path, version: int) -> None:
    """Nobody finds half of it meanwhile; who has its files open keeps them."""
    version_folder(folder, version).rename(version_folder(folder, version, REMOVED))
    for left in versions_in(folder, REMOVED):
        # What a reader has open may stay in its folder for as long, on a network's disk; then it goes with a later one.
        shutil.rmtree(version_folder(folder, left, REMOVED), ignore_errors=True)


def _read_report(part: Path, rank: int) -> _Report:
    try:
        content = json.loads(rank_file(part, rank).with_suffix(".json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"rank {rank} of the trainer has not written its part of the weights to {part}") from error
    boxes = tuple((name, tuple(start), tuple(stop)) for name, start, stop in content["boxes"])
    return _Report(base=content["base"], file=FileSum(**content["file"]), boxes=boxes)


def _check(
    version: int, base: Stamp | None, reports: Sequence[_Report], parameters: Mapping[str, ParameterSpec]
) -> None:
    bases = {report.base for report in reports}
    if bases != {None if base is None else base.version}:
        raise RunError(f"the ranks' parts of version {version} build on different versions: {bases}")
    boxes = [box for report in reports for box in report.boxes]
    written: Counter[str] = Counter()
    for name, start, stop in boxes:
        written[name] += num_elements(start, stop)
    for (name, start, stop), count in Counter(boxes).items():
        if count > 1:
            raise RunError(f"{count} ranks wrote the elements {start} to {stop} of {name!r}; one of them must")
    for name, spec in parameters.items():
        if written[name] != math.prod(spec.shape):
            raise RunError(
                f"parameter {name!r} has {math.prod(spec.shape)} elements, but the ranks wrote {written[name]} of it "
                f"to version {version}; one rank must write each"
            )
