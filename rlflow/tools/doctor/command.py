"""`rlflow doctor [key=value ...] [--cluster] [--json]`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rlflow.cluster.placement import machines_taken
from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.tools.doctor.check_machine import check_machine
from rlflow.tools.doctor.check_run import check_address, check_placement, check_run
from rlflow.tools.doctor.check_software import check_software
from rlflow.tools.doctor.facts import Seen
from rlflow.tools.doctor.findings import Finding, as_json, as_text, has_error
from rlflow.tools.doctor.needs import Needs, needs_of
from rlflow.tools.doctor.trials import look

HERE = "this machine"


def names_run(words: Sequence[str]) -> bool:
    """Whether the arguments say which run the machine is for."""
    return any(word.startswith(("recipe=", "model.path=")) for word in words)


def doctor(config: Config, *, is_run: bool, cluster: bool, json_wanted: bool) -> int:
    """Print what was found; the exit code is 1 when something of it is an error. Raises ConfigError."""
    run_dir = Path(config.run.dir or "runs").absolute()
    if cluster:
        _check_is_inside(config)
        from rlflow.tools.doctor.cluster import examine_cluster  # imports Ray

        places = examine_cluster(config, run_dir, is_run=is_run)
    else:
        places = {HERE: _examine(config, run_dir, is_run=is_run)}
    print(json.dumps(as_json(places)) if json_wanted else as_text(places))
    return int(has_error(places))


def _check_is_inside(config: Config) -> None:
    """Raises ConfigError where the settings describe pods, which have a cluster once they run."""
    if config.cluster.kubernetes.image is not None:
        raise ConfigError(
            "--cluster looks at the nodes of a cluster that runs, from inside of it, and cluster.kubernetes describes "
            "pods to come; leave it out, or run in the head's pod of a job: "
            "kubectl exec -it POD -- rlflow doctor cluster=ray --cluster"
        )


def judge(config: Config, seen: Seen, needs: Needs, *, is_run: bool, computes: bool) -> list[Finding]:
    """Software, machine and, where `is_run`, the run; `computes`: whether engines or trainers may be here."""
    findings = check_software(seen.facts, seen.tried, needs)
    findings += check_machine(seen.facts, seen.tried, needs, computes=computes)
    findings += check_address(config, seen.facts.environment)
    return [*findings, *check_run(config, seen.facts, seen.tried)] if is_run else findings


def _examine(config: Config, run_dir: Path, *, is_run: bool) -> list[Finding]:
    """Of Kubernetes this machine only hands the job in: it is not the one that computes."""
    is_for_pods = config.cluster.kubernetes.image is not None
    seen = look(
        config,
        run_dir,
        os.environ,
        is_run=is_run and not is_for_pods,
        computes=not is_for_pods,
        with_ray=not is_for_pods,
    )
    needs = needs_of(config, seen.tried.size, is_run=is_run)
    findings = judge(config, seen, needs, is_run=is_run and not is_for_pods, computes=not is_for_pods)
    return [*findings, *_in_pods(config)] if is_for_pods else findings


def _in_pods(config: Config) -> list[Finding]:
    """Whether the run fits into the pods that the settings describe."""
    try:
        return check_placement(machines_taken(config), "")
    except ConfigError as error:
        return check_placement((), str(error))
