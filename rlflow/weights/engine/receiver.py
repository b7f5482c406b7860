"""Receiving side, inside each vLLM worker: an arena's parameters become what the worker computes with.

vLLM imports this module through `worker_extension_cls`; importing it registers the weight-transfer back end
`rlflow_shm`, which vLLM drives as start -> one update a bucket -> finish. Where the weights can be laid out beside the
model (`LoadMode.beside`), the buckets come before that, while the engine samples, and start and finish only swap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
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
from rlflow.weights.engine.direct import Opening
from rlflow.weights.engine.messages import LoadMode, WeightReport, backend_of, slots_of
from rlflow.weights.engine.reload import Reloader
from rlflow.weights.engine.tensors import EngineTensors, Landings, learn_landings
from rlflow.weights.engine.verify import Columns, compare_weights
from rlflow.weights.shape.layout import Shapes
from rlflow.weights.shm.arena_view import ArenaView

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class ArenaInit(WeightTransferInitInfo):
    """Nothing to agree on: each update names its arena."""


@dataclass
class ArenaUpdate(WeightTransferUpdateInfo):
    """One bucket; see `messages.update_message`."""

    path: str
    num_bytes: int
    version: int
    slots: list[list[object]]


class ArenaEngine(WeightTransferEngine[ArenaInit, ArenaUpdate]):
    """Loads an arena's tensors in the way that `learn` has found for the model."""

    init_info_cls = ArenaInit
    update_info_cls = ArenaUpdate
    supports_draft_weight_update = False

    _arena: ArenaView | None = None
    _version: int | None = None  # that is being loaded from it
    _tensors: EngineTensors | None = None
    _reloader: Reloader | None = None
    _landings: Landings

    def init_transfer_engine(self, init_info: ArenaInit) -> None:
        """Nothing to set up."""

    def learn(self, shapes: Shapes) -> LoadMode:
        """Find out how these parameters are loaded into this model. Raises ConfigError when it does not take them."""
        self._landings = {}
        try:
            blank, self._landings = learn_landings(self.vllm_config, shapes)
            self._tensors = EngineTensors(self.model, blank, shapes, self._landings)
        except NotACopy:
            self._reloader = Reloader(self.model, self.model_config)
            return LoadMode.reloaded
        if not self._tensors.is_beside:
            return LoadMode.in_place
        keep_memory()  # each version is packed to where the one before the last was
        return LoadMode.beside

    def prepare(self, update: dict[str, object]) -> None:
        """Lay out one bucket beside the model. The first one of a version forgets what was laid out before."""
        assert self._tensors is not None and self._tensors.is_beside, "only what lies beside the model can be prepared"
        info = self.parse_update_info(update)
        if not self._is_loading(info):
            self._open(info)
            self._tensors.begin()
        self.receive_weights(info)

    def start_weight_update(self) -> None:
        if self._reloader is not None:
            self._reloader.begin()
        elif self._tensors is not None and not self._tensors.is_beside:
            self._tensors.begin()

    def update_weights(self, update_info: dict[str, object]) -> None:
        update = self.parse_update_info(update_info)
        if not self._is_loading(update):
            self._open(update)
        self.receive_weights(update)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _is_loading(self, update: ArenaUpdate) -> bool:
        return self._arena is not None and (self._arena.path, self._version) == (update.path, update.version)

    def _open(self, update: ArenaUpdate) -> None:
        self._arena = self.view(update.path, update.num_bytes)
        self._version = update.version

    def view(self, path: str, num_bytes: int) -> ArenaView:
        """An arena: the one that the last version came from, or another."""
        return self._arena if self._arena is not None and self._arena.path == path else ArenaView(path, num_bytes)

    def receive_weights(self, update_info: ArenaUpdate) -> None:
        """Load one bucket. Raises ValueError when the arena holds another version."""
        assert self._arena is not None
        self._arena.check(update_info.version)
        tensors = self._arena.tensors(slots_of(update_info.slots))
        with torch.no_grad():
            if self._reloader is not None:
                self._reloader.load(tensors)
                return
            assert self._tensors is not None, "how a model is loaded is learnt first"
            for name, tensor in tensors:
                self._tensors.land(name, tensor)

    def finish_weight_update(self) -> None:
        """Make the loaded weights effective. Raises ValueError when a parameter was not sent."""
        loader = self._reloader or self._tensors
        assert loader is not None and self._arena is not None and self._version is not None, "buckets come first"
        if missing := loader.missing:
            raise ValueError(f"{len(missing)} parameters were not sent, such as {missing[0]!r}; send the whole model")
        # Before the swap: what was prepared from an arena that was rewritten meanwhile is not put in place.
        self._arena.check(self._version)
        with torch.no_grad():
            loader.commit()
        self._arena.check(self._version)
        self._version = None

    def abort(self) -> None:
        if self._reloader is not None:
            self._reloader.abort()
        if self._tensors is not None:
            self._tensors.begin()
        self._version = None

    def compare(self, view: ArenaView, slots: Sequence[TensorSlot], columns: Columns | None) -> WeightReport:
        return compare_weights(self.model, self._landings, view.tensors(slots), columns)

    def shutdown(self) -> None:
        self._arena = None


class WorkerExtension:
    """Mixed into vLLM's worker; each method is a `collective_rpc`."""

    if TYPE_CHECKING:
        vllm_config: VllmConfig
        weight_transfer_engine: Any  # of the chosen transport: an ArenaEngine or a DirectEngine
        _weight_update_active: bool

    def rlflow_learn(self, shapes: dict[str, list[int]]) -> str:
        """How these parameters will be loaded into this worker's model: a `LoadMode`."""
        with set_current_vllm_config(self.vllm_config):
            return self.weight_transfer_engine.learn({name: tuple(shape) for name, shape in shapes.items()})

    def rlflow_prepare(self, **update: Any) -> None:
        """Lay out one bucket of a version, see `ArenaEngine.prepare`."""
        self.weight_transfer_engine.prepare(update)

    def rlflow_open(self, **opening: Any) -> tuple[str, int]:
        """Agree on a version, see `DirectEngine.open`: a `LoadMode`, and how many buckets will come."""
        with set_current_vllm_config(self.vllm_config):
            return self.weight_transfer_engine.open(Opening(**opening))

    def rlflow_receive(self, bucket: int) -> int | None:
        """Put one bucket of a version in its place, see `Receiver.receive`."""
        with set_current_vllm_config(self.vllm_config):
            return self.weight_transfer_engine.receive(bucket)

    def rlflow_compare_targets(self, version: int, num_columns: int | None) -> WeightReport:
        """Compare what this worker computes with, to what has come, see `DirectEngine.compare_targets`."""
        columns = None if num_columns is None else Columns(count=num_columns, seed=version)
        with torch.no_grad():
            return self.weight_transfer_engine.compare_targets(columns)

    def rlflow_abort_update(self) -> None:
        """Give up a half-done update. A complete one must follow before anything is sampled."""
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.weight_transfer_engine.abort()
        self._weight_update_active = False

    def rlflow_compare_weights(
        self, path: str, num_bytes: int, version: int, slots: list[list[object]], num_columns: int | None
    ) -> WeightReport:
        """Compare the weights that this worker computes with, to the arena's, bit for bit: whole, or some columns."""
        view = self.weight_transfer_engine.view(path, num_bytes)
        view.check(version)
        columns = None if num_columns is None else Columns(count=num_columns, seed=version)
        with torch.no_grad():
            return self.weight_transfer_engine.compare(view, slots_of(slots), columns)


if backend_of(Transport.shm) not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(backend_of(Transport.shm), ArenaEngine)
