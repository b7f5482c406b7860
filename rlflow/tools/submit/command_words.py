"""What a cluster is asked to do for a run: the command, the job's name and its run directory; and how to come back.

What was typed behind `rlflow submit` becomes `rlflow train ...` for the driver on the cluster. Pure.
"""

import argparse
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlflow.config import ClusterConfig, Config
from rlflow.errors import ConfigError, RunError

LOST = 75
"""Exit code when the cluster does not answer, or not us, which says nothing about the job (EX_TEMPFAIL)."""
INTERRUPTED, STOPPED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes of a run that these signals ended before its last step."""
UNREAD = 128 + signal.SIGPIPE
"""Exit code when the reader of the output has gone, as with `| head`."""

CLAIM = PurePosixPath("/rlflow")
"""Where all pods see cluster.kubernetes.claim; also where they work, so that `reward.py:score` is a file on it."""
RUNS = CLAIM / "runs"
MAX_NAME = 45
"""KubeRay derives the names of pods from it, which may have 63 characters."""
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")
"""A value that Hydra takes without quotes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """What a cluster is told of a run, whichever kind of cluster it is."""

    name: str
    """At most 45 lower-case letters, digits and hyphens, the first one a letter: RECIPE-TIME, for example."""
    run_dir: str
    """Absolute, on a file system that all machines of the cluster see. A second job with the same one goes on with the
    run of the first."""
    words: tuple[str, ...]
    """The command that the driver is started with: rlflow train recipe=... run.dir=..."""


class MaybeStarted(RunError):
    """A job was asked for, and no answer says whether there is one now."""


def make_job(config: Config, words: Sequence[str], time: str) -> Job:
    """The job, from the words behind `rlflow submit` without submit's own options.

    `time` is digits and hyphens. Raises ConfigError when run.dir is not where all machines of the cluster see it.
    """
    name = job_name(config.run.name, time)
    run_dir = run_dir_of(config, name)
    return Job(name=name, run_dir=run_dir, words=("python", "-m", "rlflow", "train", *driver_words(words, run_dir)))


def job_name(run_name: str, time: str) -> str:
    """RUN-TIME in lower-case letters, digits and hyphens, at most MAX_NAME of them."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".strip("-")
    return f"{plain[: MAX_NAME - len(time) - 1].rstrip('-')}-{time}"


def run_dir_of(config: Config, name: str) -> str:
    """The run's directory as all machines of the cluster see it."""
    given, is_on_kubernetes = config.run.dir, config.cluster.kubernetes.image is not None
    if given is None:
        if is_on_kubernetes:
            return f"{RUNS}/{name}"
        raise ConfigError(
            "run.dir is null, and the folder that a job runs in is thrown away with it; give a folder that all "
            "machines of the cluster see, such as run.dir=/shared/runs/first"
        )
    if not PurePosixPath(given).is_absolute():
        example = PurePosixPath(RUNS if is_on_kubernetes else "/shared", given)
        raise ConfigError(
            f"run.dir={given} would be in the folder that a job runs in, which is thrown away with it; give its "
            f"absolute path on the cluster, such as {example}"
        )
    if is_on_kubernetes and CLAIM not in PurePosixPath(given).parents:
        raise ConfigError(
            f"run.dir={given} is not on cluster.kubernetes.claim, which pods see at {CLAIM}; leave it out, or choose "
            f"one such as {RUNS}/{name}"
        )
    return given


def driver_words(words: Sequence[str], run_dir: str) -> tuple[str, ...]:
    """The words as they were typed, but with the directory spelled out and the cluster that the job is part of."""
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in ("run.dir", "cluster.address")]
    if not _PLAIN.fullmatch(run_dir):
        run_dir = "'" + run_dir.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return (*kept, f"run.dir={run_dir}", "cluster.address=auto")


def config_folder(words: Sequence[str]) -> Path | None:
    """The folder with configuration files of the user's own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    return parser.parse_known_args(words)[0].config_dir


def where(cluster: ClusterConfig) -> str:
    """The words that lead back to the same cluster."""
    if cluster.kubernetes.image is None:
        return shlex.join(["cluster=ray", f"cluster.address={cluster.address}"])
    return on_kubernetes(cluster.kubernetes.namespace)


def on_kubernetes(namespace: str | None) -> str:
    """The words that lead back to a namespace on Kubernetes; None is the kubeconfig's own."""
    return shlex.join(["cluster=kuberay", *([f"cluster.kubernetes.namespace={namespace}"] if namespace else [])])


def how_to_go_on(name: str, where: str) -> str:
    """How to follow or stop a job that is left alone; `where` are the words that lead back to its cluster."""
    return f"follow it: rlflow submit --attach {name} {where}\nstop it:   rlflow submit --stop {name} {where}"
