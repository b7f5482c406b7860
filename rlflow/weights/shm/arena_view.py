"""An arena, seen by who reads it."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator, Sequence

import torch

from rlflow.roles import TensorSlot
from rlflow.weights.shm.arena import tensor_at


class ArenaView:
    """A read-only mapping of an arena. To map one again takes longer than to read it; so it should be kept."""

    def __init__(self, path: str, num_bytes: int) -> None:
        self.path = path
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
