"""Settings of the machines: where processes run."""

from dataclasses import dataclass, field

from rlflow.config.choices import ModelPlacement, Placement, ProcessKind, Scheduler

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
    """See `cpus`."""
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
    """CPUs of the pod with Ray's head and the driver, which computes nothing."""
    head_memory_gb: float = 16.0
    """Memory of that pod."""
    retries: int = 3
    """How often a job that failed, for whatever reason, starts again from its last checkpoint."""
    scheduler: Scheduler = Scheduler.default
    """What admits the job."""
    queue: str | None = None
    """The queue of kueue, volcano or kai."""


@dataclass
class ClusterConfig:
    """The machines, and which processes share their devices."""

    address: str | None = None
    """A running Ray cluster: `auto` (the one that this machine is part of) or host:port; for `rlflow submit` its
    dashboard, such as http://head:8265. null starts one on this machine, on loopback."""
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Name -> machines of one kind; empty: anything may run on any machine."""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    placement: Placement = Placement.separate
    """`separate`: engines and trainer have devices of their own and overlap; takes rollout.engines x
    rollout.tensor_parallel + trainer.ranks GPUs. `colocated`: they take turns on the same devices, which is how one GPU
    is enough; the engines sleep while the trainer works, and a step is trained when its last group is ready."""
    roles: ModelPlacement = ModelPlacement.separate
    """Where critic, reference, teachers and reward model are. `separate`: on GPUs of their own. `shared`: rank i of
    each, and replica i of the reward model, on the GPU of the trainer's rank i; with `colocated` only the critic leaves
    too."""
    reference_ranks: int = 1
    """Processes, each with a GPU, over which the reference is sharded, and which share its work. With `roles=shared`
    there are as many as ranks of the trainer."""
    cpu_threads: int | None = None
    """Threads of each process that computes without a GPU. null: an equal share of this machine's cores; one thread in
    a cluster that is joined."""
