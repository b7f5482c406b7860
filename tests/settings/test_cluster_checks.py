"""What is said of a place for a run that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.config import ClusterConfig, Config, KubernetesConfig, PoolConfig, ProcessKind, Scheduler
from rlflow.errors import ConfigError
from rlflow.settings.cluster_checks import check_cluster, pool_of

ENGINE, TRAINER = ProcessKind.engine, ProcessKind.trainer
POD: dict[str, Any] = {"machines": 1, "cpus": 8, "gpus": 1, "memory_gb": 32.0}


def config(pools: dict[str, PoolConfig] | None = None, **settings: Any) -> Config:
    return Config(cluster=ClusterConfig(pools=pools or {}, **settings))


def on_kubernetes(**settings: Any) -> Config:
    given: dict[str, Any] = {"image": "mine:1", "claim": "runs"} | settings
    kubernetes = KubernetesConfig(**given)
    return config({"all": PoolConfig(**POD)}, address="auto", kubernetes=kubernetes)


@pytest.mark.parametrize(
    "wanted",
    [
        config(),
        config(address="auto"),
        config({"a": PoolConfig(processes=[ENGINE]), "b": PoolConfig()}, address="10.0.0.1:6379"),
        on_kubernetes(),
        on_kubernetes(scheduler=Scheduler.kueue, queue="team"),
    ],
)
def test_places_that_can_be(wanted: Config) -> None:
    check_cluster(wanted)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (config(cpu_threads=0), "cluster.cpu_threads must be at least 1, or null; got 0"),
        (config({"a": PoolConfig()}), r"cluster.pools \(a\) has no effect on one machine; leave it out, or join"),
        (
            config({"a": PoolConfig(), "b": PoolConfig()}, address="auto"),
            "cluster.pools.a and b both take the processes that no other pool has; give one of them `processes`",
        ),
        (
            config({"a": PoolConfig(processes=[ENGINE]), "b": PoolConfig(processes=[ENGINE])}, address="auto"),
            "engine is in cluster.pools.a and in cluster.pools.b; take one",
        ),
        (
            config({"a": PoolConfig(processes=[ENGINE, TRAINER])}, address="auto"),
            "no pool of cluster.pools has critic, reference, teacher, reward_model, runner, reward; add them to one",
        ),
        (
            config({"a": PoolConfig(processes=[]), "b": PoolConfig()}, address="auto"),
            "cluster.pools.a.processes is empty, so that nothing runs there; leave the pool out",
        ),
        (
            config({"a": PoolConfig(machines=0)}, address="auto"),
            "cluster.pools.a.machines must be at least 1; got 0",
        ),
        (
            config({"a": PoolConfig(gpus=-1)}, address="auto"),
            "cluster.pools.a.gpus must be 0 or more; got -1",
        ),
        (
            config({"a": PoolConfig(memory_gb=64)}, address="auto"),
            "cluster.pools.a.memory_gb has no effect without cluster=kuberay; leave it out",
        ),
        (
            config({"a": PoolConfig(node_labels={"zone": "b"})}, address="auto"),
            "cluster.pools.a.node_labels has no effect without cluster=kuberay; leave it out",
        ),
        (
            config(kubernetes=KubernetesConfig(retries=1)),
            "cluster.kubernetes has no effect without cluster.kubernetes.image; add cluster=kuberay",
        ),
        (
            config({"a": PoolConfig(**POD)}, kubernetes=KubernetesConfig(image="i", claim="c"), address="h:1"),
            "cluster.address=h:1 contradicts cluster.kubernetes.image",
        ),
        (
            config(kubernetes=KubernetesConfig(image="i", claim="c"), address="auto"),
            "cluster.kubernetes needs cluster.pools, of which its pods are made",
        ),
        (
            config({"a": PoolConfig()}, kubernetes=KubernetesConfig(image="i", claim="c"), address="auto"),
            "cluster.pools.a.machines must be given for pods on Kubernetes; got null",
        ),
        (on_kubernetes(claim=None), r"cluster.kubernetes.claim must name a PersistentVolumeClaim \(ReadWriteMany\)"),
        (on_kubernetes(head_cpus=0), "head_cpus and head_memory_gb must be at least 1; got 0 and 16"),
        (on_kubernetes(retries=-1), "cluster.kubernetes.retries must not be negative; got -1"),
        (on_kubernetes(queue="q"), "cluster.kubernetes.queue=q has no effect with scheduler=default"),
        (on_kubernetes(scheduler=Scheduler.kai), "scheduler=kai needs cluster.kubernetes.queue, the name of its queue"),
    ],
)
def test_places_that_cannot_be(wanted: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cluster(wanted)


def test_a_process_is_in_the_pool_that_names_it_or_in_the_one_that_has_the_rest() -> None:
    pools = {"rest": PoolConfig(), "rollout": PoolConfig(processes=[ENGINE])}
    assert pool_of(pools, ENGINE) == "rollout"
    assert pool_of(pools, TRAINER) == "rest"
    assert pool_of({}, TRAINER) is None
