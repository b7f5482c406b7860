"""What a run reserves in a Ray cluster, and the options with which each process takes its part.

    nodes -> machines -> placement.fit -> placement groups -> actor options

Slots that must stay on a certain machine share one placement group, reserved first. Every other slot has a placement
group of its own, because Ray restores a lost group only as a whole: a slot alone in its group can move to another
machine.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.cluster.calls import answer, call_on
from rlflow.cluster.fit_errors import check_counts
from rlflow.cluster.gpus import check_gpus
from rlflow.cluster.placement import Placed, describe, fit
from rlflow.cluster.slots import Machine, Slot, num_waiting
from rlflow.config import POOL_LABEL, Config, ProcessKind
from rlflow.errors import ConfigError, WorkerError
from rlflow.runtime.deadlines import within

NODE_LABEL = "ray.io/node-id"


class Devices:
    """Reserves what a run needs. On one machine without GPUs that is nothing: all processes share it."""

    def __init__(self, config: Config, *, is_restart: bool = False) -> None:
        """Raises ConfigError, with the arithmetic, when the run does not fit on the machines that are there.

        After a loss (`is_restart`) there may be fewer than cluster.pools says.
        """
        self.config = config
        """The settings of the run, with weights.transport decided."""
        self._is_joined = config.cluster.address is not None
        nodes = nodes_there()
        machines = machines_of_nodes(nodes, is_joined=self._is_joined)
        check_gpus(config, sum(machine.gpus for machine in machines))
        self._placed: Placed | None = None
        self._ids = {name: node["NodeID"] for name, node in nodes.items()}
        self._groups: list[PlacementGroup] = []
        self._bundles: dict[int, tuple[PlacementGroup, int]] = {}
        """Number of a slot -> its placement group and its index there."""
        if self._is_joined or any(machine.gpus for machine in machines):
            if not is_restart:
                check_counts(config.cluster.pools, machines)
            # Preferably on what other runs leave; else Ray waits until they end.
            unused = available_resources_per_node()
            free = {name: {**node, "Resources": unused.get(node["NodeID"], {})} for name, node in nodes.items()}
            try:
                self._placed = fit(config, machines_of_nodes(free, is_joined=self._is_joined))
            except ConfigError:
                self._placed = fit(config, machines)
            self.config = self._placed.config

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
        if pinned:
            group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
            self._groups.append(group)
            self._bundles |= {number: (group, index) for index, number in enumerate(pinned)}
            # Before the others, so that they cannot take this room.
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
        """After `reserve`: for each machine, one line that says what is on it; [] on a single machine."""
        if self._placed is None or not self._is_joined:
            return []
        nodes = nodes_there()
        placed = replace(self._placed, machines=tuple(self._names(nodes)))
        return describe(placed, machines_of_nodes(nodes, is_joined=True))

    def machines(self) -> dict[ProcessKind, dict[str, str]]:
        """After `reserve`: for each kind of process, the machines that it is on, name -> Ray's id; {} on a single
        machine."""
        found: dict[ProcessKind, dict[str, str]] = defaultdict(dict)
        if self._placed is not None and self._is_joined:
            nodes = nodes_there()
            for slot, name in zip(self._placed.slots, self._names(nodes), strict=True):
                for kind, _ in slot.processes:
                    found[kind][name] = nodes[name]["NodeID"]
        return dict(found)

    def _names(self, nodes: Mapping[str, Any]) -> list[str]:
        """The machine that each slot got."""
        names = {node["NodeID"]: name for name, node in nodes.items()}
        nodes_of: dict[Any, dict[int, str]] = {
            group.id: placement_group_table(group)["bundles_to_node_id"] for group in self._groups
        }
        places = [self._bundles[number] for number in range(len(self._bundles))]
        found = [nodes_of[group.id][index] for group, index in places]
        return [names.get(node, node) for node in found]

    def places(self, kind: ProcessKind) -> list[str]:
        """The machine that each runner, or each actor that scores, is meant for."""
        if self._placed is None:
            return ["here"] * num_waiting(self.config, kind, 1)
        pairs = zip(self._placed.slots, self._placed.machines, strict=True)
        return [name for slot, name in pairs if slot.kind is kind]

    def of(self, kind: ProcessKind, index: int) -> dict[str, Any]:
        """Ray's options for process number `index` of a kind."""
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
        """Give back what was reserved; processes that still run there end."""
        while self._groups:
            remove_placement_group(self._groups.pop())


async def wait_until_there_is_room(config: Config) -> None:
    """After a loss: wait until the run fits on the machines that are there. Raises DeadlineError after
    deadlines.start_s."""
    if config.cluster.address is not None:
        await within(
            "waiting for machines in place of those that are lost",
            config.deadlines.start_s,
            _wait_until_it_fits(config),
            "add machines, or raise deadlines.start_s, and start the run again: it goes on",
        )


async def _wait_until_it_fits(config: Config) -> None:
    # By the answer to a call, Ray knows whether a machine is there or lost.
    calls = [answer(f"machine {name}", call_on(node["NodeID"], _nothing)) for name, node in nodes_there().items()]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(error, BaseException) and not isinstance(error, WorkerError):
            raise error
    while True:
        nodes = nodes_there()
        try:
            fit(config, machines_of_nodes(nodes, is_joined=True))
            return
        except ConfigError:
            # A call that only a machine can take that is not there yet: it waits until one comes.
            others = {NODE_LABEL: f"!in({','.join(node['NodeID'] for node in nodes.values())})"}
            call = ray.remote(_nothing).options(num_cpus=0, label_selector=others)
            await answer("cluster", call.remote())


def _nothing() -> None:
    """What a machine is asked to do, to see whether it is there."""


def nodes_there() -> dict[str, dict[str, Any]]:
    """The live nodes: name -> what Ray says of it. The name is the address, with a part of the id when several nodes
    share one."""
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    count = Counter(node["NodeManagerAddress"] for node in alive)
    return {
        node["NodeManagerAddress"] + (f" ({node['NodeID'][:6]})" if count[node["NodeManagerAddress"]] > 1 else ""): node
        for node in alive
    }


def hardware() -> list[str]:
    """What Ray counts on each machine, such as "10.0.0.2: 16 CPU, 8 GPU, H200"; one line for a machine."""
    lines = []
    for name, node in nodes_there().items():
        counts = [f"{node['Resources'].get(what, 0):g} {what}" for what in ("CPU", "GPU")]
        kinds = [each.partition(":")[2] for each in node["Resources"] if each.startswith("accelerator_type:")]
        lines.append(f"{name}: {', '.join([*counts, *kinds])}")
    return lines


def has_gpus() -> bool:
    """Whether any machine of the cluster has a GPU."""
    return any(node["Resources"].get("GPU", 0) for node in nodes_there().values())


def machines_of_nodes(nodes: Mapping[str, Any], *, is_joined: bool) -> list[Machine]:
    """The nodes with all that they have, whether it is taken or not."""
    return [
        Machine(
            name=name,
            cpus=node["Resources"].get("CPU", 0) if is_joined else float("inf"),
            gpus=int(node["Resources"].get("GPU", 0)),
            pool=node["Labels"].get(POOL_LABEL),
        )
        for name, node in nodes.items()
    ]
