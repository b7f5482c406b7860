"""Which rank sends which elements to which, so that every engine gets the trainer's weights and no byte twice.

Layout of the trainer, layouts of the engines -> plan -> TransferPlan: moves in buckets, bytes of every rank

Each rank of an engine is sent exactly the elements that it holds, from a rank of the trainer that holds them, straight
from that rank's tensor to the place in its own: nothing is gathered first. What both have on one device is copied
there. Pure: the plan is made once, from metadata, and is equal on every rank that makes it from equal layouts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.errors import ConfigError
from rlflow.weights.shape.boxes import Index, extents, num_elements
from rlflow.weights.shape.layout import EngineLayout, Layout
from rlflow.weights.shape.pieces import Cut, Cuts, IntArray, cut_all

BUCKET_BYTES = 128 * 2**20
MOVES_IN_BUCKET = 8
"""A bucket has room for this many of the largest moves, so that little of one stays empty."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Move:
    """A box of a parameter, from a tensor of a trainer's rank to a tensor of an engine's rank.

    Both sides are strided views of their flat tensors, with the same `shape` and the same order of elements.
    """

    bucket: int
    parameter: str
    shape: Index
    source: int
    """Rank of the trainer."""
    source_tensor: str
    source_offset: int
    source_strides: Index
    engine: int
    """Index into the engines that the plan was made for."""
    rank: int
    """Rank of the engine."""
    tensor: str
    offset: int
    strides: Index
    dtype: str
    """The engine's: the sender casts."""
    num_bytes: int
    is_local: bool
    """Both ranks are on one device, so that nothing is sent."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sends:
    """The pieces of one parameter for one engine, and who sends them."""

    engine: int
    cut: Cut
    holders: IntArray  # [pieces], index into TensorPiece.holders
    sources: IntArray  # [pieces], ranks of the trainer
    is_local: NDArray[np.bool_]  # [pieces], nothing is sent


@dataclass(kw_only=True, slots=True, frozen=True)
class TransferStep:
    """Moves of one parameter to one engine, in one bucket."""

    bucket: int
    parameter: str
    sends: Sends
    chosen: IntArray  # index into the pieces of `sends`, in order


@dataclass(kw_only=True, slots=True, frozen=True)
class TransferPlan:
    """All moves of one transfer; what each rank sends and receives is known before anything moves.

    Every rank goes through its moves in the order that these methods give, and meets its peers in it.
    """

    source: Layout
    engines: tuple[EngineLayout, ...]
    steps: tuple[TransferStep, ...]
    num_buckets: int
    """Within one, no rank sends or receives more than the bucket's bytes."""
    sent: IntArray  # [ranks of the trainer], bytes that leave the device
    received: tuple[IntArray, ...]  # for each engine [ranks], bytes that reach the device

    def moves(self) -> Iterator[Move]:
        """All moves, in order; many for a large model, made one by one."""
        return self._moves((step, step.chosen) for step in self.steps)

    def moves_from(self, source: int) -> Iterator[Move]:
        """What a rank of the trainer sends, in order."""
        return self._moves((step, step.chosen[step.sends.sources[step.chosen] == source]) for step in self.steps)

    def moves_to(self, engine: int, rank: int) -> Iterator[Move]:
        """What a rank of an engine receives, in order."""
        steps = (step for step in self.steps if step.sends.engine == engine)
        return self._moves((step, step.chosen[step.sends.cut.ranks[step.chosen] == rank]) for step in steps)

    def _moves(self, chosen: Iterable[tuple[TransferStep, IntArray]]) -> Iterator[Move]:
        for step, indices in chosen:
            for index in indices.tolist():
                yield self._move(step, index)

    def _move(self, step: TransferStep, index: int) -> Move:
        piece, engine = step.sends.cut.pieces[index], self.engines[step.sends.engine]
        source, held = piece.holders[step.sends.holders[index]]
        here, there = self.source.placements[step.parameter], engine.layout.placements[step.parameter]
        return Move(
            bucket=step.bucket,
            parameter=step.parameter,
            shape=extents(piece.start, piece.stop),
            source=source,
            source_tensor=here.tensors[held.tensor],
            source_offset=held.offset_of(piece.start),
            source_strides=held.strides,
            engine=step.sends.engine,
            rank=piece.rank,
            tensor=there.tensors[piece.target.tensor],
            offset=piece.target.offset_of(piece.start),
            strides=piece.target.strides,
            dtype=there.dtype,
            num_bytes=num_elements(piece.start, piece.stop) * there.element_bytes,
            is_local=engine.devices is not None and engine.devices[piece.rank] == source,
        )


def plan(source: Layout, engines: Sequence[EngineLayout], bucket_bytes: int = BUCKET_BYTES) -> TransferPlan:
    """Plan a transfer of all parameters to all engines.

    Of several ranks that hold the same elements, one on the receiver's device sends them, else the one with the least
    to send so far. So two ranks that hold the same of everything, and may send to the same engines, send amounts that
    differ by at most one move, which is at most bucket_bytes / 8: the one with more is passed over until the other has
    caught up.

    Raises ConfigError when a parameter or a part of it is on one side only, shapes differ, or a bucket is too small.
    """
    if bucket_bytes < 8 * MOVES_IN_BUCKET:
        raise ConfigError(f"a bucket must have at least {8 * MOVES_IN_BUCKET} bytes; got {bucket_bytes}")
    _check(source, engines)
    cuts = cut_all(source, engines, bucket_bytes // MOVES_IN_BUCKET)
    buckets = Buckets(source.num_ranks, [engine.layout.num_ranks for engine in engines], bucket_bytes)
    steps: list[TransferStep] = []
    for name, sends in _choose(source, engines, cuts).items():
        steps += [
            TransferStep(bucket=bucket, parameter=name, sends=each, chosen=chosen)
            for bucket, each, chosen in buckets.add(sends)
            if len(chosen)
        ]
    sent, received = buckets.totals()
    return TransferPlan(
        source=source,
        engines=tuple(engines),
        steps=tuple(steps),
        num_buckets=buckets.current + 1,
        sent=sent,
        received=received,
    )


def _check(source: Layout, engines: Sequence[EngineLayout]) -> None:
    for index, engine in enumerate(engines):
        places = engine.layout.placements
        if different := sorted(set(source.placements) ^ set(places)):
            side = "the trainer" if different[0] in source.placements else f"engine {index}"
            raise ConfigError(
                f"{len(different)} parameters are on one side of the transfer only, such as {different[0]!r} in "
                f"{side}; both layouts must be of the same model"
            )
        for name, place in places.items():
            if place.shape != source.placements[name].shape:
                raise ConfigError(
                    f"parameter {name!r} must have one shape; the trainer has {source.placements[name].shape}, "
                    f"engine {index} has {place.shape}"
                )


def _choose(source: Layout, engines: Sequence[EngineLayout], cuts: Cuts) -> dict[str, list[Sends]]:
    """First count what only one rank can send, then give the rest to those with the least to send."""
    sent = np.zeros(source.num_ranks, dtype=np.int64)
    for parameter in cuts.values():
        for cut, engine in zip(parameter, engines, strict=True):
            leaves = (cut.sole >= 0) & (cut.sole != _devices(engine, cut))
            np.add.at(sent, cut.sole[leaves], cut.num_bytes[leaves])
    loads = sent.tolist()
    return {
        name: [
            _choose_open(index, cut, engine, loads)
            for index, (cut, engine) in enumerate(zip(parameter, engines, strict=True))
        ]
        for name, parameter in cuts.items()
    }


def _choose_open(index: int, cut: Cut, engine: EngineLayout, loads: list[int]) -> Sends:
    """Choose a holder for each piece, and add what it sends to `loads`."""
    holders, sources = np.zeros(len(cut.pieces), dtype=np.int64), cut.sole.copy()
    for number in cut.open:
        piece = cut.pieces[number]
        ranks = [rank for rank, _ in piece.holders]
        device = None if engine.devices is None else engine.devices[piece.rank]
        if device in ranks:
            chosen = ranks.index(device)
        else:
            chosen = min(range(len(ranks)), key=lambda each: loads[ranks[each]])
            loads[ranks[chosen]] += int(cut.num_bytes[number])
        holders[number], sources[number] = chosen, ranks[chosen]
    return Sends(engine=index, cut=cut, holders=holders, sources=sources, is_local=_devices(engine, cut) == sources)


def _devices(engine: EngineLayout, cut: Cut) -> IntArray:
    """The rank of the trainer on the device of each piece's receiver, or -2."""
    if engine.devices is None:
        return np.full(len(cut.pieces), -2, dtype=np.int64)
    return np.array(engine.devices, dtype=np.int64)[cut.ranks]


class Buckets:
    """Takes one parameter after the other, and begins a new bucket when the current one has no room for it."""

    def __init__(self, num_sources: int, engine_ranks: Sequence[int], bucket_bytes: int) -> None:
        self.current = 0
        self._bucket_bytes = bucket_bytes
        # A port is one direction of one rank: first what each source sends, then what each engine's ranks receive.
        self._first_port = np.cumsum([num_sources, *engine_ranks])
        self._used = np.zeros(self._first_port[-1], dtype=np.int64)
        self._full = np.zeros_like(self._used)

    def add(self, sends: Sequence[Sends]) -> list[tuple[int, Sends, IntArray]]:
        """The bucket of each piece, all of one parameter: (bucket, sends, indices of its pieces), in order."""
        load = sum(self._load(each) for each in sends)
        if np.max(load, initial=0) > self._bucket_bytes:
            return self._add_pieces(sends)
        if np.max(self._used + load, initial=0) > self._bucket_bytes:
            self._next()
        self._used += load
        return [(self.current, each, np.arange(len(each.sources))) for each in sends]

    def totals(self) -> tuple[IntArray, tuple[IntArray, ...]]:
        """Bytes over all buckets: what each source sends, and for each engine what its ranks receive."""
        sent, *received = np.split(self._full + self._used, self._first_port[:-1])
        return sent, tuple(received)

    def _load(self, sends: Sends) -> IntArray:
        """Bytes through each port."""
        remote = ~sends.is_local
        load = np.zeros_like(self._used)
        np.add.at(load, sends.sources[remote], sends.cut.num_bytes[remote])
        np.add.at(load, self._first_port[sends.engine] + sends.cut.ranks[remote], sends.cut.num_bytes[remote])
        return load

    def _add_pieces(self, sends: Sequence[Sends]) -> list[tuple[int, Sends, IntArray]]:
        """As many pieces as fit, in turn over the receivers, so that all of them have work in each bucket."""
        turns = [np.arange(len(each.sources)) - np.searchsorted(each.cut.ranks, each.cut.ranks) for each in sends]
        order = sorted((int(turn), which, index) for which, each in enumerate(turns) for index, turn in enumerate(each))
        found: dict[tuple[int, int], list[int]] = {}
        for _, which, index in order:
            each = sends[which]
            if not each.is_local[index]:
                num_bytes = each.cut.num_bytes[index]
                ports = [each.sources[index], self._first_port[each.engine] + each.cut.ranks[index]]
                if max(self._used[ports]) + num_bytes > self._bucket_bytes:
                    self._next()
                self._used[ports] += num_bytes
            found.setdefault((self.current, which), []).append(index)
        return [(bucket, sends[which], np.sort(indices)) for (bucket, which), indices in found.items()]

    def _next(self) -> None:
        self.current += 1
        self._full += self._used
        self._used[:] = 0
