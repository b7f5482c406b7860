"""`rlflow doctor --cluster`: every node of a running Ray cluster, the differences between them, and their bandwidth.

an actor on each node -> its findings, its versions -> NodeReport -> check_nodes -> findings
objects moved around a ring of nodes -> Link -> check_links -> findings
"""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.cluster.devices import nodes_there
from rlflow.cluster.start import ray_cluster
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.runtime.derived import by_device
from rlflow.tools.doctor.findings import Finding, error, in_order, of_config_error, ok, warning
from rlflow.tools.doctor.here import Here, existing
from rlflow.tools.doctor.machine import check_machine, needs_of
from rlflow.tools.doctor.software import check_joined_ray
from rlflow.tools.doctor.trials import look

START_TIMEOUT_S = 120.0
"""The limit for all actors together."""
LOOK_TIMEOUT_S = 300.0
"""The limit for all nodes together; more than a node gives the processes that it starts."""
ANSWER_TIMEOUT_S = 20.0
LINK_TIMEOUT_S = 60.0
"""The limit for one object."""
NUM_PINGS = 10
NUM_MOVES = 3
LARGE_BYTES = 256 << 20
SMALL_BYTES = 256 << 10
"""The smallest object that goes from store to store, and not along with the call."""
SHARE_OF_STORE = 0.125
"""How much of the smallest store the large object may take."""
MAX_SKEW_S = 1.0
"""Above it lines of logs and traces of several nodes are out of order."""
WRONG_SKEW_S = 60.0
"""Above it tokens and certificates are refused."""
SLOW = 0.5
"""Share of the median bandwidth below which a pair of nodes is called slow."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NodeReport:
    """One node of a Ray cluster."""

    name: str
    versions: Mapping[str, str]
    """As `Here.versions`."""
    run_dir: str
    sees_run_dir: bool
    """Whether a file that the driver wrote there is there."""
    sees_model: bool
    """True also when no run was named."""
    skew: float
    """Seconds that its clock is ahead of the driver's."""
    round_trip: float
    """Seconds of the fastest call; the skew is known to half of it (Cristian's algorithm)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Link:
    """Objects moved from one node's store to another's."""

    source: str
    target: str
    bytes_per_s: float
    latency: float
    """Seconds for a small object."""


class Visitor:
    """An actor on each node."""

    def clock(self) -> float:
        return time.time()

    def look(self, config: Config, run_dir: Path, computes: bool) -> tuple[Here, list[Finding]]:
        """Find out what does not depend on the settings of a run, which the driver checks."""
        environment = dict(os.environ)
        parent = Path(f"/proc/{os.getppid()}")
        if (parent / "comm").read_text().strip() == "raylet":  # its variables are what a process of a run starts with
            entries = (parent / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        # Ray hides the GPUs from this actor, because it asked for none.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({name: environment[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in environment})
        return look(config, run_dir, environment, is_run=False, computes=computes, with_ray=False)

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


def examine_cluster(config: Config, run_dir: Path, *, is_run: bool) -> dict[str, list[Finding]]:
    """Place -> findings. If no cluster answers, that is one of them, and this machine is all there is."""
    if config.cluster.address is None:
        raise ConfigError("--cluster has no effect without cluster.address; add cluster=ray, or leave it out")
    with ExitStack() as stack:
        try:
            stack.enter_context(ray_cluster(config))
        except ConfigError as problem:
            here, tried = look(config, run_dir, os.environ, is_run=is_run, computes=True, with_ray=False)
            findings = [*tried, *check_machine(here, needs_of(config, here.size, is_run=is_run))]
            return {"this machine": in_order(findings), "the cluster": [of_config_error("Ray", problem)]}
        return _examine(config, run_dir, is_run=is_run)


def _examine(config: Config, run_dir: Path, *, is_run: bool) -> dict[str, list[Finding]]:
    nodes = nodes_there()
    config = by_device(config, on_gpus=any(node["Resources"].get("GPU", 0) for node in nodes.values()))
    computes = {
        name: any(node["Resources"].get(kind, 0) > 0 for kind in ("CPU", "GPU")) for name, node in nodes.items()
    }
    own = next(name for name, node in nodes.items() if node["NodeID"] == ray.get_runtime_context().get_node_id())
    visitors, clocks, lost = _visit(nodes)
    others = {name: visitor for name, visitor in visitors.items() if name != own}
    looks = {name: visitor.look.remote(config, run_dir, computes[name]) for name, visitor in others.items()}
    with ExitStack() as stack:
        token = ""  # when no file can be written, a finding of its own says so
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".rlflow-doctor-", dir=existing(run_dir)))
            token = file.name
        except OSError:
            pass
        here, tried = look(config, run_dir, os.environ, is_run=is_run, computes=computes[own], with_ray=False)
        needs = needs_of(config, here.size, is_run=is_run)
        looked, silent = _gather(looks, LOOK_TIMEOUT_S)
        paths = [token, here.folder]
        seen, blind = _gather({name: each.sees.remote(paths) for name, each in visitors.items()}, ANSWER_TIMEOUT_S)
    looked[own] = here, [*tried, *check_joined_ray(here, needs)]
    lost = {**blind, **silent, **lost}
    names = [name for name in sorted(nodes, key=lambda name: name != own) if name not in lost]
    reports = [
        NodeReport(
            name=name,
            versions=looked[name][0].versions,
            run_dir=str(run_dir),
            sees_run_dir=seen[name][0],
            sees_model=seen[name][1],
            skew=clocks[name][1],
            round_trip=clocks[name][0],
        )
        for name in names
    ]
    # Data goes between nodes that compute; a head that computes nothing holds none.
    ends = [name for name in names if computes[name]]
    links = _measure(visitors, pairs_of(ends if len(ends) > 1 else names), nodes)
    places: dict[str, list[Finding]] = {}
    for name in names:
        there, found = looked[name]
        places[f"this machine, {name}" if name == own else name] = in_order([*found, *check_machine(there, needs)])
    return {**places, "the cluster": [*check_nodes(reports, lost), *check_links(*links)]}


def _visit(
    nodes: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, tuple[float, float]], dict[str, str]]:
    """Start an actor on each node. By node: the actors that answer, (round trip, skew) in seconds of their clocks, and
    why the others did not answer."""
    actor: Any = ray.remote(Visitor)
    started = {
        name: actor.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for name, node in nodes.items()
    }
    first, lost = _gather({name: each.clock.remote() for name, each in started.items()}, START_TIMEOUT_S)
    clocks: dict[str, tuple[float, float]] = {}
    for name in first:
        try:
            clocks[name] = min(_ping(started[name]) for _ in range(NUM_PINGS))
        except RayError as problem:
            lost[name] = _reason(problem)
    return {name: started[name] for name in clocks}, clocks, lost


def _ping(visitor: Any) -> tuple[float, float]:
    started, since = time.time(), time.perf_counter()
    there = cast(float, ray.get(visitor.clock.remote(), timeout=ANSWER_TIMEOUT_S))
    round_trip = time.perf_counter() - since
    return round_trip, there - (started + round_trip / 2)


def _measure(
    visitors: Mapping[str, Any], pairs: Sequence[tuple[str, str]], nodes: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Link], dict[str, str]]:
    """One pair after the other, so that none takes from another's bandwidth; pair -> why it could not be measured."""
    smallest = min(node["Resources"].get("object_store_memory", 0.0) for node in nodes.values())
    num_bytes = max(SMALL_BYTES, min(LARGE_BYTES, int(smallest * SHARE_OF_STORE)))
    links: list[Link] = []
    failed: dict[str, str] = {}
    for source, target in pairs:
        ends = visitors[source], visitors[target]
        try:
            latency = min(_move(*ends, SMALL_BYTES) for _ in range(NUM_MOVES))
            seconds = min(_move(*ends, num_bytes) for _ in range(NUM_MOVES))
        except RayError as problem:
            failed[f"{source} -> {target}"] = _reason(problem)
            continue
        links.append(Link(source=source, target=target, bytes_per_s=num_bytes / seconds, latency=latency))
    return links, failed


def _move(source: Any, target: Any, num_bytes: int) -> float:
    reference = source.make.remote(num_bytes)
    # The time to make it does not count.
    ray.wait([reference], timeout=LINK_TIMEOUT_S, fetch_local=False)
    return ray.get(target.take.remote([reference]), timeout=LINK_TIMEOUT_S)


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
        except RayError as problem:
            lost[name] = _reason(problem)
    return found, lost


def _reason(problem: RayError) -> str:
    """The last line, where Ray writes what it was."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[-1].strip()


def check_nodes(reports: Sequence[NodeReport], lost: Mapping[str, str]) -> list[Finding]:
    """What differs between the nodes. `lost` are nodes that did not answer, with the reason."""
    cure = "look at `ray status` and at raylet.out there; is rlflow installed on it?"
    answer = f"all {len(reports)} nodes answer" if len(reports) > 1 else "one, and it answers"
    findings = [error("nodes", f"{name}: {reason}", cure) for name, reason in lost.items()] or [ok("nodes", answer)]
    is_same = True
    for what in ("Python", "rlflow", "Ray", "transformers", "torch", "vLLM", "driver"):
        found: dict[str, list[str]] = {}
        for report in reports:
            if what in report.versions:
                found.setdefault(report.versions[what], []).append(report.name)
        if len(found) < 2:
            continue
        is_same = False
        text = "; ".join(f"{version} on {_names(names)}" for version, names in found.items())
        cure = "install the same one everywhere"
        if what == "driver":
            findings.append(warning("versions", f"NVIDIA's driver differs: {text}", cure))
        else:
            findings.append(error("versions", f"{what} differs: {text}", f"{cure}, or use one image"))
    if is_same:
        findings.append(ok("versions", "the same on all nodes"))
    cure = "run a time service on all nodes (chronyc tracking, timedatectl status)"
    is_skewed = False
    for report in reports:
        certain = abs(report.skew) - report.round_trip / 2
        if certain > MAX_SKEW_S:
            is_skewed = True
            text = f"{report.name} is {report.skew:+.1f} s off the driver's"
            findings.append((error if certain > WRONG_SKEW_S else warning)("clocks", text, cure))
    if not is_skewed and reports:
        most = max(reports, key=lambda report: abs(report.skew))
        findings.append(ok("clocks", f"at most {abs(most.skew) * 1e3:.1f} ms apart (+-{most.round_trip * 500:.1f} ms)"))
    blind = [report.name for report in reports if not report.sees_run_dir]
    if blind:
        text = f"{reports[0].run_dir} is not the driver's on {_names(blind)}"
        cure = "set run.dir to a folder on a file system that all nodes have mounted at the same path"
        findings.append(error("run directory", text, cure))
    elif len(reports) > 1:
        findings.append(ok("run directory", "the same on all nodes"))
    without = [report.name for report in reports if not report.sees_model]
    if without:
        cure = "have HF_HOME and RLFLOW_CACHE on a file system that all nodes see, or set model.path to a folder there"
        findings.append(error("model", f"its folder is not there on {_names(without)}", cure))
    return findings


def pairs_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each to the next, as in a ring; none for one node."""
    return [(name, names[(index + 1) % len(names)]) for index, name in enumerate(names)] if len(names) > 1 else []


def check_links(links: Sequence[Link], failed: Mapping[str, str]) -> list[Finding]:
    """`failed` are pairs that nothing could be sent between, with the reason."""
    closed = "are the ports of Ray's object managers open between the two (ray start --object-manager-port)?"
    findings = [error("bandwidth", f"{pair}: {reason}", closed) for pair, reason in failed.items()]
    usual = median(link.bytes_per_s for link in links) if links else 0.0
    for link in links:
        text = f"{link.source} -> {link.target}: {link.bytes_per_s / 1e9:.2f} GB/s, {link.latency * 1e3:.1f} ms"
        if link.bytes_per_s >= SLOW * usual:
            findings.append(ok("bandwidth", text))
        else:
            cure = "is one of them on another switch or network card, or busy? keep the trainer's ranks off it"
            findings.append(warning("bandwidth", f"{text}; the median is {usual / 1e9:.2f} GB/s", cure))
    return findings


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
