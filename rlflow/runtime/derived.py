"""What follows from several settings together: pure questions to a Config, asked on every floor."""

import math
from dataclasses import dataclass, replace

from rlflow.config import (
    AlgorithmConfig,
    Backend,
    Config,
    Dtype,
    LoraConfig,
    ModelPlacement,
    Placement,
    Proximal,
    Send,
    TrainerConfig,
    Transport,
)
from rlflow.roles import REFERENCE, TEACHER
from rlflow.runtime.kinds import name_for

DEFAULT_KIND = "default"
"""The key of teacher.models for kinds of tasks that are no key themselves."""
CPU_RUNNING, GPU_RUNNING = 64, 512
"""Default of rollout.max_running. A GPU reads its weights once a step, for however many requests: an H100 needs about
300 until its arithmetic is the limit (989 TFLOP/s by 3.35 TB/s), and 512 is the largest step of which vLLM 0.32 keeps a
CUDA graph (config/compilation.py). Fewer run when the cache holds fewer."""
CPU_CACHE_GB = 0.5
"""Default of rollout.kv_cache_gb without GPUs."""
MISMATCH = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |log-probability difference| of engine and trainer at the same version above which something is wrong, in
nats."""


def by_device(config: Config, *, on_gpus: bool) -> Config:
    """The settings with a value where null means that the machines decide; `on_gpus` is whether any of them has GPUs.

    The head may have none while others have: so this is asked once, of all machines, before any process starts. Two
    nulls stay: rollout.kv_cache_gb on GPUs, where each engine takes what it finds, and trainer.streaming where groups
    are not trained one by one.
    """
    model, rollout = config.model, config.rollout
    rollout = replace(rollout, seeded=not on_gpus if rollout.seeded is None else rollout.seeded)
    rollout.max_running = rollout.max_running or (GPU_RUNNING if on_gpus else CPU_RUNNING)
    if not on_gpus:
        rollout.kv_cache_gb = rollout.kv_cache_gb or CPU_CACHE_GB
    dtype = model.dtype or (Dtype.bfloat16 if on_gpus else Dtype.float32)
    trainer = config.trainer
    if trainer.streaming is None and on_gpus and can_stream(config):
        trainer = replace(trainer, streaming=True)
    return replace(config, model=replace(model, dtype=dtype), rollout=rollout, trainer=trainer)


def can_stream(config: Config) -> bool:
    """Whether the groups of a step may be trained one by one, as far as placement and updates decide it."""
    return config.cluster.placement is Placement.separate and num_updates(config.algorithm) == 1


def without_training(config: Config) -> Config:
    """The same without a trainer and what belongs to it (trainer.ranks=0): engines start with the weights of the
    model's files, as version 0."""
    default = Config()
    return replace(
        config,
        algorithm=default.algorithm,
        critic=default.critic,
        lora=default.lora,
        teacher=default.teacher,
        staleness=default.staleness,
        trainer=replace(default.trainer, ranks=0),
        # The only transport that asks for no neighbour.
        weights=replace(default.weights, transport=Transport.disk),
        cluster=replace(config.cluster, placement=Placement.separate, roles=ModelPlacement.separate),
    )


def dtype_of(config: Config) -> Dtype:
    """`model.dtype`. (`by_device` has replaced null in every run; elsewhere it is that of a CPU, as below.)"""
    return config.model.dtype or Dtype.float32


def max_running(config: Config) -> int:
    return config.rollout.max_running or CPU_RUNNING


def is_seeded(config: Config) -> bool:
    return config.rollout.seeded is not False


@dataclass(kw_only=True, slots=True, frozen=True)
class TransportChoice:
    transport: Transport
    reason: str


def num_updates(algorithm: AlgorithmConfig) -> int:
    """Updates in a step."""
    return algorithm.epochs * algorithm.minibatches


def recomputes(algorithm: AlgorithmConfig) -> bool:
    """Whether log-probabilities are computed before the first update of a step; its only update needs none."""
    return algorithm.proximal is Proximal.recomputed and num_updates(algorithm) > 1


def ranks_per_share(trainer: TrainerConfig) -> int:
    """Neighbouring ranks that go through the same micro-batches: with slices of layers, or with parts of each row."""
    return trainer.tensor_parallel * trainer.sequence_parallel


def num_shares(trainer: TrainerConfig) -> int:
    """The number of shares of a batch; the ranks of a group have the same one."""
    return trainer.ranks // ranks_per_share(trainer)


def num_shards(trainer: TrainerConfig) -> int:
    """The number of neighbouring ranks that hold the model once; the other replicas hold the same."""
    return trainer.ranks // trainer.replicas


def live_groups(config: Config) -> int:
    """The most groups that are under way, ready or in training under the staleness bound."""
    return min(1 + config.staleness.max_versions, config.run.steps) * config.algorithm.groups_per_step


def least_streamed_tokens(trainer: TrainerConfig) -> int:
    """Tokens of ready groups for which a pass through the model pays, before the step is full.

    Every pass gathers and scatters each layer, however few tokens a rank has. With one or two shares that costs little,
    and a group is trained at once; with many it tends to half a micro-batch for each.
    """
    return max(0, num_shares(trainer) - 2) * trainer.micro_batch_tokens // 2


def policy_is_reference(config: Config) -> bool:
    """True when the KL reference is the policy with its adapters disabled, so that no process holds a reference."""
    return config.algorithm.kl_coefficient > 0 and config.lora.rank is not None


def can_compile(config: Config) -> bool:
    """True if a decoder layer is one graph: no hooks of DeepSpeed, no traffic between ranks, no adapters in it, and no
    balance loss to be told of."""
    trainer, is_plain = config.trainer, config.lora.rank is None and not config.algorithm.balance_coefficient
    return trainer.backend is Backend.fsdp and ranks_per_share(trainer) == 1 and is_plain


def needs_reference(config: Config) -> bool:
    """True when processes of their own hold the KL reference."""
    return config.algorithm.kl_coefficient > 0 and not policy_is_reference(config)


def reference_ranks(config: Config) -> int:
    """Processes that hold the KL reference together; 0 without one."""
    if not needs_reference(config):
        return 0
    is_shared = config.cluster.roles is ModelPlacement.shared
    return config.trainer.ranks if is_shared else config.cluster.reference_ranks


def learns_from_rewards(config: Config) -> bool:
    """False when a teacher alone decides what is learnt, so that a reward is only shown."""
    return not config.teacher.models or config.teacher.reward_weight > 0


def teachers(config: Config) -> dict[str, str]:
    """Name -> path or URL of each teacher; kinds with the same path share one, which is named after the first of them.

    Example: teacher.models {sums: a, products: b, default: a} -> {"teacher sums": a, "teacher products": b}
    """
    names: dict[str, str] = {}
    for kind, path in config.teacher.models.items():
        names.setdefault(path, f"{TEACHER} {kind}")
    return {name: path for path, name in names.items()}


def is_served(path: str) -> bool:
    """Whether a teacher is behind a URL, so that no process of the run holds it."""
    return path.startswith(("http://", "https://"))


def held_teachers(config: Config) -> dict[str, str]:
    """Of `teachers`, those that processes of the run hold."""
    return {name: path for name, path in teachers(config).items() if not is_served(path)}


def served_teachers(config: Config) -> dict[str, str]:
    """Of `teachers`, those behind a URL; each has one process that asks it."""
    return {name: path for name, path in teachers(config).items() if is_served(path)}


def teacher_ranks(config: Config) -> int:
    """Processes that hold each teacher together."""
    return config.trainer.ranks if config.cluster.roles is ModelPlacement.shared else config.teacher.ranks


def frozen_models(config: Config, task_kind: str) -> dict[str, str]:
    """What a frozen model is to a group of this kind -> its name in `Workers.frozen`."""
    found = {REFERENCE: REFERENCE} if needs_reference(config) else {}
    models = config.teacher.models
    if models:
        path = models[name_for(task_kind, models) or DEFAULT_KIND]
        found[TEACHER] = next(name for name, its in teachers(config).items() if its == path)
    return found


def adapter_scale(lora: LoraConfig) -> float:
    """What the adapters add is multiplied by."""
    assert lora.rank is not None, "the settings of a model with adapters"
    return lora.alpha / (math.sqrt(lora.rank) if lora.rank_stabilised else lora.rank)


def sends_adapters(config: Config) -> bool:
    """True when the engines are sent adapters alone."""
    return config.lora.rank is not None and config.lora.send is Send.adapters


def transport_of(config: Config) -> Transport:
    """The transport in use: `weights.transport`, or shm when it is null. (Placement may already have replaced null.)"""
    return config.weights.transport or Transport.shm


def transports_for(config: Config, *, on_gpus: bool) -> tuple[TransportChoice, ...]:
    """What weights.transport may become if it is null, the best one first; which of them fit depends on the machines.

    Example: four engines on the GPUs of four ranks -> ipc; shm, in case the GPUs are on two machines.
    """
    through_memory = TransportChoice(transport=Transport.shm, reason="the memory of one machine reaches all engines")
    between_ranks = TransportChoice(transport=Transport.p2p, reason="trainer and engines are on several machines")
    if sends_adapters(config):
        return (through_memory,)
    if config.lora.rank is not None:
        merged = "no rank has a part of merged adapters, which p2p and ipc would send"
        return (replace(through_memory, reason=merged),)
    is_colocated = config.cluster.placement is Placement.colocated
    if not on_gpus:
        return (through_memory,) if is_colocated else (through_memory, between_ranks)
    if not is_colocated:
        return (replace(between_ranks, reason="GPUs send each other weights faster than through the CPU's memory"),)
    shared = TransportChoice(transport=Transport.ipc, reason="engines can read the memory of the trainer's GPUs")
    scattered = "the GPUs are on several machines, and ipc reaches one; NCCL takes one process for each GPU"
    return (shared, replace(through_memory, reason=scattered))


def samples_while_loading(config: Config) -> bool:
    """True when some engines have requests under way while others take new weights."""
    return config.staleness.max_versions > 0 and config.cluster.placement is Placement.separate


def keeps_cache(config: Config) -> bool:
    """True when replies under way keep their key-value cache while an engine takes new weights."""
    return samples_while_loading(config) and not config.rollout.drain and config.rollout.keep_cache is not False


def object_store_bytes(config: Config) -> int:
    """Size of the object store of a Ray that is started here: room for groups that wait, and for those under way."""
    return int(max(256, min(config.staleness.max_ready_mb * 1.5, 4096))) << 20
