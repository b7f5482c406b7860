"""A folder of versioned weights: which versions there are, which one builds on which, and the ranks' files.

version_NNNNNN/
    manifest.json         what is below
    rank_R.safetensors    what rank R of the trainer wrote: its boxes of each parameter, or what changed in them

A version without a base is an anchor: all weights. Any other holds what changed since its base. A folder has its name
from the moment that it is complete; it never changes after that.

A rank's file has the safetensors format, and is believed only when it is what was written. The checksum is zlib's
CRC-32: it needs no further package, runs at the speed of a disk, and finds what goes wrong with files. It does not
protect against intent.
"""

import json
import mmap
import os
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from rlflow.errors import RunError, WeightsDamaged, WeightsOvertaken
from rlflow.weights.shape.boxes import Index

FORMAT = 1
MANIFEST = "manifest.json"
UNFINISHED, REMOVED = ".part", ".old"
"""Suffixes of folders that are no versions: one is being written, or removed."""
POSITIONS, VALUES = "/positions", "/values"
"""After the name of a parameter: where it changed, flat [n], and to what [n]."""
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I32": torch.int32,
    "I64": torch.int64,
}


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
    """The engines' dtype: torch's name without the prefix."""


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
    """One for each rank of the trainer."""
    parameters: dict[str, ParameterSpec]
    density: float
    """The share of the elements that changed since the version written before; 1 if that is not known."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def write(self, path: Path) -> None:
        content = {"format": FORMAT, "num_ranks": len(self.files), "num_bytes": self.num_bytes}
        path.write_text(json.dumps(content | _MANIFEST.dump_python(self, mode="json")), encoding="utf-8")


_MANIFEST = TypeAdapter(Manifest)


def version_folder(folder: Path, version: int, suffix: str = "") -> Path:
    return folder / f"version_{version:06d}{suffix}"


def rank_file(folder: Path, rank: int) -> Path:
    """The file of one rank of the trainer, in the folder of a version."""
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
        manifest = _MANIFEST.validate_python(content)
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
        above = found[-1].stamp.version
        if base.version >= above:
            raise WeightsDamaged(f"version {above} in {folder} cannot build on version {base.version}")
        try:
            found.append(read_manifest(folder, base.version))
        except WeightsOvertaken as error:
            raise missing(folder, target, f"version {base.version}, which it builds on") from error
        if found[-1].stamp != base:
            what = f"version {base.version} as it builds on it: there is another of that number"
            raise missing(folder, target, what)
    return found[::-1]


def missing(folder: Path, target: Manifest, what: str) -> RunError:
    """The error for a missing part: versions are removed from the newest on, so that none on disk lacks a base."""
    version = target.stamp.version
    if version_folder(folder, version).exists():
        return WeightsDamaged(f"version {version} of the weights is in {folder}, but not {what}")
    return WeightsOvertaken(f"version {version} of the weights was removed from {folder} while it was read")


def box_key(name: str, start: Index, stop: Index) -> str:
    """How a box of a parameter is named, such as "lm_head.weight[0:8,0:4]"."""
    return f"{name}[{','.join(f'{first}:{last}' for first, last in zip(start, stop, strict=True))}]"


def parse_box_key(key: str) -> tuple[str, Index]:
    """The parameter, and where the box begins."""
    name, _, box = key.removesuffix("]").rpartition("[")
    return name, tuple(int(each.partition(":")[0]) for each in box.split(",") if each)


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> FileSum:
    """Write contiguous tensors, so that they last."""
    save_file(dict(tensors), path)
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        with mmap.mmap(file, 0, prot=mmap.PROT_READ) as mapping:
            return FileSum(num_bytes=len(mapping), crc32=zlib.crc32(mapping))
    finally:
        os.close(file)


class PartFile:
    """A file, mapped and verified: what is read is what was verified, also when the file is removed or replaced."""

    def __init__(self, path: Path, expected: FileSum) -> None:
        """Raises FileNotFoundError, or WeightsDamaged when it is not what was written."""
        file = os.open(path, os.O_RDONLY)
        try:
            num_bytes = os.fstat(file).st_size
            if num_bytes != expected.num_bytes:
                raise WeightsDamaged(f"{path} should have {expected.num_bytes} bytes, found {num_bytes}")
            mapping = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        crc32 = zlib.crc32(mapping)
        if crc32 != expected.crc32:
            raise WeightsDamaged(f"{path} should have the CRC-32 {expected.crc32:08x}, found {crc32:08x}")
        header_end = 8 + int.from_bytes(mapping[:8], "little")
        header: dict[str, Any] = json.loads(mapping[8:header_end])
        header.pop("__metadata__", None)
        self._header = header
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; nothing here writes to it.
            warnings.simplefilter("ignore", UserWarning)
            self._data = torch.frombuffer(mapping, dtype=torch.uint8)[header_end:]

    @property
    def names(self) -> list[str]:
        return list(self._header)

    def tensor(self, name: str) -> Tensor:
        """A view of the file, not to be written to."""
        entry = self._header[name]
        first, last = entry["data_offsets"]
        return self._data[first:last].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
