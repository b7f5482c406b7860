"""A run as a RayJob of the KubeRay operator. Pure.

    rayjob = render(config, job)
    print(to_yaml(rayjob))

A lost head: KubeRay makes another one, and the submitter starts the driver anew there; or, if that takes long, the job
fails and is retried with a whole new cluster. Either way the same command finds its run directory and goes on.

All pods pass the Pod Security Standard "restricted", and have the service class Guaranteed: requests are limits.
"""

import math
import re
import shlex
from importlib import metadata
from typing import Any

import yaml

from rlflow.config import POOL_LABEL, Config, PoolConfig, Scheduler
from rlflow.errors import ConfigError
from rlflow.rundir.lock import NAME as LOCK
from rlflow.rundir.lock import seconds_to_stop
from rlflow.tools.submit.command_words import CLAIM, Job

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
PART_OF = {"app.kubernetes.io/part-of": "rlflow"}
"""The label by which k8s/base/networkpolicy.yaml selects the pods of all jobs."""
_SPARE_SECONDS = 60
"""How long Ray needs to end after a preStop hook."""
SUBMITTER = "ray-job-submitter"
"""The container whose log is the driver's."""
_SUBMITTER_CPU, _SUBMITTER_MEMORY = "500m", "1Gi"
"""What `ray job logs --follow` needs."""

Tree = dict[str, Any]
"""A piece of a manifest, as YAML has it."""
_USER = 1000
_POD_SECURITY: Tree = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "fsGroupChangePolicy": "OnRootMismatch",  # else each start walks all files of the claim
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY: Tree = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def render(config: Config, job: Job) -> Tree:
    """The RayJob (ray.io/v1) of a checked configuration with cluster.kubernetes.image.

    Raises ConfigError for what Kubernetes would refuse later.
    """
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
    kubernetes = config.cluster.kubernetes
    meta: Tree = {"name": job.name}
    if kubernetes.namespace is not None:
        meta["namespace"] = kubernetes.namespace
    meta["labels"] = _labels(job)
    if kubernetes.queue is not None:
        meta["labels"][_QUEUE_LABELS[kubernetes.scheduler]] = kubernetes.queue
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
        spec["submitterPodTemplate"] = _submitter_pod(config, job)
    spec["rayClusterSpec"] = {
        "rayVersion": metadata.version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "enableIngress": False,
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},  # so that nothing but the driver runs here
            "template": _head_pod(config, job),
        },
        "workerGroupSpecs": [
            {
                "groupName": name,
                **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), pool.machines),
                "labels": {POOL_LABEL: name},
                "rayStartParams": {},
                "template": _worker_pod(config, job, pool),
            }
            for name, pool in config.cluster.pools.items()
        ],
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": meta, "spec": spec}


def to_yaml(manifest: Tree) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes everything out where it is, without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _head_pod(config: Config, job: Job) -> Tree:
    """A template: Ray's head, which computes nothing, and the driver. `rlflow stop` ends it."""
    kubernetes, seconds = config.cluster.kubernetes, str(_stop_seconds(config))
    stop = ["rlflow", "stop", job.run_dir, "--timeout", seconds]
    pod = _ray_pod(config, job, "ray-head", stop, cpus=kubernetes.head_cpus, memory_gb=kubernetes.head_memory_gb)
    [container] = pod["spec"]["containers"]
    container["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": seconds})
    # The head before this one may still be saving; the driver says so if this wait was not long enough.
    lock = f"{job.run_dir}/{LOCK}"
    wait_for_run = {
        "name": "wait-for-run",
        "image": kubernetes.image,
        "command": ["/bin/bash", "-c", f"mkdir -p {job.run_dir} && flock --wait {seconds} {lock} true || true"],
        "resources": container["resources"],
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [{"name": "claim", "mountPath": str(CLAIM)}],
    }
    pod["spec"]["initContainers"] = [wait_for_run]
    return pod


def _worker_pod(config: Config, job: Job, pool: PoolConfig) -> Tree:
    """A template for the machines of a pool, which has all its sizes."""
    assert pool.cpus is not None and pool.memory_gb is not None and pool.gpus is not None
    # Pods of a job are deleted all at once: the trainer must not go before the driver has saved.
    wait = ["flock", "--shared", "--wait", str(_stop_seconds(config)), f"{job.run_dir}/{LOCK}", "true"]
    pod = _ray_pod(config, job, "ray-worker", wait, cpus=pool.cpus, memory_gb=pool.memory_gb, gpus=pool.gpus)
    spec = pod["spec"]
    if pool.node_labels:
        spec["nodeSelector"] = dict(pool.node_labels)
    if pool.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    # Near each other in the network, and on different nodes, so that a lost one costs little; both where possible.
    same_job = {"labelSelector": {"matchLabels": _labels(job)}}
    near = {"weight": 100, "podAffinityTerm": same_job | {"topologyKey": "topology.kubernetes.io/zone"}}
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    spec["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [near]}}
    spec["topologySpreadConstraints"] = [apart | same_job]
    return pod


def _submitter_pod(config: Config, job: Job) -> Tree:
    """A template for the pod that KubeRay runs `ray job submit` in; its log is the driver's."""
    container = {
        "name": SUBMITTER,
        "image": config.cluster.kubernetes.image,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": _guaranteed(_SUBMITTER_CPU, _SUBMITTER_MEMORY),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": _POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _labels(job: Job) -> dict[str, str]:
    return PART_OF | {"app.kubernetes.io/instance": job.name}


def _stop_seconds(config: Config) -> int:
    """How long a pod may take to end: the step in hand is finished and saved."""
    return math.ceil(seconds_to_stop(config.deadlines))


def _ray_pod(
    config: Config, job: Job, name: str, before_stop: list[str], *, cpus: int, memory_gb: float, gpus: int = 0
) -> Tree:
    """A template for a pod with one container of Ray, in which the command `before_stop` runs before it is ended."""
    kubernetes = config.cluster.kubernetes
    container: Tree = {"name": name, "image": kubernetes.image, "workingDir": str(CLAIM)}
    container["env"] = [
        {"name": "HOME", "value": "/tmp"},  # caches of compilers; the root file system is read-only
        {"name": "USER", "value": "rlflow"},  # the image may have no name for its number
        {"name": "HF_HOME", "value": f"{CLAIM}/huggingface"},
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
    ]
    if kubernetes.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in kubernetes.secrets]
    container["resources"] = _guaranteed(str(cpus), _mebibytes(memory_gb), gpus)
    container["securityContext"] = _CONTAINER_SECURITY
    container["volumeMounts"] = [
        {"name": "claim", "mountPath": str(CLAIM)},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    container["lifecycle"] = {"preStop": {"exec": {"command": before_stop}}}
    spec = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _stop_seconds(config) + _SPARE_SECONDS,
        "securityContext": _POD_SECURITY,
        "containers": [container],
        "volumes": [
            {"name": "claim", "persistentVolumeClaim": {"claimName": kubernetes.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(memory_gb / 2)}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _guaranteed(cpu: str, memory: str, gpus: int = 0) -> Tree:
    amounts = {"cpu": cpu, "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _mebibytes(gigabytes: float) -> str:
    """In the form that the API server keeps: 512Gi, or 1536Mi where it is not whole."""
    mebibytes = round(gigabytes * 1024)
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"
