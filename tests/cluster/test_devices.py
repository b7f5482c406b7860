"""Whether a cluster has the GPUs that a run asks for, and who shares one."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import ray

from rlflow.cluster import devices as devices_module
from rlflow.cluster.devices import Devices, hardware
from rlflow.cluster.gpus import check_gpus, gpu_plan
from rlflow.cluster.placement import fit
from rlflow.cluster.slots import Machine
from rlflow.config import Config, ModelPlacement, Placement, ProcessKind, Quantization, Speculative, Transport
from rlflow.errors import ConfigError

ENGINE, TRAINER, CRITIC = ProcessKind.engine, ProcessKind.trainer, ProcessKind.critic
REFERENCE, REWARD_MODEL = ProcessKind.reference, ProcessKind.reward_model


def config(
    engines: int,
    ranks: int,
    *,
    tensor_parallel: int = 1,
    kl: float = 0.0,
    colocated: bool = False,
    shared: bool = False,
    replicas: int = 0,
    advantage: str = "grpo",
) -> Config:
    config = Config()
    config.rollout.engines, config.rollout.tensor_parallel = engines, tensor_parallel
    config.trainer.ranks, config.algorithm.kl_coefficient = ranks, kl
    config.algorithm.advantage = advantage
    config.cluster.placement = Placement.colocated if colocated else Placement.separate
    config.cluster.roles = ModelPlacement.shared if shared else ModelPlacement.separate
    if replicas:
        config.reward.model, config.reward.model_replicas = "mine", replicas
    return config


def one_machine(gpus: int) -> list[Machine]:
    return [Machine(name="here", cpus=math.inf, gpus=gpus)]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (config(4, 4), 0),
        (config(1, 1), 2),
        (config(2, 1, tensor_parallel=2, kl=0.1), 6),
        (config(1, 1, colocated=True), 1),
        (config(4, 4, kl=0.1, colocated=True), 5),
        (config(1, 2, replicas=3, advantage="gae"), 8),
        (config(1, 2, kl=0.1, replicas=2, advantage="gae", shared=True), 3),
        (config(2, 2, kl=0.1, replicas=1, advantage="gae", shared=True, colocated=True), 2),
    ],
)
def test_enough(asked: Config, found: int) -> None:
    check_gpus(asked, found)
    placed = fit(asked, one_machine(found))
    assert sum(slot.gpus for slot in placed.slots) == found
    assert found in (0, gpu_plan(asked).total)


@pytest.mark.parametrize(
    ("asked", "found", "message"),
    [
        (
            config(1, 1),
            1,
            r"the run needs 2 GPUs \(rollout.engines x rollout.tensor_parallel = 1, trainer.ranks = 1\); the cluster "
            "has 1; lower one of them$",
        ),
        (
            config(2, 1, tensor_parallel=2, kl=0.1),
            5,
            "needs 6 GPUs .* = 4, .* cluster.reference_ranks = 1.; the cluster has 5; lower one of them, or set "
            "cluster.roles=shared",
        ),
        (config(4, 4, kl=0.1, colocated=True), 4, "needs 5 GPUs .trainer.ranks = 4, cluster.reference_ranks = 1"),
        (config(1, 2, replicas=3), 5, "needs 6 GPUs .* reward.model_replicas = 3"),
        (config(1, 2, replicas=2, shared=True), 2, "needs 3 GPUs .* trainer.ranks = 2.; the .*; lower one of them$"),
    ],
)
def test_too_few(asked: Config, found: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(asked, one_machine(found))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (config(2, 1, colocated=True), "equal to trainer.ranks; got 1, 2 and 1; change them"),
        (config(1, 1, tensor_parallel=2, colocated=True), "got 2, 1 and 1"),
    ],
)
def test_engines_that_cannot_share(asked: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gpus(asked, 8)


def test_transports_that_need_other_gpus() -> None:
    asked = config(1, 1, colocated=True)
    asked.weights.transport = Transport.ipc
    check_gpus(asked, 1)
    with pytest.raises(ConfigError, match="ipc needs GPUs, and the cluster has none; set weights.transport=shm"):
        check_gpus(asked, 0)
    asked.weights.transport = Transport.p2p
    check_gpus(asked, 0)
    with pytest.raises(ConfigError, match="between two processes on one GPU, as with cluster.placement=colocated; set"):
        check_gpus(asked, 1)


def test_what_sleeping_engines_forget_cannot_be_built_on() -> None:
    asked = config(1, 1, colocated=True)
    asked.weights.transport = Transport.disk
    check_gpus(asked, 0)
    with pytest.raises(ConfigError, match="keeps nothing of the version before"):
        check_gpus(asked, 1)


@pytest.mark.parametrize(
    ("asked", "sharing"),
    [
        (config(1, 1, kl=0.1), (TRAINER,)),
        (config(1, 1, kl=0.1, colocated=True), (ENGINE, TRAINER)),
        (config(1, 1, kl=0.1, shared=True), (TRAINER, REFERENCE)),
        (config(2, 2, replicas=1, colocated=True, shared=True), (ENGINE, TRAINER, REWARD_MODEL)),
        (config(1, 2, kl=0.1, replicas=1, advantage="gae", shared=True), (TRAINER, CRITIC, REFERENCE, REWARD_MODEL)),
    ],
)
def test_kinds_on_the_gpus_of_the_trainer(asked: Config, sharing: tuple[ProcessKind, ...]) -> None:
    plan = gpu_plan(asked)
    assert plan.sharing == sharing
    # Ray counts in ten-thousandths; all of them must fit on one GPU.
    assert round(1 / len(plan.sharing) * 10_000) * len(sharing) <= 10_000


def gpus_of(asked: Config) -> dict[tuple[ProcessKind, int], str]:
    """The GPU on which Ray puts each process of a run."""

    class Lodger:  # inside, so that a worker need not import this file
        def gpus(self) -> list[str]:
            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    devices = Devices(asked)
    asyncio.run(devices.reserve())
    actor: Any = ray.remote(Lodger)
    lodgers = {
        (kind, index): actor.options(**devices.of(kind, index)).remote()
        for kind, count in gpu_plan(asked).counts.items()
        for index in range(count)
    }
    found = ray.get([one.gpus.remote() for one in lodgers.values()], timeout=120)
    return {who: gpu for who, (gpu,) in zip(lodgers, found, strict=True)}


@pytest.mark.slow
def test_ray_puts_each_process_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(address="local", num_cpus=1, num_gpus=5, _node_ip_address="127.0.0.1", **options)
    try:
        separate = gpus_of(config(1, 2, kl=0.1, replicas=2, shared=True))
        colocated = gpus_of(config(2, 2, replicas=1, shared=True, colocated=True))
    finally:
        ray.shutdown()
    first, second = separate[TRAINER, 0], separate[TRAINER, 1]
    assert len({first, second, separate[ENGINE, 0]}) == 3
    assert separate[REFERENCE, 0] == separate[REWARD_MODEL, 0] == first
    assert separate[REWARD_MODEL, 1] == second
    first, second = colocated[TRAINER, 0], colocated[TRAINER, 1]
    assert colocated[ENGINE, 0] == colocated[REWARD_MODEL, 0] == first
    assert colocated[ENGINE, 1] == second != first


def test_what_needs_gpus_is_refused_without() -> None:
    asked = config(1, 1)
    asked.rollout.quantization = Quantization.fp8
    with pytest.raises(ConfigError, match="rollout.quantization=fp8 needs GPUs, and the cluster has none"):
        check_gpus(asked, 0)
    check_gpus(asked, 2)
    asked.rollout.speculative = Speculative.ngram
    with pytest.raises(ConfigError, match="rollout.speculative=ngram needs GPUs: on a CPU vLLM reports wrong"):
        check_gpus(asked, 0)
    check_gpus(asked, 2)


def test_the_hardware_of_a_run_is_one_line_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "NodeID": "b" * 8, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 2.0}},
        {"Alive": False, "NodeID": "c" * 8, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 2.0}},
        {
            "Alive": True,
            "NodeID": "a" * 8,
            "NodeManagerAddress": "10.0.0.1",
            "Resources": {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H200": 1.0},
        },
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert hardware() == ["10.0.0.1: 16 CPU, 8 GPU, H200", "10.0.0.2: 2 CPU, 0 GPU"]


def test_where_the_runners_of_a_run_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,120 live episodes are five times what one runner plays."""
    nodes = [
        {
            "Alive": True,
            "NodeID": name * 8,
            "NodeManagerAddress": f"10.0.0.{name}",
            "Resources": {"CPU": 8.5},
            "Labels": {},
        }
        for name in ("1", "2")
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(devices_module, "available_resources_per_node", dict)
    asked = config(2, 2)
    asked.algorithm.groups_per_step, asked.algorithm.group_size, asked.staleness.max_versions = 64, 16, 4
    assert Devices(asked).places(ProcessKind.runner) == ["here"] * 5
    asked.cluster.address, asked.rollout.engines, asked.weights.transport = "auto", 8, Transport.p2p
    first, second = "10.0.0.1", "10.0.0.2"
    assert sorted(Devices(asked).places(ProcessKind.runner)) == [first] * 3 + [second] * 2
    assert sorted(Devices(asked).places(ProcessKind.reward)) == [first, second]
