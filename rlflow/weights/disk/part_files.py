"""Files of tensors in the safetensors format that are believed only when they are what was written.

The checksum is zlib's CRC-32: it needs no further package, runs at the speed of a disk, and finds what goes wrong with
files; it is no protection against anybody who means harm.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlflow.errors import WeightsDamaged
from rlflow.weights.disk.manifest import FileSum
from rlflow.weights.shape.boxes import Index

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I32": torch.int32,
    "I64": torch.int64,
}


POSITIONS, VALUES = "/positions", "/values"
"""After the name of a parameter: where it changed, flat [n], and to what [n]."""


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
