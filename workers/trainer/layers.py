"""Compiled decoder layers: torch fuses norms, rotary embedding and activation, and attention becomes part of the graph.

    layer(...) -> checkpointing and the hooks of FSDP, as they are -> one compiled function, the layer its argument

So a model compiles its first layer, which takes embeddings, and one for all others; with gradients, and without.
"""

from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlflow.workers.trainer.attention import compile_for_any_length


def has_experts(model: PreTrainedModel) -> bool:
    """True if the tokens choose what a layer computes, which is not one graph."""
    text = model.config.get_text_config()
    return any(getattr(text, field, None) for field in ("num_experts", "num_local_experts", "n_routed_experts"))


def compile_layers(model: PreTrainedModel, backend: Any = "inductor") -> None:
    """Compile the forward of the decoder layers of `model`. Before FSDP shards them, so that its hooks stay outside."""
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    run = compile_for_any_length(_forward, backend)
    for layer in layers:
        layer.forward = partial(run, layer)


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)
