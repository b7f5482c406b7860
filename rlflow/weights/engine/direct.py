"""Receiving side, inside each vLLM worker, of the transports that bring elements straight to where they belong.

open: learn where, agree with the trainer -> receive, once a bucket -> finish: compute with them

Importing this registers them with vLLM, which drives them as `receiver` says; only that the buckets come through
`rlflow_receive`.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
from rlflow.runtime.environment import keep_memory
from rlflow.weights.disk.manifest import read_manifest
from rlflow.weights.disk.receiver import DiskReceiver
from rlflow.weights.engine.messages import NUM_VERIFIED, LoadMode, WeightReport, backend_of
from rlflow.weights.engine.tensors import EngineTensors, learn_landings
from rlflow.weights.engine.verify import Columns, compare_tensors, compare_weights
from rlflow.weights.ipc.receiver import SharedReceiver, device_id
from rlflow.weights.p2p.receiver import PeerReceiver, Worker
from rlflow.weights.p2p.trainer_store import TrainerStore
from rlflow.weights.shape.layout import Layout, Shapes
from rlflow.weights.shm.arena_view import ArenaView


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


@dataclass(kw_only=True, slots=True, frozen=True)
class Opening:
    """What the workers of an engine are told of a version; see `messages.open_message`."""

    path: str
    """tcp://host:port of the trainer's store, or the folder of the versions."""
    engine: int
    version: int
    transfer: int
    timeout_s: float


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

    @abstractmethod
    def _shapes(self, opening: Opening) -> Shapes:
        """Of all parameters that will come."""

    @abstractmethod
    def _make_receiver(self, opening: Opening, tensors: EngineTensors) -> Receiver: ...

    def open(self, opening: Opening) -> tuple[LoadMode, int]:
        """Ask for a version; how it will be loaded, and in how many buckets. Forgets one that was not finished.

        Where the mode is `reloaded`, nothing was asked for.
        """
        if self._tensors is None or self._receiver is None:
            try:
                self._set_up(opening)
            except NotACopy:
                return LoadMode.reloaded, 0
        assert self._tensors is not None and self._receiver is not None
        self._tensors.begin()
        mode = LoadMode.beside if self._tensors.is_beside else LoadMode.in_place
        return mode, self._receiver.open(opening.version, opening.transfer)

    def _set_up(self, opening: Opening) -> None:
        shapes = self._shapes(opening)
        blank, landings = learn_landings(self.vllm_config, shapes)
        self._tensors = EngineTensors(self.model, blank, shapes, landings)
        if self._tensors.is_beside:
            keep_memory()  # each version is packed to where the one before the last was
        self._receiver = self._make_receiver(opening, self._tensors)

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

    def compare_targets(self, columns: Columns | None) -> WeightReport:
        """Compare tensors that this worker computes with, to what has come for them: columns of a few, or all.

        That what has come is what the trainer has is known from checksums. Where it came into the model's own tensors
        there is nothing to compare.
        """
        assert self._tensors is not None, "nothing has come yet"
        targets, names = self._tensors.targets, sorted(self._tensors.targets)
        if not self._tensors.is_beside:
            return WeightReport(num_equal=0, different=[], unverified=names)
        if columns is not None:
            names = random.Random(columns.seed).sample(names, min(NUM_VERIFIED, len(names)))
        return compare_tensors(self.model, {name: targets[name] for name in names}, columns)

    def view(self, path: str, num_bytes: int) -> ArenaView:
        return ArenaView(path, num_bytes)

    def compare(self, view: ArenaView, slots: Sequence[TensorSlot], columns: Columns | None) -> WeightReport:
        """Compare what this worker computes with, to an arena."""
        assert self._tensors is not None, "nothing has come yet"
        return compare_weights(self.model, self._tensors.landings, view.tensors(slots), columns)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


class PeerEngine(DirectEngine):
    """From rank to rank."""

    _trainer: TrainerStore
    _source: Layout

    def _shapes(self, opening: Opening) -> Shapes:
        self._trainer = TrainerStore(opening.path, opening.timeout_s)
        self._source = self._trainer.layout()
        return {name: place.shape for name, place in self._source.placements.items()}

    def _make_receiver(self, opening: Opening, tensors: EngineTensors) -> Receiver:
        worker = Worker(
            engine=opening.engine,
            rank=get_tensor_model_parallel_rank(),
            num_ranks=get_tensor_model_parallel_world_size(),
            device=self.device,
        )
        return PeerReceiver(self._trainer, self._source, worker, tensors.targets, tensors.landings, tensors.landed)


class SharedEngine(PeerEngine):
    """Out of the memory of the trainer's GPUs."""

    def _make_receiver(self, opening: Opening, tensors: EngineTensors) -> Receiver:
        gpu = device_id(self.device)
        return SharedReceiver(self._trainer, self._source, gpu, tensors.targets, tensors.landings, tensors.landed)


class DiskEngine(DirectEngine):
    """From the versions in a folder."""

    def _shapes(self, opening: Opening) -> Shapes:
        manifest = read_manifest(Path(opening.path), opening.version)
        return {name: each.shape for name, each in manifest.parameters.items()}

    def _make_receiver(self, opening: Opening, tensors: EngineTensors) -> DiskReceiver:
        return DiskReceiver(
            Path(opening.path), self._shapes(opening), tensors.targets, tensors.landings, tensors.landed
        )


_ENGINES = {Transport.p2p: PeerEngine, Transport.ipc: SharedEngine, Transport.disk: DiskEngine}

for _transport, _engine in _ENGINES.items():
    if backend_of(_transport) not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend_of(_transport), _engine)
