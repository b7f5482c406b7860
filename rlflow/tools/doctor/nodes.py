"""Visits every node of a Ray cluster that this process has joined: an actor on each looks around and moves data."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.cluster.devices import machines_of_nodes, nodes_there
from rlflow.cluster.fit_errors import check_counts
from rlflow.cluster.gpus import check_gpus
from rlflow.cluster.placement import describe, fit
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.tools.doctor.facts import Link, RayFacts, Seen

START_TIMEOUT_S = 120.0
"""For all actors together."""
LOOK_TIMEOUT_S = 300.0
"""For all nodes together; more than a node gives the processes that it starts."""
ANSWER_TIMEOUT_S = 20.0
LINK_TIMEOUT_S = 60.0
"""For one object."""
NUM_PINGS = 10
NUM_MOVES = 3
LARGE_BYTES = 256 << 20
SMALL_BYTES = 256 << 10
"""The smallest object that goes from store to store, and not along with the call."""
SHARE_OF_STORE = 0.125
"""That the large object may take of the smallest store."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Clock:
    """Of a node, beside that of the driver; seconds."""

    skew: float
    """How far it is ahead, to within half of the round trip (Cristian's algorithm)."""
    round_trip: float


class Visitor:
    """One on each node."""

    def clock(self) -> float:
        return time.time()

    def look(self, config: Config, run_dir: str, computes: bool) -> Seen:
        """All that can be found out without the settings of a run, which are for the driver to check."""
        from rlflow.tools.doctor.trials import look

        environment = _environment_of_node()
        # Ray hides the GPUs from this actor, which asked for none.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({name: environment[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in environment})
        return look(config, Path(run_dir), environment, is_run=False, computes=computes, with_ray=False)

    def sees(self, paths: Sequence[str]) -> list[bool]:
        return [Path(path).exists() for path in paths]

    def make(self, num_bytes: int) -> NDArray[np.uint8]:
        """An object in the store of this node."""
        return np.ones(num_bytes, np.uint8)

    def take(self, references: Sequence[Any]) -> float:
        """Seconds until the one object is in the store of this node."""
        started = time.perf_counter()
        ray.get(references[0])
        return time.perf_counter() - started


@dataclass(kw_only=True, slots=True, frozen=True)
class Visit:
    """The actors that answer, by the names of their nodes."""

    visitors: dict[str, Any]
    clocks: dict[str, Clock]
    lost: dict[str, str]
    """Node -> why there is nothing of it."""


def read_cluster(config: Config, *, is_run: bool) -> RayFacts:
    """The cluster that this process is part of, and whether the run fits on it."""
    nodes = nodes_there()
    resources = ray.cluster_resources()
    placed: tuple[str, ...] = ()
    misfit = ""
    if is_run:
        try:
            placed = _placed(config, nodes)
        except ConfigError as error:
            misfit = str(error)
    return RayFacts(
        nodes=len(nodes),
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        is_joined=config.cluster.address is not None,
        has_tokens=is_token_auth_enabled(),
        placed=placed,
        misfit=misfit,
    )


def _placed(config: Config, nodes: Mapping[str, Any]) -> tuple[str, ...]:
    """As `Devices` would place the run on machines that nobody else uses. Raises ConfigError."""
    is_joined = config.cluster.address is not None
    machines = machines_of_nodes(nodes, is_joined=is_joined)
    num_gpus = sum(machine.gpus for machine in machines)
    check_gpus(config, num_gpus)
    check_counts(config.cluster.pools, machines)
    return tuple(describe(fit(config, machines), machines)) if is_joined or num_gpus else ()


def arrive(nodes: Mapping[str, Mapping[str, Any]]) -> Visit:
    """Start an actor on each node and read its clock."""
    actor: Any = ray.remote(Visitor)
    started = {
        name: actor.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for name, node in nodes.items()
    }
    first, lost = _gather({name: each.clock.remote() for name, each in started.items()}, START_TIMEOUT_S)
    visitors = {name: started[name] for name in first}
    clocks: dict[str, Clock] = {}
    for name, visitor in visitors.items():
        try:
            clocks[name] = min((_ping(visitor) for _ in range(NUM_PINGS)), key=lambda clock: clock.round_trip)
        except RayError as error:
            lost[name] = _reason(error)
    return Visit(visitors={name: visitors[name] for name in clocks}, clocks=clocks, lost=lost)


def look_around(
    visit: Visit, names: Sequence[str], config: Config, run_dir: Path, computes: Mapping[str, bool]
) -> dict[str, Any]:
    """Node -> reference to what is seen there, which takes a while."""
    return {
        name: visit.visitors[name].look.remote(config, str(run_dir), computes[name])
        for name in names
        if name in visit.visitors
    }


def collect(looks: Mapping[str, Any]) -> tuple[dict[str, Seen], dict[str, str]]:
    """What was seen, and why some nodes have nothing to say."""
    return _gather(looks, LOOK_TIMEOUT_S)


def who_sees(visit: Visit, paths: Sequence[str]) -> tuple[dict[str, list[bool]], dict[str, str]]:
    """Node -> whether each path is there."""
    return _gather({name: each.sees.remote(paths) for name, each in visit.visitors.items()}, ANSWER_TIMEOUT_S)


def measure(visit: Visit, pairs: Sequence[tuple[str, str]], num_bytes: int) -> tuple[list[Link], dict[str, str]]:
    """One pair after the other, so that none takes from another's bandwidth; pair -> why it could not be measured."""
    links: list[Link] = []
    failed: dict[str, str] = {}
    for source, target in pairs:
        ends = visit.visitors[source], visit.visitors[target]
        try:
            latency = min(_move(*ends, SMALL_BYTES) for _ in range(NUM_MOVES))
            seconds = min(_move(*ends, num_bytes) for _ in range(NUM_MOVES))
        except RayError as error:
            failed[f"{source} -> {target}"] = _reason(error)
            continue
        links.append(Link(source=source, target=target, bytes_per_s=num_bytes / seconds, latency=latency))
    return links, failed


def object_bytes(nodes: Mapping[str, Mapping[str, Any]]) -> int:
    """Of an object that every store has room for."""
    smallest = min(node["Resources"].get("object_store_memory", 0.0) for node in nodes.values())
    return max(SMALL_BYTES, min(LARGE_BYTES, int(smallest * SHARE_OF_STORE)))


def _move(source: Any, target: Any, num_bytes: int) -> float:
    reference = source.make.remote(num_bytes)
    # The time to make it does not count.
    ray.wait([reference], timeout=LINK_TIMEOUT_S, fetch_local=False)
    return ray.get(target.take.remote([reference]), timeout=LINK_TIMEOUT_S)


def _ping(visitor: Any) -> Clock:
    started, since = time.time(), time.perf_counter()
    there = cast(float, ray.get(visitor.clock.remote(), timeout=ANSWER_TIMEOUT_S))
    round_trip = time.perf_counter() - since
    return Clock(skew=there - (started + round_trip / 2), round_trip=round_trip)


def _gather(references: Mapping[str, Any], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers that come within that time, and why the others did not."""
    ray.wait(list(references.values()), num_returns=len(references), timeout=seconds) if references else None
    found: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for name, reference in references.items():
        try:
            found[name] = ray.get(reference, timeout=0)
        except TimeoutError:
            lost[name] = f"it did not answer within {seconds:g} s"
        except RayError as error:
            lost[name] = _reason(error)
    return found, lost


def _reason(error: RayError) -> str:
    """The last line, where Ray writes what it was."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def _environment_of_node() -> dict[str, str]:
    """What a process of a run starts with: the variables of Ray's own process, which has started this one."""
    parent = Path(f"/proc/{os.getppid()}")
    if (parent / "comm").read_text().strip() != "raylet":
        return dict(os.environ)
    entries = (parent / "environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, separator, value in (entry.partition("=") for entry in entries) if separator}
