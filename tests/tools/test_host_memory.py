"""Main memory of the machines of cluster.pools, against literal sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.cluster.placement import fit
from rlflow.cluster.slots import machines_of
from rlflow.config import Config, OnExists, Placement, PoolConfig, ProcessKind, Transport
from rlflow.tools.dry_run.command import check_main_memory
from rlflow.tools.dry_run.host import GIB, HostMemory, host_memory, too_much
from rlflow.tools.dry_run.memory import Item, ProcessMemory

TRAINER = ProcessMemory(
    items=(
        Item(name="frozen parameters", num_bytes=GIB, note=""),
        Item(name="parameters", num_bytes=4 * GIB, note=""),
        Item(name="gradients", num_bytes=4 * GIB, note=""),
        Item(name="moments of AdamW", num_bytes=8 * GIB, note=""),
        Item(name="gathered parameters", num_bytes=5 * GIB, note="", is_kept=False),
    )
)
"""What one rank keeps is 17 GiB; a checkpoint copies 12 GiB of it."""


def asked(memory_gb: float = 100.0) -> Config:
    """Two engines on four GPUs each and eight ranks, each kind on one machine of 8 GPUs."""
    made = Config()
    made.cluster.address, made.weights.transport = "auto", Transport.p2p
    made.rollout.engines, made.rollout.tensor_parallel, made.trainer.ranks = 2, 4, 8
    made.staleness.max_ready_mb, made.env.processes, made.reward.workers = 2048.0, 4, 2
    rollout = [ProcessKind.engine, ProcessKind.runner, ProcessKind.reward]
    made.cluster.pools = {
        "rollout": PoolConfig(processes=rollout, machines=1, cpus=64, gpus=8, memory_gb=memory_gb),
        "training": PoolConfig(machines=1, cpus=64, gpus=8, memory_gb=memory_gb),
    }
    return made


def found(config: Config, *, loading: int = 0, converted: int = 0, staged: int = 0) -> dict[str, HostMemory]:
    machines = machines_of(config.cluster.pools)
    assert machines is not None
    placed = fit(config, machines)
    trainer = {ProcessKind.trainer: TRAINER}
    hosts = host_memory(config, placed, trainer, loading=loading, converted=converted, staged=staged)
    return {each.pool: each for each in hosts}


def gib(memory: HostMemory) -> dict[str, float]:
    return {item.name: item.num_bytes / GIB for item in memory.items}


def test_each_machine_has_the_sum_of_its_processes() -> None:
    hosts = found(asked(), loading=GIB // 2, converted=60 * GIB)
    assert gib(hosts["rollout"]) == {"Ray": 1, "engines": 32, "runners": 2, "rewards": 1, "object store": 2}
    assert gib(hosts["training"]) == {"Ray": 1, "ranks": 24, "loading": 4, "conversion": 60, "checkpoint": 96}
    assert hosts["training"].total == 185 * GIB


def test_nothing_is_copied_for_checkpoints_that_are_not_made() -> None:
    config = asked()
    config.run.checkpoint_every = 0
    assert gib(found(config)["training"]) == {"Ray": 1, "ranks": 24}


def test_ranks_that_leave_their_gpus_wait_in_main_memory() -> None:
    config = asked()
    config.cluster.placement, config.rollout.tensor_parallel = Placement.colocated, 1
    config.rollout.engines, config.weights.transport = 8, Transport.shm
    config.cluster.pools = {"workers": PoolConfig(machines=1, cpus=64, gpus=8, memory_gb=100)}
    taken = gib(found(config, staged=3 * GIB)["workers"])
    assert (taken["parked ranks"], taken["weights"], taken["engines"], taken["ranks"]) == (136, 3, 56, 24)


def test_a_pod_with_too_little_memory_is_named_with_what_takes_most() -> None:
    (line,) = too_much(list(found(asked(), loading=GIB // 2).values()))
    assert line == (
        "cluster.pools.training.memory_gb is 100, but the processes on one machine take about 125.00 GiB of main "
        "memory (checkpoint 96.00 GiB, ranks 24.00 GiB, loading 4.00 GiB); raise it, or have more machines"
    )
    assert too_much(list(found(asked(512.0)).values())) == []


def test_a_model_that_is_not_here_leaves_memory_unchecked(tmp_path: Path) -> None:
    config = asked()
    config.model.path = str(tmp_path / "absent")
    (line,) = check_main_memory(config)
    assert line.startswith("whether its pods have enough memory was not checked: ")
    config.cluster.pools = {}
    assert check_main_memory(config) == []


@pytest.mark.parametrize("memory_gb", [512.0, 64.0])
def test_a_32b_on_64_gpus_by_its_config(memory_gb: float) -> None:
    """The pods of cluster=kuberay_64 have room: no rank holds the whole model, not even while it loads."""
    config = asked(memory_gb)
    config.model.path = str(Path(__file__).parents[1] / "support" / "data" / "qwen2_32b")
    config.rollout.engines, config.trainer.ranks = 8, 32
    config.cluster.kubernetes.image, config.cluster.kubernetes.claim = "rlflow:cuda", "rlflow"
    config.run.on_exists = OnExists.resume
    for pool in config.cluster.pools.values():
        pool.machines = 4
    named = [line.split(" is ")[0] for line in check_main_memory(config)]
    assert named == ([] if memory_gb == 512.0 else ["cluster.pools.training.memory_gb"])


def test_actors_that_score_divide_the_processes_and_round_up() -> None:
    """8 over 3 machines are 3 for each, however many runners there are: here 5, 2 of which are on one machine."""
    config = asked()
    config.reward.workers, config.rollout.engines = 8, 6
    config.cluster.pools["rollout"].machines = 3
    config.algorithm.groups_per_step, config.algorithm.group_size, config.staleness.max_versions = 64, 16, 4
    taken = gib(found(config)["rollout"])
    assert (taken["rewards"], taken["runners"]) == (0.5 + 3 / 4, 2 + 4 / 4)


def test_a_teacher_behind_a_url_is_no_rank() -> None:
    config = asked()
    before = gib(found(config)["training"])
    config.teacher.models = {"default": "http://teacher:8000/v1"}
    assert gib(found(config)["training"]) == before
