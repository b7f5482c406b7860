"""What a run reserves in a Ray cluster: one placement group, of which each process has a part."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlflow.cluster.calls import answer
from rlflow.cluster.gpus import check_gpus
from rlflow.cluster.placement import Placed, describe, fit
from rlflow.cluster.slots import Machine
from rlflow.config import POOL_LABEL, Config, Process
from rlflow.deadlines import within
from rlflow.errors import ConfigError, WorkerError

NODE_LABEL = "ray.io/node-id"


class Devices:
    """Ray's actor options of each process of a run.

    On one machine without GPUs nothing is reserved: all processes share it.
    """

    def __init__(self, config: Config) -> None:
        """Raises ConfigError, with the arithmetic, when the run does not fit on the machines that are there."""
        self.config = config
        """With weights.transport settled."""
        self._is_joined = config.cluster.address is not None
        nodes = nodes_there()
        machines = machines_of_nodes(nodes, is_joined=self._is_joined)
        check_gpus(config, sum(machine.gpus for machine in machines))
        self._places: dict[tuple[Process, int], tuple[int, float, float]] = {}
        """Process -> number of its bundle, and the CPUs and GPUs that it takes of it."""
        self.lines: list[str] = []
        self._group: PlacementGroup | None = None
        self._bundles: list[dict[str, float]] = []
        self._pools: list[dict[str, str]] = []
        """Label of the machines that each bundle may be on."""
        if self._is_joined or any(machine.gpus for machine in machines):
            placed = self._fit(machines, nodes)
            self.config = placed.config
            self.lines = describe(placed, machines)
            self._reserve(placed, {name: node["NodeID"] for name, node in nodes.items()})

    def _fit(self, machines: list[Machine], nodes: Mapping[str, Any]) -> Placed:
        """On what other runs leave, if that is enough; else Ray waits until they end."""
        unused = available_resources_per_node()
        free = [
            _machine(name, node, unused.get(node["NodeID"], {}), is_joined=self._is_joined)
            for name, node in nodes.items()
        ]
        try:
            return fit(self.config, free)
        except ConfigError:
            return fit(self.config, machines)

    def _reserve(self, placed: Placed, ids: Mapping[str, str]) -> None:
        labels: list[dict[str, str]] = []
        for number, slot in enumerate(placed.slots):
            # A run's own machine may have fewer CPUs than processes.
            cpus = slot.cpus if self._is_joined or not slot.gpus else 0.0
            self._bundles.append({what: size for what, size in (("CPU", cpus), ("GPU", slot.gpus)) if size})
            own = {POOL_LABEL: slot.pool} if slot.pool is not None else {}
            self._pools.append(own)
            labels.append({NODE_LABEL: ids[placed.machines[number]]} if placed.is_pinned[number] else own)
            share = len(slot.processes)
            for process in slot.processes:
                self._places[process] = number, cpus / share, slot.gpus / share
        self._group = placement_group(self._bundles, strategy="PACK", bundle_label_selector=labels)

    async def ready(self) -> None:
        """Wait until all that the run needs is reserved. Raises DeadlineError after deadlines.start_s."""
        if self._group is not None:
            await within(
                "reserving the run's machines",
                self.config.deadlines.start_s,
                answer("cluster", self._group.ready()),
                "another run may have them: `ray status` says what is taken",
            )

    def machines(self) -> dict[Process, dict[str, str]]:
        """When it is ready, the machines that each kind of process is on, by name: Ray's id. None where there is one
        machine only."""
        if self._group is None or not self._is_joined:
            return {}
        names = {node["NodeID"]: name for name, node in nodes_there().items()}
        ids: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        found: dict[Process, dict[str, str]] = defaultdict(dict)
        for (kind, _), (bundle, _, _) in self._places.items():
            found[kind][names.get(ids[bundle], ids[bundle])] = ids[bundle]
        return dict(found)

    def of(self, kind: Process, index: int) -> dict[str, Any]:
        """The options of process `index` of a kind."""
        if self._group is None:
            return {"num_cpus": 0, "num_gpus": 0}
        bundle, cpus, gpus = self._places[kind, index]
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Give back what was reserved; what still runs there ends."""
        if self._group is not None:
            remove_placement_group(self._group)

    async def room(self) -> None:
        """After `release`: wait until the cluster has as much again, on whichever machines. Raises DeadlineError after
        deadlines.start_s."""
        if self._group is not None:
            await within(
                "waiting for machines in place of those that are lost",
                self.config.deadlines.start_s,
                self._until_there_is_room(),
                "add machines, or raise deadlines.start_s, and start the run again: it goes on",
            )

    async def _until_there_is_room(self) -> None:
        if self._is_joined:
            await asyncio.gather(*(_until_known(name, node["NodeID"]) for name, node in nodes_there().items()))
        group = placement_group(self._bundles, strategy="PACK", bundle_label_selector=self._pools)
        try:
            await answer("cluster", group.ready())
        finally:
            remove_placement_group(group)


async def _until_known(name: str, node: str) -> None:
    """Wait until Ray has found out that a machine is lost, or has seen that it is not."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    call = ray.remote(_nothing).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote()
    with contextlib.suppress(WorkerError):  # it is lost
        await answer(f"machine {name}", call)


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
