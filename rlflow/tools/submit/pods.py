"""The pods of a RayJob: head, workers, and the one that submits. Pure.

All of them pass the Pod Security Standard "restricted", and have the service class Guaranteed: requests are limits.
"""

from __future__ import annotations

import math
from typing import Any

from rlflow.config import Config, PoolConfig
from rlflow.rundir.lock import NAME as LOCK
from rlflow.rundir.stopping import seconds_to_stop
from rlflow.tools.submit.job import CLAIM, Job

PART_OF = {"app.kubernetes.io/part-of": "rlflow"}
"""What k8s/base/networkpolicy.yaml knows the pods of all jobs by."""

_USER = 1000
_SPARE_SECONDS = 60
"""For Ray to end after a preStop hook."""
_SUBMITTER_CPU, _SUBMITTER_MEMORY = "500m", "1Gi"
"""For `ray job logs --follow`."""

Tree = dict[str, Any]
"""A piece of a manifest, as YAML has it."""


def head_pod(config: Config, job: Job) -> Tree:
    """A template: Ray's head, which computes nothing, and the driver. `rlflow stop` ends it."""
    kubernetes = config.cluster.kubernetes
    resources = _guaranteed(str(kubernetes.head_cpus), _mebibytes(kubernetes.head_memory_gb))
    seconds = stop_seconds(config)
    container = _ray_container(config, "ray-head", resources)
    container["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(seconds)})
    container["lifecycle"] = _before_stop(["rlflow", "stop", job.run_dir, "--timeout", str(seconds)])
    spec = _pod(config, container, kubernetes.head_memory_gb)
    spec["initContainers"] = [_wait_for_run(config, job, resources)]
    return {"metadata": {"labels": labels(job)}, "spec": spec}


def worker_pod(config: Config, job: Job, pool: PoolConfig) -> Tree:
    """A template for the machines of a pool, which has all its sizes."""
    assert pool.cpus is not None and pool.memory_gb is not None and pool.gpus is not None
    resources = _guaranteed(str(pool.cpus), _mebibytes(pool.memory_gb), pool.gpus)
    container = _ray_container(config, "ray-worker", resources)
    # Pods of a job are deleted all at once: the trainer must not go before the driver has saved.
    wait = ["flock", "--shared", "--wait", str(stop_seconds(config)), f"{job.run_dir}/{LOCK}", "true"]
    container["lifecycle"] = _before_stop(wait)
    spec = _pod(config, container, pool.memory_gb)
    if pool.node_labels:
        spec["nodeSelector"] = dict(pool.node_labels)
    if pool.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    spec |= _spread(job)
    return {"metadata": {"labels": labels(job)}, "spec": spec}


def submitter_pod(config: Config, job: Job) -> Tree:
    """A template for the pod that KubeRay runs `ray job submit` in; its log is the driver's."""
    container = {
        "name": "ray-job-submitter",
        "image": config.cluster.kubernetes.image,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": _guaranteed(_SUBMITTER_CPU, _SUBMITTER_MEMORY),
        "securityContext": _container_security(),
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": _pod_security(),
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    return {"metadata": {"labels": labels(job)}, "spec": spec}


def labels(job: Job) -> dict[str, str]:
    return PART_OF | {"app.kubernetes.io/instance": job.name}


def stop_seconds(config: Config) -> int:
    """How long a pod may take to end: the step in hand is finished and saved."""
    return math.ceil(seconds_to_stop(config.deadlines))


def _ray_container(config: Config, name: str, resources: Tree) -> Tree:
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
    container["resources"] = resources
    container["securityContext"] = _container_security()
    container["volumeMounts"] = [
        {"name": "claim", "mountPath": str(CLAIM)},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    return container


def _pod(config: Config, container: Tree, memory_gb: float) -> Tree:
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": stop_seconds(config) + _SPARE_SECONDS,
        "securityContext": _pod_security(),
        "containers": [container],
        "volumes": [
            {"name": "claim", "persistentVolumeClaim": {"claimName": config.cluster.kubernetes.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(memory_gb / 2)}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }


def _wait_for_run(config: Config, job: Job, resources: Tree) -> Tree:
    """Before a head starts, the one before it may still be saving; the driver says so if this was not long enough."""
    lock = f"{job.run_dir}/{LOCK}"
    script = f"mkdir -p {job.run_dir} && flock --wait {stop_seconds(config)} {lock} true || true"
    return {
        "name": "wait-for-run",
        "image": config.cluster.kubernetes.image,
        "command": ["/bin/bash", "-c", script],
        "resources": resources,
        "securityContext": _container_security(),
        "volumeMounts": [{"name": "claim", "mountPath": str(CLAIM)}],
    }


def _spread(job: Job) -> Tree:
    """Near each other in the network, and on different nodes, so that a lost one costs little; both where possible."""
    same_job = {"labelSelector": {"matchLabels": labels(job)}}
    near = {"weight": 100, "podAffinityTerm": same_job | {"topologyKey": "topology.kubernetes.io/zone"}}
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    return {
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [near]}},
        "topologySpreadConstraints": [apart | same_job],
    }


def _pod_security() -> Tree:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "fsGroupChangePolicy": "OnRootMismatch",  # else each start walks all files of the claim
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security() -> Tree:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _guaranteed(cpu: str, memory: str, gpus: int = 0) -> Tree:
    amounts = {"cpu": cpu, "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _before_stop(command: list[str]) -> Tree:
    return {"preStop": {"exec": {"command": command}}}


def _mebibytes(gigabytes: float) -> str:
    """In the form that the API server keeps: 512Gi, or 1536Mi where it is not whole."""
    mebibytes = round(gigabytes * 1024)
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"
