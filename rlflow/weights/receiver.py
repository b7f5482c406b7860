"""Receiving side of the shared-memory transport, inside each vLLM worker.

vLLM imports this module through `worker_extension_cls`; importing it registers the weight-transfer back end
`rlflow_shm`, which vLLM drives as start -> one update a bucket -> finish.

On a CPU vLLM 0.32 keeps packed copies of weights which its reloader does not renew in two places: the output head that
is tied to the embedding, and the experts of a mixture. Both are repaired here; without that, logits are silently wrong.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator, Sequence
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
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from rlflow.roles import TensorSlot
from rlflow.weights.arena import tensor_at
from rlflow.weights.messages import BACKEND, slots_of
from rlflow.weights.verify import WeightReport, compare_weights

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
    """Loads an arena's tensors through vLLM's layerwise reloader."""

    init_info_cls = ArenaInit
    update_info_cls = ArenaUpdate
    supports_draft_weight_update = False

    _arena: ArenaView | None = None
    _loaded: set[str]

    def init_transfer_engine(self, init_info: ArenaInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        abort_reload(self.model)
        forget_packed_experts(self.model)
        self._loaded = set()
        with torch.no_grad():
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        update = self.parse_update_info(update_info)
        with torch.no_grad():
            self.receive_weights(update)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ArenaUpdate) -> None:
        """Load one bucket. Raises ValueError when the arena holds another version."""
        if self._arena is None:
            # The reloader keeps views of what it was given until a fused layer is complete: hold the map until finish.
            self._arena = ArenaView(update_info.path, update_info.num_bytes, update_info.version)
        self._arena.check()
        model: Any = self.model
        loaded: set[str] | None = model.load_weights(self._arena.tensors(slots_of(update_info.slots)))
        if loaded is None:
            raise ValueError(f"{type(self.model).__name__} does not report what it loaded; it is not supported")
        self._loaded |= loaded

    def finish_weight_update(self) -> None:
        """Make the loaded weights effective. Raises ValueError when a parameter was not sent."""
        assert self._arena is not None, "finish before the first bucket"
        missing = sorted(parameter_names(self.model) - self._loaded)
        if missing:
            raise ValueError(f"{len(missing)} parameters were not sent, such as {missing[0]!r}; send the whole model")
        tied = unloaded_heads(self.model)
        with torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
            for head in tied:
                head.quant_method.process_weights_after_loading(head)
        self._arena.check()
        self._arena = None

    def abort(self) -> None:
        abort_reload(self.model)
        self._arena = None

    def shutdown(self) -> None:
        self._arena = None


class ArenaView:
    """A read-only mapping of an arena that is expected to hold one version."""

    def __init__(self, path: str, num_bytes: int, version: int) -> None:
        self._version = version
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            mapping = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; nothing here writes to it.
            warnings.simplefilter("ignore", UserWarning)
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def check(self) -> None:
        found = int(self._bytes[:8].view(torch.int64).item())
        if found != self._version:
            raise ValueError(f"the arena holds version {found}, not {self._version}: it was rewritten while loading")

    def tensors(self, slots: Sequence[TensorSlot]) -> Iterator[tuple[str, torch.Tensor]]:
        for slot in slots:
            yield slot.name, tensor_at(self._bytes, slot)


def parameter_names(model: torch.nn.Module) -> set[str]:
    """Names of all parameters while a reload is under way; of tied ones the first."""
    tied = {id(head) for head in unloaded_heads(model)}
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if id(module) not in tied
        for name in module._parameters
        if module._parameters[name] is not None
    }


def unloaded_heads(model: torch.nn.Module) -> list[VocabParallelEmbedding]:
    """Output heads which share the embedding's weight and so are sent nothing of their own."""
    owners: dict[int, torch.nn.Module] = {}
    tied: list[VocabParallelEmbedding] = []
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding):
            continue
        info = layerwise.get_layerwise_info(module)
        kernel = info.kernel_tensors[0] if info.kernel_tensors is not None else module._parameters
        weight = kernel.get("weight")
        if owners.setdefault(id(weight), module) is not module:
            tied.append(module)
    return tied


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Make the next load pack the experts again; vLLM packs only while it has no kernel. CPU only."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        weight = next(module.parameters(recurse=False), None)
        on_cpu = weight is not None and weight.device.type == "cpu"
        if method is not None and on_cpu and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def abort_reload(model: torch.nn.Module) -> None:
    """Forget a half-done reload, so that a later one starts clean.

    Layers already processed keep new weights, the others get their old tensors back: the model is then a mixture, and
    must not be sampled from before a complete update. Without this, unprocessed layers stay without storage and the
    next reload replays what the failed one had buffered.
    """
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load():
            continue
        tensors: list[Any] = [*layer._parameters.values(), *layer._buffers.values()]
        for tensor in tensors:
            if hasattr(tensor, "weight_loader"):
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


class WorkerExtension:
    """Mixed into vLLM's worker; each method is a `collective_rpc`."""

    if TYPE_CHECKING:
        vllm_config: VllmConfig
        weight_transfer_engine: ArenaEngine
        _weight_update_active: bool

    def rlflow_abort_update(self) -> None:
        """Give up a half-done update. A complete one must follow before anything is sampled."""
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.weight_transfer_engine.abort()
        self._weight_update_active = False

    def rlflow_compare_weights(
        self, path: str, num_bytes: int, version: int, slots: list[list[object]]
    ) -> WeightReport:
        """Compare the weights that this worker computes with, to the arena's, bit for bit."""
        if self.vllm_config.parallel_config.world_size > 1:
            raise ValueError("weights can be compared with one worker an engine only; set rollout.tensor_parallel=1")
        view = ArenaView(path, num_bytes, version)
        view.check()
        with torch.no_grad():
            return compare_weights(self.weight_transfer_engine.model, dict(view.tensors(slots_of(slots))))


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ArenaEngine)
