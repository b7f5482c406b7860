"""Low-rank adapters (LoRA, arXiv:2106.09685) by PEFT: adding them to a model, switching them off, merging, naming.

A linear layer with the weight W computes with W + scale * B A. A and B are trained, and W is frozen.
Shape letters: R rank, I inputs and O outputs of a linear layer.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlflow.config import LoraConfig
from rlflow.errors import ConfigError, first_line
from rlflow.runtime.derived import adapter_scale
from rlflow.workers.trainer.layers import decoder_layers

_ADAPTER = "default"
_BASE = ".base_layer."


def add_adapters(model: PreTrainedModel, lora: LoraConfig, dtype: torch.dtype, whole: Sequence[str] = ()) -> None:
    """Put adapters into the layers `lora.targets` of a float32 model, and freeze the rest.

    The model is on the meta device; `first_adapter` gives the values that the adapters begin with. Frozen parameters
    are held in `dtype`, trained ones in float32; the modules `whole` are trained without adapters. Raises ConfigError
    without peft, and for a model without such layers.
    """
    peft = _import_peft()
    options = peft_config(lora, linear_layers(model, lora.targets))
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
    for name in whole:
        model.get_submodule(name).requires_grad_(True)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.detach().to(dtype)


def first_adapter(name: str, shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """The values that a parameter of an adapter begins with, as PEFT draws them: A uniform, B zero. [R, I] or [O, R].

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
    """Let what dropout draws depend on these numbers alone: called before each pass with a gradient.

    A layer that the backward pass computes again draws the same, because torch puts the state of its generator back.
    """
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7]))


def linear_layers(model: PreTrainedModel, targets: Sequence[str] | None = None) -> list[str]:
    """The last parts of the names of all linear layers within the decoder layers, or those among `targets`.

    Raises ConfigError without any, and for a target that is none of them.
    """
    layers = decoder_layers(model)
    names = {name.rpartition(".")[2] for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    if not names:
        raise ConfigError(
            f"lora.rank: the {model.config.model_type} model at model.path has no linear layers that adapters could be "
            "put on; set lora.rank to null, or choose a model such as Llama, Qwen2 or Qwen3"
        )
    if unknown := sorted(set(targets or ()) - names):
        raise ConfigError(
            f"lora.targets: the {model.config.model_type} model at model.path has no linear layers called "
            f"{', '.join(unknown)} in its decoder layers; it has {', '.join(sorted(names))}"
        )
    return sorted(targets or names)


def peft_config(lora: LoraConfig, targets: Sequence[str], base: str | None = None) -> Any:
    """PEFT's own configuration of such adapters; `base` names the model that they belong to."""
    return _import_peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rank_stabilised,
        target_modules=list(targets),
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


def parts_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Hugging Face name -> the model's parameters that it is made of: one, or the three that `merged` takes."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        module, base, kind = name.rpartition(_BASE)
        if base and kind == "weight":
            found[f"{module}.weight"] = (name, *adapters_of(module))
        elif not is_adapter(name):
            found[name_in_files(name)] = (name,)
    return found


def name_in_files(name: str) -> str:
    """The name that a parameter of a model has in the files of the model."""
    return name.replace(_BASE, ".")


def merged(parts: Sequence[Tensor], lora: LoraConfig) -> Tensor:
    """W [O, I], A [R, I] and B [O, R] -> W + scale * B A, float32; a single parameter stays as it is."""
    if len(parts) == 1:
        return parts[0]
    weight, inner, outer = parts
    return weight.float() + outer.float() @ inner.float() * adapter_scale(lora)


def adapters_of(module: str) -> tuple[str, str]:
    """The names of A and B of a linear layer."""
    return f"{module}.lora_A.{_ADAPTER}.weight", f"{module}.lora_B.{_ADAPTER}.weight"


def module_of(name: str) -> str:
    """The linear layer that a parameter of an adapter belongs to; the inverse of `adapters_of`."""
    return name.rpartition(".lora_")[0]


def is_adapter(name: str) -> bool:
    return bool(module_of(name))


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
