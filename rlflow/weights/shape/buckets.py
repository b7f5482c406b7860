"""Filling buckets: rounds of a transfer in which no rank sends or receives more than a given number of bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.weights.shape.pieces import Cut, IntArray


@dataclass(kw_only=True, slots=True, frozen=True)
class Sends:
    """The pieces of one parameter for one engine, and who sends them."""

    engine: int
    cut: Cut
    holders: IntArray  # [pieces], index into Piece.holders
    sources: IntArray  # [pieces], ranks of the trainer
    is_local: NDArray[np.bool_]  # [pieces], nothing is sent


class Buckets:
    """Takes one parameter after the other, and begins a new bucket where the one at hand has no room for it."""

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
            self._add_piece(sends[which], index)
            found.setdefault((self.current, which), []).append(index)
        return [(bucket, sends[which], np.sort(indices)) for (bucket, which), indices in found.items()]

    def _add_piece(self, sends: Sends, index: int) -> None:
        if sends.is_local[index]:
            return
        num_bytes = sends.cut.num_bytes[index]
        ports = [sends.sources[index], self._first_port[sends.engine] + sends.cut.ranks[index]]
        if max(self._used[ports]) + num_bytes > self._bucket_bytes:
            self._next()
        self._used[ports] += num_bytes

    def _next(self) -> None:
        self.current += 1
        self._full += self._used
        self._used[:] = 0
