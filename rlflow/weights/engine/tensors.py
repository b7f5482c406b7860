"""The tensors of one vLLM worker: where the elements of the parameters go, and how they become what it computes with.

parameters' elements -> targets, laid out as vLLM's loader fills them -> prepare -> commit

On a GPU the targets are the model's own tensors: to fill them is to load, so sampling must have stopped. On a CPU vLLM
multiplies with packed copies. There the targets are a copy beside the model; a layer that is complete is packed while
sampling goes on, and `commit` puts all layers in place within milliseconds.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from rlflow.errors import NotACopy
from rlflow.weights.engine.messages import Columns, WeightReport
from rlflow.weights.engine.receiver import Named
from rlflow.weights.engine.tracing import trace_loading
from rlflow.weights.engine.verify import compare_weights, is_plain, sampled
from rlflow.weights.shape.landings import Landings, whole_landings
from rlflow.weights.shape.layout import Shapes


def learn_landings(config: VllmConfig, shapes: Shapes) -> tuple[nn.Module, Landings]:
    """The worker's model again, without storage, and where its loader puts each parameter.

    `shapes` are those of all parameters that will come, by their Hugging Face names. Raises NotACopy when the loader
    does anything but copy elements; ConfigError when it refuses a parameter, or one is missing.
    """
    own = copy.copy(config)
    # The engine must not take the copy's layers for its own.
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.static_forward_context = {}
    own.compilation_config.static_all_moe_layers = []
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    with torch.device("meta"), set_default_torch_dtype(dtype), torch.no_grad():
        blank: Any = initialize_model(own)
    return blank, trace_loading(blank, blank.load_weights, shapes, dtype)


class EngineTensors:
    """A `Destination`: the model's own tensors, or on a CPU copies of them beside the model."""

    def __init__(self, model: nn.Module, blank: nn.Module, shapes: Shapes, landings: Landings) -> None:
        """`blank` and `landings` are what `learn_landings` gives for the model and these shapes.

        Raises NotACopy for a model whose weights are not kept as its loader fills them.
        """
        self.shapes = shapes
        self.landings = landings
        self._model = model
        live = dict(model.named_parameters())
        self.is_beside = next(iter(live.values())).device.type == "cpu"
        name_of = {id(parameter): name for name, parameter in live.items()}
        self._owners: list[tuple[Any, dict[str, str]]] = [
            (module, {leaf: name_of[id(each)] for leaf, each in module._parameters.items() if each is not None})
            for module in model.modules()
            if module._parameters
        ]
        """Modules, each with its own parameters: their names in it and in the model; a tied one goes by its first."""
        for name, loaded in blank.named_parameters():
            kept = live[name]
            is_same = (loaded.shape, loaded.dtype, loaded.stride()) == (kept.shape, kept.dtype, kept.stride())
            if not is_same and not (self.is_beside and kept.numel() == 0):  # packed on a CPU
                raise NotACopy(
                    f"vLLM keeps {name!r} as {tuple(kept.shape)} of {kept.dtype} and not as it is loaded, "
                    f"{tuple(loaded.shape)} of {loaded.dtype}"
                )
        for module in model.modules():
            if isinstance(module, MLAAttention) or (module._parameters and not is_plain(module)):
                raise NotACopy(f"{type(module).__name__} derives what it computes with from its weights")
        filled = {landing.tensor for found in landings.values() for landing in found}
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in filled}
        self.targets: Mapping[str, Tensor] = live | self._buffers
        if self.is_beside:
            # Of zeros, because nothing is sent for the padding.
            blanks = {**dict(blank.named_parameters()), **self._buffers}
            self.targets = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in blanks.items()}
        self.begin()

    def begin(self) -> None:
        # For each tensor of the model the parameters that it still lacks.
        self._missing: dict[str, set[str]] = {}
        for name, landings in self.landings.items():
            for landing in landings:
                self._missing.setdefault(landing.tensor, set()).add(name)
        self._ready: list[tuple[Any, Any]] = []

    abort = begin

    def land(self, name: str, whole: Tensor) -> None:
        """Copy this worker's part of a parameter into the targets; pack the layers that are complete with it.

        Raises ValueError for a parameter of another name or shape than was learnt.
        """
        self.place(name, whole)
        self.landed(name)

    def place(self, name: str, whole: Tensor) -> None:
        """The copying alone."""
        if self.shapes.get(name) != tuple(whole.shape):
            raise ValueError(f"{name!r} of shape {tuple(whole.shape)} was sent, but not when the shapes were learnt")
        for landing in self.landings.get(name, ()):
            target = self.targets[landing.tensor].detach()
            for region in landing.regions:
                region.view_of(target).copy_(region.box_of(whole))

    def landed(self, name: str) -> None:
        """This worker's part of a parameter is in the targets: make ready the modules that are complete with it."""
        changed = {landing.tensor for landing in self.landings.get(name, ())}
        for tensor in changed:
            self._missing[tensor].discard(name)
        if not self.is_beside:
            return
        packed: dict[str, Any] = {}
        for module, tensors in self._owners:
            names = set(tensors.values())
            if names & changed and not any(self._missing[each] for each in names):
                self._ready.append((module, self._pack(module, tensors, packed)))

    @property
    def missing(self) -> list[str]:
        return sorted(set().union(*self._missing.values()))

    def commit(self) -> None:
        for module, stand_in in self._ready:
            for name, parameter in stand_in._parameters.items():
                module._parameters[name].data = parameter.data
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = stand_in.cpu_linear
        if self.is_beside:
            for name, buffer in self._buffers.items():
                buffer.copy_(self.targets[name])
        self.begin()
        if not self.is_beside:
            torch.accelerator.synchronize()

    def compare(self, expected: Iterable[Named] | None, columns: Columns | None) -> WeightReport:
        """See `Receiver.compare`. What has come into the model's own tensors cannot be compared to anything else."""
        if expected is not None:
            return compare_weights(self._model, self.landings, expected, columns)
        if not self.is_beside:
            return WeightReport(num_equal=0, different=[], unverified=sorted(self.targets))
        shapes = {name: tuple(each.shape) for name, each in self.targets.items()}
        identity = whole_landings(shapes, dict.fromkeys(shapes, ""))
        return compare_weights(self._model, identity, sampled(self.targets, columns).items(), columns)

    def _pack(self, module: Any, tensors: Mapping[str, str], packed: dict[str, Any]) -> Any:
        """A stand-in that holds all that a module is given for a version. Tied weights are packed once."""
        weight = tensors.get("weight", "")
        if weight in packed:
            return packed[weight]
        stand_in: Any = nn.Module()
        for name, full_name in tensors.items():
            stand_in.register_parameter(name, nn.Parameter(self.targets[full_name], requires_grad=False))
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(stand_in)
            packed[weight] = stand_in
        # What stays unpacked must not change when the next version lands.
        for parameter in stand_in._parameters.values():
            parameter.data = parameter.data.clone()
        return stand_in
