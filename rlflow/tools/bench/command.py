"""The verb `bench`: which measurement it names, and what that one takes.

`e2e`, `async` and `envs` measure rlflow alone. The others compare it with another system or another way, and are
scripts in `benchmarks/` of a checkout, with the other side; a wheel does not bring them.
"""

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from rlflow.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

_MEASUREMENTS = {
    "e2e": "a whole run's steady state",
    "async": "what asynchrony gains",
    "queue": "ledger and ready queue beside TransferQueue",
    "train": "a step of the trainer beside a padded loop and TRL's",
    "weights": "new weights for an engine beside saving and reloading them",
    "envs": "a thousand episodes with slow tools at once on one runner",
}
_WITHOUT_SETTINGS = ("queue", "train", "envs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measured = "; ".join(f"{name}: {text}" for name, text in _MEASUREMENTS.items())
    parser.add_argument("name", choices=list(_MEASUREMENTS), help=measured)
    parser.epilog = (
        "Further arguments (key=value) are settings of the runs that e2e and async measure; weights takes model.path "
        "and model.dtype. queue, train and weights need a checkout of rlflow."
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object on the last line")
    parser.add_argument(
        "--verify", action="store_true", help="weights only: compare every parameter; exit code 1 when one differs"
    )


def run(name: str, settings: Sequence[str], *, verify: bool) -> Mapping[str, float | list[float]]:
    """Measure; ConfigError for what `name` does not take or needs, RunError when the measurement fails."""
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
