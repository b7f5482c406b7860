"""Every cross-check of the settings: what is out of range, contradicts another setting or has no effect.

Each message names the key, the value found and the cure. The ranges and most settings without effect are tables; what
depends on more is a function. `algorithms.registry.check_functions` checks what needs the functions that were chosen.
"""

import math
from collections.abc import Callable
from operator import attrgetter

from rlflow.algorithms.registry import needs_critic
from rlflow.config import (
    ADAPTER_RANKS,
    Backend,
    Config,
    Dtype,
    ModelPlacement,
    Order,
    Placement,
    Proximal,
    Schedule,
    Send,
    Transport,
)
from rlflow.curriculum.registry import check_curriculum
from rlflow.errors import ConfigError
from rlflow.runtime.derived import (
    can_compile,
    held_teachers,
    needs_reference,
    num_updates,
    samples_while_loading,
    sends_adapters,
)
from rlflow.settings import reward_checks, teacher_checks
from rlflow.settings.cluster_checks import check_cluster
from rlflow.settings.engine_args import check_engine_args
from rlflow.settings.stop_when import check_stop
from rlflow.settings.trainer_checks import check_trainer

MAX_PROFILED = 5
"""Steps; the profile of a step of a large model is some hundred MB on each rank."""
MAX_OVERSAMPLE = 4
"""Times what is needed; the rest of what is played is thrown away."""
_POSITIVE = {
    "run": ("steps", "keep_checkpoints", "show_samples_every"),
    "model": ("max_length",),
    "env": (
        "processes",
        "max_turns",
        "max_observation_chars",
        "setup_timeout_s",
        "step_timeout_s",
        "episode_timeout_s",
    ),
    "reward": ("model_replicas", "workers", "timeout_s"),
    "algorithm": ("groups_per_step", "epochs", "minibatches", "entropy_target"),
    "rollout": ("tensor_parallel", "max_new_tokens", "temperature", "max_running", "kv_cache_gb"),
    "eval": ("episodes",),
    "trainer": (
        "ranks",
        "tensor_parallel",
        "sequence_parallel",
        "replicas",
        "learning_rate",
        "max_grad_norm",
        "micro_batch_tokens",
    ),
    "lora": ("alpha",),
    "critic": ("learning_rate",),
    "cluster": ("reference_ranks",),
    "teacher": ("weight", "ranks"),
    "staleness": ("max_ready_mb",),
    "deadlines": ("start_s", "group_s", "train_s", "weights_s", "checkpoint_s", "heartbeat_s"),
}
_NOT_NEGATIVE = {
    "run": ("seed", "checkpoint_every"),
    "rollout": ("engines",),
    "algorithm": ("kl_coefficient", "entropy_bonus", "balance_coefficient"),
    "critic": ("warmup_steps",),
    "trainer": ("warmup_steps", "weight_decay"),
    "staleness": ("max_versions",),
    "teacher": ("reward_weight",),
    "eval": ("every",),
}
_SHARES = {"trainer": ("beta1", "beta2"), "rollout": ("min_p",), "lora": ("dropout",)}

_OF_ENGINES = (
    *("rollout.stop", "rollout.speculative", "rollout.quantization", "rollout.tensor_parallel", "rollout.engine_args"),
    *("rollout.drain", "rollout.keep_cache", "rollout.update", "weights.transport", "weights.verify", "lora.send"),
    *("cluster.placement", "algorithm.mask_truncated", "rollout.oversample", "rollout.oversample_episodes"),
)

_WITHOUT_EFFECT: list[tuple[str, Callable[[Config], object], str]] = [
    (
        "model.float32_head",
        lambda c: c.model.dtype is Dtype.float32,
        "with model.dtype=float32, in which the output layer is computed too; leave it false",
    ),
    (
        "cluster.roles",
        lambda c: not (c.reward.model or held_teachers(c) or needs_reference(c) or needs_critic(c.algorithm)),
        "without a critic, a reference, a teacher or a reward model (with lora.rank the policy is its own reference); "
        "set it to separate",
    ),
    (
        "cluster.reference_ranks",
        lambda c: not needs_reference(c),
        "without processes for a reference (algorithm.kl_coefficient=0, or lora.rank is set); leave it at 1",
    ),
    (
        "cluster.reference_ranks",
        lambda c: c.cluster.roles is ModelPlacement.shared,
        "with cluster.roles=shared, which puts one on each GPU of the trainer; leave it at 1",
    ),
    (
        "algorithm.kl_target",
        lambda c: c.algorithm.kl_in_reward,
        "with algorithm.kl_in_reward=true, whose coefficient stays; set it to null",
    ),
    (
        "algorithm.kl_in_reward",
        lambda c: not c.algorithm.kl_coefficient,
        "with algorithm.kl_coefficient=0; set the coefficient, or it to false",
    ),
    (
        "algorithm.kl",
        lambda c: not c.algorithm.kl_coefficient,
        "with algorithm.kl_coefficient=0; set the coefficient",
    ),
    (
        "algorithm.kl",
        lambda c: c.algorithm.kl_in_reward,
        "with algorithm.kl_in_reward=true, because no estimate is in the loss then; leave it out",
    ),
    (
        "algorithm.filter_on",
        lambda c: not c.algorithm.dynamic_sampling,
        "with algorithm.dynamic_sampling=false; set it to null, or dynamic_sampling to true",
    ),
    (
        "algorithm.proximal",
        lambda c: c.algorithm.proximal is Proximal.interpolated and c.staleness.max_versions < 2,
        "where no token is older than one version; got staleness.max_versions={staleness.max_versions}; raise it to 2 "
        "or more, or take behaviour",
    ),
    *(
        (f"lora.{name}", lambda c: c.lora.rank is None, "with lora.rank=null; set lora.rank")
        for name in ("alpha", "rank_stabilised", "targets", "dropout", "send")
    ),
    (
        "staleness.order",
        lambda c: c.staleness.max_versions == 0,
        "with staleness.max_versions=0, where all groups of a step are of one version; set it to oldest_first, or "
        "raise staleness.max_versions",
    ),
    (
        "rollout.oversample",
        lambda c: c.staleness.max_versions and c.staleness.order is Order.oldest_first,
        "with staleness.order=oldest_first, under which every group is waited for; set that to ready_first, or "
        "rollout.oversample to 1",
    ),
    (
        "staleness.late",
        lambda c: c.staleness.order is Order.oldest_first,
        "with staleness.order=oldest_first, under which no group is late; set it to requeue, or staleness.order to "
        "ready_first",
    ),
    (
        "trainer.streaming",
        lambda c: c.cluster.placement is Placement.colocated,
        "with cluster.placement=colocated, which trains a step when its last group is ready; leave it null",
    ),
    (
        "trainer.streaming",
        lambda c: num_updates(c.algorithm) > 1,
        "with several updates a step (algorithm.epochs, algorithm.minibatches), which wait for its groups anyway; "
        "leave it null",
    ),
    *(
        (key, lambda c: not c.rollout.engines, "with rollout.engines=0, where nothing is sampled; leave it out")
        for key in _OF_ENGINES
    ),
    (
        "rollout.update",
        lambda c: c.rollout.engines == 1 or not samples_while_loading(c),
        "with a single engine, with staleness.max_versions=0 or with cluster.placement=colocated, where engines load "
        "at once anyway; leave it at rolling",
    ),
    (
        "rollout.drain",
        lambda c: not samples_while_loading(c),
        "with staleness.max_versions=0 or with cluster.placement=colocated, where nothing that is trained is under way "
        "when weights are loaded; leave it false",
    ),
    (
        "rollout.expert_parallel",
        lambda c: c.rollout.tensor_parallel == 1,
        "with rollout.tensor_parallel=1, where one GPU has all experts; raise rollout.tensor_parallel, or leave it "
        "false",
    ),
    (
        "rollout.keep_cache",
        lambda c: c.rollout.drain or not samples_while_loading(c),
        "with staleness.max_versions=0, with cluster.placement=colocated or with rollout.drain=true, where nothing "
        "that is trained is under way when weights are loaded; leave it null",
    ),
    ("eval.episodes", lambda c: not c.eval.every, "with eval.every=0; set eval.every"),
    (
        "weights.transport",
        lambda c: c.weights.transport is not Transport.shm and sends_adapters(c),
        "on adapters, which are sent alone; leave it at shm, or set lora.send=merged",
    ),
    (
        "trainer.schedule_args",
        lambda c: c.trainer.schedule is Schedule.constant and "floor" in c.trainer.schedule_args,
        "with trainer.schedule=constant; leave it out, or set trainer.schedule to linear or cosine",
    ),
    (
        "trainer.zero_stage",
        lambda c: c.trainer.backend is not Backend.deepspeed,
        "with trainer.backend={trainer.backend}; set it to null, or trainer.backend=deepspeed",
    ),
    (
        "trainer.tensor_parallel",
        lambda c: c.trainer.backend is Backend.deepspeed,
        "with trainer.backend=deepspeed; set it to 1, or trainer.backend=fsdp",
    ),
    (
        "trainer.compile",
        lambda c: not can_compile(c),
        "with trainer.backend=deepspeed, trainer.tensor_parallel or trainer.sequence_parallel above 1, lora.rank or "
        "algorithm.balance_coefficient; set it to null",
    ),
    (
        "trainer.replicas",
        lambda c: c.trainer.backend is Backend.deepspeed,
        "with trainer.backend=deepspeed; set it to 1, or trainer.backend=fsdp",
    ),
    (
        "trainer.nvme_path",
        lambda c: c.trainer.zero_stage != 3,
        "without trainer.backend=deepspeed and trainer.zero_stage=3; set these, or trainer.nvme_path to null",
    ),
]
"""(key, when, why): a value other than the default has no effect when the condition holds; `why` ends with the cure."""


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that is out of range, contradicts another or has no effect."""
    _check_ranges(config)
    check_curriculum(config.curriculum)
    default = Config()
    for key, has_none, why in (*_WITHOUT_EFFECT, *reward_checks.WITHOUT_EFFECT, *teacher_checks.WITHOUT_EFFECT):
        value = attrgetter(key)(config)
        if value == attrgetter(key)(default) or not has_none(config):
            continue
        shown = {True: "", False: "=false"}[value] if isinstance(value, bool) else f"={value}"
        raise ConfigError(f"{key}{shown} has no effect {why.format(**vars(config))}")
    _check_profile(config)
    check_stop(config)
    _check_contradictions(config)
    reward_checks.check_reward(config)
    teacher_checks.check_teacher(config)
    _check_algorithm(config)
    check_trainer(config)
    _check_rollout(config)
    check_cluster(config)


def _check_ranges(config: Config) -> None:
    for keys, is_right, wanted in (
        (_POSITIVE, lambda value: value > 0, "be positive"),
        (_NOT_NEGATIVE, lambda value: value >= 0, "not be negative"),
        (_SHARES, lambda value: 0 <= value < 1, "be in [0, 1)"),
    ):
        for section, names in keys.items():
            for name in names:
                value = getattr(getattr(config, section), name)
                if value is None:
                    continue
                if not math.isfinite(value):
                    raise ConfigError(f"{section}.{name} must be a finite number; got {value}")
                if not is_right(value):
                    raise ConfigError(f"{section}.{name} must {wanted}; got {value}")
    for key in ("oversample", "oversample_episodes"):
        value = getattr(config.rollout, key)
        if not 1 <= value <= MAX_OVERSAMPLE:
            raise ConfigError(
                f"rollout.{key} must be from 1, which is off, to {MAX_OVERSAMPLE}, such as 1.25; got {value}"
            )
    if config.algorithm.group_size < 1:
        raise ConfigError(f"algorithm.group_size must be at least 1; got {config.algorithm.group_size}")
    if config.algorithm.group_size == 1 and config.algorithm.dynamic_sampling:
        raise ConfigError(
            "algorithm.dynamic_sampling=true drops groups of equal rewards, and with algorithm.group_size=1 a group "
            "has only one; set it to false, or raise the size"
        )
    top_k, top_p = config.rollout.top_k, config.rollout.top_p
    if top_k is not None and top_k < 1:
        raise ConfigError(f"rollout.top_k must be at least 1, or null for all tokens; got {top_k}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"rollout.top_p must be in (0, 1]; got {top_p}")
    value_clip, rank = config.critic.value_clip, config.lora.rank
    if value_clip is not None and value_clip <= 0:
        raise ConfigError(f"critic.value_clip must be positive, or null for no clip; got {value_clip}")
    if config.critic.warmup_steps >= config.run.steps:
        raise ConfigError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves no step to the policy, because "
            f"run.steps={config.run.steps}; lower it, or raise run.steps"
        )
    if rank is not None and rank < 1:
        raise ConfigError(f"lora.rank must be at least 1, or null to train the whole model; got {rank}")
    if config.lora.targets == []:
        raise ConfigError("lora.targets names no layer; name some, or set it to null for all linear layers")


def _check_profile(config: Config) -> None:
    steps = config.run.profile_steps
    if steps is None:
        return
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= config.run.steps or steps[1] - steps[0] >= MAX_PROFILED:
        raise ConfigError(
            f"run.profile_steps must be the first and the last of at most {MAX_PROFILED} steps, from 1 to run.steps "
            f"({config.run.steps}); got {steps}"
        )


def _check_contradictions(config: Config) -> None:
    rollout = config.rollout
    if rollout.top_k is None and (rollout.top_p, rollout.min_p) != (1, 0):
        raise ConfigError(
            f"rollout.top_p={rollout.top_p:g} with rollout.min_p={rollout.min_p:g} needs a rollout.top_k, which bounds "
            "how many tokens engines report for each choice; set it to 1024, which leaves out next to nothing more"
        )
    lora, transport = config.lora, config.weights.transport
    if lora.rank is not None and lora.rank > ADAPTER_RANKS[-1] and lora.send is Send.adapters:
        raise ConfigError(
            f"lora.rank={lora.rank} is more than the {ADAPTER_RANKS[-1]} that engines take with lora.send=adapters; "
            "lower it, or set lora.send=merged"
        )
    if lora.rank is not None and config.trainer.tensor_parallel > 1:
        raise ConfigError(
            f"lora.rank={lora.rank} does not go with trainer.tensor_parallel={config.trainer.tensor_parallel}: "
            "adapters are not cut into slices; set trainer.tensor_parallel to 1, which adapters leave memory for"
        )
    if transport in (Transport.p2p, Transport.ipc) and lora.rank is not None:
        raise ConfigError(
            f"weights.transport={transport} does not go with lora.send=merged: no rank has a part of what is merged; "
            "set weights.transport to shm or disk"
        )
    if transport is Transport.ipc and config.cluster.placement is not Placement.colocated:
        raise ConfigError(
            "weights.transport=ipc is for engines on the trainer's GPUs; set cluster.placement=colocated, or "
            "weights.transport=p2p"
        )
    max_new_tokens, max_length = config.rollout.max_new_tokens, config.model.max_length
    if config.rollout.engines and max_new_tokens >= max_length:
        raise ConfigError(
            f"rollout.max_new_tokens ({max_new_tokens}) leaves no room for a prompt within model.max_length "
            f"({max_length}); lower the first or raise the second"
        )
    if config.trainer.micro_batch_tokens < max_length:
        raise ConfigError(
            f"trainer.micro_batch_tokens ({config.trainer.micro_batch_tokens}) must hold at least one sequence of "
            f"model.max_length ({max_length}) tokens"
        )


def _check_rollout(config: Config) -> None:
    rollout, lora = config.rollout, config.lora
    if rollout.engine_args:
        check_engine_args(config)
    if "" in rollout.stop:
        raise ConfigError("rollout.stop has an empty text, which would end every reply at once; leave it out")
    if rollout.quantization is None:
        return
    if config.model.dtype is Dtype.float32:
        raise ConfigError(
            f"rollout.quantization={rollout.quantization} does not go with model.dtype=float32, because vLLM rounds "
            "from 16 bits only; set model.dtype=bfloat16, or leave it null"
        )
    if lora.rank is not None and lora.send is Send.adapters:
        raise ConfigError(
            f"rollout.quantization={rollout.quantization} rounds each version as it comes, and with lora.send=adapters "
            "only adapters do; set lora.send=merged, or rollout.quantization to null"
        )


def _check_algorithm(config: Config) -> None:
    algorithm, max_new_tokens = config.algorithm, config.rollout.max_new_tokens
    if algorithm.groups_per_step % algorithm.minibatches:
        raise ConfigError(
            f"algorithm.minibatches must divide algorithm.groups_per_step ({algorithm.groups_per_step}), because each "
            f"has equally many whole groups; got {algorithm.minibatches}"
        )
    if algorithm.proximal is Proximal.interpolated and num_updates(algorithm) > 1:
        raise ConfigError(
            "algorithm.proximal=interpolated estimates the policy before the only update of a step, and here a step "
            f"makes {num_updates(algorithm)} (algorithm.epochs, algorithm.minibatches); take recomputed"
        )
    if algorithm.kl_target is not None and (algorithm.kl_target <= 0 or not algorithm.kl_coefficient):
        raise ConfigError(
            "algorithm.kl_target must be positive, with an algorithm.kl_coefficient to begin with; got "
            f"{algorithm.kl_target} and {algorithm.kl_coefficient}"
        )
    low, high = algorithm.entropy_low, algorithm.entropy_high
    if (low, high) != (None, None) and (low is None or high is None or not 0 <= low < high):
        raise ConfigError(
            f"algorithm.entropy_low and entropy_high must be null both, or 0 <= low < high; got {low} and {high}"
        )
    overlong = algorithm.overlong_tokens
    if overlong is not None and not 0 < overlong <= max_new_tokens:
        raise ConfigError(
            f"algorithm.overlong_tokens must be from 1 to rollout.max_new_tokens ({max_new_tokens}), or null; got "
            f"{overlong}"
        )
