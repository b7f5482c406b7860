"""What a folder of versioned weights says of itself: which versions there are, and which one builds on which.

version_NNNNNN/
    manifest.json         what is below
    rank_R.safetensors    what rank R of the trainer wrote: its boxes of each parameter, or what changed in them

A version without a base is an anchor: all weights. Any other holds what changed since its base. A folder has its name
from the moment that it is complete; it never changes after that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlflow.errors import RunError, WeightsDamaged, WeightsOvertaken

FORMAT = 1
MANIFEST = "manifest.json"
UNFINISHED, REMOVED = ".part", ".old"
"""Suffixes of folders that are no versions: one is being written, or removed."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Stamp:
    """One version. Numbers come again when a trainer goes on from a checkpoint, with other weights; stamps do not."""

    version: int
    id: str


@dataclass(kw_only=True, slots=True, frozen=True)
class ParameterSpec:
    """How a parameter is written."""

    shape: tuple[int, ...]
    dtype: str
    """The engines', as torch's name without the prefix."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FileSum:
    """What a file must be, to be believed."""

    num_bytes: int
    crc32: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """One version on disk."""

    stamp: Stamp
    base: Stamp | None
    """What must have been applied before; None for an anchor."""
    files: tuple[FileSum, ...]
    """For each rank of the trainer."""
    parameters: Mapping[str, ParameterSpec]
    density: float
    """Changed elements of all, since the version written before; 1 where that is not known."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def write(self, path: Path) -> None:
        content = {"format": FORMAT, "num_ranks": len(self.files), "num_bytes": self.num_bytes, **asdict(self)}
        path.write_text(json.dumps(content), encoding="utf-8")


def version_folder(folder: Path, version: int, suffix: str = "") -> Path:
    return folder / f"version_{version:06d}{suffix}"


def rank_file(folder: Path, rank: int) -> Path:
    """In the folder of a version."""
    return folder / f"rank_{rank}.safetensors"


def versions_in(folder: Path, suffix: str = "") -> list[int]:
    """The complete versions, or those with a suffix, in ascending order."""
    pattern = re.compile(rf"version_(\d{{6,}}){re.escape(suffix)}")
    found = (pattern.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def read_manifest(folder: Path, version: int) -> Manifest:
    """Raises WeightsOvertaken when there is no such version (any more), WeightsDamaged when it cannot be read."""
    path = version_folder(folder, version) / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise RunError(
                f"{path} has format {content['format']}, but this rlflow reads format {FORMAT}; use one rlflow only"
            )
        manifest = Manifest(
            stamp=Stamp(**content["stamp"]),
            base=None if content["base"] is None else Stamp(**content["base"]),
            files=tuple(FileSum(**file) for file in content["files"]),
            parameters={
                name: ParameterSpec(shape=tuple(spec["shape"]), dtype=spec["dtype"])
                for name, spec in content["parameters"].items()
            },
            density=content["density"],
        )
    except FileNotFoundError as error:
        raise WeightsOvertaken(f"version {version} of the weights is not, or no longer, in {folder}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsDamaged(f"{path} is not the manifest that was written: {error!r}") from error
    if manifest.stamp.version != version:
        raise WeightsDamaged(f"{path} is the manifest of version {manifest.stamp.version}")
    return manifest


def chain(folder: Path, version: int, held: Stamp | None) -> list[Manifest]:
    """The fewest versions to apply, in order, to have `version`: from `held` if it leads there, else from the anchor.

    Empty when it is held already. Raises WeightsOvertaken when the version is not there (any more), WeightsDamaged
    when it is, but not all that it builds on.
    """
    target = read_manifest(folder, version)
    if target.stamp == held:
        return []
    found = [target]
    while (base := found[-1].base) is not None and base != held:
        found.append(_read_base(folder, found[-1], base, target))
    return found[::-1]


def _read_base(folder: Path, manifest: Manifest, base: Stamp, target: Manifest) -> Manifest:
    if base.version >= manifest.stamp.version:
        raise WeightsDamaged(f"version {manifest.stamp.version} in {folder} cannot build on version {base.version}")
    try:
        found = read_manifest(folder, base.version)
    except WeightsOvertaken as error:
        raise missing(folder, target, f"version {base.version}, which it builds on") from error
    if found.stamp != base:
        raise missing(folder, target, f"version {base.version} as it builds on it: there is another of that number")
    return found


def missing(folder: Path, target: Manifest, what: str) -> RunError:
    """The error for a missing part: versions are removed from the newest on, so nothing that is there lacks a base."""
    version = target.stamp.version
    if version_folder(folder, version).exists():
        return WeightsDamaged(f"version {version} of the weights is in {folder}, but not {what}")
    return WeightsOvertaken(f"version {version} of the weights was removed from {folder} while it was read")
