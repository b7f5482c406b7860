"""A model's facts from its config.json: the model is built on the meta device, where tensors have no memory."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import isfunction, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlflow.config import Config, LoraConfig
from rlflow.errors import ConfigError, first_line
from rlflow.models.opening import build_model, open_config
from rlflow.models.resolve import POLICY, REWARD, TEACHERS, resolve_config
from rlflow.runtime.derived import dtype_of, held_teachers
from rlflow.tools.dry_run.memory import FLOAT32, Activations, ModelFacts, RewardModelFacts, Weight
from rlflow.workers.engine.setup import BYTES_PER_ELEMENT, CacheShape, cache_shape
from rlflow.workers.trainer.layers import backbone, decoder_layers, keeps
from rlflow.workers.trainer.lora import add_adapters, is_adapter
from rlflow.workers.trainer.policy import Policy, torch_dtype
from rlflow.workers.trainer.pretrained import converted_patterns
from rlflow.workers.trainer.rank_group import RankGroup
from rlflow.workers.trainer.tensor_parallel import cut_layers
from rlflow.workers.trainer.vision import policy_class
from rlflow.workers.trainer.way import Way, attention_of, check_packed, choose_way, go_in_rows, set_attention, way_of

_ATTENTION = "rlflow_dry_run"
_NUM_TOKENS = 64
"""Tokens of the pass that is measured; what a token needs does not depend on it."""


def read_model(config: Config, folder: str) -> ModelFacts:
    """The facts of the model whose config.json is in `folder`.

    Raises ConfigError for a config.json that transformers does not know, for a model that cannot be trained or
    cut, and for one that cannot be followed without weights.
    """
    model, cut = _build(config, folder), dict[str, int]()
    if config.lora.rank is not None:
        with torch.device("meta"):
            add_adapters(model, config.lora, torch_dtype(config))
        nn.Module.to(model, torch_dtype(config))  # what computes
    layer_of = {id(each): index for index, layer in enumerate(decoder_layers(model)) for each in layer.parameters()}
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "checked by Policy"
    activations = trainer_activations = _activations(model)
    if config.trainer.tensor_parallel > 1:
        one_rank = _build(config, folder)
        cut = cut_layers(one_rank, RankGroup(size=config.trainer.tensor_parallel))
        trainer_activations = _activations(one_rank)
    cache = cache_shape(config, folder)
    if config.trainer.sequence_parallel > 1:
        trainer_activations = _with_repeated_heads(activations, cache, config)
    weights = [
        Weight(name=name, shape=tuple(parameter.shape), layer=layer_of.get(id(parameter)), cut=cut.get(name))
        for name, parameter in model.named_parameters()
    ]
    return ModelFacts(
        model_type=str(model.config.model_type),
        weights=tuple(weight for weight in weights if not is_adapter(weight.name)),
        adapters=tuple(weight for weight in weights if is_adapter(weight.name)),
        activations=activations,
        trainer_activations=trainer_activations,
        cache=cache,
        hidden_size=model.config.get_text_config().hidden_size,
        vocabulary_size=len(head.weight),
        is_packed=attention_of(model) == _ATTENTION,
        converted=_converted(model, open_config(folder, trust=config.model.trust_remote_code)),
    )


def _with_repeated_heads(alone: Activations, cache: CacheShape, config: Config) -> Activations:
    """What a rank that shares rows needs of each of its tokens: attention repeats keys and values for more ranks."""
    heads = cache.num_key_value_heads
    repeated = math.lcm(heads, config.trainer.sequence_parallel) - heads
    more = 2 * repeated * cache.head_dim * BYTES_PER_ELEMENT[dtype_of(config)]
    return replace(alone, layers=alone.layers + cache.num_layers * more, largest_layer=alone.largest_layer + more)


def read_teachers(config: Config) -> list[ModelFacts]:
    """The facts of each teacher that the run holds, from its config.json. Raises ConfigError as `read_model`."""
    trainer = replace(config.trainer, tensor_parallel=1, sequence_parallel=1)
    whole = replace(config, lora=LoraConfig(), trainer=trainer)
    return [read_model(whole, resolve_config(path, TEACHERS)) for path in held_teachers(config).values()]


def read_reward_model(config: Config, folder: str) -> RewardModelFacts:
    """The facts of the classifier whose config.json is in `folder`. Raises ConfigError as `read_model`."""
    model = _on_meta(AutoModelForSequenceClassification, config, folder, REWARD)
    return RewardModelFacts(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        largest_layer=_activations(model).largest_layer,
    )


def _build(config: Config, folder: str) -> PreTrainedModel:
    """The model on the meta device. Raises ConfigError if the trainer would refuse it."""
    model = _on_meta(None, config, folder, POLICY, config.trainer.sequence_parallel)
    Policy(model, config.rollout.temperature)  # refuses an output layer that it cannot take
    return model


def _on_meta(auto_class: Any, config: Config, folder: str, setting: str, sequence_parallel: int = 1) -> PreTrainedModel:
    """`auto_class` None for a policy's."""
    trust = config.model.trust_remote_code
    try:
        model_config = open_config(folder, trust=trust, setting=setting)
        with torch.device("meta"):
            auto_class = auto_class or policy_class(model_config)
            model = build_model(auto_class, model_config, trust=trust, setting=setting, dtype=torch_dtype(config))
    except ConfigError:
        raise
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise ConfigError(
            f"{setting}: no model can be built from {folder}/config.json: {first_line(error)}; "
            "take the config.json that came with the model"
        ) from error
    choose_way(model)
    check_packed(model, sequence_parallel)
    if (way := way_of(model)) is Way.packed:
        set_attention(model, _ATTENTION)
    elif way is Way.end_to_end:  # where a token costs the same
        go_in_rows(model)
    return model


def _converted(model: PreTrainedModel, in_files: PreTrainedConfig) -> int:
    """Bytes of the files if they must be converted; 0 if not."""
    if not converted_patterns(model):
        return 0
    width = in_files.dtype.itemsize if isinstance(in_files.dtype, torch.dtype) else FLOAT32
    return width * sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def _without_kernels(model: PreTrainedModel) -> Iterator[None]:
    """transformers' own code in the place of kernels, which cannot follow tensors without memory."""
    codes = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
    found = [(code, name, each) for code in codes.values() for name, each in vars(code).items() if isfunction(each)]
    replaced = [one for one in found if "is_new_implementation" in one[2].__code__.co_freevars]
    for code, name, each in replaced:
        setattr(code, name, unwrap(each))
    try:
        yield
    finally:
        for code, name, each in replaced:
            setattr(code, name, each)


def _activations(model: PreTrainedModel) -> Activations:
    """What the forward pass saves for the backward pass, each storage counted where it is saved first.

    Raises ConfigError for a model that cannot be followed without weights.
    """
    meter = _Meter(model)
    input_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    options = {"position_ids": input_ids, "meter": meter} if attention_of(model) == _ATTENTION else {}
    try:
        with _without_kernels(model), saved_tensors_hooks(meter.save, lambda tensor: tensor), meter:
            outputs = backbone(model)(input_ids=input_ids, use_cache=False, **options)
            hidden = outputs.last_hidden_state
    except RuntimeError as error:
        raise ConfigError(
            f"model.path: a {model.config.model_type} model in {str(model.dtype).removeprefix('torch.')} cannot be "
            f"followed without weights: {first_line(error)}; take model.dtype=bfloat16 or another model"
        ) from error
    in_layers = [meter.num_bytes[index] for index in range(len(decoder_layers(model)))]
    return Activations(
        layers=-(-sum(in_layers) // _NUM_TOKENS),
        largest_layer=-(-max(in_layers) // _NUM_TOKENS),
        layer_inputs=len(in_layers) * hidden.shape[-1] * hidden.dtype.itemsize,
        kept=-(-meter.kept // _NUM_TOKENS),
        experts=tuple(meter.experts.values()),
        rest=-(-meter.num_bytes[None] // _NUM_TOKENS),
    )


class _Meter(TorchDispatchMode):
    """Counts the bytes that autograd saves, by decoder layer; None is the rest. Parameters do not count.

    And, in `kept`, those that selective checkpointing keeps, and in `experts` sums of experts and their adapters.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.kept = 0
        self.experts = Counter[int | None]()
        self.num_bytes = Counter[int | None]()
        self._layer: int | None = None
        self._parameters = {_storage(parameter) for parameter in model.parameters()}
        self._seen = set(self._parameters)
        self._held: list[Tensor] = []
        for index, layer in enumerate(decoder_layers(model)):
            layer.register_forward_pre_hook(partial(self._enter, index))
            layer.register_forward_hook(partial(self._enter, None))

    def save(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._seen:
            self._seen.add(_storage(tensor))
            self._held.append(tensor)  # a storage that is freed could be mistaken for a later one
            self.num_bytes[self._layer] += tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True  # transformers asks whether this is one sequence without padding
        found = func(*args, **(kwargs or {}))
        if keeps(func, args):
            self.kept += found.nbytes
        if func is torch.ops.aten.baddbmm.default and _storage(args[0]) in self._parameters:
            self.experts[self._layer] += found.nbytes
            self._seen.add(_storage(found))
            self._held.append(found)
        return found

    def _enter(self, layer: int | None, *ignored: Any) -> None:
        self._layer = layer


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _FusedAttention(torch.autograd.Function):
    """Saves what the CUDA kernel saves: its inputs, its output, and one float32 a query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # laid out as queries are
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("nothing is computed on the meta device")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    meter: _Meter,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """query and key [1, H, T, D], value [1, H, T, E] -> [1, T, H, E], as transformers calls it; keys of fewer heads."""
    del module, attention_mask, ignored
    output: Tensor = _FusedAttention.apply(query, key, value)  # pyright: ignore[reportAssignmentType]
    meter.kept += output.nbytes + FLOAT32 * output[..., 0].numel()
    return output.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)
