"""How the decoder layers run: what of their activations is computed again, and whether they are compiled.

    layer(...) -> hooks of FSDP -> compiled( checkpoint( the layer's own forward ) )

All layers run one compiled function, of which the layer is an argument, so a model compiles one layer for each way in
which it runs: with gradients, and without.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from rlflow.config import Checkpointing
from rlflow.workers.trainer.attention import compile_for_any_length

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
_ATTENTION = frozenset(
    {torch.ops.higher_order.flex_attention, _aten._scaled_dot_product_flash_attention_for_cpu.default}
)
_Contexts = Callable[[], tuple[Any, Any]]


def set_up_layers(
    model: PreTrainedModel, checkpointing: Checkpointing, *, compiles: bool, backend: Any = "inductor"
) -> None:
    """Give each decoder layer of `model` its way to run; before FSDP shards them, so that its hooks stay outside."""
    if checkpointing is Checkpointing.none and not compiles:
        return
    contexts = _contexts_of_selective(model.config.get_text_config().intermediate_size)
    run = compile_for_any_length(_run, backend) if compiles else _run
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        layer.forward = partial(run, layer, checkpointing, contexts)


def _run(layer: nn.Module, checkpointing: Checkpointing, contexts: _Contexts, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    if checkpointing is Checkpointing.none or not torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    if checkpointing is Checkpointing.selective:
        kwargs["context_fn"] = contexts
    # A layer draws no random numbers.
    return checkpoint(forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _contexts_of_selective(mlp_width: int) -> _Contexts:
    """Keep attention and its projections, which take little memory for the time they take."""

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del context, kwargs
        is_projection = operation in _PRODUCTS and mlp_width not in args[-1].shape
        keeps = is_projection or operation in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(choose)
