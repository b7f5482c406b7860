"""The floating-point operations of a training step, from the sizes of the model and of what goes through it. Pure.

A multiplication and an addition count as two. Only what training needs is counted, not what is computed again for
gradient checkpointing, so that the rate tells how well a GPU is used (PaLM, arXiv:2204.02311, appendix B). Norms,
activation functions and softmax are left out, as everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from rlflow.batching.pack import PackedBatch
from rlflow.types import TrainSample
from rlflow.workers.trainer.layers import VALUE_HEAD, decoder_layers, num_experts
from rlflow.workers.trainer.lora import is_of_experts
from rlflow.workers.trainer.rows import end_to_end
from rlflow.workers.trainer.way import Way


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSizes:
    """What one token is multiplied with."""

    trained: int
    """Elements of the trained matrices of all decoder layers; of experts only those that a token goes through."""
    frozen: int
    """The same of frozen matrices."""
    head: int
    """Elements of the output layer."""
    is_head_trained: bool
    attention: int
    """Heads times their size, summed over the layers: multiplications of a query with one key, and again with its
    value."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RowSizes:
    """What goes through the model at once."""

    tokens: int
    pairs: int
    """Queries with each of the keys that they attend to."""
    predictions: int
    """Tokens that go through the output layer."""


def sizes_of(model: PreTrainedModel) -> ModelSizes:
    """From the parameters of a model that is neither sharded nor cut, and its configuration."""
    config = model.config.get_text_config()
    layers = decoder_layers(model)
    counts = {True: 0, False: 0}
    for name, parameter in layers.named_parameters():
        share = 1.0
        if parameter.dim() == 3 or is_of_experts(name):  # one after the other
            number = num_experts(config) or parameter.shape[0]
            share = getattr(config, "num_experts_per_tok", number) / number
        if parameter.dim() > 1:
            counts[parameter.requires_grad] += round(parameter.numel() * share)
    head = getattr(model, VALUE_HEAD, None) or model.get_output_embeddings()
    assert head is not None, "checked by Policy"
    weight = head.get_parameter("weight")
    # In some families layers differ in it; those are asked one by one.
    sizes = [_attention_size(each) for each in getattr(config, "per_layer_config", ()) or [config] * len(layers)]
    return ModelSizes(
        trained=counts[True],
        frozen=counts[False],
        head=weight.numel(),
        is_head_trained=weight.requires_grad,
        attention=sum(sizes),
    )


def _attention_size(layer: PreTrainedConfig) -> int:
    """Heads times their size; of a layer without heads, what it has in their place."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    return heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)


def packed_sizes(packed: PackedBatch) -> RowSizes:
    """A row in which shared prefixes are computed once."""
    pairs = (packed.position_ids + 1).sum()
    return RowSizes(tokens=len(packed.input_ids), pairs=int(pairs), predictions=len(np.unique(packed.loss_positions)))


def laid_out_sizes(packed: PackedBatch, padded: RowSizes, way: Way) -> RowSizes:
    """A row as it goes through the model; `padded` if that pads it."""
    if way is Way.padded:
        return padded
    return packed_sizes(end_to_end(packed)[0] if way is Way.end_to_end else packed)


def padded_sizes(samples: Sequence[TrainSample]) -> RowSizes:
    """The same samples as a batch: each with its own prompt, all as long as the longest prompt and completion."""
    if not samples:
        return RowSizes(tokens=0, pairs=0, predictions=0)
    prompt = max(len(sample.sample.prompt_ids) for sample in samples)
    completion = max(len(sample.sample.completion_ids) for sample in samples)
    length, count = prompt + completion, len(samples)
    return RowSizes(tokens=count * length, pairs=count * length * (length + 1) // 2, predictions=count * completion)


def flops(model: ModelSizes, row: RowSizes, *, with_backward: bool = True) -> float:
    """Forward and backward: a trained matrix costs 6 an element and token, a frozen one 4, attention 12 a pair."""
    linear = row.tokens * (model.trained + model.frozen) + row.predictions * model.head
    forward = 2 * linear + 4 * row.pairs * model.attention
    if not with_backward:
        return float(forward)
    weights = row.tokens * model.trained + row.predictions * model.head * model.is_head_trained
    return float(forward + 2 * linear + 2 * weights + 8 * row.pairs * model.attention)
