"""Which process is on which machine, and what is said when they do not fit."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cluster.fit_errors import check_counts
from rlflow.cluster.placement import Placed, describe, describe_way, fit
from rlflow.cluster.slots import Machine, machines_of
from rlflow.config import Config, Placement, PoolConfig, ProcessKind, Send, Transport
from rlflow.errors import ConfigError
from rlflow.runtime.derived import transports_for, without_training

SPLIT = {
    "rollout": PoolConfig(
        processes=[ProcessKind.engine, ProcessKind.runner, ProcessKind.reward], machines=1, cpus=32, gpus=2
    ),
    "training": PoolConfig(machines=1, cpus=48, gpus=6),
}


def config(
    engines: int = 1,
    ranks: int = 1,
    *,
    tensor_parallel: int = 1,
    trainer_parallel: int = 1,
    transport: Transport | None = Transport.p2p,
    pools: dict[str, PoolConfig] | None = None,
    kl: float = 0.0,
) -> Config:
    made = Config()
    made.cluster.address = "auto"
    made.rollout.engines, made.rollout.tensor_parallel = engines, tensor_parallel
    made.trainer.ranks, made.trainer.tensor_parallel = ranks, trainer_parallel
    made.weights.transport, made.algorithm.kl_coefficient = transport, kl
    made.cluster.pools = pools or {}
    return made


def machines(*gpus: int, cpus: float = 64, pool: str | None = None) -> list[Machine]:
    return [Machine(name=f"m{index}", cpus=cpus, gpus=number, pool=pool) for index, number in enumerate(gpus)]


def where(placed: Placed, kind: ProcessKind) -> list[str]:
    return [name for slot, name in zip(placed.slots, placed.machines, strict=True) if slot.kind is kind]


def test_64_gpus_are_shared_out_without_splitting_an_engine() -> None:
    there = machines(*[8] * 8)
    placed = fit(config(8, 32, tensor_parallel=4), there)
    assert where(placed, ProcessKind.trainer) == [f"m{rank // 8}" for rank in range(32)]
    assert where(placed, ProcessKind.engine) == ["m4", "m4", "m5", "m5", "m6", "m6", "m7", "m7"]
    lines = describe(placed, there)
    assert lines[0] == "m0: 8 of 8 GPUs; trainer 0-7"
    assert lines[7] == "m7: 8 of 8 GPUs; engine 6-7, runner 3, reward 3"


def test_a_fleet_without_training_needs_gpus_for_its_engines_alone() -> None:
    """Also where each machine has too few GPUs for all engines, and none is pinned to one machine."""
    asked = config(3, 8, tensor_parallel=2, kl=0.1, transport=Transport.shm)
    asked.algorithm.advantage, asked.cluster.placement = "gae", Placement.colocated
    placed = fit(without_training(asked), machines(2, 4))
    assert sorted(where(placed, ProcessKind.engine)) == ["m0", "m1", "m1"]
    assert {slot.kind for slot in placed.slots} == {ProcessKind.engine, ProcessKind.runner, ProcessKind.reward}
    assert not any(placed.is_pinned)
    assert asked.trainer.ranks == 8, "the settings as they were given stay"


def test_pools_keep_their_processes_apart() -> None:
    asked = config(2, 6, pools=SPLIT)
    there = machines_of(SPLIT)
    assert there is not None
    placed = fit(asked, there)
    assert describe(placed, there) == [
        "rollout 0: 2 of 2 GPUs; engine 0-1, runner 0, reward 0",
        "training 0: 6 of 6 GPUs; trainer 0-5",
    ]


def test_only_ranks_are_pinned_where_weights_cross_machines() -> None:
    placed = fit(config(1, 2), machines(4))
    pinned = {slot.kind for slot, is_pinned in zip(placed.slots, placed.is_pinned, strict=True) if is_pinned}
    assert pinned == {ProcessKind.trainer}
    placed = fit(config(1, 2, transport=Transport.shm), machines(4))
    pinned = {slot.kind for slot, is_pinned in zip(placed.slots, placed.is_pinned, strict=True) if is_pinned}
    assert pinned == {ProcessKind.trainer, ProcessKind.engine}


@pytest.mark.parametrize("key", ["tensor_parallel", "sequence_parallel"])
def test_ranks_with_the_same_micro_batches_share_a_machine(key: str) -> None:
    asked = config(1, 4)
    setattr(asked.trainer, key, 2)
    placed = fit(asked, machines(3, 3))
    ranks = where(placed, ProcessKind.trainer)
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]


def test_large_engines_go_first_where_the_trainer_would_be_in_their_way() -> None:
    placed = fit(config(1, 2, tensor_parallel=4), machines(4, 2))
    assert where(placed, ProcessKind.engine) == ["m0"]
    assert where(placed, ProcessKind.trainer) == ["m1", "m1"]


def test_shared_memory_means_one_machine() -> None:
    asked = config(2, 2, transport=Transport.shm)
    placed = fit(asked, machines(2, 4))
    assert {*where(placed, ProcessKind.trainer), *where(placed, ProcessKind.engine)} == {"m1"}
    message = (
        r"weights.transport=shm needs the trainer and all engines on one machine, with 4 GPUs; of the "
        r"cluster's machines, 2 with 3; set weights.transport=p2p$"
    )
    with pytest.raises(ConfigError, match=message):
        fit(asked, machines(3, 3))


def test_weights_cross_the_network_where_they_must() -> None:
    asked = config(2, 2, transport=None)
    assert fit(asked, machines(3, 3)).config.weights.transport is Transport.p2p
    assert asked.weights.transport is None
    with pytest.raises(ConfigError, match="the run needs 4 GPUs"):
        fit(asked, machines(2, 1))


def test_colocated_engines_find_their_weights_on_every_machine() -> None:
    asked = config(4, 4, transport=None)
    asked.cluster.placement = Placement.colocated
    placed = fit(asked, machines(2, 2))
    assert placed.config.weights.transport is Transport.shm
    assert describe(placed, machines(2, 2)) == [
        "m0: 2 of 2 GPUs; trainer 0-1, engine 0-1, runner 0, reward 0",
        "m1: 2 of 2 GPUs; trainer 2-3, engine 2-3, runner 1, reward 1",
    ]
    asked.weights.transport = Transport.ipc
    with pytest.raises(ConfigError, match="weights.transport=ipc needs the trainer and all engines on one machine"):
        fit(asked, machines(2, 2))


def test_adapters_mean_one_machine() -> None:
    asked = config(2, 2, transport=Transport.shm)
    asked.lora.rank = 8
    with pytest.raises(ConfigError, match=r"lora.send=adapters needs .*; set lora.send=merged and weights.transport"):
        fit(asked, machines(3, 3))


def test_an_engine_needs_all_of_its_gpus_on_one_machine() -> None:
    message = (
        r"the GPUs of the cluster are enough, but not those of each machine \(3 with 2\); the processes need on "
        r"one machine each: an engine 4, the trainer's neighbouring ranks 1; lower rollout.tensor_parallel"
    )
    with pytest.raises(ConfigError, match=message):
        fit(config(1, 1, tensor_parallel=4), machines(2, 2, 2))


def test_cpus_are_counted_where_there_are_no_gpus() -> None:
    asked = config(2, 2)
    placed = fit(asked, machines(0, 0, cpus=2.1))
    assert sorted(where(placed, ProcessKind.trainer) + where(placed, ProcessKind.engine)) == ["m0", "m0", "m1", "m1"]
    message = (
        r"needs 4.02 CPUs \(rollout.engines x rollout.tensor_parallel = 2, trainer.ranks = 2, runners = 0.01, "
        r"rewards = 0.01\); the cluster has 3 CPUs "
        r"on 2 machines \(1 with 2, 1 with 1\); add machines, or lower one of them$"
    )
    with pytest.raises(ConfigError, match=message):
        fit(asked, [*machines(0, cpus=2), Machine(name="small", cpus=1, gpus=0)])


def test_a_head_without_cpus_gets_nothing() -> None:
    there = [Machine(name="head", cpus=0, gpus=0), *machines(0, cpus=4)]
    assert set(fit(config(), there).machines) == {"m0"}


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            machines(2, pool="rollout"),
            "cluster.pools.training has 0 of the 1 machines that it needs: nodes of the cluster with the label "
            "rlflow-pool=training; start them with",
        ),
        (
            [*machines(1, pool="rollout"), *machines(6, pool="training")],
            "cluster.pools.rollout.gpus is 2, but the machine m0 has 1; lower it",
        ),
        (
            [*machines(2, pool="rollout"), *machines(6, pool="training", cpus=4)],
            "cluster.pools.training.cpus is 48, but the machine m0 has 4; lower it",
        ),
    ],
)
def test_a_cluster_that_is_not_as_described(there: list[Machine], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(config(1, 1, pools=SPLIT), there)


def test_a_run_may_go_on_with_fewer_machines_than_it_began_with() -> None:
    pools = {"all": PoolConfig(machines=2)}
    fit(config(pools=pools), machines(2, pool="all"))
    with pytest.raises(ConfigError, match="cluster.pools.all has 1 of the 2 machines that it needs"):
        check_counts(pools, machines(2, pool="all"))


def test_a_pool_that_is_too_small() -> None:
    message = (
        r"what runs in cluster.pools.training needs 7 GPUs \(trainer.ranks = 6, cluster.reference_ranks = 1\); it has "
        r"6; lower one of them, or set cluster.roles=shared$"
    )
    there = machines_of(SPLIT)
    assert there is not None
    with pytest.raises(ConfigError, match=message):
        fit(config(1, 6, pools=SPLIT, kl=0.1), there)


def test_pools_are_kept_apart_also_where_shared_memory_would_do() -> None:
    there = [*machines(8, pool="rollout"), Machine(name="n", cpus=64, gpus=8, pool="training")]
    asked = config(2, 2, pools=SPLIT, transport=None)
    placed = fit(asked, there)
    assert placed.config.weights.transport is Transport.p2p
    assert (where(placed, ProcessKind.engine), where(placed, ProcessKind.trainer)) == (["m0"] * 2, ["n"] * 2)
    asked.weights.transport = Transport.shm
    message = (
        r"cluster.pools keeps engine \(in rollout\) and trainer \(in training\) apart, but weights.transport=shm needs "
        "them on one machine; have them in one pool, or set weights.transport=p2p$"
    )
    with pytest.raises(ConfigError, match=message):
        fit(asked, there)
    asked.weights.transport, asked.cluster.placement = None, Placement.colocated
    with pytest.raises(ConfigError, match="apart, but cluster.placement=colocated and cluster.roles=separate put them"):
        fit(asked, there)


def test_merged_adapters_cross_machines_on_disk_only() -> None:
    asked = config(2, 2, transport=None)
    asked.lora.rank, asked.lora.send = 8, Send.merged
    with pytest.raises(ConfigError, match="weights.transport=shm needs .*; set weights.transport=disk$"):
        fit(asked, machines(3, 3))


def test_machines_that_the_settings_leave_open() -> None:
    assert machines_of({}) is None
    assert machines_of({"all": PoolConfig(machines=2)}) is None


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (8, 4)]),
    st.sampled_from([Transport.p2p, Transport.shm]),
)
def test_what_is_placed_fits(
    gpus: list[int], engines: int, tensor_parallel: int, ranks: tuple[int, int], transport: Transport
) -> None:
    asked = config(engines, ranks[0], trainer_parallel=ranks[1], tensor_parallel=tensor_parallel, transport=transport)
    there = machines(*gpus, cpus=16)
    try:
        placed = fit(asked, there)
    except ConfigError:
        return
    taken: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for slot, name in zip(placed.slots, placed.machines, strict=True):
        taken[name][0] += slot.gpus
        taken[name][1] += slot.cpus
    for machine in there:
        assert taken[machine.name][0] <= machine.gpus
        assert taken[machine.name][1] <= machine.cpus + 1e-6
    processes = [process for slot in placed.slots for process in slot.processes]
    assert len(processes) == len(set(processes))
    assert sum(kind is ProcessKind.engine for kind, _ in processes) == engines
    trainers = where(placed, ProcessKind.trainer)
    if transport is Transport.shm:
        assert len({*trainers, *where(placed, ProcessKind.engine)}) == 1
    for first in range(0, len(trainers), ranks[1]):
        assert len(set(trainers[first : first + ranks[1]])) == 1


@pytest.mark.parametrize(
    ("gpus", "colocated", "lora", "machine_sizes", "expected"),
    [
        # On GPUs nothing goes through the memory of the CPU that can go another way.
        (True, True, None, (2,), Transport.ipc),
        (True, True, None, (1, 1), Transport.shm),
        (True, True, Send.merged, (2,), Transport.shm),
        (True, True, Send.adapters, (2,), Transport.shm),
        (True, False, None, (4,), Transport.p2p),
        (True, False, None, (3, 3), Transport.p2p),
        (True, False, Send.merged, (4,), Transport.shm),
        (True, False, Send.adapters, (4,), Transport.shm),
        (False, True, None, (0,), Transport.shm),
        (False, False, None, (0,), Transport.shm),
        (False, False, Send.merged, (0,), Transport.shm),
    ],
)
def test_how_weights_travel_if_the_settings_do_not_say(
    gpus: bool, colocated: bool, lora: Send | None, machine_sizes: tuple[int, ...], expected: Transport
) -> None:
    asked = config(2, 2, transport=None)
    if colocated:
        asked.cluster.placement = Placement.colocated
    if lora is not None:
        asked.lora.rank, asked.lora.send = 4, lora
    there = machines(*machine_sizes)
    placed = fit(asked, there)
    assert placed.config.weights.transport is expected
    assert placed.way in transports_for(asked, on_gpus=gpus)
    assert placed.way is not None
    line = f"weights.transport={expected.value}: {placed.way.reason}"
    assert describe_way(placed) == ([] if lora is Send.adapters else [line])


def test_what_cannot_be_sent_from_gpu_to_gpu_is_explained() -> None:
    asked = config(2, 2, transport=None)
    asked.lora.rank, asked.lora.send = 4, Send.merged
    assert describe_way(fit(asked, machines(4))) == [
        "weights.transport=shm: no rank has a part of merged adapters, which p2p and ipc would send"
    ]
    with pytest.raises(ConfigError, match="needs the trainer and all engines on one machine"):
        fit(asked, machines(2, 2))


def test_weights_cross_the_network_between_cpus_where_they_must() -> None:
    small = [Machine(name=f"m{index}", cpus=4, gpus=0, pool=None) for index in range(2)]
    placed = fit(config(3, 2, transport=None), small)
    assert placed.config.weights.transport is Transport.p2p
    assert describe_way(placed) == ["weights.transport=p2p: trainer and engines are on several machines"]
    asked = config(3, 2)
    assert describe_way(fit(asked, small)) == []


def test_each_machine_with_engines_has_a_runner_and_an_actor_that_scores() -> None:
    """The pools of recipe=grpo_32b at 64 GPUs, with more live episodes than a runner for each machine plays."""
    rollout = [ProcessKind.engine, ProcessKind.runner, ProcessKind.reward]
    pools = {
        "rollout": PoolConfig(processes=rollout, machines=4, cpus=64, gpus=8),
        "training": PoolConfig(machines=4, cpus=64, gpus=8),
    }
    asked = config(8, 32, tensor_parallel=4, pools=pools)
    asked.algorithm.groups_per_step, asked.algorithm.group_size, asked.staleness.max_versions = 64, 16, 4
    there = machines_of(pools)
    assert there is not None
    placed = fit(asked, there)
    names = [f"rollout {index}" for index in range(4)]
    assert where(placed, ProcessKind.reward) == names
    assert where(placed, ProcessKind.runner) == [*names, "rollout 0"], "5,120 live episodes are five times 1,024"
    asked.staleness.max_versions = 0
    assert where(fit(asked, there), ProcessKind.runner) == names


def test_runners_are_spread_over_a_pool_of_their_own() -> None:
    pools = {
        "players": PoolConfig(processes=[ProcessKind.runner, ProcessKind.reward], machines=3, cpus=8, gpus=0),
        "rest": PoolConfig(machines=1, cpus=64, gpus=4),
    }
    there = machines_of(pools)
    assert there is not None
    placed = fit(config(2, 2, pools=pools), there)
    assert where(placed, ProcessKind.runner) == where(placed, ProcessKind.reward) == [f"players {i}" for i in range(3)]


def test_where_engines_leave_no_cpu_as_many_other_machines_have_runners() -> None:
    asked = config(2, 2)
    placed = fit(asked, [*machines(0, 0, cpus=2), *(Machine(name=f"idle {i}", cpus=1, gpus=0) for i in range(3))])
    assert where(placed, ProcessKind.engine) == ["idle 0", "idle 1"]
    assert where(placed, ProcessKind.runner) == where(placed, ProcessKind.reward) == ["idle 2", "m1"]


def test_a_reward_model_takes_the_place_of_actors_that_score() -> None:
    asked = config(2, 2)
    asked.reward.model, asked.reward.model_replicas = "mine", 1
    assert where(fit(asked, machines(3, 3)), ProcessKind.reward) == []


def test_actors_that_a_run_does_not_have_need_no_room() -> None:
    """What calls functions would be in the pool of the ranks, which take all of its CPUs."""
    pools = {
        "rollout": PoolConfig(
            processes=[ProcessKind.engine, ProcessKind.runner, ProcessKind.reward_model], machines=1, cpus=8, gpus=0
        ),
        "training": PoolConfig(machines=1, cpus=2, gpus=0),
    }
    asked = config(1, 2, pools=pools)
    asked.reward.model = "mine"
    there = machines_of(pools)
    assert there is not None
    assert describe(fit(asked, there), there) == [
        "rollout 0: 2.01 of 8 CPUs; engine 0, reward model 0, runner 0",
        "training 0: 2 of 2 CPUs; trainer 0-1",
    ]


def test_no_machine_has_room_for_what_mostly_waits() -> None:
    """Each machine has a hundredth of a CPU beside its engine, and the runners take them."""
    there = [Machine(name=f"m{index}", cpus=1.01, gpus=0) for index in range(3)]
    message = (
        r"no machine of the cluster has 0.01 CPUs left for the rewards; have one more CPU on one of them, or fewer "
        r"engines or ranks there$"
    )
    with pytest.raises(ConfigError, match=message):
        fit(without_training(config(3)), there)
