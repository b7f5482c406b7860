"""Bytes of GPU memory that each kind of process takes. Pure arithmetic on settings and plain facts about the model.

    Config, ModelFacts -> engine_memory, trainer_memory, ... -> ProcessMemory

What is kept stays there for the whole run. What is not is counted at its largest, although not everything is at its
largest at the same moment: the sum errs on the safe side.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow.config import Checkpointing, Config, Dtype, Optimizer, Quantization, Transport
from rlflow.runtime.derived import dtype_of, num_shards, sends_adapters, transport_of
from rlflow.workers.engine.setup import (
    BYTES_PER_ELEMENT,
    CPU_BLOCK_TOKENS,
    CacheShape,
    cache_bytes,
    largest_rank,
    memory_share,
    smallest_cache,
)
from rlflow.workers.trainer.lora import is_of_experts

FLOAT32 = 4
STAGED = "weights for the engines"
SCALED_ELEMENTS = 256
"""Elements of an 8-bit moment that share a float32 scale."""
OUTPUT_LAYER, CACHE = "output layer", "key-value cache"
LOGIT_BYTES = 3 * FLOAT32
"""What one logit takes: itself, its log-softmax and its gradient, all float32."""
GATHERED_LAYERS = 2
"""Layers that are whole at the same time: the one in use, and the one that is gathered meanwhile."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Weight:
    """One parameter; tied ones are one."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    """The decoder layer that it belongs to. None: the rest, which FSDP2 gathers as one."""
    cut: int | None = None
    """The dimension along which a tensor group of the trainer shares it out; None: it stays whole."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(kw_only=True, slots=True, frozen=True)
class Activations:
    """Bytes that the backward pass needs of each token, in the dtype that the model computes in."""

    layers: int
    """All decoder layers together."""
    largest_layer: int
    layer_inputs: int
    """What full checkpointing keeps instead of `layers`: the input of each."""
    kept: int
    """What selective checkpointing keeps beside `layer_inputs`."""
    rest: int
    """Outside the decoder layers."""
    experts: tuple[int, ...] = ()
    """Bytes of the sums of experts and their adapters in each layer that has them, however many tokens there are."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardModelFacts:
    """A classifier that is never trained."""

    num_parameters: int
    largest_layer: int
    """Bytes that the largest decoder layer needs of each token."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelFacts:
    model_type: str
    weights: tuple[Weight, ...]
    activations: Activations
    """In a process that computes everything."""
    trainer_activations: Activations
    """In one rank of the trainer, which computes a slice of each layer if trainer.tensor_parallel is above 1."""
    cache: CacheShape
    hidden_size: int
    vocabulary_size: int
    """Rows of the output layer."""
    adapters: tuple[Weight, ...] = ()
    """What is trained in place of `weights`, if anything is."""
    converted: int = 0
    """Bytes of the files, if transformers has to convert them for this family; else 0."""
    is_packed: bool = True
    """Samples go through it in rows that share prefixes."""

    @property
    def num_parameters(self) -> int:
        return sum(weight.size for weight in self.weights)

    @property
    def num_layers(self) -> int:
        return len({weight.layer for weight in self.weights} - {None})

    def largest_layer(self, tensor_parallel: int = 1) -> int:
        """Parameters of the largest decoder layer that one rank of a tensor group computes with."""
        return _largest_layer(self.weights, tensor_parallel)

    @property
    def largest_adapters(self) -> int:
        """Parameters of the adapters of one decoder layer."""
        return _largest_layer(self.adapters)

    @property
    def outside_layers(self) -> int:
        """Parameters of the embedding, the last norm and the output layer."""
        return sum(weight.size for weight in self.weights if weight.layer is None)


def _largest_layer(weights: Sequence[Weight], tensor_parallel: int = 1) -> int:
    sizes = Counter[int]()
    for weight in weights:
        if weight.layer is not None:
            sizes[weight.layer] += weight.size if weight.cut is None else weight.size // tensor_parallel
    return max(sizes.values(), default=0)


@dataclass(kw_only=True, slots=True, frozen=True)
class Item:
    name: str
    num_bytes: int
    is_kept: bool = True
    note: str


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
    """As people read it."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def trainer_memory(config: Config, facts: ModelFacts, num_tokens: int, max_logits: int) -> ProcessMemory:
    """One rank of FSDP2 whose micro-batches have up to `num_tokens` tokens, `max_logits` logits at once.

    With trainer.sequence_parallel a rank has its share of them.

    Parameters, gradients and both moments of AdamW are float32 and sharded: 16 bytes a parameter, over the ranks of a
    replica. What computes
    is gathered in model.dtype, layer by layer, with tensor parallelism a slice of each; the embedding and the output
    layer stay whole between forward and backward. A single float32 rank has nothing to gather. With adapters all that
    is theirs alone, and the frozen model is sharded in model.dtype.
    """
    width, parallel = BYTES_PER_ELEMENT[dtype_of(config)], config.trainer.tensor_parallel
    ranks, parts = num_shards(config.trainer), config.trainer.sequence_parallel
    num_tokens = -(-num_tokens // parts)
    share = f", a share of {ranks}" if ranks > 1 else ""
    wide, narrow = f"float32{share}", f"{dtype_of(config).value}{share}"
    trained = [(weight, shard_size(weight, ranks, parallel)) for weight in facts.adapters or facts.weights]
    shard = FLOAT32 * sum(size for _, size in trained)
    frozen = width * sum(shard_size(weight, ranks, parallel) for weight in facts.weights)
    items = [
        Item(name="adapters" if facts.adapters else "parameters", num_bytes=shard, note=wide),
        Item(name="gradients", num_bytes=shard, note=wide),
        _moments(config.trainer.optimizer, trained, share),
    ]
    if facts.adapters:
        items.insert(0, Item(name="frozen parameters", num_bytes=frozen, note=narrow))
    if transport_of(config) in (Transport.p2p, Transport.ipc):
        items.append(Item(name=STAGED, num_bytes=frozen, note=narrow))
    chosen = config.trainer.gradient_checkpointing
    takes = {each: activation_bytes(facts, num_tokens, each) for each in Checkpointing}
    others = ", ".join(f"{size(takes[each])} if {each}" for each in Checkpointing if each is not chosen)
    part = f"a share of {parts}; " if parts > 1 else ""
    note = f"{part}trainer.gradient_checkpointing={chosen}; {others}"
    items += [*_gathered(config, facts), Item(name="activations", num_bytes=takes[chosen], note=note, is_kept=False)]
    # The logits of some rows at once, the output layer's gradient if it has one, and the hidden states with theirs,
    # which is summed up in float32.
    rows = logit_rows(facts, -(-num_tokens // parallel), max_logits)
    gradient = 0 if facts.adapters else width * facts.vocabulary_size * facts.hidden_size
    num_bytes = LOGIT_BYTES * rows * facts.vocabulary_size + gradient
    num_bytes += (width + FLOAT32) * num_tokens * facts.hidden_size
    note = f"logits of {rows:,} tokens at once" + ("" if facts.adapters else f", gradient in {dtype_of(config).value}")
    items.append(Item(name=OUTPUT_LAYER, num_bytes=num_bytes, note=note, is_kept=False))
    return ProcessMemory(items=tuple(items))


def _moments(optimizer: Optimizer, trained: Sequence[tuple[Weight, int]], share: str) -> Item:
    """What the optimiser keeps of weights of which a rank has so many elements."""
    num_elements = sum(size for _, size in trained)
    if optimizer is Optimizer.adamw8bit:
        scales = FLOAT32 * num_elements // SCALED_ELEMENTS
        return Item(name="moments of AdamW", num_bytes=2 * (num_elements + scales), note=f"a byte each{share}")
    matrices = sum(
        size
        for weight, size in trained
        if weight.layer is not None and len(weight.shape) == 2 and not is_of_experts(weight.name)
    )
    if optimizer is Optimizer.muon:
        num_bytes = FLOAT32 * (2 * num_elements - matrices)
        return Item(name="moments of Muon and AdamW", num_bytes=num_bytes, note=f"float32{share}")
    return Item(name="moments of AdamW", num_bytes=2 * FLOAT32 * num_elements, note=f"float32{share}")


def _gathered(config: Config, facts: ModelFacts) -> list[Item]:
    if config.trainer.ranks == 1 and dtype_of(config) is Dtype.float32:
        return []
    dtype, parallel = dtype_of(config).value, config.trainer.tensor_parallel
    width, layer = BYTES_PER_ELEMENT[dtype_of(config)], facts.largest_layer(parallel)
    whole = facts.outside_layers + GATHERED_LAYERS * (layer + facts.largest_adapters)
    largest = facts.largest_adapters or max(facts.outside_layers, layer)
    layers = f"{GATHERED_LAYERS} layers" if parallel == 1 else f"a slice of {parallel} of {GATHERED_LAYERS} layers"
    parameters, gradients = f"{dtype}: embedding, output layer and {layers}", f"{dtype}, and their sum in float32"
    return [
        Item(name="gathered parameters", num_bytes=width * whole, note=parameters, is_kept=False),
        Item(name="gradients to be scattered", num_bytes=(width + FLOAT32) * largest, note=gradients, is_kept=False),
    ]


def activation_bytes(facts: ModelFacts, num_tokens: int, checkpointing: Checkpointing) -> int:
    """With gradient checkpointing: layers' inputs, what is kept, and all of the layer that is computed again.

    Beside sums of experts and adapters the gradients of those of one layer.
    """
    found = facts.trainer_activations
    gradients = max(found.experts, default=0)
    if checkpointing is Checkpointing.none:
        return num_tokens * (found.layers + found.rest) + sum(found.experts) + gradients
    kept = found.kept if checkpointing is Checkpointing.selective else 0
    return num_tokens * (found.layer_inputs + kept + found.largest_layer + found.rest) + 2 * gradients


def shard_size(weight: Weight, ranks: int, tensor_parallel: int) -> int:
    """Elements of the largest shard: FSDP2 cuts along the first dimension and pads.

    A whole weight is cut over all ranks, a slice of a tensor group over those that have the same one.
    """
    rows, columns = weight.shape[0], weight.size // weight.shape[0]
    if weight.cut is None:
        return -(-rows // ranks) * columns
    rows, columns = (rows // tensor_parallel, columns) if weight.cut == 0 else (rows, columns // tensor_parallel)
    return -(-rows // (ranks // tensor_parallel)) * columns


def largest_shard(config: Config, facts: ModelFacts) -> int:
    """Elements of the largest part of a parameter that a rank of the trainer keeps."""
    ranks, parallel = num_shards(config.trainer), config.trainer.tensor_parallel
    return max(shard_size(weight, ranks, parallel) for weight in facts.weights)


def logit_rows(facts: ModelFacts, num_tokens: int, max_logits: int) -> int:
    """Tokens whose logits exist at once."""
    return min(num_tokens, max(1, max_logits // facts.vocabulary_size))


def frozen_memory(config: Config, facts: ModelFacts, num_tokens: int, max_logits: int, ranks: int) -> ProcessMemory:
    """One of the ranks of a frozen model, which computes no gradients; a single rank holds it whole."""
    rows = logit_rows(facts, num_tokens, max_logits)
    passing = num_tokens * facts.activations.largest_layer + LOGIT_BYTES * rows * facts.vocabulary_size
    if ranks <= 1:
        return _frozen(config, facts.num_parameters, "one layer and the logits", passing, num_tokens)
    shards = sum(shard_size(replace(weight, cut=None), ranks, 1) for weight in facts.weights)
    found = _frozen(config, shards, "one layer and the logits", passing, num_tokens)
    whole = facts.outside_layers + GATHERED_LAYERS * facts.largest_layer()
    note = f"{dtype_of(config).value}: embedding, output layer and {GATHERED_LAYERS} layers"
    num_bytes = BYTES_PER_ELEMENT[dtype_of(config)] * whole
    return ProcessMemory(
        items=(*found.items, Item(name="gathered parameters", num_bytes=num_bytes, note=note, is_kept=False))
    )


def reward_model_memory(config: Config, facts: RewardModelFacts) -> ProcessMemory:
    """The frozen classifier, whole, whose rows have up to trainer.micro_batch_tokens tokens."""
    num_tokens = config.trainer.micro_batch_tokens
    return _frozen(config, facts.num_parameters, "one layer", num_tokens * facts.largest_layer, num_tokens)


def _frozen(config: Config, num_parameters: int, name: str, passing: int, num_tokens: int) -> ProcessMemory:
    kept = BYTES_PER_ELEMENT[dtype_of(config)] * num_parameters
    return ProcessMemory(
        items=(
            Item(name="parameters", num_bytes=kept, note=dtype_of(config).value),
            Item(name=name, num_bytes=passing, note=f"{num_tokens:,} tokens", is_kept=False),
        )
    )


def engine_memory(config: Config, facts: ModelFacts, gpu: int | None = None) -> ProcessMemory:
    """Each GPU of one engine: its slice of the weights, and the cache; and adapters, of which not all are cut.

    If rollout.kv_cache_gb is null, the cache is what a GPU of `gpu` GB has left, or, without it, the least that serves.
    """
    width, parallel = BYTES_PER_ELEMENT[dtype_of(config)], config.rollout.tensor_parallel
    held, note = width * facts.num_parameters, dtype_of(config).value
    if config.rollout.quantization is Quantization.fp8:
        held, note = facts.num_parameters + (width - 1) * facts.outside_layers, "float8 in the layers"
    share = f"{note}, a share of {parallel}" if parallel > 1 else note
    items = [Item(name="weights", num_bytes=-(-held // parallel), note=share)]
    if sends_adapters(config):
        assert config.lora.rank is not None
        rank = largest_rank(config.lora.rank)
        adapters = width * sum(weight.size for weight in facts.adapters) * rank // config.lora.rank
        items.append(Item(name="adapters", num_bytes=adapters, note=f"as of rank {rank}"))
    cache, note = cache_bytes(config, on_gpu=True), "rollout.kv_cache_gb"
    if cache is None and gpu is None:
        cache, note = smallest_cache(config, facts.cache), "at least"
    elif cache is None and gpu is not None:
        cache = int(memory_share(config) * gpu * 2**30) - sum(item.num_bytes for item in items)
        note = f"what a GPU of {gpu} GB has left of {memory_share(config):.0%}"
    assert cache is not None
    return ProcessMemory(items=(*items, Item(name=CACHE, num_bytes=cache, note=note)))


def cached_sequences(config: Config, facts: ModelFacts, cache: int) -> int:
    """Sequences of model.max_length that a cache of so many bytes holds, if they share nothing.

    In blocks of the size that a CPU takes, so that on a GPU it may be a few more; vLLM keeps one block for itself.
    """
    heads = max(1, facts.cache.num_key_value_heads // config.rollout.tensor_parallel)
    per_gpu = replace(facts.cache, num_key_value_heads=heads)
    block = per_gpu.num_bytes(CPU_BLOCK_TOKENS, BYTES_PER_ELEMENT[dtype_of(config)])
    return (cache // block - 1) // -(-config.model.max_length // CPU_BLOCK_TOKENS)
