"""What ranks send each other to carry a plan out: messages of bytes, packed here and unpacked there. Pure.

tensors of a trainer's rank -> pack -> header and elements -> unpack -> tensors of an engine's rank

A message holds all that one rank sends another in one bucket. Its header says which transfer it belongs to, which
version its sender holds, and the sum of what follows, so that what arrives is what was sent or is not used. On a GPU
all of this is written and added up where the message is, and nothing waits for it: only `check` reads numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rlflow.errors import RunError
from rlflow.weights.shape.plan import Move

BUCKET_BYTES = 32 * 2**20
"""An engine on a CPU samples between two buckets, so they are small; and each side holds two of them."""
GPU_BUCKET_BYTES = 512 * 2**20
"""An engine on a GPU is paused for all buckets, so that few large ones are best; each side holds two of them."""
HEADER_BYTES = 32
_WORD = 8


@dataclass(kw_only=True, slots=True, frozen=True)
class PeerMessage:
    """What one rank of the trainer sends one rank of an engine in one bucket."""

    source: int
    """Rank of the trainer."""
    rank: int
    """Rank of the engine."""
    moves: tuple[Move, ...]
    offsets: tuple[int, ...]
    """Bytes from the start of the message to the elements of each move."""
    num_bytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class MessageStamp:
    """Which message of which transfer this is."""

    transfer: int
    """A number that the engine has drawn; below 2**63."""
    version: int
    """The one that the engine has asked for."""
    bucket: int


def cut_messages(moves: Iterable[Move], num_buckets: int) -> list[list[PeerMessage]]:
    """In each bucket one message for each pair of ranks, in ascending order; what is local is not sent.

    `moves` are those from one rank or to one rank, so that both sides cut the same messages.
    """
    found: list[dict[tuple[int, int], list[Move]]] = [{} for _ in range(num_buckets)]
    for move in moves:
        if not move.is_local:
            found[move.bucket].setdefault((move.source, move.rank), []).append(move)
    return [[_lay_out(source, rank, each[source, rank]) for source, rank in sorted(each)] for each in found]


def _lay_out(source: int, rank: int, moves: Sequence[Move]) -> PeerMessage:
    *offsets, end = accumulate((-(-move.num_bytes // _WORD) * _WORD for move in moves), initial=HEADER_BYTES)
    return PeerMessage(source=source, rank=rank, moves=tuple(moves), offsets=tuple(offsets), num_bytes=end)


def pack(message: PeerMessage, tensors: Mapping[str, Tensor], packed: Tensor) -> None:
    """Copy the elements of a message to `packed` (uint8 [num_bytes]), cast to what the engine keeps.

    `tensors` are the rank's own, flat.
    """
    for move, offset in zip(message.moves, message.offsets, strict=True):
        _elements(packed, move, offset).copy_(source_view(tensors[move.source_tensor], move))


def seal(packed: Tensor, stamp: MessageStamp, version: Tensor) -> None:
    """Fill in the header of what was packed. `version` (int64 [1]) is what the sender holds by now; -1: nothing whole.

    It is read after the elements were. A sender that rewrites its tensors changes it first, so if it is the version
    that was asked for, the elements are too.
    """
    header = packed[:HEADER_BYTES].view(torch.int64)
    header[0].fill_(stamp.transfer)
    header[1:2].copy_(version)
    header[2].fill_(stamp.bucket)
    header[3].copy_(_checksum(packed))


def digest(packed: Tensor) -> Tensor:
    """What `check` needs of a message that has come, on its device (int64 [5]): its header, and its sum."""
    return torch.cat([packed[:HEADER_BYTES].view(torch.int64), _checksum(packed)[None]])


def check(digested: Sequence[int], stamp: MessageStamp) -> int:
    """The version that the sender says it has; if it is that of `stamp`, the message is whole.

    Raises RunError for a message of another transfer or bucket, or one that was changed on its way.
    """
    transfer, version, bucket, expected, found = digested
    if (transfer, bucket) != (stamp.transfer, stamp.bucket):
        raise RunError(
            f"bucket {stamp.bucket} of transfer {stamp.transfer} was awaited, but bucket {bucket} of transfer "
            f"{transfer} came"
        )
    if version == stamp.version and expected != found:
        raise RunError(f"bucket {bucket} of the weights of version {version} did not arrive as it was sent")
    return version


def unpack(message: PeerMessage, packed: Tensor, targets: Mapping[str, Tensor]) -> None:
    """Copy the elements of a message to where the engine's rank keeps them."""
    for move, offset in zip(message.moves, message.offsets, strict=True):
        target_view(targets[move.tensor], move).copy_(_elements(packed, move, offset))


def source_view(tensor: Tensor, move: Move) -> Tensor:
    """The elements that a move takes, in its shape."""
    return tensor.as_strided(move.shape, move.source_strides, move.source_offset + int(tensor.storage_offset()))


def target_view(tensor: Tensor, move: Move) -> Tensor:
    """Where a move puts them; the tensor lies in one piece."""
    return tensor.detach().as_strided(move.shape, move.strides, move.offset + int(tensor.storage_offset()))


def _elements(packed: Tensor, move: Move, offset: int) -> Tensor:
    return packed[offset : offset + move.num_bytes].view(getattr(torch, move.dtype)).view(move.shape)


def _checksum(packed: Tensor) -> Tensor:
    """The sum of all words after the header, modulo 2**64."""
    return packed[HEADER_BYTES:].view(torch.int64).sum()


class Arrivals:
    """Which parameters are complete on one rank of an engine, as their moves arrive."""

    def __init__(self, parameters: Iterable[str], moves: Iterable[Move]) -> None:
        """All parameters of the transfer, and all moves to the rank."""
        self._left = dict.fromkeys(parameters, 0)
        for move in moves:
            self._left[move.parameter] += 1

    def without_moves(self) -> list[str]:
        """Parameters that are complete before anything arrives: the rank keeps nothing of them."""
        return [name for name, count in self._left.items() if count == 0]

    def arrived(self, moves: Iterable[Move]) -> list[str]:
        """Count moves that are in place; the parameters that are complete with them."""
        complete: list[str] = []
        for move in moves:
            self._left[move.parameter] -= 1
            if self._left[move.parameter] == 0:
                complete.append(move.parameter)
        return complete
