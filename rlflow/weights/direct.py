"""Receiving side, inside each vLLM worker, of the transports that bring elements straight to where they belong.

open: learn where, agree with the trainer -> receive, once a bucket -> finish: compute with them

Importing this registers `rlflow_p2p` and `rlflow_ipc` with vLLM, which drives them as `receiver` says; only that the
buckets come through `rlflow_receive`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rlflow.config import Transport
from rlflow.errors import NotACopy
from rlflow.roles import TensorSlot
from rlflow.weights.arena_view import ArenaView
from rlflow.weights.engine_tensors import EngineTensors, learn_landings
from rlflow.weights.layout import Layout
from rlflow.weights.messages import LoadMode, WeightReport, backend_of
from rlflow.weights.p2p_receiver import PeerReceiver, Worker
from rlflow.weights.tracing import Landings
from rlflow.weights.trainer_store import TrainerStore
from rlflow.weights.verify import compare_weights


class Receiver(Protocol):
    """One transport, in one worker."""

    def open(self, version: int, transfer: int) -> int:
        """Agree with the trainer on a version; how many buckets will come. `transfer` is a fresh number."""
        ...

    def receive(self, bucket: int) -> int | None:
        """Put the next bucket in its place; the version that the trainer has, where it is another one by now."""
        ...

    def give_up(self) -> None:
        """Let the rest of a version not come."""
        ...

    def close(self) -> None: ...


@dataclass
class DirectInit(WeightTransferInitInfo):
    """Nothing to agree on: each version names where the trainer is."""


@dataclass
class DirectUpdate(WeightTransferUpdateInfo):
    """Nothing comes this way."""


class DirectEngine(WeightTransferEngine[DirectInit, DirectUpdate]):
    """Fills `EngineTensors`; a model that needs whole tensors has to take another transport."""

    init_info_cls = DirectInit
    update_info_cls = DirectUpdate
    supports_draft_weight_update = False

    _tensors: EngineTensors | None = None
    _receiver: Receiver | None = None
    _landings: Landings

    @abstractmethod
    def _make_receiver(
        self, trainer: TrainerStore, source: Layout, worker: Worker, tensors: EngineTensors
    ) -> Receiver: ...

    def open(self, address: str, engine: int, version: int, transfer: int, timeout_s: float) -> tuple[LoadMode, int]:
        """Ask for a version; how it will be loaded, and in how many buckets. Forgets one that was not finished.

        Where the mode is `reloaded`, nothing was asked for.
        """
        if self._tensors is None or self._receiver is None:
            try:
                self._set_up(TrainerStore(address, timeout_s), engine)
            except NotACopy:
                return LoadMode.reloaded, 0
        assert self._tensors is not None and self._receiver is not None
        self._tensors.begin()
        mode = LoadMode.beside if self._tensors.is_beside else LoadMode.in_place
        return mode, self._receiver.open(version, transfer)

    def _set_up(self, trainer: TrainerStore, engine: int) -> None:
        source = trainer.layout()
        shapes = {name: place.shape for name, place in source.placements.items()}
        blank, self._landings = learn_landings(self.vllm_config, shapes)
        self._tensors = EngineTensors(self.model, blank, shapes, self._landings)
        worker = Worker(
            engine=engine,
            rank=get_tensor_model_parallel_rank(),
            num_ranks=get_tensor_model_parallel_world_size(),
            device=self.device,
        )
        self._receiver = self._make_receiver(trainer, source, worker, self._tensors)

    def receive(self, bucket: int) -> int | None:
        """Put one bucket in its place; see `Receiver.receive`."""
        assert self._receiver is not None, "a version is opened before its buckets are received"
        with torch.no_grad():
            return self._receiver.receive(bucket)

    def init_transfer_engine(self, init_info: DirectInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing to do: `open` has begun."""

    def receive_weights(self, update_info: DirectUpdate) -> None:
        raise NotImplementedError("weights come through rlflow_receive")

    def finish_weight_update(self) -> None:
        """Compute with what has come. Raises ValueError when a part of it has not."""
        assert self._tensors is not None, "finish before the first bucket"
        if missing := self._tensors.missing:
            raise ValueError(f"{len(missing)} parameters were not sent, such as {missing[0]!r}; send the whole model")
        with torch.no_grad():
            self._tensors.commit()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def abort(self) -> None:
        if self._receiver is not None:
            self._receiver.give_up()
        if self._tensors is not None:
            self._tensors.begin()

    def compare(self, view: ArenaView, slots: Sequence[TensorSlot]) -> WeightReport:
        return compare_weights(self.model, self._landings, view.tensors(slots))

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


class PeerEngine(DirectEngine):
    """From rank to rank."""

    def _make_receiver(
        self, trainer: TrainerStore, source: Layout, worker: Worker, tensors: EngineTensors
    ) -> PeerReceiver:
        return PeerReceiver(trainer, source, worker, tensors.targets, tensors.landings, tensors.landed)


for _transport, _engine in ((Transport.p2p, PeerEngine),):
    if backend_of(_transport) not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend_of(_transport), _engine)
