"""The command `rlflow`. Each verb imports what it needs when it runs, so that help and errors come at once."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import ConfigError, RunError
from rlflow.runtime.streams import discard, make_dispensable, open_closed_streams

if TYPE_CHECKING:
    from rlflow.config import Config

_VERBS = {
    "train": "train a model: rlflow train recipe=NAME [key=value ...] [--dry-run]",
    "submit": "hand a run to a cluster: rlflow submit recipe=NAME cluster=ray|kuberay [key=value ...]",
    "stop": "have a run finish its step, save and end",
    "recipes": "list the recipes, or print one",
    "algorithms": "list advantages, losses and corrections with their options",
    "checkpoint": "is every byte of a run's checkpoints what was written: rlflow checkpoint verify RUN",
    "export": "write a checkpoint as a folder for transformers and vLLM",
    "report": "write a run's report.html",
    "ledger": "count a run's groups by state",
    "doctor": "is this machine, or a cluster, fit: rlflow doctor [key=value ...] [--cluster] [--clean] [--json]",
    "env": "play an environment with scripts (check), or write a new one (new)",
    "bench": "measure on this machine",
    "simulate": "the driver on a fleet of modelled engines: throughput by staleness",
}

_OF_TORCH = ("torch", "vllm", "accelerate", "jinja2")
"""What comes with torch and vLLM, of which there is a build for CPUs and one for GPUs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the run failed, 2 the command or its configuration is wrong, 128 + a signal: ended by it."""
    open_closed_streams()
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        from rlflow.runtime.disk import describe_disk_error

        if (told := describe_disk_error(error, "a file", Path(error.filename or "."))) is None:
            raise
        if error.filename is None:
            told = f"what is printed, or a file, cannot be written: {error.strerror}; look where the output goes"
        discard(sys.stdout)
        return _report(RunError(f"{told} and call again"))


def _run(words: list[str]) -> int:
    try:
        if words[:1] in (["-sc"], ["--shell-completion"]):  # how the shell asks for completions
            return _complete(words)
        if words[:1] == ["train"]:
            return _train(words[1:])
        if words[:1] == ["submit"]:
            from rlflow.tools.submit.command import submit

            return submit(words[1:], _report)
        if words[:1] == ["doctor"]:
            return _doctor(words[1:])
        if words[:1] == ["env"]:
            return _env(words[1:])
        parser = _parser()
        options, overrides = parser.parse_known_args(words)
        if unknown := [word for word in overrides if options.verb != "bench" or "=" not in word or word[0] == "-"]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return _run_verb(options, overrides)
    except (ConfigError, RunError) as error:
        return _report(error)
    except ModuleNotFoundError as error:
        if error.name not in _OF_TORCH:
            raise
        return _report(
            ConfigError(
                f"{error.name} is not installed; pip install 'rlflow[gpu]', or 'rlflow[cpu]' on a machine without GPUs"
            )
        )
    except KeyboardInterrupt:  # before a run has begun; a run handles the signal by itself
        return 130


def _report(error: ConfigError | RunError) -> int:
    if os.environ.get("RLFLOW_TRACEBACK", "0") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    print("\n".join([f"rlflow: error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
    return 2 if isinstance(error, ConfigError) else 1


def _train(arguments: Sequence[str]) -> int:
    """Hydra reads the arguments, except for the two that it does not know."""
    from rlflow.settings.compose import train

    for_hydra = [each for each in arguments if each not in ("--dry-run", "--json")]
    if "--dry-run" in arguments:
        from rlflow.tools.dry_run.command import dry_run

        return train(for_hydra, _report, partial(dry_run, json_wanted="--json" in arguments))
    if "--json" in arguments:
        raise ConfigError("--json has no effect without --dry-run; leave it out: a run writes metrics.jsonl")
    return train(for_hydra, _report, _start)


def _start(config: Config) -> int:
    from rlflow.run import train  # imports Ray

    make_dispensable()
    return train(config)


def _doctor(arguments: Sequence[str]) -> int:
    """Hydra reads the settings, which need not name a recipe."""
    parser = argparse.ArgumentParser(prog="rlflow doctor", description="is this machine, or a cluster, fit for a run?")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of a run, such as recipe=NAME; none: any run")
    parser.add_argument(
        "--cluster", action="store_true", help="look at every node of cluster.address, and between them"
    )
    parser.add_argument("--clean", action="store_true", help="remove what killed runs have left on this machine")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    options = parser.parse_intermixed_args(arguments)
    from rlflow.settings.compose import train
    from rlflow.tools.doctor.command import doctor, names_run

    settings: list[str] = options.settings
    if unknown := [word for word in settings if "=" not in word or word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if not any(word.startswith("recipe=") for word in settings):
        settings.append("run.name=run")
    wanted = {"cluster": options.cluster, "clean": options.clean, "json_wanted": options.json}
    run = partial(doctor, is_run=names_run(settings), **wanted)
    return train(settings, _report, run, needs_recipe=False)


def _env(arguments: Sequence[str]) -> int:
    """`new` takes a folder; what follows `check` is for Hydra, but for the name, the number of tasks and --json."""
    parser = argparse.ArgumentParser(prog="rlflow env", description=_VERBS["env"])
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    new = verbs.add_parser("new", help="write a small environment that works, to be changed")
    new.add_argument("path", type=Path, metavar="FOLDER", help="where; its last part is the environment's name")
    check = verbs.add_parser("check", help="play tasks with scripts in place of a model, and say what is wrong")
    check.add_argument(
        "settings",
        nargs="+",
        metavar="NAME|key=value",
        help="env.name, or recipe=NAME; env.args.x=1, reward.function=f ...",
    )
    check.add_argument("--tasks", type=int, default=20, metavar="N", help="how many; 20 by default")
    check.add_argument("--json", action="store_true", help="as one JSON object")
    options = parser.parse_args(arguments)
    if options.verb == "new":
        from rlflow.tools.env.new import env_new

        print("\n".join(str(path) for path in env_new(options.path)))
        return 0
    from rlflow.settings.compose import train
    from rlflow.tools.env.check import env_check

    if options.tasks < 1:
        raise ConfigError(f"--tasks must be at least 1; got {options.tasks}")
    settings = [each if "=" in each else f"env.name={each}" for each in options.settings]
    if not any(each.startswith("recipe=") for each in settings):
        settings.append("run.name=check")
    run = partial(env_check, num_tasks=options.tasks, as_json=options.json)
    return train(settings, _report, run, needs_recipe=False)


def _parser() -> argparse.ArgumentParser:
    from rlflow import __version__
    from rlflow.tools.bench import command as bench
    from rlflow.tools.simulate import command as simulate

    parser = argparse.ArgumentParser(prog="rlflow", description="Reinforcement learning for language models, on Ray.")
    parser.add_argument("--version", action="version", version=f"rlflow {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verb = {name: verbs.add_parser(name, help=text, description=text) for name, text in _VERBS.items()}
    verb["recipes"].add_argument("name", nargs="?", metavar="NAME", help="print this recipe")
    for name in ("stop", "export", "report", "ledger"):
        verb[name].add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    of_checkpoint = verb["checkpoint"].add_subparsers(dest="what", metavar="VERB", required=True)
    verify = of_checkpoint.add_parser("verify", help="one line for each checkpoint; exit code 1 if one is not whole")
    verify.add_argument("run", type=Path, metavar="RUN", help="the run's directory, or the folder of one checkpoint")
    verb["stop"].add_argument(
        "--timeout", type=float, metavar="SECONDS", help="how long to wait; by default what the run's deadlines allow"
    )
    verb["export"].add_argument("out", type=Path, metavar="OUT", help="the folder to write; it must not exist")
    verb["export"].add_argument("--step", metavar="N|best", help="the checkpoint; the last one by default")
    verb["export"].add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    verb["export"].add_argument(
        "--adapter", action="store_true", help="the adapters of a run with lora.rank alone, for PEFT"
    )
    bench.add_arguments(verb["bench"])
    verb["ledger"].add_argument("--json", action="store_true", help="as one JSON object")
    simulate.add_arguments(verb["simulate"])
    return parser


def _run_verb(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if "run" in options and not options.run.is_dir():
        raise ConfigError(f"{options.run} is not a run's directory; give the run.dir that `rlflow train` printed")
    if options.verb == "recipes":
        from rlflow.settings.recipe_files import recipe_names, recipe_summary, recipe_text

        if options.name is not None:
            print(recipe_text(options.name), end="")
        else:
            width = max(map(len, recipe_names()))
            print("\n".join(f"{each:{width}}  {recipe_summary(each)}" for each in recipe_names()))
    elif options.verb == "algorithms":
        from rlflow.tools.algorithms import lines

        print("\n".join(lines()))
    elif options.verb == "bench":
        from rlflow.tools.bench import command as bench

        if options.name == "gpu":
            return bench.run_kit(options, overrides)
        figures = bench.run(options, overrides)
        _print_figures(figures, as_json=options.json)
        return int(figures.get("verify/different", 0) != 0)
    elif options.verb == "simulate":
        from rlflow.tools.simulate import command

        command.run(options)
    elif options.verb == "stop":
        from rlflow.rundir.lock import stop

        print(stop(options.run, options.timeout))
    elif options.verb == "checkpoint":
        from rlflow.rundir.store import verify

        found = verify(options.run)
        print("\n".join(f"{name}  {damage or 'whole'}" for name, damage in found.items()) or "no checkpoint yet")
        return int(any(found.values()))
    elif options.verb == "export":
        from rlflow.tools.export import export

        print(export(options.run, options.out, step=options.step, dtype=options.dtype, adapter_only=options.adapter))
    elif options.verb == "report":
        from rlflow.telemetry.report.report import write_report

        print(write_report(options.run) or options.run / "report.html")
    else:
        from rlflow.groups.ledger import counts_by_state

        path = options.run / "ledger.db"
        if not path.is_file():
            raise ConfigError(f"{options.run} has no ledger.db; give the directory of a run that has started")
        _print_figures(counts_by_state(path), as_json=options.json)
    return 0


def _print_figures(figures: Mapping[str, float | list[float]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = " ".join(f"{each:.3g}" for each in value) if isinstance(value, list) else f"{value:.4g}"
        print(f"{name:24} {shown}")


def _complete(words: list[str]) -> int:
    """Answer the shell: the verbs by ourselves, what follows `train` and `submit` by Hydra, which knows no verbs."""
    line = os.environ.get("COMP_LINE", "")
    program, *typed = line.split()[:2] or ["rlflow"]
    if typed not in (["train"], ["submit"]) or line.endswith(typed[0]):
        print(" ".join(name for name in _VERBS if name.startswith(typed[0] if typed else "")))
        return 0
    from rlflow.settings.compose import train

    os.environ["COMP_LINE"] = line.replace(f"{typed[0]} ", "", 1) if program else line
    return train(words, _report, _start)
