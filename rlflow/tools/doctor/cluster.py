"""`rlflow doctor --cluster`: every node of a running Ray cluster, the differences between them, and their bandwidth."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlflow.cluster.devices import nodes_there
from rlflow.cluster.start import ray_cluster
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.tools.doctor import nodes
from rlflow.tools.doctor.check_cluster import check_links, check_nodes, pairs_of
from rlflow.tools.doctor.command import HERE, judge
from rlflow.tools.doctor.facts import ModelReport, NodeReport, Seen
from rlflow.tools.doctor.findings import Finding, of_config_error
from rlflow.tools.doctor.machine import existing
from rlflow.tools.doctor.needs import needs_of
from rlflow.tools.doctor.trials import look

CLUSTER = "the cluster"


def examine_cluster(config: Config, run_dir: Path, *, is_run: bool) -> dict[str, list[Finding]]:
    """Place -> findings. Where no cluster answers, that is one of them, and this machine is all there is."""
    if config.cluster.address is None:
        raise ConfigError("--cluster has no effect without cluster.address; add cluster=ray, or leave it out")
    with ExitStack() as stack:
        try:
            stack.enter_context(ray_cluster(config))
        except ConfigError as problem:
            seen = look(config, run_dir, os.environ, is_run=is_run, computes=True, with_ray=False)
            needs = needs_of(config, seen.tried.size, is_run=is_run)
            here = judge(config, seen, needs, is_run=is_run, computes=True)
            return {HERE: here, CLUSTER: [of_config_error("Ray", problem)]}
        return _examine(config, run_dir, is_run=is_run)


def _examine(config: Config, run_dir: Path, *, is_run: bool) -> dict[str, list[Finding]]:
    found = nodes_there()
    computes = {name: _computes(node) for name, node in found.items()}
    own = next(name for name, node in found.items() if node["NodeID"] == ray.get_runtime_context().get_node_id())
    visit = nodes.arrive(found)
    looks = nodes.look_around(visit, [name for name in found if name != own], config, run_dir, computes)
    with _token(run_dir) as token:
        here = look(config, run_dir, os.environ, is_run=is_run, computes=computes[own], with_ray=False)
        seen, silent = nodes.collect(looks)
        folder = here.tried.model.folder if isinstance(here.tried.model, ModelReport) else ""
        sees, blind = nodes.who_sees(visit, [token, folder])
    here = replace(here, tried=replace(here.tried, ray=nodes.read_cluster(config, is_run=is_run)))
    seen = {own: here, **seen}
    lost = {**blind, **silent, **visit.lost}
    names = [name for name in sorted(found, key=lambda name: name != own) if name not in lost]
    reports = [_report(name, computes[name], seen[name], visit.clocks[name], sees[name]) for name in names]
    links = nodes.measure(visit, pairs_of(_ends(names, computes)), nodes.object_bytes(found))
    needs = needs_of(config, here.tried.size, is_run=is_run)
    places = {
        (f"{HERE}, {name}" if name == own else name): judge(
            config, seen[name], needs, is_run=is_run and name == own, computes=computes[name]
        )
        for name in names
    }
    return {**places, CLUSTER: [*check_nodes(reports, lost), *check_links(*links)]}


def _computes(node: Mapping[str, Any]) -> bool:
    return any(node["Resources"].get(what, 0) > 0 for what in ("CPU", "GPU"))


def _ends(names: Sequence[str], computes: Mapping[str, bool]) -> list[str]:
    """Between which data will go: a head that computes nothing holds none."""
    computing = [name for name in names if computes[name]]
    return computing if len(computing) > 1 else list(names)


def _report(name: str, computes: bool, seen: Seen, clock: nodes.Clock, sees: Sequence[bool]) -> NodeReport:
    return NodeReport(
        name=name,
        computes=computes,
        facts=seen.facts,
        tried=seen.tried,
        sees_run_dir=sees[0],
        sees_model=sees[1],
        skew=clock.skew,
        round_trip=clock.round_trip,
    )


@contextmanager
def _token(run_dir: Path) -> Iterator[str]:
    """The path of a file that is there for a while; where none can be written, which has a line of its own, of
    nothing."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".rlflow-doctor-", dir=existing(run_dir)))
        except OSError:
            yield ""
            return
        yield file.name
