"""Every cross-check of the settings. Each message names the field, the value found and the cure.

What needs the functions that were chosen is `algorithms.registry.check_functions`.
"""

from __future__ import annotations

import math

from rlflow.algorithms.registry import needs_critic
from rlflow.config import (
    ADAPTER_RANKS,
    AlgorithmConfig,
    Backend,
    Config,
    CriticConfig,
    Dtype,
    EvalConfig,
    Late,
    LoraConfig,
    Offload,
    Order,
    Placement,
    Proximal,
    RewardConfig,
    Roles,
    Send,
    TrainerConfig,
    Transport,
    Update,
    needs_reference,
    samples_while_loading,
    sends_adapters,
    value_of,
)
from rlflow.curriculum.registry import check_curriculum
from rlflow.errors import ConfigError
from rlflow.settings.cluster_checks import check_cluster

_POSITIVE = (
    "run.steps",
    "run.keep_checkpoints",
    "run.show_samples_every",
    "model.max_length",
    "env.processes",
    "env.max_turns",
    "env.max_observation_chars",
    "env.setup_timeout_s",
    "env.step_timeout_s",
    "env.episode_timeout_s",
    "reward.model_replicas",
    "reward.workers",
    "reward.timeout_s",
    "algorithm.groups_per_step",
    "rollout.engines",
    "rollout.tensor_parallel",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.max_running",
    "rollout.kv_cache_gb",
    "eval.episodes",
    "trainer.ranks",
    "trainer.tensor_parallel",
    "trainer.learning_rate",
    "lora.alpha",
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
    _check_reward(config.reward)
    check_curriculum(config.curriculum)
    _check_roles(config)
    _check_algorithm(config)
    _check_critic(config.critic)
    _check_lora(config.lora, config.trainer.tensor_parallel)
    _check_staleness(config)
    _check_engines(config)
    _check_weights(config)
    _check_lengths(config)
    _check_backend(config.trainer, config.model.dtype)
    for key in ("trainer.beta1", "trainer.beta2"):
        if not 0 <= value_of(config, key) < 1:
            raise ConfigError(f"{key} must be in [0, 1); got {value_of(config, key)}")
    check_cluster(config)


def _check_reward(reward: RewardConfig) -> None:
    if reward.model is None:
        if reward.model_replicas != RewardConfig().model_replicas:
            raise ConfigError(
                f"reward.model_replicas={reward.model_replicas} has no effect without reward.model; give one, or set "
                "reward.workers for more processes that call a function"
            )
        _check_weights_of_rewards(reward.weights)
        return
    if reward.function is not None:
        raise ConfigError(
            f"reward.function={reward.function} contradicts reward.model={reward.model}: a reply has one reward; set "
            "one of them to null"
        )
    for key, value in (("weights", reward.weights), ("args", reward.args)):
        if value:
            raise ConfigError(f"reward.{key}={value} has no effect with reward.model; leave it out")
    if reward.workers != RewardConfig().workers:
        raise ConfigError(
            f"reward.workers={reward.workers} has no effect with reward.model; set it to 1, and "
            "reward.model_replicas for more processes"
        )


def _check_weights_of_rewards(weights: list[float] | None) -> None:
    if weights is None:
        return
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"reward.weights must be finite numbers; got {weights}")
    if not any(weights):
        raise ConfigError(f"reward.weights must not all be 0, for then there is no reward; got {weights}")


def _check_roles(config: Config) -> None:
    if config.cluster.roles is Roles.separate:
        return
    has_model = config.reward.model is not None
    if not (has_model or needs_reference(config) or needs_critic(config.algorithm)):
        raise ConfigError(
            "cluster.roles=shared has no effect without a critic, a reference or a reward model (with lora.rank the "
            "policy is its own reference); set it to separate"
        )
    if has_model and config.reward.model_replicas > config.trainer.ranks:
        raise ConfigError(
            "cluster.roles=shared puts each replica of the reward model on the GPU of another rank of the trainer; got "
            f"reward.model_replicas={config.reward.model_replicas} and trainer.ranks={config.trainer.ranks}; lower the "
            "first, or set cluster.roles=separate"
        )


def _check_critic(critic: CriticConfig) -> None:
    if critic.value_clip is not None and critic.value_clip <= 0:
        raise ConfigError(f"critic.value_clip must be positive, or null for no clip; got {critic.value_clip}")


def _check_lora(lora: LoraConfig, tensor_parallel: int) -> None:
    if lora.rank is not None and lora.rank < 1:
        raise ConfigError(f"lora.rank must be at least 1, or null to train the whole model; got {lora.rank}")
    if lora.rank is None and lora.alpha != LoraConfig().alpha:
        raise ConfigError(f"lora.alpha={lora.alpha} has no effect with lora.rank=null; set lora.rank")
    if lora.rank is None and lora.send is not LoraConfig().send:
        raise ConfigError(f"lora.send={lora.send.value} has no effect with lora.rank=null; set lora.rank")
    if lora.rank is not None and lora.rank > ADAPTER_RANKS[-1] and lora.send is Send.adapters:
        raise ConfigError(
            f"lora.rank={lora.rank} is more than the {ADAPTER_RANKS[-1]} that engines take with lora.send=adapters; "
            "lower it, or set lora.send=merged"
        )
    if lora.rank is not None and tensor_parallel > 1:
        raise ConfigError(
            f"lora.rank={lora.rank} does not go with trainer.tensor_parallel={tensor_parallel}: adapters are not cut "
            "into slices; set trainer.tensor_parallel to 1, which adapters leave memory for"
        )


def _check_algorithm(config: Config) -> None:
    """What can be known without the functions themselves; the rest is `algorithms.registry.check_functions`."""
    algorithm = config.algorithm
    if algorithm.group_size < 2:
        raise ConfigError(
            f"algorithm.group_size must be at least 2, to have something to compare; got {algorithm.group_size}"
        )
    _check_kl(algorithm)
    bounds = (algorithm.entropy_low, algorithm.entropy_high)
    if bounds != (None, None) and (None in bounds or not 0 <= (bounds[0] or 0.0) < (bounds[1] or 0.0)):
        raise ConfigError(
            "algorithm.entropy_low and entropy_high must be null both, or 0 <= low < high; got "
            f"{bounds[0]} and {bounds[1]}"
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


def _check_kl(algorithm: AlgorithmConfig) -> None:
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
            "algorithm.kl_target has no effect with algorithm.kl_in_reward=true, whose coefficient stays; set "
            "it to null"
        )
    if algorithm.kl_in_reward and not algorithm.kl_coefficient:
        raise ConfigError(
            "algorithm.kl_in_reward has no effect with algorithm.kl_coefficient=0; set the coefficient, or it to false"
        )
    if algorithm.kl_in_reward and algorithm.kl != AlgorithmConfig().kl:
        raise ConfigError(
            f"algorithm.kl={algorithm.kl} has no effect with algorithm.kl_in_reward=true, which takes k1; leave it out"
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


def _check_weights(config: Config) -> None:
    transport = config.weights.transport
    if transport in (None, Transport.shm):
        return
    if sends_adapters(config):
        raise ConfigError(
            f"weights.transport={transport.value} has no effect on adapters, which are sent alone; leave it at shm, or "
            "set lora.send=merged"
        )
    if transport in (Transport.p2p, Transport.ipc) and config.lora.rank is not None:
        raise ConfigError(
            f"weights.transport={transport.value} does not go with lora.send=merged: no rank has a part of what is "
            "merged; set weights.transport to shm or disk"
        )
    if transport is Transport.ipc and config.cluster.placement is not Placement.colocated:
        raise ConfigError(
            "weights.transport=ipc is for engines on the trainer's GPUs; set cluster.placement=colocated, or "
            "weights.transport=p2p"
        )


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
    if trainer.tensor_parallel > 1 and trainer.backend is Backend.deepspeed:
        raise ConfigError(
            f"trainer.tensor_parallel={trainer.tensor_parallel} has no effect with trainer.backend=deepspeed; set it "
            "to 1, or trainer.backend=fsdp"
        )
    if trainer.ranks % trainer.tensor_parallel:
        raise ConfigError(
            f"trainer.tensor_parallel must divide trainer.ranks ({trainer.ranks}); got {trainer.tensor_parallel}"
        )
    if trainer.zero_stage == 1 and dtype is Dtype.bfloat16:
        raise ConfigError(
            "trainer.zero_stage=1 with model.dtype=bfloat16 would add gradients up in bfloat16, and to add them up in "
            "float32 DeepSpeed takes another class of optimiser there, BF16_Optimizer, which rlflow cannot save; set "
            "trainer.zero_stage to 2, which adds them up in float32 and takes less memory"
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
