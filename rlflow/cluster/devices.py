"""What a run reserves in a Ray cluster: placement groups, of which each process has a part.

What must be on a certain machine is one group, reserved first. Everything else has a group of its own, which Ray moves
to another machine by itself when its own is lost: the parts of a group come back all together only, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.cluster.calls import answer, call_on
from rlflow.cluster.gpus import check_gpus
from rlflow.cluster.misfit import check_counts
from rlflow.cluster.placement import Placed, describe, fit
from rlflow.cluster.slots import Machine, Slot
from rlflow.config import POOL_LABEL, Config, ProcessKind
from rlflow.errors import ConfigError, WorkerError
from rlflow.runtime.deadlines import within

NODE_LABEL = "ray.io/node-id"


class Devices:
    """Ray's actor options of each process of a run.

    On one machine without GPUs nothing is reserved: all processes share it.
    """

    def __init__(self, config: Config, *, is_restart: bool = False) -> None:
        """Raises ConfigError, with the arithmetic, when the run does not fit on the machines that are there.

        After a loss (`is_restart`) there may be fewer than cluster.pools says.
        """
        self.config = config
        """With weights.transport settled."""
        self._is_joined = config.cluster.address is not None
        nodes = nodes_there()
        machines = machines_of_nodes(nodes, is_joined=self._is_joined)
        check_gpus(config, sum(machine.gpus for machine in machines))
        self._placed: Placed | None = None
        self._ids = {name: node["NodeID"] for name, node in nodes.items()}
        self._groups: list[PlacementGroup] = []
        self._bundles: dict[int, tuple[PlacementGroup, int]] = {}
        """Number of a slot -> its group and its place there."""
        if self._is_joined or any(machine.gpus for machine in machines):
            if not is_restart:
                check_counts(config.cluster.pools, machines)
            self._placed = self._fit(machines, nodes)
            self.config = self._placed.config

    def _fit(self, machines: list[Machine], nodes: Mapping[str, Any]) -> Placed:
        """On what other runs leave, if that is enough; else Ray waits until they end."""
        unused = available_resources_per_node()
        free = [
            _machine(name, node, unused.get(node["NodeID"], {}), is_joined=self._is_joined)
            for name, node in nodes.items()
        ]
        with contextlib.suppress(ConfigError):
            return fit(self.config, free)
        return fit(self.config, machines)

    async def reserve(self) -> None:
        """Wait until all that the run needs is reserved. Raises DeadlineError after deadlines.start_s."""
        if self._placed is not None:
            await within(
                "reserving the run's machines",
                self.config.deadlines.start_s,
                self._reserve(self._placed),
                "another run may have them: `ray status` says what is taken",
            )

    async def _reserve(self, placed: Placed) -> None:
        pinned = [number for number, is_pinned in enumerate(placed.is_pinned) if is_pinned]
        labels = [{NODE_LABEL: self._ids[placed.machines[number]]} for number in pinned]
        bundles = [self._resources(placed.slots[number]) for number in pinned]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
        self._groups.append(group)
        self._bundles |= {number: (group, index) for index, number in enumerate(pinned)}
        # The others come afterwards, so that they take no room of these.
        await answer("cluster", group.ready())
        for number, slot in enumerate(placed.slots):
            if number in self._bundles:
                continue
            group = placement_group(
                [self._resources(slot)],
                strategy="STRICT_PACK",
                bundle_label_selector=[{POOL_LABEL: slot.pool} if slot.pool is not None else {}],
                _soft_target_node_id=self._ids[placed.machines[number]],
            )
            self._groups.append(group)
            self._bundles[number] = group, 0
        await asyncio.gather(*(answer("cluster", group.ready()) for group in self._groups))

    def _resources(self, slot: Slot) -> dict[str, float]:
        # A run's own machine may have fewer CPUs than processes.
        cpus = slot.cpus if self._is_joined or not slot.gpus else 0.0
        return {what: size for what, size in (("CPU", cpus), ("GPU", slot.gpus)) if size}

    def lines(self) -> list[str]:
        """When it is reserved, one line a machine: what is on it. None where there is one machine only."""
        if self._placed is None or not self._is_joined:
            return []
        nodes = nodes_there()
        placed = replace(self._placed, machines=tuple(self._names(nodes)))
        return describe(placed, machines_of_nodes(nodes, is_joined=True))

    def _names(self, nodes: Mapping[str, Any]) -> list[str]:
        """The machine that each slot got."""
        names = {node["NodeID"]: name for name, node in nodes.items()}
        nodes_of: dict[Any, dict[int, str]] = {
            group.id: placement_group_table(group)["bundles_to_node_id"] for group in self._groups
        }
        places = [self._bundles[number] for number in range(len(self._bundles))]
        found = [nodes_of[group.id][index] for group, index in places]
        return [names.get(node, node) for node in found]

    def machines(self) -> dict[ProcessKind, dict[str, str]]:
        """When it is reserved, the machines that each kind of process is on, by name: Ray's id. None where there is one
        machine only."""
        if self._placed is None or not self._is_joined:
            return {}
        nodes = nodes_there()
        found: dict[ProcessKind, dict[str, str]] = defaultdict(dict)
        for slot, name in zip(self._placed.slots, self._names(nodes), strict=True):
            for kind, _ in slot.processes:
                found[kind][name] = nodes[name]["NodeID"]
        return dict(found)

    def of(self, kind: ProcessKind, index: int) -> dict[str, Any]:
        """The options of process `index` of a kind."""
        if self._placed is None:
            return {"num_cpus": 0, "num_gpus": 0}
        number = next(i for i, slot in enumerate(self._placed.slots) if (kind, index) in slot.processes)
        group, bundle = self._bundles[number]
        resources, share = group.bundle_specs[bundle], len(self._placed.slots[number].processes)
        return {
            "num_cpus": resources.get("CPU", 0) / share,
            "num_gpus": resources.get("GPU", 0) / share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        }

    def release(self) -> None:
        """Give back what was reserved; what still runs there ends."""
        for group in self._groups:
            remove_placement_group(group)


async def wait_for_room(config: Config) -> None:
    """After a loss: wait until the run fits on the machines that are there. Raises DeadlineError after
    deadlines.start_s."""
    if config.cluster.address is not None:
        await within(
            "waiting for machines in place of those that are lost",
            config.deadlines.start_s,
            _until_it_fits(config),
            "add machines, or raise deadlines.start_s, and start the run again: it goes on",
        )


async def _until_it_fits(config: Config) -> None:
    await asyncio.gather(*(_until_known(name, node["NodeID"]) for name, node in nodes_there().items()))
    while True:
        nodes = nodes_there()
        try:
            fit(config, machines_of_nodes(nodes, is_joined=True))
            return
        except ConfigError:
            # A call that only a machine can take that was not there: it waits until one comes.
            others = {NODE_LABEL: f"!in({','.join(node['NodeID'] for node in nodes.values())})"}
            call = ray.remote(_nothing).options(num_cpus=0, label_selector=others)
            await answer("cluster", call.remote())


async def _until_known(name: str, node: str) -> None:
    """Wait until Ray has found out that a machine is lost, or has seen that it is not."""
    with contextlib.suppress(WorkerError):  # it is lost
        await answer(f"machine {name}", call_on(node, _nothing))


def _nothing() -> None:
    """What a machine is asked to do that is there."""


def nodes_there() -> dict[str, dict[str, Any]]:
    """Name -> what Ray says of it, of each node that lives. The name is its address, with a part of its id where
    several have the same one."""
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    count = Counter(node["NodeManagerAddress"] for node in alive)
    return {
        node["NodeManagerAddress"] + (f" ({node['NodeID'][:6]})" if count[node["NodeManagerAddress"]] > 1 else ""): node
        for node in alive
    }


def machines_of_nodes(nodes: Mapping[str, Any], *, is_joined: bool) -> list[Machine]:
    """With all that they have, whether it is taken or not."""
    return [_machine(name, node, node["Resources"], is_joined=is_joined) for name, node in nodes.items()]


def _machine(name: str, node: Mapping[str, Any], resources: Mapping[str, float], *, is_joined: bool) -> Machine:
    return Machine(
        name=name,
        cpus=resources.get("CPU", 0) if is_joined else float("inf"),
        gpus=int(resources.get("GPU", 0)),
        pool=node["Labels"].get(POOL_LABEL),
    )
