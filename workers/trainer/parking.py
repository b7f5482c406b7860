"""Emptying a GPU for a while: what lay on it waits in the memory of the CPU, always in the same place.

tensors -> park: copied out, storages emptied -> unpark: storages filled again

The memory of the CPU is allocated once and pinned, so that copies run at the speed of the bus and need no page of the
system in between. It grows if more is parked, and stays until the process ends.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

CHUNK_BYTES = 2**28
"""What is allocated at once. A power of two, because torch rounds pinned memory up to one."""


class ParkingSpace:
    """One process's tensors on `device`, or its memory in the CPU that they are copied to."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._parked: list[tuple[UntypedStorage, int, int]] = []
        """Storages that were emptied, each with the first of its bytes in the chunks, and their number."""

    @property
    def num_bytes(self) -> int:
        """What is parked now."""
        return sum(size for _, _, size in self._parked)

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Empty the storages of those tensors that lie on the device. They must not be used until `unpark`.

        Tensors stay views of their storages, so nothing that holds a tensor needs to know. Nothing is emptied before
        everything has been copied, so running out of memory half-way changes nothing.
        """
        assert not self._parked, "what is parked comes back before anything else is parked"
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes():
                found[storage.data_ptr()] = storage
        end, places = 0, []
        for storage in found.values():
            places.append((storage, end, storage.nbytes()))
            end += storage.nbytes()
        while len(self._chunks) * self._chunk_bytes < end:
            pins = self._device.type == "cuda"
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pins))
        for place in places:
            for here, there in self._parts(*place):
                there.copy_(here, non_blocking=True)
        self._finish()
        self._parked = places
        for storage, _, _ in places:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def unpark(self) -> None:
        """Fill the storages again, if anything is parked."""
        for place in self._parked:
            storage, _, size = place
            storage.resize_(size)
            for here, there in self._parts(*place):
                here.copy_(there, non_blocking=True)
        self._finish()
        self._parked = []

    def _parts(self, storage: UntypedStorage, start: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A storage and its place, cut where a chunk ends: (bytes on the device, bytes in the memory of the CPU)."""
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        done = 0
        while done < size:
            chunk, offset = divmod(start + done, self._chunk_bytes)
            count = min(size - done, self._chunk_bytes - offset)
            yield whole[done : done + count], self._chunks[chunk][offset : offset + count]
            done += count

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
