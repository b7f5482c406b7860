"""The shared-memory transport's file: as large as the model, written by the trainer and mapped by the engines.

named tensors -> Arena.stage -> StagedWeights (metadata) -> ArenaView: engines read the bytes in place

The file is persistent: rewriting pages that are already mapped costs a tenth of filling a fresh file. Its first bytes
hold the version that it carries, or `BEING_WRITTEN`, so that a reader notices when it is overtaken by a writer.
"""

import errno
import math
import mmap
import os
import secrets
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from rlflow.errors import ConfigError
from rlflow.roles import StagedWeights, TensorSlot
from rlflow.runtime import scratch
from rlflow.weights.source import Specs

ALIGNMENT = 64
"""Bytes; every tensor starts on a cache line."""
HEADER_BYTES = ALIGNMENT
"""Before the first tensor; holds the version as an int64."""
BEING_WRITTEN = -1
BUCKET_BYTES = 128 * 2**20
"""What an engine lays out between two of its steps: smaller ones hold a step up for less, and take more steps in all. A
large model's embedding alone is as large."""


class Arena:
    """Owns one arena file from construction to `close` (or the end of the process).

    Nothing may load from the arena while `stage` runs: the engines read these very bytes.
    """

    def __init__(
        self,
        specs: Specs,
        folder: Path = scratch.SHARED,
        bucket_bytes: int = BUCKET_BYTES,
        label: str = "",
    ) -> None:
        """Reserve room for all tensors. Others find the file by its `label`; without one, by what `stage` returns.

        Raises ConfigError when `folder` has too little room, ValueError for an empty or repeated name.
        """
        self.slots, self.num_bytes = lay_out(specs)
        self.buckets = cut_buckets(self.slots, bucket_bytes)
        # Whose it is, so that it goes with the run's other temporary files.
        self.path = folder / f"{scratch.folder().name}-{label or secrets.token_hex(8)}"
        file = _create_file(self.path, self.num_bytes)
        self._close = weakref.finalize(self, _close_file, self.path, file)
        self._bytes: torch.Tensor | None = torch.frombuffer(mmap.mmap(file, self.num_bytes), dtype=torch.uint8)
        self._slot_of = {slot.name: slot for slot in self.slots}

    def stage(self, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Copy one complete version in, casting each tensor to the dtype of its slot.

        Raises ValueError when a name is unknown, comes twice or is missing, or a shape differs; then the arena holds no
        version until the next complete call.
        """
        self.begin(version)
        memory = self.memory
        missing = dict(self._slot_of)
        for name, tensor in named:
            slot = missing.pop(name, None)
            if slot is None:
                problem = "came twice" if name in self._slot_of else "has no slot"
                raise ValueError(f"tensor {name!r} {problem}; send each of the {len(self.slots)} tensors exactly once")
            if tuple(tensor.shape) != slot.shape:
                raise ValueError(f"tensor {name!r} must have shape {slot.shape}; got {tuple(tensor.shape)}")
            tensor_at(memory, slot).copy_(tensor.detach())
        if missing:
            first = next(iter(missing))
            raise ValueError(f"{len(missing)} of {len(self.slots)} tensors were not sent, such as {first!r}")
        return self.finish(version)

    def begin(self, version: int) -> None:
        """Say that the arena is being written: it holds no version until `finish`."""
        if version < 0:
            raise ValueError(f"version must not be negative; got {version}")
        self._header().fill_(BEING_WRITTEN)

    def finish(self, version: int) -> StagedWeights:
        """Say that all of a version was written."""
        self._header().fill_(version)
        return StagedWeights(
            version=version, path=str(self.path), num_bytes=self.num_bytes, slots=self.slots, buckets=self.buckets
        )

    @property
    def memory(self) -> torch.Tensor:
        """All bytes, uint8 [num_bytes]; see `tensor_at`."""
        if self._bytes is None:
            raise ValueError(f"the arena {self.path} is closed; make a new one")
        return self._bytes

    def _header(self) -> torch.Tensor:
        return self.memory[:8].view(torch.int64)

    def close(self) -> None:
        """Remove the file. What an engine has mapped stays readable until it lets go. Safe to call twice."""
        self._bytes = None
        self._close()


def lay_out(specs: Specs) -> tuple[tuple[TensorSlot, ...], int]:
    """Slots in the given order, and the bytes that the whole arena takes."""
    slots: list[TensorSlot] = []
    offset = HEADER_BYTES
    for name, dtype, shape in specs:
        num_bytes = math.prod(shape) * dtype.itemsize
        dtype_name = str(dtype).removeprefix("torch.")
        slots.append(TensorSlot(name=name, dtype=dtype_name, shape=tuple(shape), offset=offset, num_bytes=num_bytes))
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if not slots:
        raise ValueError("an arena needs at least one tensor; got none")
    names = {slot.name for slot in slots}
    if len(names) != len(slots):
        raise ValueError(f"tensor names must differ; got {len(slots)} tensors with {len(names)} names")
    return tuple(slots), offset


def cut_buckets(slots: Sequence[TensorSlot], bucket_bytes: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of `slots`, each of at most `bucket_bytes`, or of a single tensor that is larger."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive; got {bucket_bytes}")
    buckets: list[tuple[int, int]] = []
    first, filled = 0, 0
    for index, slot in enumerate(slots):
        if index > first and filled + slot.num_bytes > bucket_bytes:
            buckets.append((first, index))
            first, filled = index, 0
        filled += slot.num_bytes
    buckets.append((first, len(slots)))
    return tuple(buckets)


def tensor_at(arena_bytes: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """The tensor of `slot` as a view of the arena's bytes (uint8, [num_bytes])."""
    found = arena_bytes[slot.offset : slot.offset + slot.num_bytes]
    return found.view(getattr(torch, slot.dtype)).view(slot.shape)


def _create_file(path: Path, num_bytes: int) -> int:
    """An open file of `num_bytes` that nobody else may read, with its memory reserved."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"the weights are handed over in {path.parent}, which cannot be written: {error}") from error
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        _close_file(path, file)
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EINTR):
            raise
        space = os.statvfs(path.parent)
        raise ConfigError(
            f"{path.parent} has too little room to hand the weights over: {num_bytes / 2**20:.0f} MiB needed, "
            f"{space.f_bavail * space.f_frsize / 2**20:.0f} MiB free; make it larger (a container needs --shm-size or "
            "a memory-backed volume there), or take a smaller model or model.dtype=bfloat16"
        ) from error
    return file


def _close_file(path: Path, file: int) -> None:
    path.unlink(missing_ok=True)
    os.close(file)


class ArenaView:
    """A read-only mapping of an arena."""

    def __init__(self, path: str, num_bytes: int) -> None:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            mapping = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; nothing here writes to it.
            warnings.simplefilter("ignore", UserWarning)
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def check(self, version: int) -> None:
        """Raises ValueError when the arena holds another version."""
        found = int(self._bytes[:8].view(torch.int64).item())
        if found != version:
            raise ValueError(f"the arena holds version {found}, not {version}: it was rewritten while loading")

    def tensors(self, slots: Sequence[TensorSlot]) -> Iterator[tuple[str, torch.Tensor]]:
        for slot in slots:
            yield slot.name, tensor_at(self._bytes, slot)


@lru_cache(maxsize=1)
def map_arena(path: str, num_bytes: int) -> ArenaView:
    """The arena, mapped once for as long as it is the last one asked for: mapping takes longer than reading."""
    return ArenaView(path, num_bytes)


def staged_version(path: str) -> int | None:
    """The version that an arena's header holds now, BEING_WRITTEN while it is rewritten; None if the file is gone."""
    try:
        with open(path, "rb") as file:
            return int.from_bytes(file.read(8), sys.byteorder, signed=True)
    except FileNotFoundError:
        return None
