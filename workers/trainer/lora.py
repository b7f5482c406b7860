"""Low-rank adapters (LoRA, arXiv:2106.09685) by PEFT: adding them to a model, switching them off, merging, naming.

A linear layer with the weight W computes with W + scale * B A. A and B are trained, and W is frozen. The experts of a
layer are one parameter, and each has an A and a B of its own. A forward pass adds up W + scale * B A of all of them,
and keeps it for the backward pass: as much memory as the experts of all layers whole, or of one layer with
trainer.gradient_checkpointing.
Shape letters: R rank, I inputs and O outputs of a linear layer, E experts.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlflow.config import LoraConfig, Send
from rlflow.errors import ConfigError, first_line
from rlflow.runtime.derived import adapter_scale
from rlflow.workers.trainer.layers import decoder_layers, has_experts

_ADAPTER = "default"
_ROUTERS = {"router", "gate"}


class Targets(NamedTuple):
    """What has adapters, as PEFT is told."""

    layers: list[str]
    """The last parts of the names of linear layers."""
    experts: list[str]
    """The last two parts of the names of parameters that hold a matrix of each expert."""


def add_adapters(model: PreTrainedModel, lora: LoraConfig, dtype: torch.dtype, whole: Sequence[str] = ()) -> None:
    """Put adapters into the layers `lora.targets` of a float32 model, and freeze the rest.

    The model is on the meta device; `first_adapter` gives the values that the adapters begin with. Frozen parameters
    are held in `dtype`, trained ones in float32; the modules `whole` are trained without adapters. Raises ConfigError
    without peft, and for a model without such layers.
    """
    peft = _import_peft()
    options = peft_config(lora, targets_of(model, lora))
    try:
        with torch.device("meta"):
            peft.inject_adapter_in_model(options, model)
    except ValueError as error:  # a linear layer and one that is none have the same name
        raise ConfigError(
            f"lora.rank: no adapters can be put on the {model.config.model_type} model at model.path: "
            f"{first_line(error)}; set lora.rank to null"
        ) from error
    for module in filter(is_adapted, model.modules()):
        setattr(module.get_submodule("lora_dropout"), _ADAPTER, _Dropout(lora.dropout))
        if hasattr(module, "parameter_name"):
            module.forward = partial(_with_summed_experts, module)
    for name in whole:
        model.get_submodule(name).requires_grad_(True)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.detach().to(dtype)


def first_adapter(name: str, shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """The values that a parameter of an adapter begins with, as PEFT draws them: A uniform, B zero. [R, I] or [O, R];
    of experts [E * R, I] or [O, R * E].

    The same seed gives the same values everywhere. They are float32, and `dtype` can hold them, because some back ends
    can only begin with such values.
    """
    if ".lora_B." in name:
        return torch.zeros(*shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    bound = shape[1] ** -0.5
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator).to(dtype).float()


class _Dropout(nn.Module):
    """Dropout in passes that get a gradient: not where log-probabilities are asked for, or the model is measured."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def forward(self, inputs: Tensor) -> Tensor:
        return F.dropout(inputs, self._share, training=torch.is_grad_enabled()) if self._share else inputs


def seed_dropout(*numbers: int) -> None:
    """Let what dropout draws depend on these numbers alone; called before each pass with a gradient.

    A layer that the backward pass computes again draws the same, because torch puts the state of its generator back.
    """
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7]))


def _with_summed_experts(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of PEFT's layer around experts.

    Its own would make a class of each layer, sum up twice, and move the parameter away from where FSDP put it.
    """
    parameters, name = wrapper.get_base_layer()._parameters, wrapper.parameter_name
    frozen = parameters[name]
    inner, outer = (each[_ADAPTER].weight for each in (wrapper.lora_A, wrapper.lora_B))
    parameters[name] = torch.baddbmm(frozen, *_of_experts(inner, outer, len(frozen)), alpha=wrapper.scaling[_ADAPTER])
    try:
        return wrapper.base_layer(*args, **kwargs)
    finally:
        parameters[name] = frozen


def _of_experts(inner: Tensor, outer: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """A [E * R, I] and B [O, R * E], as PEFT lays them out -> B [E, O, R] and A [E, R, I]."""
    return outer.view(len(outer), -1, num_experts).permute(2, 0, 1), inner.view(num_experts, -1, inner.shape[1])


def targets_of(model: PreTrainedModel, lora: LoraConfig) -> Targets:
    """The linear layers and experts within the decoder layers that `lora.targets` names, or all but the routers.

    Raises ConfigError without any, for a target that is none of them, and for experts that cannot have adapters.
    """
    layers, is_mixture = decoder_layers(model), has_experts(model.config)
    names: set[str] = set()
    experts: dict[str, bool] = {}  # and whether it is laid out [E, O, I]
    for path, module in layers.named_modules():
        parts = path.split(".")
        if isinstance(module, nn.Linear) and not (is_mixture and _ROUTERS & set(parts)):
            names.add(parts[-1])
        for name, parameter in module.named_parameters(recurse=False) if is_mixture else ():
            if parameter.dim() == 3 and not isinstance(module, nn.Conv1d):
                experts[f"{parts[-1]}.{name}"] = getattr(module, "is_transposed", None) is False
    called = {name.rpartition(".")[2] for name in experts}
    if not names:
        raise ConfigError(
            f"lora.rank: the {model.config.model_type} model at model.path has no linear layers that adapters could be "
            "put on; set lora.rank to null, or choose a model such as Llama, Qwen2 or Qwen3"
        )
    wanted = set(lora.targets or names | called)
    if unknown := sorted(wanted - names - called):
        raise ConfigError(
            f"lora.targets: the {model.config.model_type} model at model.path has no linear layers called "
            f"{', '.join(unknown)} in its decoder layers; it has {', '.join(sorted(names | called))}"
        )
    found = Targets(sorted(wanted & names), sorted(name for name in experts if name.rpartition(".")[2] in wanted))
    others = f"leave experts out with lora.targets=[{','.join(sorted(names - called))}]"
    if not all(experts[name] for name in found.experts):
        kind = model.config.model_type
        raise ConfigError(f"lora.rank: the experts of the {kind} model at model.path cannot have adapters; {others}")
    for name, is_wrong, cure in (
        ("lora.dropout", lora.dropout > 0, "lora.dropout=0"),
        ("lora.send=adapters", lora.send is Send.adapters, "lora.send=merged"),
    ):
        if found.experts and is_wrong:
            raise ConfigError(f"{name} does not go with adapters on experts; set {cure}, or {others}")
    return found


def peft_config(lora: LoraConfig, targets: Targets, base: str | None = None) -> Any:
    """PEFT's own configuration of such adapters; `base` names the model that they belong to."""
    return _import_peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rank_stabilised,
        target_modules=targets.layers,
        target_parameters=targets.experts or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model without its adapters, until the block ends.

    The adapters are multiplied by 0 and not skipped, because a back end that gathers parameters module by module relies
    on the order of the modules.
    """
    layers: list[Any] = list(filter(is_adapted, model.modules()))
    assert layers, "a model without adapters"
    for layer in layers:
        layer.set_scale(_ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_ADAPTER, 1.0)


def is_adapted(module: nn.Module) -> bool:
    """True for PEFT's layer around one that has an adapter."""
    return hasattr(module, "lora_A")


def parts_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Hugging Face name -> the model's parameters that it is made of: one, or the three that `merged` takes."""
    adapters: dict[str, tuple[str, str]] = {}
    for path, module in model.named_modules():
        if is_adapted(module):
            name = f"{path}.{getattr(module, 'parameter_name', 'weight')}"
            adapters[name_in_files(name)] = f"{path}.lora_A.{_ADAPTER}.weight", f"{path}.lora_B.{_ADAPTER}.weight"
    names = [name for name, _ in model.named_parameters() if not is_adapter(name)]
    return {name_in_files(name): (name, *adapters.get(name_in_files(name), ())) for name in names}


def name_in_files(name: str) -> str:
    """The name that a parameter of a model has in the files of the model."""
    return re.sub(r"\bbase_layer\.", "", name)


def merged(parts: Sequence[Tensor], lora: LoraConfig) -> Tensor:
    """W [O, I], A [R, I] and B [O, R] -> W + scale * B A, float32; a single parameter stays as it is.

    Of experts W [E, O, I], A [E * R, I] and B [O, R * E].
    """
    if len(parts) == 1:
        return parts[0]
    weight, inner, outer = (part.float() for part in parts)
    if weight.dim() == 3:
        return weight + torch.matmul(*_of_experts(inner, outer, len(weight))) * adapter_scale(lora)
    return weight + outer @ inner * adapter_scale(lora)


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def is_of_experts(name: str) -> bool:
    """True for a parameter of an adapter that holds the matrices of all experts of a layer, one after the other."""
    return ".experts.lora_" in name_in_files(name)


def peft_name(name: str) -> str:
    """PEFT's name of an adapter's parameter in its files."""
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def _import_peft() -> Any:
    """Raises ConfigError if it is not installed."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"adapters (lora.rank, export --adapter) need a package that is missing: {error}; install rlflow with the "
            "extra `lora`, or go without: lora.rank=null, or export without --adapter"
        ) from error
    return peft
