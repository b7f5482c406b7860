"""Loading whole parameters through vLLM's layerwise reloader: for models whose weights are not kept as they are loaded.

On a CPU vLLM 0.32 keeps packed copies of weights which its reloader does not renew in two places: the output head that
is tied to the embedding, and the experts of a mixture. Both are repaired here; without that, logits are silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise


class Reloader:
    """For one version after the other: `begin`, `load` once or more, `commit`. Nothing may be sampled meanwhile."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self._model = model
        self._config = config
        self._loaded: set[str] = set()

    def begin(self) -> None:
        abort_reload(self._model)
        forget_packed_experts(self._model)
        self._loaded = set()
        initialize_layerwise_reload(self._model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """What is given must last until `commit`: the reloader keeps views of it until a fused layer is complete."""
        loaded: set[str] | None = self._model.load_weights(tensors)
        if loaded is None:
            raise ValueError(f"{type(self._model).__name__} does not report what it loaded; it is not supported")
        self._loaded |= loaded

    @property
    def missing(self) -> list[str]:
        """Parameters of the model that nothing was loaded into."""
        return sorted(parameter_names(self._model) - self._loaded)

    def commit(self) -> None:
        tied = unloaded_heads(self._model)
        finalize_layerwise_reload(self._model, self._config)
        for head in tied:
            head.quant_method.process_weights_after_loading(head)

    def abort(self) -> None:
        abort_reload(self._model)


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
