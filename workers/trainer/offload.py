"""Frees a device's memory for a while: storages are emptied, and refilled later.

Tensors stay views of their storages, so nothing that holds a tensor needs to know.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage


class Parked(NamedTuple):
    """An emptied storage, and its bytes in the memory of the CPU."""

    storage: UntypedStorage
    contents: UntypedStorage


def park(tensors: Iterable[Tensor], device: torch.device, into: list[Parked]) -> None:
    """Empty the storages of those tensors that lie on `device`. They must not be used until `unpark`.

    Each storage is added to `into` as it is emptied, so that running out of memory half-way can be undone.
    """
    storages: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            storages[storage.data_ptr()] = storage
    for storage in storages.values():
        contents = UntypedStorage(storage.nbytes(), device="cpu")
        contents.copy_(storage, non_blocking=False)
        into.append(Parked(storage=storage, contents=contents))
        storage.resize_(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def unpark(parked: Iterable[Parked]) -> None:
    for storage, contents in parked:
        storage.resize_(contents.nbytes())
        storage.copy_(contents, non_blocking=False)
