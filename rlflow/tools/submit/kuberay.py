"""A run as a RayJob of the KubeRay operator. Pure.

    rayjob = render(config, job)
    print(to_yaml(rayjob))

A lost head: KubeRay makes another one, and the submitter starts the driver anew there; or, if that takes long, the job
fails and is retried with a whole new cluster. Either way the same command finds its run directory and goes on.
"""

from __future__ import annotations

import re
import shlex
from importlib import metadata

import yaml

from rlflow.config import POOL_LABEL, Config, PoolConfig, Scheduler
from rlflow.errors import ConfigError
from rlflow.tools.submit.job import Job
from rlflow.tools.submit.pods import Tree, head_pod, labels, submitter_pod, worker_pod

_KEEP_SECONDS = 60
"""Machines are kept for so long after a job, for its last words; the log of the driver is kept with the RayJob."""
_SUBMITTER_RETRIES = 2
"""The connection to the driver's log may break, and a lost head ends it; another submitter goes on where it was."""
_POOL_NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
_QUEUE_LABELS = {
    Scheduler.kueue: "kueue.x-k8s.io/queue-name",
    Scheduler.volcano: "volcano.sh/queue-name",
    Scheduler.kai: "kai.scheduler/queue",
}


def render(config: Config, job: Job) -> Tree:
    """The RayJob (ray.io/v1) of a checked configuration with cluster.kubernetes.image.

    Raises ConfigError for what Kubernetes would refuse later.
    """
    _check(config, job)
    kubernetes = config.cluster.kubernetes
    meta: Tree = {"name": job.name}
    if kubernetes.namespace is not None:
        meta["namespace"] = kubernetes.namespace
    meta["labels"] = labels(job)
    if kubernetes.queue is not None:
        meta["labels"][_QUEUE_LABELS[kubernetes.scheduler]] = kubernetes.queue
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": meta, "spec": _spec(config, job)}


def to_yaml(manifest: Tree) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes everything out where it is, without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _spec(config: Config, job: Job) -> Tree:
    kubernetes = config.cluster.kubernetes
    spec: Tree = {
        "entrypoint": shlex.join(job.words),
        "backoffLimit": kubernetes.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEEP_SECONDS,
    }
    if kubernetes.scheduler is Scheduler.kueue:
        spec["suspend"] = True  # Kueue lets it go when the queue has room for all of its pods
    if kubernetes.scheduler is Scheduler.kai:
        # It starts all pods of a job at once, and a submitter of its own would only come after them.
        spec["submissionMode"] = "SidecarMode"
    else:
        spec["submissionMode"] = "K8sJobMode"
        spec["submitterConfig"] = {"backoffLimit": _SUBMITTER_RETRIES}
        spec["submitterPodTemplate"] = submitter_pod(config, job)
    spec["rayClusterSpec"] = {
        "rayVersion": metadata.version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": _head(config, job),
        "workerGroupSpecs": [_group(config, job, name, pool) for name, pool in config.cluster.pools.items()],
    }
    return spec


def _head(config: Config, job: Job) -> Tree:
    return {
        "serviceType": "ClusterIP",
        "enableIngress": False,
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},  # so that nothing but the driver runs here
        "template": head_pod(config, job),
    }


def _group(config: Config, job: Job, name: str, pool: PoolConfig) -> Tree:
    return {
        "groupName": name,
        "replicas": pool.machines,
        "minReplicas": pool.machines,
        "maxReplicas": pool.machines,
        "labels": {POOL_LABEL: name},
        "rayStartParams": {},
        "template": worker_pod(config, job, pool),
    }


def _check(config: Config, job: Job) -> None:
    for name in config.cluster.pools:
        if not _POOL_NAME.fullmatch(name):
            raise ConfigError(
                f"cluster.pools.{name} becomes part of the names of pods; take up to 30 lower-case letters, digits and "
                "hyphens, the first one a letter"
            )
    if shlex.quote(job.run_dir) != job.run_dir:
        raise ConfigError(
            f"run.dir={job.run_dir} has characters that a shell changes; take letters, digits, - _ . and /"
        )
