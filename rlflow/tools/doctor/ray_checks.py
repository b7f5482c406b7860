"""Checks Ray: whether it starts, or answers, and whether the run fits on the machines that it has."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from rlflow.cluster.devices import machines_of_nodes, nodes_there
from rlflow.cluster.fit_errors import check_counts
from rlflow.cluster.gpus import check_gpus
from rlflow.cluster.placement import describe, fit
from rlflow.cluster.start import ray_cluster
from rlflow.config import Config
from rlflow.tools.doctor.findings import Finding, check_placement, ok, warning
from rlflow.tools.doctor.here import Here
from rlflow.tools.doctor.machine import Needs


def check_ray(here: Here, needs: Needs) -> Iterator[Finding]:
    """Start Ray, or join it, as a run would. Raises whatever Ray raises, and ConfigError."""
    with ray_cluster(needs.config):
        ray.get(ray.remote(_nothing).options(num_cpus=0).remote())
        yield from check_joined_ray(here, needs)


def _nothing() -> None:
    """What a worker does to show that it can be started."""


def check_joined_ray(here: Here, needs: Needs) -> Iterator[Finding]:
    """The cluster that this process is part of, and whether the run fits on it."""
    nodes, resources = nodes_there(), ray.cluster_resources()
    counts = {"node": len(nodes), "CPU": int(resources.get("CPU", 0)), "GPU": int(resources.get("GPU", 0))}
    is_joined = needs.config.cluster.address is not None
    yield describe_ray(here, counts, is_joined=is_joined, has_tokens=is_token_auth_enabled())
    if needs.is_run:
        yield from check_placement(partial(_placed, needs.config, nodes))


def describe_ray(here: Here, counts: Mapping[str, int], *, is_joined: bool, has_tokens: bool) -> Finding:
    """`is_joined`: whether Ray was there already; `has_tokens`: whether it asks for one."""
    package = here.package("ray")
    version = (package and package.installed) or "a version that is not known"
    sizes = ", ".join(f"{count} {what}" if count == 1 else f"{count} {what}s" for what, count in counts.items())
    text = f"{version} answers; {sizes}"
    if is_joined and not has_tokens:
        cure = "ray get-auth-token --generate, bring the token to all nodes, and start Ray with RAY_AUTH_MODE=token"
        risk = "it asks for no token: anybody who reaches its ports can run programs there"
        return warning("Ray", f"{text}; {risk}", cure)
    return ok("Ray", f"{text}; asks for a token" if has_tokens else text)


def _placed(config: Config, nodes: Mapping[str, Any]) -> Sequence[str]:
    """As `Devices` would place the run on machines that nobody else uses. Raises ConfigError."""
    is_joined = config.cluster.address is not None
    machines = machines_of_nodes(nodes, is_joined=is_joined)
    num_gpus = sum(machine.gpus for machine in machines)
    check_gpus(config, num_gpus)
    check_counts(config.cluster.pools, machines)
    return describe(fit(config, machines), machines) if is_joined or num_gpus else ()
