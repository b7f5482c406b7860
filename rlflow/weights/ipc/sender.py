"""The transport on one GPU, and between those of one machine, in a rank of the trainer: engines read its memory.

held -> stage: a copy of this rank's own part, on its GPU -> a handle in the store -> engines copy what they keep of it

Nothing is gathered: beside the model there is one copy of the rank's own part, in the engines' dtype. It stays while
the engines sample, for one that is restarted, and goes when the trainer needs the memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter
from torch import Tensor, UntypedStorage

from rlflow.errors import ConfigError
from rlflow.roles import StagedWeights
from rlflow.weights.p2p.rendezvous import HostedStore
from rlflow.weights.source import WeightSender, WeightSource

_ALIGNMENT = 64


@dataclass(kw_only=True, slots=True, frozen=True)
class Handle:
    """Memory of a GPU that another process may open: torch's own description of it, without pickle."""

    gpu: str
    """The device's UUID."""
    memory: str
    """Bytes, in hexadecimal digits, as the two others."""
    num_bytes: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    must_wait: bool


@dataclass(kw_only=True, slots=True, frozen=True)
class SharedPart:
    """What one rank of the trainer has staged."""

    version: int
    tensors: dict[str, tuple[int, int, str]]
    """Name -> the first of its bytes in the memory, the number of elements, and torch's name of their dtype."""
    handle: Handle


SHARED_PART = TypeAdapter(SharedPart)


def part_key(rank: int) -> str:
    return f"shared/{rank}"


def lay_out(
    counts: Mapping[str, int], dtypes: Mapping[str, torch.dtype]
) -> tuple[dict[str, tuple[int, int, str]], int]:
    """Tensors of these numbers of elements, one behind the other; see `SharedPart.tensors`; and the bytes of all."""
    found: dict[str, tuple[int, int, str]] = {}
    end = 0
    for name, count in counts.items():
        found[name] = (end, count, str(dtypes[name]).removeprefix("torch."))
        end += -(-count * dtypes[name].itemsize // _ALIGNMENT) * _ALIGNMENT
    return found, end


def tensors_in(part: SharedPart, memory: Tensor) -> dict[str, Tensor]:
    """The tensors of a part, flat, as views of its memory (uint8)."""
    views: dict[str, Tensor] = {}
    for name, (offset, count, dtype_name) in part.tensors.items():
        dtype: torch.dtype = getattr(torch, dtype_name)
        views[name] = memory[offset : offset + count * dtype.itemsize].view(dtype)
    return views


def share(memory: Tensor) -> Handle:
    """Let other processes open this memory of a GPU for as long as this one keeps it."""
    found = memory.untyped_storage()._share_cuda_()
    device, handle, num_bytes, offset, counter, counter_offset, event, must_wait = found
    return Handle(
        gpu=str(torch.cuda.get_device_properties(device).uuid),
        memory=handle.hex(),
        num_bytes=num_bytes,
        offset=offset,
        counter=counter.hex(),
        counter_offset=counter_offset,
        event=event.hex(),
        must_wait=must_wait,
    )


def open_shared(handle: Handle) -> Tensor:
    """The memory of another process, uint8. Let go of it before that process frees it.

    Raises ConfigError when its GPU is not to be seen from this process.
    """
    gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if handle.gpu not in gpus:
        raise ConfigError(
            f"weights.transport=ipc reaches the GPUs of one machine; GPU {handle.gpu} of the trainer is not one of "
            f"those that the engine sees ({', '.join(gpus)}); set weights.transport=shm"
        )
    storage: UntypedStorage = UntypedStorage._new_shared_cuda(
        gpus.index(handle.gpu),
        bytes.fromhex(handle.memory),
        handle.num_bytes,
        handle.offset,
        bytes.fromhex(handle.counter),
        handle.counter_offset,
        bytes.fromhex(handle.event),
        handle.must_wait,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class SharedSender(WeightSender):
    """Lets engines read this rank's memory."""

    def __init__(
        self,
        backend: WeightSource,
        rank: int,
        rendezvous: str,
        timeout_s: float,
        device: torch.device,
        share: Callable[[Tensor], Handle] = share,
    ) -> None:
        """`rendezvous` is where the ranks met; the store listens on the same address."""
        super().__init__(backend, rank)
        self._device = device
        self._share = share
        self._hosted = HostedStore(backend, rank, rendezvous, timeout_s)
        self._store = self._hosted.connect()
        self._memory: Tensor | None = None

    @torch.no_grad()
    def stage(self, version: int) -> StagedWeights | None:
        """Copy this rank's part of the back end's weights, in the engines' dtype; rank 0 is told where to ask."""
        self.release()
        held = {name: tensor.numel() for name, tensor in self._backend.held()}
        tensors, num_bytes = lay_out(held, self._hosted.dtypes)
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        part = SharedPart(version=version, tensors=tensors, handle=self._share(self._memory))
        copies = tensors_in(part, self._memory)
        for name, tensor in self._backend.held():
            copies[name].copy_(tensor)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._store.set(part_key(self._rank), SHARED_PART.dump_json(part).decode())
        return self._hosted.staged(version)

    def release(self) -> None:
        """Free what was staged; no engine reads it any more."""
        if self._memory is not None:
            self._store.delete_key(part_key(self._rank))
            self._memory = None

    def close(self) -> None:
        self._memory = None
