"""The rank-to-rank transport in one worker of an engine: asks the trainer for a version, and puts it where it belongs.

open: request, group, plan -> receive, once a bucket: check, unpack -> targets

Imports no vLLM. While one bucket is unpacked the next one is under way, so that little of a bucket is waited for. On a
GPU all of it is queued at once: what has come is checked when the last bucket has been unpacked, before it is used.
"""

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from torch.distributed import Work  # pyright: ignore[reportPrivateImportUsage]

from rlflow.errors import RunError
from rlflow.weights.engine.messages import Opening
from rlflow.weights.engine.receiver import Destination, Receiver
from rlflow.weights.p2p.exchange import Arrivals, MessageStamp, PeerMessage, check, cut_messages, digest, unpack
from rlflow.weights.p2p.rendezvous import Deadline, PeerGroup, TrainerStore, wait_all
from rlflow.weights.p2p.sender import TransferRequest, landings_key, plan_for, submit
from rlflow.weights.shape.landings import landings_to_json
from rlflow.weights.shape.plan import Move


@dataclass(kw_only=True, slots=True, frozen=True)
class Worker:
    """The worker that receives: its engine's index, and its rank in the engine."""

    engine: int
    rank: int
    num_ranks: int
    device: torch.device


class PeerReceiver(Receiver):
    """Takes what the ranks of the trainer send to this worker; the group with them lasts for many versions."""

    def __init__(self, destination: Destination, trainer: TrainerStore, worker: Worker) -> None:
        super().__init__(destination)
        self._trainer = trainer
        self._worker = worker
        self._group: PeerGroup | None = None
        self._buckets: list[list[PeerMessage]] = []
        self._moves: list[Move] = []
        self._memory: list[dict[int, Tensor]] = [{}, {}]
        self._under_way: list[Work] = []
        self._next = 0
        self._found: int | None = None
        self._unchecked: list[tuple[int, Tensor]] = []
        """Bucket and digest of messages."""

    def _ask(self, opening: Opening) -> int:
        """Ask together with the other workers of the engine. Raises RuntimeError when not all come within the time."""
        transfer, version = opening.transfer, opening.staged.version
        self._found = None
        self._unchecked = []
        self._deadline = Deadline(self._trainer.timeout_s)
        if self._group is not None and self._group.is_broken:
            self.shutdown()
        if self._group is None:
            self._name = f"{self._worker.engine}/{transfer}"
            landings = landings_to_json(self._destination.landings)
            self._trainer.store.set(landings_key(self._name, self._worker.rank), landings)
        if self._worker.rank == 0:
            request = TransferRequest(
                engine=self._worker.engine,
                group=self._name,
                num_ranks=self._worker.num_ranks,
                transfer=transfer,
                version=version,
            )
            submit(self._trainer.store, asdict(request))
        if self._group is None:
            self._group = self._join(self._name)
        self._arrivals = Arrivals(self._trainer.layout.placements, self._moves)
        for parameter in self._arrivals.without_moves():
            self._destination.landed(parameter)
        self._stamp = MessageStamp(transfer=transfer, version=version, bucket=0)
        self._next = 0
        self._begin(0)
        return len(self._buckets)

    @torch.no_grad()
    def receive(self, bucket: int) -> int | None:
        """Put the next bucket in its place. If the trainer has replaced the version, returns the one it has now.

        Then nothing more of this version counts, but all buckets must be received, because the trainer sends them.
        Raises RunError when something did not arrive as it was sent, RuntimeError when the trainer is lost or not ready
        in time.
        """
        if bucket != self._next or self._group is None:
            raise RunError(f"bucket {self._next} comes next, but {bucket} was asked for; open the transfer again")
        self._next += 1
        wait_all(self._under_way, self._deadline)
        self._begin(bucket + 1)
        on_gpu = self._worker.device.type == "cuda"
        for message in self._buckets[bucket]:
            packed = self._memory[bucket % 2][message.source][: message.num_bytes]
            self._unchecked.append((bucket, digest(packed)))
            if not on_gpu:
                self._check()
            if self._found is None:
                unpack(message, packed, self._destination.targets)
                for parameter in self._arrivals.arrived(message.moves):
                    self._destination.landed(parameter)
        if self._next == len(self._buckets):
            self._check()
            if on_gpu:
                self._memory = [{}, {}]  # vLLM may compute in this memory until the next version
        return self._found

    def _check(self) -> None:
        """Read what was found out about messages; on a GPU this waits until they have come."""
        if not self._unchecked:
            return
        buckets, digests = zip(*self._unchecked, strict=True)
        self._unchecked = []
        for bucket, digested in zip(buckets, torch.stack(digests).tolist(), strict=True):
            found = check(digested, replace(self._stamp, bucket=bucket))
            if found != self._stamp.version:
                self._found = found

    def abort(self) -> None:
        """If a part has not come, let it not come: there will be another group for the next version."""
        super().abort()
        if self._next < len(self._buckets):
            self.shutdown()

    def shutdown(self) -> None:
        """Give the group up: the ranks of the trainer that still send notice it."""
        if self._group is not None:
            self._group.give_up()
        self._group = None
        self._under_way = []

    def _join(self, name: str) -> PeerGroup:
        trainer, worker = self._trainer, self._worker
        made = plan_for(trainer.layout, trainer.store, name, worker.num_ranks)
        self._moves = list(made.moves_to(0, worker.rank))
        self._buckets = cut_messages(self._moves, made.num_buckets)
        num_sources = trainer.layout.num_ranks
        rank, size = num_sources + worker.rank, num_sources + worker.num_ranks
        return PeerGroup(trainer, name, rank, size, worker.device)

    def _begin(self, bucket: int) -> None:
        """Begin to receive a bucket, if there is one."""
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
        self._under_way = self._group.receive(messages)
