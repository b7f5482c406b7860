"""`rlflow submit`: what was typed -> a checked configuration -> a job of a Ray cluster, or a RayJob on Kubernetes."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from rlflow.config import Config
from rlflow.errors import ConfigError, report_error
from rlflow.settings.compose import train
from rlflow.tools.submit.command_words import (
    LOST,
    UNREAD,
    Job,
    MaybeStarted,
    config_folder,
    how_to_go_on,
    make_job,
    where,
)


class _Options(argparse.Namespace):
    """Submit's own options; the other words are the driver's."""

    dry_run: bool
    detach: bool
    working_dir: Path | None
    wheel: list[Path]
    attach: str | None
    stop: str | None
    words: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rlflow submit recipe=NAME cluster=ray|kuberay [key=value ...] [OPTIONS]"
    parser.description = "Hand a run to a cluster, and follow it; Ctrl-C leaves it running."
    parser.add_argument("-h", "--help", action="help", help="show this help message and exit")
    parser.add_argument("--dry-run", action="store_true", help="print what would be asked for, and ask for nothing")
    parser.add_argument("--detach", action="store_true", help="do not follow the job")
    parser.add_argument(
        "--working-dir",
        type=Path,
        metavar="DIR",
        help="send the code in this folder (Ray cluster); by default the current one, or none with --wheel",
    )
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", action="append", default=[], help="send this package; may be repeated"
    )
    parser.add_argument("--attach", metavar="JOB", help="follow a job that was submitted before")
    parser.add_argument("--stop", metavar="JOB", help="have a job finish its step, save and end")


def run(options: _Options) -> int:
    """The exit code: the job's, or 0 with --detach, --dry-run and --stop.

    LOST when the cluster does not answer, UNREAD when nobody reads what is shown.

    Raises ConfigError for options that contradict each other, and when nothing can be composed.
    """
    is_there = check_options(options)
    words = list(options.words)
    if is_there and not any(word.startswith("recipe=") for word in words):
        words.append("run.name=job")
    if options.working_dir is not None:
        if not options.working_dir.is_dir():
            raise ConfigError(f"--working-dir {options.working_dir} is not a folder; give the one with your code")
        options.wheel = [wheel.absolute() for wheel in options.wheel]
        os.chdir(options.working_dir)  # relative paths mean what they will mean in the job
    try:
        code = train(words, report_error, partial(_run, options=options), needs_recipe=not is_there)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # Python would complain when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def check_options(options: _Options) -> bool:
    """Whether they name a job that is there. Raises ConfigError for options that contradict each other."""
    is_there = options.attach is not None or options.stop is not None
    if options.attach is not None and options.stop is not None:
        raise ConfigError("--attach and --stop contradict each other; give one of them")
    if {"-m", "--multirun"} & {*options.words}:
        raise ConfigError("rlflow submit makes one job; leave --multirun out, and submit each one")
    for name in ("--dry-run", "--detach", "--working-dir", "--wheel"):
        if is_there and getattr(options, name[2:].replace("-", "_")):
            raise ConfigError(f"{name} has no effect with --attach and --stop; leave it out")
    if options.dry_run and options.detach:
        raise ConfigError("--detach has no effect with --dry-run, which starts nothing; leave it out")
    return is_there


def _run(config: Config, *, options: _Options) -> int:
    if config.cluster.kubernetes.image is not None:
        return _on_kubernetes(config, options)
    if config.cluster.address is None:
        raise ConfigError(
            "rlflow submit hands a run to a cluster, and cluster=local is this machine; use rlflow train, or add "
            "cluster=ray cluster.address=http://HOST:8265, or cluster=kuberay"
        )
    return _on_ray(config, options)


def _on_ray(config: Config, options: _Options) -> int:
    from rlflow.tools.submit.package import collect
    from rlflow.tools.submit.ray_job import RayJobs

    jobs = RayJobs(config)
    if options.stop is not None:
        return jobs.stop(options.stop)
    if options.attach is not None:
        return jobs.follow(options.attach)
    job = make_job(config, options.words, time.strftime("%Y%m%d-%H%M%S"))
    package = collect(None if options.wheel and options.working_dir is None else Path.cwd(), options.wheel)
    if _is_planned(config, options, package, lambda: jobs.plan(job, package)):
        return 0
    return _hand_over(config, options, job, partial(jobs.start, job, package), jobs.follow)


def _on_kubernetes(config: Config, options: _Options) -> int:
    from rlflow.tools.submit.kuberay import render, to_yaml
    from rlflow.tools.submit.kubernetes_api import Kubernetes

    if options.working_dir is not None or options.wheel:
        raise ConfigError(
            "--working-dir and --wheel have no effect on Kubernetes, where code is in the image or on the claim; leave "
            "them out"
        )
    namespace = config.cluster.kubernetes.namespace
    if options.stop is not None:
        print(Kubernetes(namespace).stop(options.stop))
        return 0
    if options.attach is not None:
        return Kubernetes(namespace).follow(options.attach)
    job = make_job(config, options.words, time.strftime("%Y%m%d-%H%M%S"))
    rayjob = render(config, job)
    if _is_planned(config, options, (), lambda: to_yaml(rayjob)):
        return 0
    cluster = Kubernetes(namespace)
    return _hand_over(config, options, job, partial(cluster.apply, rayjob), cluster.follow)


def _is_planned(config: Config, options: _Options, packaged: Collection[str], plan: Callable[[], str]) -> bool:
    """Check what is to be sent, and say what could not be checked; with --dry-run, print the plan: then it is all.

    The plan is YAML; what is on which machine is in its comments.
    """
    from rlflow.cluster.placement import machines_taken
    from rlflow.tools.dry_run.command import check_main_memory
    from rlflow.tools.submit.check import check_run

    machines = machines_taken(config)
    for each in check_main_memory(config):
        print(f"rlflow: warning: {each}", file=sys.stderr)
    for each in check_run(config, packaged, config_folder(options.words)):
        print(f"rlflow: not checked before the job starts: {each}", file=sys.stderr)
    if options.dry_run:
        print("".join(f"# {line}\n" for line in machines) + plan(), end="")
    return options.dry_run


def _hand_over(
    config: Config, options: _Options, job: Job, start: Callable[[], None], follow: Callable[[str], int]
) -> int:
    what = f"job {job.name}, run.dir {job.run_dir}\n{how_to_go_on(job.name, where(config.cluster))}"
    try:
        start()
    except MaybeStarted as error:
        print(f"rlflow: {error}; it may have been started all the same:\n{what}", file=sys.stderr)
        return LOST
    print(what, flush=True)
    return 0 if options.detach else follow(job.name)
