"""Models that do not keep their weights as they are loaded: whole parameters go through vLLM's layerwise reloader.

whole parameters, beside the model while it computes -> commit, during a pause: vLLM's loader -> what it computes with

On a CPU vLLM 0.32 keeps packed copies of weights which its reloader does not renew in two places: the output head that
is tied to the embedding, and the experts of a mixture. Both are repaired here; without that, logits are silently wrong.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from rlflow.weights.engine.messages import Columns, WeightReport
from rlflow.weights.engine.receiver import Named
from rlflow.weights.engine.verify import compare_weights, sampled
from rlflow.weights.shape.landings import Landings, whole_landings
from rlflow.weights.shape.layout import Dtypes, Shapes


class ReloadedModel:
    """A `Destination` that holds one version of whole parameters in the memory of the CPU and reloads the model."""

    is_beside = True

    def __init__(self, model: Any, config: ModelConfig, shapes: Shapes, dtypes: Dtypes, readable: Landings) -> None:
        """`readable` says where the model keeps those parameters that can be read back."""
        self.shapes = shapes
        self.landings = whole_landings(shapes, dtypes)
        self._dtypes = dtypes
        self._model = model
        register_once(model)
        self._config = config
        self._readable = readable
        self._targets: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}

    @property
    def targets(self) -> Mapping[str, Tensor]:
        """Made when a transport fills them: shared memory, where parameters are whole, needs none."""
        if not self._targets:
            self._targets = {
                name: torch.zeros(shape, dtype=getattr(torch, self._dtypes[name]), device="cpu")
                for name, shape in self.shapes.items()
            }
        return self._targets

    @property
    def missing(self) -> list[str]:
        return sorted(self.shapes.keys() - self._given.keys())

    def begin(self) -> None:
        self._given = {}

    def abort(self) -> None:
        abort_reload(self._model)
        self.begin()

    def land(self, name: str, whole: Tensor) -> None:
        """vLLM's loader keeps views of what it is given until a fused layer is complete."""
        if self.shapes.get(name) != tuple(whole.shape):
            raise ValueError(f"{name!r} of shape {tuple(whole.shape)} was sent, but not with the first version")
        self._given[name] = whole

    def landed(self, name: str) -> None:
        self._given[name] = self.targets[name]

    def commit(self) -> None:
        abort_reload(self._model)
        forget_packed_experts(self._model)
        initialize_layerwise_reload(self._model)
        loaded: set[str] | None = self._model.load_weights((name, self._given[name]) for name in self.shapes)
        if loaded is None:
            raise ValueError(f"{type(self._model).__name__} does not report what it loaded; it is not supported")
        if missing := sorted(parameter_names(self._model) - loaded):
            raise ValueError(f"nothing was loaded into {len(missing)} parameters, such as {missing[0]!r}")
        tied = unloaded_heads(self._model)
        finalize_layerwise_reload(self._model, self._config)
        for head in tied:
            head.quant_method.process_weights_after_loading(head)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # what was given may be rewritten from now on

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        if expected is None:
            expected = sampled(self._given, columns).items()
        return compare_weights(self._model, self._readable, expected, columns)


def register_once(model: torch.nn.Module) -> None:
    """Let a parameter that several modules share belong to the first of them; for the others it is an attribute.

    vLLM's reload would give each module a tensor of its own, fill one, and copy what the other holds over it: so it
    does to the corrections by which GLM-4.5 and DeepSeek-V3 choose experts (0.32). Output heads are `unloaded_heads`.
    """
    owners: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or owners.setdefault(id(parameter), module) is module:
                continue
            if not isinstance(module, VocabParallelEmbedding):
                del module._parameters[name]
                module.__dict__[name] = parameter
                layerwise.get_layerwise_info(module).restore_metadata[0].pop(name, None)


def parameter_names(model: torch.nn.Module) -> set[str]:
    """The names of all parameters while a reload is under way; a tied parameter goes by its first name."""
    tied = {id(head) for head in unloaded_heads(model)}
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if id(module) not in tied
        for name in module._parameters
        if module._parameters[name] is not None
    }


def unloaded_heads(model: torch.nn.Module) -> list[VocabParallelEmbedding]:
    """Output heads that share the embedding's weight, so that nothing is sent for them."""
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
