"""Which faults hit which processes of which run, decided by a seed alone.

A scenario is one run; its faults come one after the other. `plan` gives every fault of all scenarios a number, and the
same seed and number always give the same fault, however many of the others are left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

HUNG_S = 3.0
"""How long a pause lasts: no process may be taken for dead after it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fault:
    number: int
    seed: int
    scenario: str
    action: str
    """A function of chaos_faults."""
    target: str
    """A kind of process (chaos_run.KINDS), or "" if the fault hits none."""
    delay_s: float
    """After the step before it."""
    pick: float
    """In [0, 1): which one of several."""

    @property
    def name(self) -> str:
        return f"{self.action} {self.target}".strip()

    def __str__(self) -> str:
        return (
            f"fault {self.number} of seed {self.seed} ({self.scenario}): {self.name}, {self.delay_s:.2f} s after "
            f"a step, pick {self.pick:.2f}"
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Scenario:
    name: str
    settings: tuple[str, ...]
    max_versions: int
    kills: dict[str, int]
    """Kind of process -> how often in a whole plan."""
    others: dict[str, int]
    """ "action target" -> how often."""
    num_nodes: int = 0
    """Machines of a cluster beside its head; 0 means that the run starts a Ray of its own."""
    has_reward_model: bool = False


PLAIN = Scenario(
    name="plain",
    settings=(),
    max_versions=0,
    kills={
        "driver": 6, "gcs": 3, "raylet": 3, "engine": 6, "vllm": 6, "runner": 6, "environment": 6, "reward": 4,
        "scoring": 4, "trainer": 4, "companion": 2,
    },
    others={
        "hang engine": 2, "hang vllm": 2, "hang runner": 2, "hang environment": 1, "hang reward": 1, "hang scoring": 1,
        "hang trainer": 2, "hang raylet": 1, "hang gcs": 1,
        "pause driver": 1, "pause engine": 1, "pause runner": 1, "pause trainer": 1, "pause raylet": 1, "pause gcs": 1,
        "cut": 2, "fill_disk": 2, "read_only": 1, "damage": 3, "clock": 3, "limit_memory runner": 1,
        "limit_memory environment": 1, "out_of_memory": 1, "nan": 2, "second_driver": 1, "interrupt_twice": 1,
        "terminate_while_saving": 2, "hang_up": 1, "fill_shared_memory": 1, "lock_ledger": 1, "close_output": 1,
    },
)  # fmt: skip
FULL = Scenario(
    name="full",
    settings=(
        "staleness.max_versions=2", "algorithm.advantage=gae", "critic.learning_rate=1e-2",
        "algorithm.kl_coefficient=0.01", "trainer.ranks=2", "cluster.cpu_threads=1",
    ),
    max_versions=2,
    kills={
        "driver": 2, "engine": 2, "vllm": 2, "runner": 3, "environment": 2, "trainer": 5, "critic": 5, "reference": 4,
        "reward_model": 5,
    },
    others={
        "hang trainer": 1, "hang critic": 1, "hang reference": 1, "hang reward_model": 1, "hang vllm": 1,
        "hang runner": 1,
        "pause critic": 1, "nan": 1, "clock": 1, "terminate_while_saving": 1, "damage": 1, "limit_memory trainer": 1,
    },
    has_reward_model=True,
)  # fmt: skip
NODES = Scenario(
    name="nodes",
    settings=(
        "staleness.max_versions=2", "trainer.ranks=2", "rollout.engines=2", "weights.transport=p2p",
        "cluster.cpu_threads=1",
        "+cluster.pools={rollout: {processes: [engine]}, training: {processes: [trainer]}, others: {}}",
    ),
    max_versions=2,
    kills={"driver": 2, "machine": 6, "raylet": 3, "engine": 2, "vllm": 2, "runner": 2, "reward": 1, "trainer": 2},
    others={
        "cut_link": 3, "hang engine": 1, "hang raylet": 1, "hang trainer": 1, "pause raylet": 1, "interrupt_twice": 1,
    },
    num_nodes=5,
)  # fmt: skip
SCENARIOS = {each.name: each for each in (PLAIN, FULL, NODES)}
POOLS = ("rollout", "rollout", "training", "training", "others")
"""The pool of each machine of NODES."""


def plan(seed: int, scenarios: Sequence[Scenario] = tuple(SCENARIOS.values())) -> list[Fault]:
    """All faults of all scenarios. Each scenario's are in an order of their own; `scenarios` may be fewer, but the
    numbers stay what they are."""
    faults: list[Fault] = []
    for scenario in SCENARIOS.values():
        names = [f"kill {kind}" for kind, count in scenario.kills.items() for _ in range(count)]
        names += [name for name, count in scenario.others.items() for _ in range(count)]
        random.Random(f"{seed} {scenario.name}").shuffle(names)
        faults += [make_fault(seed, scenario.name, len(faults) + i, name) for i, name in enumerate(names)]
    wanted = {scenario.name for scenario in scenarios}
    return [fault for fault in faults if fault.scenario in wanted]


def shortened(faults: Sequence[Fault], count: int) -> list[Fault]:
    """About `count` of the faults, of as many kinds as there are: the first of each kind, then the second ..."""
    seen: Counter[tuple[str, str]] = Counter()
    turns = []
    for fault in faults:
        turns.append((seen[fault.scenario, fault.name], fault.number, fault))
        seen[fault.scenario, fault.name] += 1
    chosen = sorted(turns)[:count]
    return sorted((fault for _, _, fault in chosen), key=lambda fault: fault.number)


def make_fault(seed: int, scenario: str, number: int, name: str) -> Fault:
    """The fault with this name, its details decided by seed and number."""
    details = random.Random(f"{seed} {number} {name}")
    action, _, target = name.partition(" ")
    return Fault(
        number=number,
        seed=seed,
        scenario=scenario,
        action=action,
        target=target,
        delay_s=details.uniform(0, 1.5),
        pick=details.random(),
    )
