"""`rlflow eval RUN|CHECKPOINT|MODEL [key=value ...] [--step N|best] [--base] [--tasks N] [--json]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.tools.eval.evaluate import evaluate_target
from rlflow.tools.target import find_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rlflow eval RUN|CHECKPOINT|MODEL [key=value ...] [--step N|best] [--base] [--tasks N] [--json]"
    parser.epilog = "key=value: over the settings of the run, such as env.name=NAME or eval.episodes=8"
    parser.add_argument("target", metavar="RUN|CHECKPOINT|MODEL", help="a folder, a hub id or a built-in model")
    parser.add_argument("--step", metavar="N|best", help="of the run's checkpoints; the last one by default")
    parser.add_argument("--base", action="store_true", help="also the model that the run began with")
    parser.add_argument("--tasks", type=int, metavar="N", help="only the first so many tasks")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(options: argparse.Namespace) -> int:
    # Evaluation is what happens, however often a run does it; 0 would make eval.episodes a setting without effect.
    target = find_target(options.target, options.step, ["eval.every=1", *options.words])
    if options.base and target.run is None:
        raise ConfigError(f"--base has no effect on {options.target}, which is no run; give a run, or leave it out")
    given = any(word.startswith("run.dir=") for word in options.words)
    folder = Path(target.config.run.dir) if given and target.config.run.dir is not None else None
    evaluated = evaluate_target(target, folder=folder, base=options.base, num_tasks=options.tasks)
    print(json.dumps(evaluated.records) if options.json else evaluated)
    return 0
