"""`rlflow doctor [key=value ...] [--cluster] [--clean] [--json]`."""

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlflow.cluster.placement import machines_taken
from rlflow.config import Config
from rlflow.errors import ConfigError, report_error
from rlflow.runtime import scratch
from rlflow.runtime.derived import by_device
from rlflow.tools.doctor.findings import Finding, as_json, as_text, check_placement, in_order
from rlflow.tools.doctor.machine import check_machine, needs_of
from rlflow.tools.doctor.trials import look
from rlflow.tools.dry_run.memory import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rlflow doctor [key=value ...] [--cluster] [--clean] [--json]"
    parser.description = "is this machine, or a cluster, fit for a run?"
    parser.epilog = "key=value: settings of a run, such as recipe=NAME; none: any run"
    parser.add_argument(
        "--cluster", action="store_true", help="look at every node of cluster.address, and between them"
    )
    parser.add_argument("--clean", action="store_true", help="remove what killed runs have left on this machine")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(options: argparse.Namespace) -> int:
    from rlflow.settings.compose import train

    settings: list[str] = options.words
    if not any(word.startswith("recipe=") for word in settings):
        settings.append("run.name=run")
    wanted = {"cluster": options.cluster, "clean": options.clean, "json_wanted": options.json}
    return train(settings, report_error, partial(doctor, is_run=_names_run(settings), **wanted), needs_recipe=False)


def _names_run(words: Sequence[str]) -> bool:
    """Whether the arguments say which run the machine is for."""
    return any(word.startswith(("recipe=", "model.path=")) for word in words)


def doctor(config: Config, *, is_run: bool, cluster: bool, clean: bool, json_wanted: bool) -> int:
    """Print what was found; the exit code is 1 when something of it is an error. Raises ConfigError.

    `clean` looks at nothing, and removes what killed runs of this user have left on this machine.
    """
    run_dir = Path(config.run.dir or "runs").absolute()
    is_for_pods = config.cluster.kubernetes.image is not None
    if cluster and is_for_pods:
        raise ConfigError(
            "--cluster looks at the nodes of a cluster that runs, from inside of it, and cluster.kubernetes describes "
            "pods to come; leave it out, or run in the head's pod of a job: "
            "kubectl exec -it POD -- rlflow doctor cluster=ray --cluster"
        )
    if clean:
        if cluster:
            raise ConfigError("--clean is about this machine; leave --cluster out, and call it on each node")
        removed = {str(path): num_bytes for path, num_bytes in scratch.leavings(remove=True).items()}
        lines = [f"removed {path}, {size(num_bytes)} with its shared memory" for path, num_bytes in removed.items()]
        print(json.dumps(removed) if json_wanted else "\n".join(lines or ["no killed run has left anything"]))
        return 0
    if cluster:
        from rlflow.tools.doctor.cluster import examine_cluster  # imports Ray

        places = examine_cluster(config, run_dir, is_run=is_run)
    else:
        computes = not is_for_pods  # a machine that hands a job in does not run it
        here, tried = look(config, run_dir, os.environ, is_run=is_run, computes=computes, with_ray=computes)
        config = by_device(config, on_gpus=here.num_gpus > 0)
        findings = [*tried, *check_machine(here, needs_of(config, here.size, is_run=is_run))]
        findings += check_placement(partial(machines_taken, config)) if is_for_pods else ()
        places: dict[str, list[Finding]] = {"this machine": in_order(findings)}
    shown = as_json(places)
    print(json.dumps(shown) if json_wanted else as_text(places))
    return int(not shown["ok"])
