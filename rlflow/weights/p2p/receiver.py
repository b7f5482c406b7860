"""The rank-to-rank transport in one worker of an engine: asks the trainer for a version, and puts it where it belongs.

open: request, group, plan -> receive, once a bucket: check, unpack -> targets

Imports no vLLM. While one bucket is unpacked the next one is under way, so that little of a bucket is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work  # pyright: ignore[reportPrivateImportUsage]

from rlflow.errors import RunError
from rlflow.weights.learn.tracing import Landings
from rlflow.weights.learn.wire import landings_from_json, landings_to_json
from rlflow.weights.p2p.exchange import Arrivals, Message, Stamp, check, cut_messages, unpack
from rlflow.weights.p2p.meeting import Deadline, build_group, receive, wait_all
from rlflow.weights.p2p.sender import BUCKET, landings_key, plan_for, submit
from rlflow.weights.p2p.trainer_store import TrainerStore
from rlflow.weights.shape.layout import Layout
from rlflow.weights.shape.plan import Move


@dataclass(kw_only=True, slots=True, frozen=True)
class Worker:
    """Who receives."""

    engine: int
    rank: int
    num_ranks: int
    device: torch.device


class PeerReceiver:
    """Of one worker, for one version after the other: `open`, then `receive` each bucket."""

    def __init__(
        self,
        trainer: TrainerStore,
        source: Layout,
        worker: Worker,
        targets: Mapping[str, Tensor],
        landings: Landings,
        landed: Callable[[str], None],
    ) -> None:
        """`targets` are the worker's tensors, each in one piece; `landed` is told each parameter that is in them."""
        self._trainer = trainer
        self._source = source
        self._worker = worker
        self._targets = targets
        self._landings = landings
        self._landed = landed
        self._group: ProcessGroup | None = None
        self._buckets: list[list[Message]] = []
        self._moves: list[Move] = []
        self._memory: list[dict[int, Tensor]] = [{}, {}]
        self._under_way: list[Work] = []
        self._next = 0
        self._found: int | None = None

    def open(self, version: int, transfer: int) -> int:
        """Ask for a version, together with the other workers of the engine; the number of buckets that will come.

        `transfer` is a fresh number, the same for all of them. Raises RuntimeError when not all come within the time.
        """
        self._found = None
        self._deadline = Deadline(self._trainer.timeout_s)
        name = None if self._group is not None else f"{self._worker.engine}/{transfer}"
        if name is not None:
            self._name = name
            self._trainer.store.set(landings_key(name, self._worker.rank), landings_to_json(self._landings))
        if self._worker.rank == 0:
            request = {
                "engine": self._worker.engine,
                "group": self._name,
                "num_ranks": self._worker.num_ranks,
                "transfer": transfer,
                "version": version,
            }
            submit(self._trainer.store, request)
        if name is not None:
            self._group = self._join(name)
        self._arrivals = Arrivals(self._source.placements, self._moves)
        for parameter in self._arrivals.without_moves():
            self._landed(parameter)
        self._stamp = Stamp(transfer=transfer, version=version, bucket=0)
        self._next = 0
        self._begin(0)
        return len(self._buckets)

    @torch.no_grad()
    def receive(self, bucket: int) -> int | None:
        """Put the next bucket in its place; the version that the trainer has, where it is another one by now.

        Then nothing more of this version counts, but all buckets have to be received: the trainer sends them.
        Raises RunError when something did not arrive as it was sent, RuntimeError when the trainer is lost or not ready
        in time.
        """
        if bucket != self._next or self._group is None:
            raise RunError(f"bucket {self._next} comes next, but {bucket} was asked for; open the transfer again")
        self._next += 1
        wait_all(self._under_way, self._deadline)
        self._begin(bucket + 1)
        stamp = Stamp(transfer=self._stamp.transfer, version=self._stamp.version, bucket=bucket)
        for message in self._buckets[bucket]:
            packed = self._memory[bucket % 2][message.source][: message.num_bytes]
            found = check(packed, stamp)
            if found != stamp.version:
                self._found = found
            if self._found is None:
                unpack(message, packed, self._targets)
                for parameter in self._arrivals.arrived(message.moves):
                    self._landed(parameter)
        return self._found

    def give_up(self) -> None:
        """Let the rest not come: there will be another group for the next version."""
        if self._next < len(self._buckets):
            self.close()

    def close(self) -> None:
        """Leave the group: the ranks of the trainer that still send notice it."""
        self._group = None
        self._under_way = []

    def _join(self, name: str) -> ProcessGroup:
        trainer, worker = self._trainer, self._worker
        landings = [landings_from_json(trainer.store.get(landings_key(name, rank))) for rank in range(worker.num_ranks)]
        made = plan_for(self._source, landings, int(trainer.store.get(BUCKET)))
        self._moves = list(made.moves_to(0, worker.rank))
        self._buckets = cut_messages(self._moves, made.num_buckets)
        num_sources = self._source.num_ranks
        rank, size = num_sources + worker.rank, num_sources + worker.num_ranks
        return build_group(trainer.store, name, rank, size, worker.device, trainer.host, trainer.timeout_s)

    def _begin(self, bucket: int) -> None:
        """Let a bucket come, if there is one."""
        self._under_way = []
        if bucket == len(self._buckets):
            return
        assert self._group is not None
        memory = self._memory[bucket % 2]
        messages: list[tuple[Tensor, int]] = []
        for message in self._buckets[bucket]:
            if message.source not in memory or len(memory[message.source]) < message.num_bytes:
                memory[message.source] = torch.empty(message.num_bytes, dtype=torch.uint8, device=self._worker.device)
            messages.append((memory[message.source][: message.num_bytes], message.source))
        self._under_way = receive(self._group, messages)
