"""Bytes of GPU memory that each kind of process takes. Pure arithmetic on settings and model facts.

What is kept stays there for the whole run. What is not is counted at its largest, although not everything is at its
largest at the same moment: the sum errs on the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.config import Config, Dtype, Transport
from rlflow.runtime.derived import sends_adapters, transport_of
from rlflow.tools.dry_run.facts import ModelFacts, RewardModelFacts, Weight
from rlflow.workers.engine.setup import (
    BYTES_PER_ELEMENT,
    CPU_BLOCK_TOKENS,
    CacheShape,
    cache_bytes,
    largest_rank,
)

FLOAT32 = 4
OUTPUT_LAYER = "output layer"
LOGIT_BYTES = 3 * FLOAT32
"""Of each logit in hand: the logits, their log-softmax and what the gradient makes of it, all float32."""
GATHERED_LAYERS = 2
"""Layers that are whole at the same time: the one in use, and the one that is gathered meanwhile."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Item:
    name: str
    num_bytes: int
    is_kept: bool = True
    note: str = ""


@dataclass(kw_only=True, slots=True, frozen=True)
class ProcessMemory:
    """What one process takes of each GPU that it has."""

    items: tuple[Item, ...]

    @property
    def kept(self) -> int:
        return sum(item.num_bytes for item in self.items if item.is_kept)

    @property
    def passing(self) -> int:
        return sum(item.num_bytes for item in self.items if not item.is_kept)

    @property
    def total(self) -> int:
        return self.kept + self.passing


def size(num_bytes: int) -> str:
    """For people to read."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def trainer_memory(config: Config, facts: ModelFacts, num_tokens: int, max_logits: int) -> ProcessMemory:
    """One rank of FSDP2 whose micro-batches have up to `num_tokens` tokens, `max_logits` logits at once.

    Parameters, gradients and both moments are float32 and sharded: 16 bytes a parameter, over all ranks. What computes
    is gathered in model.dtype, layer by layer, with tensor parallelism a slice of each; the embedding and the output
    layer stay whole between forward and backward. A single float32 rank has nothing to gather. With adapters all that
    is of them alone, and the frozen model is sharded in model.dtype.
    """
    ranks, width = config.trainer.ranks, BYTES_PER_ELEMENT[config.model.dtype]
    parallel = config.trainer.tensor_parallel
    share = f", a share of {ranks}" if ranks > 1 else ""
    shard = FLOAT32 * sum(shard_size(weight, ranks, parallel) for weight in facts.adapters or facts.weights)
    items = [
        Item(name="adapters" if facts.adapters else "parameters", num_bytes=shard, note=f"float32{share}"),
        Item(name="gradients", num_bytes=shard, note=f"float32{share}"),
        Item(name="moments of AdamW", num_bytes=2 * shard, note=f"float32{share}"),
    ]
    if facts.adapters:
        frozen = width * sum(shard_size(weight, ranks, parallel) for weight in facts.weights)
        note = f"{config.model.dtype.value}{share}"
        items.insert(0, Item(name="frozen parameters", num_bytes=frozen, note=note))
    if transport_of(config) in (Transport.p2p, Transport.ipc):
        aside = width * sum(shard_size(weight, ranks, parallel) for weight in facts.weights)
        note = f"{config.model.dtype.value}{share}"
        items.append(Item(name="weights for the engines", num_bytes=aside, note=note))
    if ranks > 1 or config.model.dtype is not Dtype.float32:
        layer = facts.largest_layer(parallel)
        whole = facts.outside_layers + GATHERED_LAYERS * (layer + facts.largest_adapters)
        largest = facts.largest_adapters or max(facts.outside_layers, layer)
        layers = f"{GATHERED_LAYERS} layers" if parallel == 1 else f"a slice of {parallel} of {GATHERED_LAYERS} layers"
        items += [
            Item(
                name="gathered parameters",
                num_bytes=width * whole,
                is_kept=False,
                note=f"{config.model.dtype.value}: embedding, output layer and {layers}",
            ),
            Item(
                name="gradients to be scattered",
                num_bytes=(width + FLOAT32) * largest,
                is_kept=False,
                note=f"{config.model.dtype.value}, and their sum in float32",
            ),
        ]
    rows = logit_rows(facts, -(-num_tokens // parallel), max_logits)
    items += [_activations(config, facts, num_tokens), _head(facts, num_tokens, rows, width)]
    return ProcessMemory(items=tuple(items))


def shard_size(weight: Weight, ranks: int, tensor_parallel: int) -> int:
    """Elements of the largest shard: FSDP2 cuts along the first dimension and pads.

    A whole weight is cut over all ranks, a slice of a tensor group over those that have the same one.
    """
    rows, columns = weight.shape[0], weight.size // weight.shape[0]
    if weight.cut is None:
        return -(-rows // ranks) * columns
    rows, columns = (rows // tensor_parallel, columns) if weight.cut == 0 else (rows, columns // tensor_parallel)
    return -(-rows // (ranks // tensor_parallel)) * columns


def activation_bytes(facts: ModelFacts, num_tokens: int, *, with_checkpointing: bool) -> int:
    """With gradient checkpointing: the input of every layer, and all of the one that is computed again."""
    found = facts.trainer_activations
    layers = found.layer_inputs + found.largest_layer if with_checkpointing else found.layers
    return num_tokens * (layers + found.rest)


def reference_memory(config: Config, facts: ModelFacts, num_tokens: int, max_logits: int) -> ProcessMemory:
    """The frozen model, whole, which computes no gradients."""
    width = BYTES_PER_ELEMENT[config.model.dtype]
    rows = logit_rows(facts, num_tokens, max_logits)
    passing = num_tokens * facts.activations.largest_layer + LOGIT_BYTES * rows * facts.vocabulary_size
    return ProcessMemory(
        items=(
            Item(name="parameters", num_bytes=width * facts.num_parameters, note=config.model.dtype.value),
            Item(name="one layer and the logits", num_bytes=passing, is_kept=False, note=f"{num_tokens:,} tokens"),
        )
    )


def reward_model_memory(config: Config, facts: RewardModelFacts) -> ProcessMemory:
    """The frozen classifier, whole, whose rows have up to trainer.micro_batch_tokens tokens."""
    width, num_tokens = BYTES_PER_ELEMENT[config.model.dtype], config.trainer.micro_batch_tokens
    layer = num_tokens * facts.largest_layer
    return ProcessMemory(
        items=(
            Item(name="parameters", num_bytes=width * facts.num_parameters, note=config.model.dtype.value),
            Item(name="one layer", num_bytes=layer, is_kept=False, note=f"{num_tokens:,} tokens"),
        )
    )


def engine_memory(config: Config, facts: ModelFacts) -> ProcessMemory:
    """Each GPU of one engine: its slice of the weights, and the cache; adapters of their own, which are not all cut."""
    parallel = config.rollout.tensor_parallel
    weights = -(-BYTES_PER_ELEMENT[config.model.dtype] * facts.num_parameters // parallel)
    share = f"{config.model.dtype.value}, a share of {parallel}" if parallel > 1 else config.model.dtype.value
    items = [
        Item(name="weights", num_bytes=weights, note=share),
        Item(name="key-value cache", num_bytes=cache_bytes(config), note="rollout.kv_cache_gb"),
    ]
    if sends_adapters(config):
        assert config.lora.rank is not None
        rank = largest_rank(config.lora.rank)
        size_of_one = BYTES_PER_ELEMENT[config.model.dtype] * sum(weight.size for weight in facts.adapters)
        items.append(Item(name="adapters", num_bytes=size_of_one * rank // config.lora.rank, note=f"as of rank {rank}"))
    return ProcessMemory(items=tuple(items))


def cached_sequences(config: Config, facts: ModelFacts) -> int:
    """Sequences of model.max_length that one engine's cache holds, if they share nothing.

    In blocks of the size that a CPU takes, so that on a GPU it may be a few more; vLLM keeps one block for itself.
    """
    per_gpu = CacheShape(
        num_layers=facts.cache.num_layers,
        num_key_value_heads=max(1, facts.cache.num_key_value_heads // config.rollout.tensor_parallel),
        head_dim=facts.cache.head_dim,
    )
    width = BYTES_PER_ELEMENT[config.model.dtype]
    blocks = cache_bytes(config) // per_gpu.num_bytes(CPU_BLOCK_TOKENS, width) - 1
    return blocks // -(-config.model.max_length // CPU_BLOCK_TOKENS)


def logit_rows(facts: ModelFacts, num_tokens: int, max_logits: int) -> int:
    """Tokens whose logits exist at once."""
    return min(num_tokens, max(1, max_logits // facts.vocabulary_size))


def _activations(config: Config, facts: ModelFacts, num_tokens: int) -> Item:
    is_on = config.trainer.gradient_checkpointing
    other = size(activation_bytes(facts, num_tokens, with_checkpointing=not is_on))
    return Item(
        name="activations",
        num_bytes=activation_bytes(facts, num_tokens, with_checkpointing=is_on),
        is_kept=False,
        note=f"trainer.gradient_checkpointing={str(is_on).lower()}; {other} if {str(not is_on).lower()}",
    )


def _head(facts: ModelFacts, num_tokens: int, rows: int, width: int) -> Item:
    """Logits of `rows` tokens at once, the output layer's float32 gradient if it has one, and the hidden states with
    theirs."""
    gradient = 0 if facts.adapters else FLOAT32 * facts.vocabulary_size * facts.hidden_size
    num_bytes = LOGIT_BYTES * rows * facts.vocabulary_size + gradient
    return Item(
        name=OUTPUT_LAYER,
        num_bytes=num_bytes + 2 * width * num_tokens * facts.hidden_size,
        is_kept=False,
        note=f"logits of {rows:,} tokens at once" + ("" if facts.adapters else ", gradient in float32"),
    )
