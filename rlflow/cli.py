"""The command `rlflow`: a table of verbs. A verb's module is imported when that verb runs, so that help comes at once.

A module has `add_arguments(parser)` and `run(options)`, which returns the exit code. `options.words` is what the parser
does not know: settings for Hydra, in the order in which they were typed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from rlflow.errors import ConfigError, RunError, report_error
from rlflow.runtime.streams import discard, open_closed_streams


class _Words(Enum):
    """What a verb takes beside its own arguments."""

    none = auto()
    settings = auto()
    """key=value"""
    hydra = auto()
    """Settings, and Hydra's options; the shell completes them."""


class _Verb(NamedTuple):
    help: str
    module: str
    words: _Words = _Words.none


_VERBS = {
    "train": _Verb(
        "train a model: rlflow train recipe=NAME [key=value ...] [--dry-run]", "rlflow.tools.train", _Words.hydra
    ),
    "submit": _Verb(
        "hand a run to a cluster: rlflow submit recipe=NAME cluster=ray|kuberay [key=value ...]",
        "rlflow.tools.submit.command",
        _Words.hydra,
    ),
    "stop": _Verb("have a run finish its step, save and end", "rlflow.tools.stop"),
    "status": _Verb("what a run does now, and what each of its processes waits for", "rlflow.tools.runs.status"),
    "runs": _Verb("list the runs below a folder: rlflow runs [FOLDER] [--json]", "rlflow.tools.runs.command"),
    "compare": _Verb("lay the curves of runs side by side: rlflow compare A B ...", "rlflow.tools.runs.compare"),
    "recipes": _Verb("list the recipes, or print one", "rlflow.tools.recipes"),
    "algorithms": _Verb("list advantages, losses and corrections with their options", "rlflow.tools.algorithms"),
    "checkpoint": _Verb(
        "is every byte of a run's checkpoints what was written: rlflow checkpoint verify RUN", "rlflow.tools.checkpoint"
    ),
    "export": _Verb("write a checkpoint as a folder for transformers and vLLM", "rlflow.tools.export"),
    "eval": _Verb(
        "measure a run or a model: rlflow eval RUN|CHECKPOINT|MODEL [key=value ...]",
        "rlflow.tools.eval.command",
        _Words.settings,
    ),
    "chat": _Verb("talk to a model: rlflow chat RUN|CHECKPOINT|MODEL", "rlflow.tools.chat", _Words.settings),
    "serve": _Verb(
        "a model behind vLLM's OpenAI server: rlflow serve RUN|CHECKPOINT|MODEL", "rlflow.tools.serve", _Words.settings
    ),
    "report": _Verb("write a run's report.html, or show it while the run goes on (--watch)", "rlflow.tools.report"),
    "ledger": _Verb("count a run's groups by state", "rlflow.tools.ledger"),
    "doctor": _Verb(
        "is this machine, or a cluster, fit: rlflow doctor [key=value ...] [--cluster] [--clean] [--json]",
        "rlflow.tools.doctor.command",
        _Words.settings,
    ),
    "env": _Verb("play an environment with scripts (check), or write a new one (new)", "rlflow.tools.env.command"),
    "bench": _Verb("measure on this machine", "rlflow.tools.bench.command", _Words.settings),
    "simulate": _Verb(
        "the driver on a fleet of modelled engines: throughput by staleness", "rlflow.tools.simulate.command"
    ),
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
        return report_error(RunError(f"{told} and call again"))


def _run(words: list[str]) -> int:
    try:
        if words[:1] in (["-sc"], ["--shell-completion"]):  # how the shell asks for completions
            return _complete(words)
        if not words or words[0] not in _VERBS:
            _front_parser().parse_args(words[:1])  # prints what was asked for, or what is wrong, and exits
        _check_folder()
        module = importlib.import_module(_VERBS[words[0]].module)
        options = parse(words, module.add_arguments)
        if "run" in options and not options.run.is_dir():
            raise ConfigError(f"{options.run} is not a run's directory; give the run.dir that `rlflow train` printed")
        return module.run(options)
    except (ConfigError, RunError) as error:
        return report_error(error)
    except ModuleNotFoundError as error:
        if error.name not in _OF_TORCH:
            raise
        return report_error(
            ConfigError(
                f"{error.name} is not installed; pip install 'rlflow[gpu]', or 'rlflow[cpu]' on a machine without GPUs"
            )
        )
    except KeyboardInterrupt:  # before a run has begun; a run handles the signal by itself
        return 130


def _check_folder() -> None:
    """Raise RunError if the folder that this process was started in is there no more; relative paths need it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RunError(
            "the current folder has been removed; change to one that is there. Ray makes that of a job, and nodes that "
            "share a folder for Ray's sessions remove it for each other: start each with a --temp-dir of its own"
        ) from None


def _front_parser() -> argparse.ArgumentParser:
    from rlflow import __version__

    parser = argparse.ArgumentParser(prog="rlflow", description="Reinforcement learning for language models, on Ray.")
    parser.add_argument("--version", action="version", version=f"rlflow {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in _VERBS.items():
        verbs.add_parser(name, help=verb.help)
    return parser


def parse(words: Sequence[str], add_arguments: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """The arguments of the verb `words[0]`. Exits with code 2 for those that it does not take."""
    verb = _VERBS[words[0]]
    is_free = verb.words is _Words.hydra
    parser = argparse.ArgumentParser(
        prog=f"rlflow {words[0]}", description=verb.help, add_help=not is_free, allow_abbrev=not is_free
    )
    add_arguments(parser)
    options, options.words = parser.parse_known_args(words[1:])
    takes = verb.words is _Words.settings
    unknown = [word for word in options.words if not takes or "=" not in word or word.startswith("-")]
    if unknown and not is_free:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _complete(words: list[str]) -> int:
    """Answer the shell: the verbs by ourselves, what follows `train` and `submit` by Hydra, which knows no verbs."""
    line = os.environ.get("COMP_LINE", "")
    program, *typed = line.split()[:2] or ["rlflow"]
    verb = _VERBS.get(typed[0]) if typed else None
    if verb is None or verb.words is not _Words.hydra or line.endswith(typed[0]):
        print(" ".join(name for name in _VERBS if name.startswith(typed[0] if typed else "")))
        return 0
    from rlflow.settings.compose import train

    os.environ["COMP_LINE"] = line.replace(f"{typed[0]} ", "", 1) if program else line
    return train(words, report_error, lambda config: 0)
