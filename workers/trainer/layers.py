"""Compiled decoder layers, and layers of which the backward pass computes a part again.

    layer(...) -> full checkpointing and the hooks of FSDP, as they are -> one function, compiled or not, the layer its
    argument -> selective checkpointing -> the layer's own forward

Compiled, torch fuses norms, rotary embedding and activation, and attention becomes part of the graph. A model compiles
its first layer, which takes embeddings, and one for all others; with gradients, and without.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel

from rlflow.config import Checkpointing, Config
from rlflow.errors import ConfigError
from rlflow.runtime.derived import can_compile
from rlflow.workers.trainer.attention import compile_for_any_length

_ATTENTION = (torch.ops.higher_order.flex_attention, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head."""
    base = model.base_model
    if base is model:  # families whose prefix is that of another model
        base = model.get_submodule("model")
    assert isinstance(base, PreTrainedModel), "every causal model of transformers has one"
    return base


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers that tokens go through, whatever the family calls them. Raises ConfigError if there is no list."""
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(
            f"model.path names a {model.config.model_type} model without a list of decoder layers, as sharding needs "
            "it; choose another model"
        )
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def layer_types(model: PreTrainedModel) -> list[str]:
    """What transformers calls each decoder layer; [] if the configuration does not say."""
    return list(getattr(model.config.get_text_config(), "layer_types", None) or ())


ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Those of `layer_types` that know no token but by attention."""
VALUE_HEAD = "score"
"""The name of a critic's output layer."""


def put_value_head(model: PreTrainedModel) -> None:
    """Give a causal model one number a state in place of its logits: a critic of any family, from the same files."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "checked by Policy"
    (name,) = (name for name, module in model.named_modules() if module is head)
    model.set_submodule(name, nn.Identity())
    model.add_module(VALUE_HEAD, nn.Linear(head.in_features, 1))


def has_experts(config: PreTrainedConfig) -> bool:
    """True for a mixture of experts, where the tokens choose what a layer computes."""
    return num_experts(config) > 0


def num_experts(config: PreTrainedConfig) -> int:
    """Experts of a layer that tokens choose among; 0 if the model is no mixture."""
    text = config.get_text_config()
    fields = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((number for field in fields if (number := getattr(text, field, None))), 0)


def wrap_as_asked(model: PreTrainedModel, config: Config, *, on_gpu: bool) -> None:
    """Compile and checkpoint the decoder layers as the settings say."""
    asked, checkpointing = config.trainer.compile, config.trainer.gradient_checkpointing
    # Neither experts nor layers with a state make one graph for rows of any length.
    is_plain = not has_experts(model.config) and not set(layer_types(model)) - ATTENTION_LAYERS
    is_default = on_gpu and can_compile(config) and is_plain
    is_compiled, is_selective = is_default if asked is None else asked, checkpointing is Checkpointing.selective
    if is_compiled or is_selective:
        wrap_layers(model, compiled=is_compiled, selective=is_selective)
    if checkpointing is Checkpointing.full:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def wrap_layers(model: PreTrainedModel, *, compiled: bool, selective: bool, backend: Any = "inductor") -> None:
    """Compile the forward of the decoder layers of `model`, or checkpoint it selectively, or both.

    Before FSDP shards them, so that its hooks stay outside: what they do depends on when they are called.
    """
    run = _checkpointed if selective else _forward
    if compiled:
        run = compile_for_any_length(run, backend)
    for layer in decoder_layers(model):
        layer.forward = partial(run, layer)


def keeps(operation: Any, args: Sequence[Any]) -> bool:
    """True if selective checkpointing keeps what this operation returns.

    Each number kept saves 2 operations for each input of its product, or about 4 for each token that it attends to. So
    attention is worth most. Of the products, those whose inputs and outputs differ at most twofold are kept: the
    queries and the projection after attention. Gate and up of the MLP would save as much for each byte, but they are
    the largest tensors: of Qwen2.5-7B 76 KB a token and layer, beside 21 KB for all that is kept. The product after
    them is not read again. Keys and values of shared heads cost little, and neither do the products of adapters.
    """
    if operation in _PRODUCTS:
        weight = args[-1]
        return max(weight.shape) <= 2 * min(weight.shape)
    return operation in _ATTENTION


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Inside of what is compiled, because `keeps` would see no operation of a graph.

    On CUDA, attention of a layer that is not compiled is a graph of its own, which is computed again.
    """
    if not torch.is_grad_enabled():
        return _forward(layer, *args, **kwargs)
    return checkpoint(_forward, layer, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, kwargs
    return CheckpointPolicy.MUST_SAVE if keeps(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE
