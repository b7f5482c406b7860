"""An arena, seen by who reads it."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator, Sequence

import torch

from rlflow.roles import TensorSlot
from rlflow.weights.arena import tensor_at


class ArenaView:
    """A read-only mapping of an arena that is expected to hold one version."""

    def __init__(self, path: str, num_bytes: int, version: int) -> None:
        self._path, self._version = path, version
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            mapping = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; nothing here writes to it.
            warnings.simplefilter("ignore", UserWarning)
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def is_of(self, path: str, version: int) -> bool:
        return (self._path, self._version) == (path, version)

    def check(self) -> None:
        found = int(self._bytes[:8].view(torch.int64).item())
        if found != self._version:
            raise ValueError(f"the arena holds version {found}, not {self._version}: it was rewritten while loading")

    def tensors(self, slots: Sequence[TensorSlot]) -> Iterator[tuple[str, torch.Tensor]]:
        for slot in slots:
            yield slot.name, tensor_at(self._bytes, slot)
