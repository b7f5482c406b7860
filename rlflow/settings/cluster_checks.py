"""Cross-checks of where a run is to be: address, pools, Kubernetes. Whether it fits is `cluster.placement.fit`."""

import math

from rlflow.config import Config, KubernetesConfig, OnExists, PoolConfig, ProcessKind, Scheduler
from rlflow.errors import ConfigError


def check_cluster(config: Config) -> None:
    """Raise ConfigError for the first setting that contradicts another or has no effect."""
    cluster = config.cluster
    if cluster.cpu_threads is not None and cluster.cpu_threads < 1:
        raise ConfigError(f"cluster.cpu_threads must be at least 1, or null; got {cluster.cpu_threads}")
    if cluster.pools and cluster.address is None:
        raise ConfigError(
            f"cluster.pools ({', '.join(cluster.pools)}) has no effect on one machine; leave it out, or join a cluster "
            "with cluster=ray or cluster=kuberay"
        )
    rest = [name for name, pool in cluster.pools.items() if pool.processes is None]
    if len(rest) > 1:
        raise ConfigError(
            f"cluster.pools.{rest[0]} and {rest[1]} both take the processes that no other pool has; give one of them "
            f"`processes`, some of {', '.join(ProcessKind)}"
        )
    owners: dict[ProcessKind, str] = {}
    for name, pool in cluster.pools.items():
        for process in pool.processes or ():
            if process in owners:
                raise ConfigError(
                    f"{process} is in cluster.pools.{owners[process]} and in cluster.pools.{name}; take one"
                )
            owners[process] = name
    missing = [process for process in ProcessKind if process not in owners]
    if cluster.pools and missing and not rest:
        raise ConfigError(
            f"no pool of cluster.pools has {', '.join(missing)}; add them to one, or give one pool no `processes`, so "
            "that it has the rest"
        )
    on_kubernetes = cluster.kubernetes.image is not None
    for name, pool in cluster.pools.items():
        where = f"cluster.pools.{name}"
        if pool.processes == []:
            raise ConfigError(f"{where}.processes is empty, so that nothing runs there; leave the pool out")
        for size in ("machines", "cpus", "gpus", "memory_gb"):
            value, least = getattr(pool, size), 0 if size == "gpus" else 1
            if value is None:
                if on_kubernetes:
                    raise ConfigError(f"{where}.{size} must be given for pods on Kubernetes; got null")
            elif not math.isfinite(value) or value < least:
                raise ConfigError(f"{where}.{size} must be {'at least 1' if least else '0 or more'}; got {value}")
        if not on_kubernetes and (pool.memory_gb is not None or pool.node_labels):
            field = "node_labels" if pool.node_labels else "memory_gb"
            raise ConfigError(f"{where}.{field} has no effect without cluster=kuberay; leave it out")
    if on_kubernetes:
        _check_kubernetes(config)
    elif cluster.kubernetes != KubernetesConfig():
        raise ConfigError(
            "cluster.kubernetes has no effect without cluster.kubernetes.image; add cluster=kuberay and the image, or "
            "leave it out"
        )


def pool_of(pools: dict[str, PoolConfig], process: ProcessKind) -> str | None:
    """The pool that a process runs in; None where there are no pools."""
    for name, pool in pools.items():
        if pool.processes is not None and process in pool.processes:
            return name
    return next((name for name, pool in pools.items() if pool.processes is None), None)


def _check_kubernetes(config: Config) -> None:
    kubernetes = config.cluster.kubernetes
    if config.cluster.address != "auto":
        raise ConfigError(
            f"cluster.address={config.cluster.address} contradicts cluster.kubernetes.image: the job joins the cluster "
            "that it was given; set it to auto, or the image to null"
        )
    if config.run.on_exists is not OnExists.resume:
        raise ConfigError(
            f"run.on_exists={config.run.on_exists.value} contradicts cluster.kubernetes, where a job that failed is "
            "started again with the same run.dir; set it to resume, and choose another run.dir to start over"
        )
    if not config.cluster.pools:
        raise ConfigError("cluster.kubernetes needs cluster.pools, of which its pods are made; give at least one")
    if kubernetes.claim is None:
        raise ConfigError(
            "cluster.kubernetes.claim must name a PersistentVolumeClaim (ReadWriteMany) for run directories; got null"
        )
    if kubernetes.head_cpus < 1 or not kubernetes.head_memory_gb >= 1:
        raise ConfigError(
            "cluster.kubernetes.head_cpus and head_memory_gb must be at least 1; got "
            f"{kubernetes.head_cpus} and {kubernetes.head_memory_gb:g}"
        )
    if kubernetes.retries < 0:
        raise ConfigError(f"cluster.kubernetes.retries must not be negative; got {kubernetes.retries}")
    if kubernetes.queue is not None and kubernetes.scheduler is Scheduler.default:
        raise ConfigError(
            f"cluster.kubernetes.queue={kubernetes.queue} has no effect with scheduler=default; set scheduler to "
            "kueue, volcano or kai, or the queue to null"
        )
    if kubernetes.queue is None and kubernetes.scheduler is not Scheduler.default:
        raise ConfigError(
            f"cluster.kubernetes.scheduler={kubernetes.scheduler.value} needs cluster.kubernetes.queue, the name of "
            "its queue; got null"
        )
