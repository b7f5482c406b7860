"""Which process gets which GPU and how much of it, how large a step is, what a new version costs. Pure arithmetic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlflow.batching.plan import plan_micro_batches
from rlflow.cluster.gpus import GpuPlan, check_gpus, gpu_plan
from rlflow.cluster.placement import Placed, describe, fit
from rlflow.cluster.slots import machines_of
from rlflow.config import Backend, Config, Dtype, Offload, Placement, ProcessKind, Transport
from rlflow.errors import ConfigError
from rlflow.runtime.derived import (
    can_stream,
    dtype_of,
    live_groups,
    max_running,
    num_shares,
    num_updates,
    reference_ranks,
    sends_adapters,
    teacher_ranks,
    transport_of,
    transports_for,
)
from rlflow.tools.dry_run.host import HostMemory, host_memory
from rlflow.tools.dry_run.memory import (
    CACHE,
    FLOAT32,
    OUTPUT_LAYER,
    STAGED,
    ModelFacts,
    ProcessMemory,
    RewardModelFacts,
    cached_sequences,
    engine_memory,
    frozen_memory,
    largest_shard,
    reward_model_memory,
    trainer_memory,
)
from rlflow.types import EpisodeEnd, EpisodeSummary
from rlflow.workers.engine.setup import BYTES_PER_ELEMENT, memory_share

GPU_SIZES = (16, 24, 32, 40, 48, 80, 96, 141, 180, 288)
"""GB of the GPUs that are on sale; each has about as many GiB."""
USABLE = 0.9
"""Share of a GPU that may be planned with: CUDA, vLLM's graphs and fragments of memory take the rest."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GpuRange:
    """GPUs with the same load, counted in the order in which the processes ask for them."""

    first: int
    last: int
    holds: str
    num_bytes: int
    """The most that is needed of each GPU."""
    gpu_size: int | None
    """GB of the smallest usual GPU that holds it; None when none does."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Batch:
    """Everything at its most: each episode has model.max_length tokens."""

    groups: int
    """In one step, as are episodes and tokens."""
    episodes: int
    tokens: int
    live_groups: int
    """Under way, ready or in training, under the staleness bound."""
    live_episodes: int
    decoding: int
    """Requests that all engines together decode at the same time."""
    cached_sequences: int
    """Sequences of model.max_length in one engine's cache."""
    updates: int
    micro_batches: int
    """Those of one rank in all updates of a step whose groups come to the trainer together."""
    micro_batches_one_by_one: int | None
    """The same when they come one by one; None when they cannot."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightUpdate:
    """How a new version gets to the engines, and the bytes that it takes."""

    transport: Transport
    reason: str | None
    """Why it is this one; None if the settings name it, or adapters are sent alone."""
    staged: int
    """As the engines hold it."""
    gathered: int
    """What ranks send each other so that the first one has all adapters, as they hold them."""
    largest: int
    """The largest tensor of these, which is whole on every rank at its time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StartMemory:
    """Bytes of main memory that the trainer takes on GPUs, only while it starts."""

    rank: int
    """What each rank takes: its part of the parameter with the largest, in float32."""
    converted: int
    """What rank 0 takes: the whole model as its files have it; 0 if every rank reads them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimate:
    recipe: str
    model_type: str
    num_parameters: int
    num_layers: int
    dtype: str
    is_packed: bool
    """See ModelFacts."""
    micro_batch_tokens: int
    """Tokens of the largest micro-batch that there can be."""
    gpus: tuple[GpuRange, ...]
    machines: tuple[str, ...]
    """What is on each machine of cluster.pools; empty where their sizes are not given."""
    processes: dict[str, ProcessMemory]
    batch: Batch
    weights: WeightUpdate
    start: StartMemory
    hosts: tuple[HostMemory, ...]
    """Main memory on machines of cluster.pools with GPUs; empty where their sizes are not given."""


def estimate(
    config: Config,
    facts: ModelFacts,
    max_logits: int,
    reward_model: RewardModelFacts | None = None,
    teachers: Sequence[ModelFacts] = (),
) -> Estimate:
    """What the run needs of GPUs; `max_logits` is how many logits the trainer holds at once. Each teacher counts as the
    largest of them.

    Raises ConfigError when engines and ranks cannot be placed, when they do not fit into cluster.pools, and for a
    trainer that is not modelled.
    """
    if config.trainer.backend is not Backend.fsdp or config.trainer.offload is not Offload.none:
        raise ConfigError(
            "--dry-run knows the memory of trainer.backend=fsdp with trainer.offload=none only; got "
            f"{config.trainer.backend.value} and {config.trainer.offload.value}"
        )
    machines = machines_of(config.cluster.pools)
    lines: list[str] = []
    placed: Placed | None = None
    way = transports_for(config, on_gpus=True)[0] if config.weights.transport is None else None
    if machines is not None:
        placed = fit(config, machines)
        config, lines, way = placed.config, describe(placed, machines), placed.way
    elif way is not None:
        config = replace(config, weights=replace(config.weights, transport=way.transport))
    plan = gpu_plan(config)
    check_gpus(config, plan.total)
    num_tokens = min(config.trainer.micro_batch_tokens, _tokens_of_step(config) // config.algorithm.minibatches)
    processes = {
        ProcessKind.engine: engine_memory(config, facts),
        ProcessKind.trainer: trainer_memory(config, facts, num_tokens, max_logits),
    }
    if ProcessKind.critic in plan.counts:
        # The same model, with a head of one number instead of logits; it is sent to nobody.
        items = (item for item in processes[ProcessKind.trainer].items if item.name not in (OUTPUT_LAYER, STAGED))
        processes[ProcessKind.critic] = ProcessMemory(items=tuple(items))
    if ProcessKind.reference in plan.counts:
        processes[ProcessKind.reference] = frozen_memory(config, facts, num_tokens, max_logits, reference_ranks(config))
    if teachers:
        ranks = teacher_ranks(config)
        found = [frozen_memory(config, each, num_tokens, max_logits, ranks) for each in teachers]
        processes[ProcessKind.teacher] = max(found, key=lambda memory: memory.total)
    if reward_model is not None:
        processes[ProcessKind.reward_model] = reward_model_memory(config, reward_model)
    gpu = _gpu_of_run(config, plan, processes)
    engine = processes[ProcessKind.engine] = engine_memory(config, facts, gpu)
    cache = next(item.num_bytes for item in engine.items if item.name == CACHE)
    if not config.rollout.engines:  # nothing is sampled, and no weights are sent
        del processes[ProcessKind.engine]
        items = (item for item in processes[ProcessKind.trainer].items if item.name != STAGED)
        processes[ProcessKind.trainer] = ProcessMemory(items=tuple(items))
    weights = _weights(config, facts, None if way is None or sends_adapters(config) else way.reason)
    start = StartMemory(rank=FLOAT32 * largest_shard(config, facts), converted=facts.converted)
    hosts: tuple[HostMemory, ...] = ()
    if placed is not None and any(machine.gpus for machine in machines or ()):
        hosts = host_memory(
            config, placed, processes, loading=start.rank, converted=start.converted, staged=weights.staged
        )
    return Estimate(
        recipe=config.run.name,
        model_type=facts.model_type,
        num_parameters=facts.num_parameters,
        num_layers=facts.num_layers,
        dtype=dtype_of(config).value,
        is_packed=facts.is_packed,
        micro_batch_tokens=num_tokens,
        gpus=tuple(_gpus(config, plan, processes)),
        machines=tuple(lines),
        processes={kind.value: memory for kind, memory in processes.items()},
        batch=_batch(config, facts, cache),
        weights=weights,
        start=start,
        hosts=hosts,
    )


def smallest_gpu(num_bytes: int) -> int | None:
    """GB of the smallest usual GPU whose usable share holds that many bytes."""
    return next((size for size in GPU_SIZES if num_bytes <= USABLE * size * 2**30), None)


def _gpu_of_run(config: Config, plan: GpuPlan, processes: dict[ProcessKind, ProcessMemory]) -> int | None:
    """GB of the smallest usual GPU on which each process has room, an engine within its share; None: no GPU is."""
    most, engine = max(each.num_bytes for each in _gpus(config, plan, processes)), processes[ProcessKind.engine].total
    share = memory_share(config)
    return next((gpu for gpu in GPU_SIZES if most <= USABLE * gpu * 2**30 and engine <= share * gpu * 2**30), None)


def _gpus(config: Config, plan: GpuPlan, processes: dict[ProcessKind, ProcessMemory]) -> Iterator[GpuRange]:
    next_gpu = 0
    for kind, num_gpus in plan.own.items():
        if kind is ProcessKind.trainer:
            # There may be fewer of a kind than ranks; the first GPUs hold them.
            edges = sorted({0, *(min(plan.counts[sharer], num_gpus) for sharer in plan.sharing)})
        else:
            edges = [0, num_gpus]
        for start, stop in pairwise(edges):
            if kind is ProcessKind.trainer:
                here = [sharer for sharer in plan.sharing if plan.counts[sharer] > start]
                names = [_numbered(sharer, start, stop, plan.on_a_gpu(sharer)) for sharer in here]
                if config.cluster.placement is Placement.colocated:
                    num_in_turn = 3 if ProcessKind.critic in here else 2
                    names[:num_in_turn] = [f"{names[0]} and {', '.join(names[1:num_in_turn])}, in turn"]
                holds, num_bytes = "; ".join(names), _most(here, processes, plan)
            else:
                each = f" on {plan.per_engine} GPUs each" if kind is ProcessKind.engine and plan.per_engine > 1 else ""
                holds, num_bytes = _numbered(kind, 0, plan.counts[kind]) + each, processes[kind].total
            first, next_gpu = next_gpu, next_gpu + stop - start
            size = smallest_gpu(num_bytes)
            yield GpuRange(first=first, last=next_gpu - 1, holds=holds, num_bytes=num_bytes, gpu_size=size)


def _most(kinds: Sequence[ProcessKind], processes: dict[ProcessKind, ProcessMemory], plan: GpuPlan) -> int:
    """Bytes of one GPU that these processes need together.

    An engine sleeps while trainer and critic work, and these leave the GPU while it works, except for what was staged;
    the others may work at any time.
    """
    trained = sum(processes[kind].total for kind in kinds if kind in (ProcessKind.trainer, ProcessKind.critic))
    stay = (ProcessKind.reference, ProcessKind.teacher, ProcessKind.reward_model)
    others = sum(plan.on_a_gpu(kind) * processes[kind].total for kind in kinds if kind in stay)
    staged = sum(item.num_bytes for item in processes[ProcessKind.trainer].items if item.name == STAGED)
    engine = processes[ProcessKind.engine].total + staged if ProcessKind.engine in kinds else 0
    return max(engine, trained) + others


def _numbered(kind: ProcessKind, first: int, stop: int, each: int = 1) -> str:
    """`each`: how many models have such ranks."""
    is_rank = kind in (ProcessKind.trainer, ProcessKind.critic, ProcessKind.reference, ProcessKind.teacher)
    name = f"{kind.value} rank" if is_rank else kind.value.replace("_", " ")
    of_all = f" of {each} of them" if each > 1 else ""
    return f"{name} {first}{of_all}" if stop - first == 1 else f"{name}s {first} to {stop - 1}{of_all}"


def _tokens_of_step(config: Config) -> int:
    return config.algorithm.groups_per_step * config.algorithm.group_size * config.model.max_length


def _batch(config: Config, facts: ModelFacts, cache: int) -> Batch:
    groups, size, max_length = config.algorithm.groups_per_step, config.algorithm.group_size, config.model.max_length
    live = live_groups(config)
    # A prompt of one token, because all of it can be shared.
    longest = EpisodeSummary(
        end=EpisodeEnd.COMPLETED,
        reward=0.0,
        num_prompt_tokens=1,
        num_completion_tokens=max_length - 1,
        num_loss_tokens=max_length - 1,
        oldest_version=0,
        newest_version=0,
    )
    group, part = [longest] * size, groups // config.algorithm.minibatches
    shares, max_tokens = num_shares(config.trainer), config.trainer.micro_batch_tokens
    one_by_one, updates = None, num_updates(config.algorithm)
    if config.trainer.streaming is not False and can_stream(config):
        one_by_one = groups * len(plan_micro_batches([group], shares, max_tokens)[0])
    return Batch(
        groups=groups,
        episodes=groups * size,
        tokens=_tokens_of_step(config),
        live_groups=live,
        live_episodes=live * size,
        decoding=config.rollout.engines * max_running(config),
        cached_sequences=cached_sequences(config, facts, cache),
        updates=updates,
        micro_batches=updates * len(plan_micro_batches([group] * part, shares, max_tokens)[0]),
        micro_batches_one_by_one=one_by_one,
    )


def _weights(config: Config, facts: ModelFacts, reason: str | None) -> WeightUpdate:
    whole, width = FLOAT32 * facts.num_parameters, BYTES_PER_ELEMENT[dtype_of(config)]
    num_adapters = sum(weight.size for weight in facts.adapters)
    is_sharded = config.trainer.ranks > 1 or dtype_of(config) is not Dtype.float32
    if sends_adapters(config):
        sent, staged, held = facts.adapters, width * num_adapters, FLOAT32 * num_adapters
    else:
        sent, staged = facts.weights, width * facts.num_parameters
        held = staged + FLOAT32 * num_adapters if facts.adapters else whole
    return WeightUpdate(
        transport=transport_of(config),
        reason=reason,
        staged=staged,
        gathered=held if facts.adapters and is_sharded else 0,
        largest=FLOAT32 * max(weight.size for weight in sent),
    )
