"""The rank-to-rank transport in a rank of the trainer: engines ask for a version, and are sent what they hold of it.

held -> stage: a copy of this rank's own part -> requests of engines -> plan -> pack, send, bucket by bucket

Nothing is gathered, and training goes on while the copy is sent. One thread reads the requests, which all ranks find in
one store in the same order; each is answered by a thread of its own, so that an engine that hangs holds up no other.
"""

import datetime
import json
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store, Work  # pyright: ignore[reportPrivateImportUsage]

from rlflow.errors import ConfigError, RunError
from rlflow.roles import StagedWeights
from rlflow.weights.p2p.exchange import BUCKET_BYTES, MessageStamp, PeerMessage, cut_messages, pack, seal
from rlflow.weights.p2p.rendezvous import Deadline, HostedStore, begin, build_group, wait_all
from rlflow.weights.shape.landings import landings_from_json, layout_of
from rlflow.weights.shape.layout import EngineLayout, Layout
from rlflow.weights.shape.plan import TransferPlan, plan
from rlflow.weights.source import WeightSender, WeightSource

_BUCKET = "bucket"
"""Key of the store: the bytes of a bucket."""
NUM_REQUESTS = "requests"
_CLOSING = "closing"
_LOOK_AGAIN = datetime.timedelta(seconds=10)
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
    process_group: ProcessGroup | None = None
    messages: list[list[PeerMessage]] = field(default_factory=list)
    """What this rank sends, by bucket."""
    stream: torch.cuda.Stream | None = None
    """The stream of the sends on a GPU, so that they and training do not wait for each other."""


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
    dtype = next(iter(source.placements.values())).dtype
    return plan(source, [EngineLayout(layout=layout_of(source.shapes, dtype, landings))], int(store.get(_BUCKET)))


class PeerSender(WeightSender):
    """Serves engines that ask for the staged version, which they may do at any time."""

    def __init__(
        self,
        backend: WeightSource,
        rank: int,
        world_size: int,
        rendezvous: str,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`rendezvous` is where these ranks met; the store listens on the same address."""
        super().__init__(backend, rank)
        self._timeout_s = timeout_s
        self._hosted = HostedStore(backend, rank, rendezvous, timeout_s)
        self._source = self._hosted.source
        if rank == 0:
            self._hosted.connect().set(_BUCKET, str(bucket_bytes))
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._staged: dict[str, Tensor] = {}
        self._version = -1
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
        self._version = -1
        for name, held in self._backend.held():
            if name not in self._staged:
                self._staged[name] = torch.empty(
                    held.shape, dtype=self._hosted.dtype, device=self._device or held.device
                )
            self._staged[name].copy_(held)
        _finish(self._device)
        self._version = version
        return self._hosted.staged(version)

    def close(self) -> None:
        """Answer no more requests, on all ranks."""
        if self._thread.is_alive():
            submit(self._hosted.connect(_CLOSE_S), {_CLOSING: True})
        self._thread.join(_CLOSE_S)
        self._sessions.clear()

    def _serve(self) -> None:
        try:
            store = self._hosted.connect()
            number = 0
            while True:
                found = _next(store, number)
                if found is not None and _CLOSING in found:
                    return
                if found is not None:
                    request = TransferRequest(**found)
                    session = self._sessions.get(request.engine)
                    if session is None or session.group != request.group:
                        session = self._sessions[request.engine] = _Session(group=request.group)
                    name = f"weights for engine {request.engine}"
                    threading.Thread(target=self._answer, args=(request, session), name=name, daemon=True).start()
                if self._rank == 0 and number >= _KEPT_REQUESTS:
                    store.delete_key(request_key(number - _KEPT_REQUESTS))
                number += 1
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The log says why at once, because nobody waits for a thread; the next version that is staged says it too."""
        _logger.exception("trainer rank %d sends no weights any more", self._rank)
        self._failure = error

    def _answer(self, request: TransferRequest, session: _Session) -> None:
        try:
            with session.lock, torch.no_grad():
                deadline = Deadline(self._timeout_s)
                if session.process_group is None:
                    session.process_group = self._join(request, session)
                    session.stream = torch.cuda.Stream(self._device) if self._device is not None else None
                self._send_all(request, session, session.process_group, deadline)
        except (RuntimeError, ConfigError) as error:
            # The engine sees it too, and is started again; it comes back with another group.
            session.process_group = None
            _logger.warning("engine %d was not sent version %d: %s", request.engine, request.version, error)
        except Exception as error:
            self._fail(error)

    def _join(self, request: TransferRequest, session: _Session) -> ProcessGroup:
        store = self._hosted.connect()
        made = plan_for(self._source, store, session.group, request.num_ranks)
        session.messages = cut_messages(made.moves_from(self._rank), made.num_buckets)
        num_sources = self._source.num_ranks
        size, device = num_sources + request.num_ranks, self._device or torch.device("cpu")
        return build_group(store, session.group, self._rank, size, device, self._hosted.host, self._timeout_s)

    def _send_all(self, request: TransferRequest, session: _Session, group: ProcessGroup, deadline: Deadline) -> None:
        """Two buckets in turn: one is packed while the other one is sent."""
        memory: list[dict[int, Tensor]] = [{}, {}]
        under_way: list[list[Work]] = [[], []]
        with torch.cuda.stream(session.stream):
            for bucket, messages in enumerate(session.messages):
                wait_all(under_way[bucket % 2], deadline)
                packed = memory[bucket % 2]
                for message in messages:
                    self._pack(message, request, bucket, packed)
                peers = [
                    (packed[message.rank][: message.num_bytes], self._source.num_ranks + message.rank)
                    for message in messages
                ]
                under_way[bucket % 2] = begin(group, group.send, peers)
            for works in under_way:
                wait_all(works, deadline)

    def _pack(self, message: PeerMessage, request: TransferRequest, bucket: int, memory: dict[int, Tensor]) -> None:
        """Fill the memory of a peer; if the copy is rewritten meanwhile, the message says that it is no version."""
        found = memory.get(message.rank)
        if found is None or len(found) < message.num_bytes:
            found = memory[message.rank] = torch.zeros(message.num_bytes, dtype=torch.uint8, device=self._device)
        packed = found[: message.num_bytes]
        version = self._version
        if version == request.version:
            pack(message, self._staged, packed)
            _finish(self._device)
            version = self._version
        stamp = MessageStamp(transfer=request.transfer, version=version, bucket=bucket)
        seal(packed, stamp, is_complete=version == request.version)


def _next(store: Store, number: int) -> dict[str, Any] | None:
    """Wait until there is this request, however long no engine asks; None if it never comes.

    A worker takes a number, then writes: one that dies in between leaves a gap, which those after it show.
    """
    while True:
        try:
            store.wait([request_key(number)], _LOOK_AGAIN)
            return json.loads(store.get(request_key(number)))
        except torch.distributed.DistStoreError as error:
            if "timeout" not in str(error):
                raise
        if store.add(NUM_REQUESTS, 0) > number + 1 and not store.check([request_key(number)]):
            return None


def _finish(device: torch.device | None) -> None:
    """Wait for the copies that this thread has begun."""
    if device is not None:
        torch.cuda.current_stream(device).synchronize()
