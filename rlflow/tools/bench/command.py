"""The verb `bench`: which measurement it names, and what that one takes.

`e2e`, `async` and `envs` measure rlflow alone. The others compare it with another system or another way, and are
scripts in `benchmarks/` of a checkout, with the other side; a wheel does not bring them.
"""

import argparse
import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from rlflow.errors import ConfigError
from rlflow.tools.figures import print_figures

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

_MEASUREMENTS = {
    "gpu": "the proof kit: everything that a GPU must show, in one command",
    "e2e": "a whole run's steady state",
    "async": "what asynchrony gains",
    "queue": "ledger and ready queue beside TransferQueue",
    "train": "a step of the trainer beside a padded loop and TRL's",
    "weights": "new weights for an engine beside saving and reloading them",
    "envs": "a thousand episodes with slow tools at once on one runner",
}
_WITHOUT_SETTINGS = ("queue", "train", "envs")
_OF_GPU = ("model", "minutes", "only")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measured = "; ".join(f"{name}: {text}" for name, text in _MEASUREMENTS.items())
    parser.add_argument("name", choices=list(_MEASUREMENTS), help=measured)
    parser.epilog = (
        "Further arguments (key=value) are settings of the runs that e2e and async measure; weights takes model.path "
        "and model.dtype. queue, train and weights need a checkout of rlflow. gpu writes bench-gpu.md, bench-gpu.json "
        "and the folder bench-gpu with a log for each stage; its exit code is 1 when a stage failed."
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object on the last line")
    parser.add_argument(
        "--verify", action="store_true", help="weights only: compare every parameter; exit code 1 when one differs"
    )
    parser.add_argument("--model", help="gpu only: as model.path, or random-0.5b, random-1.5b, random-7b")
    parser.add_argument("--minutes", type=float, metavar="N", help="gpu only: how long at most; 60 by default")
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE", help="gpu only: these stages, or those that begin so, such as trainer"
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print. The exit code is 1 when a stage of the kit failed or a parameter differs."""
    if options.name == "gpu":
        return _run_kit(options, options.words)
    figures = _measure(options, options.words)
    print_figures(figures, as_json=options.json)
    return int(figures.get("verify/different", 0) != 0)


def _run_kit(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """`rlflow bench gpu`; lines as stages end, or one JSON object on the last line. The exit code."""
    from rlflow.tools.bench.gpu.kit import MINUTES, bench_gpu

    if settings:
        raise ConfigError(f"bench gpu takes no settings; got {' '.join(settings)}; leave them out")
    minutes = MINUTES if options.minutes is None else options.minutes
    if not 0 < minutes < float("inf"):
        raise ConfigError(f"--minutes must be positive; got {minutes:g}; leave it out for {MINUTES:g}")
    lines = sys.stderr if options.json else sys.stdout
    kit = bench_gpu(options.model, minutes, options.only, lambda line: print(line, file=lines, flush=True))
    print(json.dumps(kit.as_json()) if options.json else f"written: {kit.folder}.md", flush=True)
    return int(any(result.status == "failed" for result in kit.results))


def _measure(options: argparse.Namespace, settings: Sequence[str]) -> Mapping[str, float | list[float]]:
    """Measure; ConfigError for what the measurement does not take or needs, RunError when it fails."""
    name, verify = options.name, options.verify
    if given := [f"--{each}" for each in _OF_GPU if getattr(options, each) is not None]:
        raise ConfigError(f"bench {name} takes no {given[0]}; leave it out, or measure gpu")
    if verify and name != "weights":
        raise ConfigError(f"bench {name} takes no --verify; leave it out, or measure weights")
    if settings and name in _WITHOUT_SETTINGS:
        raise ConfigError(f"bench {name} takes no settings; got {' '.join(settings)}; leave them out")
    if name == "weights":
        return _script("weights_update").weights(settings, verify=verify)
    if name == "queue":
        return _script("group_queue").queue()
    if name == "train":
        return _script("train_step").training()
    if name == "envs":
        from rlflow.tools.bench import envs

        return asyncio.run(envs.measure(envs.NUM_EPISODES))
    from rlflow.tools.bench import runs

    return runs.asynchrony(settings) if name == "async" else runs.end_to_end(settings)


def _script(name: str) -> ModuleType:
    if not BENCHMARKS.is_dir():
        raise ConfigError(
            f"this measurement needs a checkout of rlflow for its other side, and there is no {BENCHMARKS}; get "
            "rlflow's repository, run `make setup` in it, and measure with its .venv/bin/rlflow"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))  # its scripts import each other, also in the processes that they start
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{BENCHMARKS}{os.pathsep}{inherited}" if inherited else str(BENCHMARKS)
    return importlib.import_module(name)
