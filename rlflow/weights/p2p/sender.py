"""The rank-to-rank transport in a rank of the trainer: engines ask for a version, and are sent what they hold of it.

held -> stage: a copy of this rank's own part -> requests of engines -> plan -> pack, send, bucket by bucket

Nothing is gathered, and training goes on while the copy is sent. One thread reads the requests, which all ranks find in
one store in the same order; each is answered by a thread of its own, so that an engine that hangs holds up no other.
"""

import json
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, Work  # pyright: ignore[reportPrivateImportUsage]

from rlflow.errors import ConfigError, RunError
from rlflow.roles import StagedWeights
from rlflow.weights.p2p.exchange import (
    BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    MessageStamp,
    PeerMessage,
    cut_messages,
    pack,
    seal,
)
from rlflow.weights.p2p.rendezvous import Deadline, HostedStore, PeerGroup, comes, wait_all
from rlflow.weights.shape.landings import landings_from_json, layout_of
from rlflow.weights.shape.layout import EngineLayout, Layout
from rlflow.weights.shape.plan import TransferPlan, plan
from rlflow.weights.source import WeightSender, WeightSource

_BUCKET = "bucket"
"""Key of the store: the bytes of a bucket."""
NUM_REQUESTS = "requests"
_CLOSING = "closing"
_KEPT_REQUESTS = 1000
"""So many requests stay in the store after they were answered: no rank is that far behind another."""
_CLOSE_S = 10.0

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class TransferRequest:
    """What an engine asks of all ranks of the trainer."""

    engine: int
    group: str
    """Names the process group; a new one for an engine that was restarted, or whose group broke."""
    num_ranks: int
    """The engine's."""
    transfer: int
    version: int


@dataclass(kw_only=True, slots=True)
class _Session:
    """What is kept for an engine between two requests."""

    group: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that answers."""
    peers: PeerGroup | None = None
    messages: list[list[PeerMessage]] = field(default_factory=list)
    """What this rank sends, by bucket."""
    stream: torch.cuda.Stream | None = None
    """The stream of the sends on a GPU, so that they and training do not wait for each other."""
    joined: threading.Event = field(default_factory=threading.Event)
    """Set when the group was built, or could not be."""


def request_key(number: int) -> str:
    return f"request/{number}"


def landings_key(group: str, rank: int) -> str:
    """Key of the store: what a rank of an engine has learnt from its loader."""
    return f"landings/{group}/{rank}"


def submit(store: Store, request: dict[str, Any]) -> None:
    """Let all ranks of the trainer see a request, after those that were submitted before."""
    store.set(request_key(store.add(NUM_REQUESTS, 1) - 1), json.dumps(request))


def plan_for(source: Layout, store: Store, group: str, num_ranks: int) -> TransferPlan:
    """The transfer to one engine, from what each of its `num_ranks` has learnt. All ranks make the same plan."""
    landings = [landings_from_json(store.get(landings_key(group, rank))) for rank in range(num_ranks)]
    return plan(
        source, [EngineLayout(layout=layout_of(source.shapes, source.dtypes, landings))], int(store.get(_BUCKET))
    )


class PeerSender(WeightSender):
    """Serves engines that ask for the staged version, which they may do at any time."""

    def __init__(
        self,
        backend: WeightSource,
        rank: int,
        world_size: int,
        rendezvous: str,
        timeout_s: float,
        bucket_bytes: int | None = None,
    ) -> None:
        """`rendezvous` is where these ranks met; the store listens on the same address. `bucket_bytes` is None for the
        device's own."""
        super().__init__(backend, rank)
        self._timeout_s = timeout_s
        self._hosted = HostedStore(backend, rank, rendezvous, timeout_s)
        self._source = self._hosted.source
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        if rank == 0:
            usual = BUCKET_BYTES if self._device is None else GPU_BUCKET_BYTES
            self._hosted.connect().set(_BUCKET, str(bucket_bytes or usual))
        self._staged: dict[str, Tensor] = {}
        # On the device, where it is read and changed in turn with the copies.
        self._version = torch.full((1,), -1, device=self._device)
        self._sessions: dict[int, _Session] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def stage(self, version: int) -> StagedWeights | None:
        """Copy this rank's part of the back end's weights, in the engines' dtype; rank 0 is told where to ask for it.

        Raises RunError when requests can no longer be answered.
        """
        if self._failure is not None:
            raise RunError(f"trainer rank {self._rank} sends no weights any more: {self._failure!r}") from self._failure
        # What is sent from now on, while the copy is rewritten, says that it is no version.
        self._version.fill_(-1)
        for name, held in self._backend.held():
            if name not in self._staged:
                self._staged[name] = torch.empty(
                    held.shape, dtype=self._hosted.dtypes[name], device=self._device or held.device
                )
            self._staged[name].copy_(held)
        self._version.fill_(version)
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        return self._hosted.staged(version)

    def close(self) -> None:
        """Answer no more requests, on all ranks."""
        if self._thread.is_alive():
            submit(self._hosted.connect(_CLOSE_S), {_CLOSING: True})
        self._thread.join(_CLOSE_S)
        for session in self._sessions.values():
            if session.peers is not None:
                session.peers.give_up()
        self._sessions.clear()

    def _serve(self) -> None:
        try:
            store = self._hosted.connect()
            number = 0
            last = threading.Event()
            last.set()
            while True:
                found = _next(store, number)
                if found is not None and _CLOSING in found:
                    return
                if found is not None:
                    request = TransferRequest(**found)
                    session = self._sessions.get(request.engine)
                    before = last
                    if session is None or session.group != request.group:
                        if session is not None and session.peers is not None:
                            session.peers.give_up()  # to a process of the engine that has gone, a thread may still send
                        session = self._sessions[request.engine] = _Session(group=request.group)
                        last = session.joined
                    name = f"weights for engine {request.engine}"
                    work = threading.Thread(
                        target=self._answer, args=(request, session, before), name=name, daemon=True
                    )
                    work.start()
                if self._rank == 0 and number >= _KEPT_REQUESTS:
                    store.delete_key(request_key(number - _KEPT_REQUESTS))
                number += 1
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The log says why at once, because nobody waits for a thread; the next version that is staged says it too."""
        _logger.exception("trainer rank %d sends no weights any more", self._rank)
        self._failure = error

    def _answer(self, request: TransferRequest, session: _Session, before: threading.Event) -> None:
        """`before` is set when the group that was asked for before this one is built."""
        try:
            with session.lock, torch.no_grad():
                deadline = Deadline(self._timeout_s)
                if session.peers is None:
                    session.peers = self._join(request, session, before, deadline)
                    session.stream = torch.cuda.Stream(self._device) if self._device is not None else None
                self._send_all(request, session, session.peers, deadline)
        except (RuntimeError, ConfigError) as error:
            # The engine sees it too, and is started again; it comes back with another group.
            if session.peers is not None:
                session.peers.give_up()
            session.peers = None
            _logger.warning("engine %d was not sent version %d: %s", request.engine, request.version, error)
        except Exception as error:
            self._fail(error)
        finally:
            session.joined.set()

    def _join(
        self, request: TransferRequest, session: _Session, before: threading.Event, deadline: Deadline
    ) -> PeerGroup:
        made = plan_for(self._source, self._hosted.connect(), session.group, request.num_ranks)
        session.messages = cut_messages(made.moves_from(self._rank), made.num_buckets)
        num_sources = self._source.num_ranks
        size, device = num_sources + request.num_ranks, self._device or torch.device("cpu")
        if self._device is not None:
            # NCCL may wait for the GPU while it builds a group: all ranks build theirs in the order of the requests.
            before.wait(deadline.left.total_seconds())
        peers = PeerGroup(self._hosted, session.group, self._rank, size, device)
        session.joined.set()
        return peers

    def _send_all(self, request: TransferRequest, session: _Session, peers: PeerGroup, deadline: Deadline) -> None:
        """Two buckets in turn: one is packed while the other one is sent. On a GPU all is queued, then waited for."""
        memory: list[dict[int, Tensor]] = [{}, {}]
        under_way: list[list[Work]] = [[], []]
        with torch.cuda.stream(session.stream):
            for bucket, messages in enumerate(session.messages):
                wait_all(under_way[bucket % 2], deadline)
                packed = memory[bucket % 2]
                for message in messages:
                    self._pack(message, request, bucket, packed)
                under_way[bucket % 2] = peers.send(
                    [
                        (packed[message.rank][: message.num_bytes], self._source.num_ranks + message.rank)
                        for message in messages
                    ]
                )
            for works in under_way:
                wait_all(works, deadline)
        if session.stream is not None:
            session.stream.synchronize()

    def _pack(self, message: PeerMessage, request: TransferRequest, bucket: int, memory: dict[int, Tensor]) -> None:
        """Fill the memory of a peer; if the copy is rewritten meanwhile, the message says that it is no version."""
        found = memory.get(message.rank)
        if found is None or len(found) < message.num_bytes:
            found = memory[message.rank] = torch.zeros(message.num_bytes, dtype=torch.uint8, device=self._device)
        packed = found[: message.num_bytes]
        pack(message, self._staged, packed)
        stamp = MessageStamp(transfer=request.transfer, version=request.version, bucket=bucket)
        seal(packed, stamp, self._version)


def _next(store: Store, number: int) -> dict[str, Any] | None:
    """Wait until there is this request, however long no engine asks; None if it never comes.

    A worker takes a number, then writes: one that dies in between leaves a gap, which those after it show.
    """
    while not comes(store, request_key(number)):
        if store.add(NUM_REQUESTS, 0) > number + 1 and not store.check([request_key(number)]):
            return None
    return json.loads(store.get(request_key(number)))
