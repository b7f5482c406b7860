"""Who sends which elements to whom, so that every engine gets the trainer's weights and no byte twice.

Layout of the trainer, layouts of the engines -> plan -> TransferPlan: moves in buckets, bytes of every rank

Each rank of an engine is sent exactly the elements that it holds, from a rank of the trainer that holds them, straight
from that rank's tensor to the place in its own: nothing is gathered first. What both have on one device is copied
there. Pure: the plan is made once, from metadata, and is equal on every rank that makes it from equal layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlflow.errors import ConfigError
from rlflow.weights.shape.boxes import Index, extents, num_elements
from rlflow.weights.shape.buckets import Buckets, Sends
from rlflow.weights.shape.layout import Engine, Layout
from rlflow.weights.shape.pieces import Cut, Cuts, IntArray, Piece, cut_all

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
    """Of the engine."""
    tensor: str
    offset: int
    strides: Index
    dtype: str
    """The engine's: the sender casts."""
    num_bytes: int
    is_local: bool
    """Both ranks are on one device, so that nothing is sent."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    """Moves of one parameter to one engine, in one bucket."""

    bucket: int
    parameter: str
    engine: int
    pieces: tuple[Piece, ...]
    holders: IntArray  # [pieces], index into Piece.holders
    sources: IntArray  # [pieces], ranks of the trainer
    ranks: IntArray  # [pieces], ranks of the engine


@dataclass(kw_only=True, slots=True, frozen=True)
class TransferPlan:
    """All moves of one transfer; what each rank sends and receives is known before anything moves.

    Every rank goes through its moves in the order that these methods give, and meets its peers in it.
    """

    source: Layout
    engines: tuple[Engine, ...]
    steps: tuple[Step, ...]
    num_buckets: int
    """Within one, no rank sends or receives more than the bucket's bytes."""
    sent: IntArray  # [ranks of the trainer], bytes that leave the device
    received: tuple[IntArray, ...]  # for each engine [ranks], bytes that reach the device

    def moves(self) -> Iterator[Move]:
        """All moves, in order; many for a large model, made one by one."""
        return self._moves((step, range(len(step.pieces))) for step in self.steps)

    def moves_from(self, source: int) -> Iterator[Move]:
        """What a rank of the trainer sends, in order."""
        return self._moves((step, np.flatnonzero(step.sources == source).tolist()) for step in self.steps)

    def moves_to(self, engine: int, rank: int) -> Iterator[Move]:
        """What a rank of an engine receives, in order."""
        steps = (step for step in self.steps if step.engine == engine)
        return self._moves((step, np.flatnonzero(step.ranks == rank).tolist()) for step in steps)

    def _moves(self, chosen: Iterable[tuple[Step, Iterable[int]]]) -> Iterator[Move]:
        for step, indices in chosen:
            for index in indices:
                yield self._move(step, index)

    def _move(self, step: Step, index: int) -> Move:
        piece, engine = step.pieces[index], self.engines[step.engine]
        source, held = piece.holders[step.holders[index]]
        here, there = self.source.placements[step.parameter], engine.layout.placements[step.parameter]
        return Move(
            bucket=step.bucket,
            parameter=step.parameter,
            shape=extents(piece.start, piece.stop),
            source=source,
            source_tensor=here.tensors[held.tensor],
            source_offset=held.offset_of(piece.start),
            source_strides=held.strides,
            engine=step.engine,
            rank=piece.rank,
            tensor=there.tensors[piece.target.tensor],
            offset=piece.target.offset_of(piece.start),
            strides=piece.target.strides,
            dtype=there.dtype,
            num_bytes=num_elements(piece.start, piece.stop) * there.element_bytes,
            is_local=engine.devices is not None and engine.devices[piece.rank] == source,
        )


def plan(source: Layout, engines: Sequence[Engine], bucket_bytes: int = BUCKET_BYTES) -> TransferPlan:
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
    cut = cut_all(source, engines, bucket_bytes // MOVES_IN_BUCKET)
    chosen = _choose(source, engines, cut)
    return _fill_buckets(source, engines, cut, chosen, bucket_bytes)


_Sources = dict[str, list[tuple[IntArray, IntArray]]]
"""For each parameter and engine the chosen index into the holders, and the rank of the trainer that this is."""


def _check(source: Layout, engines: Sequence[Engine]) -> None:
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


def _choose(source: Layout, engines: Sequence[Engine], cuts: Cuts) -> _Sources:
    """First count what only one rank can send, then give the rest to those with the least to send."""
    sent = np.zeros(source.num_ranks, dtype=np.int64)
    for parameter in cuts.values():
        for cut, engine in zip(parameter, engines, strict=True):
            leaves = (cut.sole >= 0) & (cut.sole != _devices(engine, cut))
            np.add.at(sent, cut.sole[leaves], cut.num_bytes[leaves])
    loads = sent.tolist()
    return {
        name: [_choose_open(cut, engine, loads) for cut, engine in zip(parameter, engines, strict=True)]
        for name, parameter in cuts.items()
    }


def _choose_open(cut: Cut, engine: Engine, loads: list[int]) -> tuple[IntArray, IntArray]:
    """Choose a holder for each piece, and add what it sends to `loads`."""
    holders, sources = np.zeros(len(cut.pieces), dtype=np.int64), cut.sole.copy()
    for index in cut.open:
        piece = cut.pieces[index]
        ranks = [rank for rank, _ in piece.holders]
        device = None if engine.devices is None else engine.devices[piece.rank]
        if device in ranks:
            chosen = ranks.index(device)
        else:
            chosen = min(range(len(ranks)), key=lambda each: loads[ranks[each]])
            loads[ranks[chosen]] += int(cut.num_bytes[index])
        holders[index], sources[index] = chosen, ranks[chosen]
    return holders, sources


def _devices(engine: Engine, cut: Cut) -> IntArray:
    """For each piece the rank of the trainer on the receiver's device, or -2."""
    if engine.devices is None:
        return np.full(len(cut.pieces), -2, dtype=np.int64)
    return np.array(engine.devices, dtype=np.int64)[cut.ranks]


def _fill_buckets(
    source: Layout, engines: Sequence[Engine], cuts: Cuts, sources: _Sources, bucket_bytes: int
) -> TransferPlan:
    buckets = Buckets(source.num_ranks, [engine.layout.num_ranks for engine in engines], bucket_bytes)
    steps: list[Step] = []
    for name, parameter in cuts.items():
        sends = [
            Sends(engine=index, cut=cut, holders=holders, sources=ranks, is_local=_devices(engine, cut) == ranks)
            for index, (cut, engine, (holders, ranks)) in enumerate(zip(parameter, engines, sources[name], strict=True))
        ]
        steps += [_step(bucket, name, each, chosen) for bucket, each, chosen in buckets.add(sends) if len(chosen)]
    sent, received = buckets.totals()
    return TransferPlan(
        source=source,
        engines=tuple(engines),
        steps=tuple(steps),
        num_buckets=buckets.current + 1,
        sent=sent,
        received=received,
    )


def _step(bucket: int, parameter: str, sends: Sends, chosen: IntArray) -> Step:
    cut = sends.cut
    return Step(
        bucket=bucket,
        parameter=parameter,
        engine=sends.engine,
        pieces=cut.pieces if len(chosen) == len(cut.pieces) else tuple(cut.pieces[index] for index in chosen),
        holders=sends.holders[chosen],
        sources=sends.sources[chosen],
        ranks=cut.ranks[chosen],
    )
