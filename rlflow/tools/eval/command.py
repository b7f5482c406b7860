"""`rlflow eval RUN|CHECKPOINT|MODEL [key=value ...] [--step N|best] [--base] [--tasks N] [--json]`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.tools.eval.evaluate import EvaluationTable, evaluate_model
from rlflow.tools.figures import table
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
    if options.tasks is not None and options.tasks < 1:
        raise ConfigError(f"--tasks must be at least 1; got {options.tasks}")
    # Evaluation is what happens, however often a run does it; 0 would make eval.episodes a setting without effect.
    target = find_target(options.target, options.step, ["eval.every=1", *options.words])
    if options.base and target.run is None:
        raise ConfigError(f"--base has no effect on {options.target}, which is no run; give a run, or leave it out")
    given = any(word.startswith("run.dir=") for word in options.words)
    where = Path("runs") if target.run is None else target.run / "evaluations"
    label = "".join(each if each.isalnum() else "-" for each in target.name)
    folder = where / f"eval-{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    if given and target.config.run.dir is not None:
        folder = Path(target.config.run.dir)
    with target.model(folder) as model:
        found = [evaluate_model(target.config, model, name=target.name, folder=folder, num_tasks=options.tasks)]
    if options.base:
        path = target.config.model.path
        found.append(evaluate_model(target.config, path, name=f"base {path}", folder=folder, num_tasks=options.tasks))
    records = [each.record() for each in found]
    (folder / "evaluation.json").write_text(json.dumps(records, indent=1) + "\n")
    print(json.dumps(records) if options.json else "\n".join(lines(found)))
    return 0


def lines(tables: Sequence[EvaluationTable]) -> list[str]:
    """The tables under one head, the same row of each model beneath each other, and where the answers are."""
    most = sorted({k for each in tables for score in each.scores for k in score.passes})
    head = ["model", "tokens", "kind", "tasks", "reward", "95 %", *(f"pass@{k}" for k in most), "failed", "cut off"]
    rows = []
    for scores in zip(*(each.scores for each in tables), strict=True):
        for each, score in zip(tables, scores, strict=True):
            half = "-" if score.error is None else f"+-{score.error:.3f}"
            passes = [_share(score.passes.get(k)) for k in most]
            counts = [str(score.num_failed), "-" if score.truncated is None else f"{score.truncated:.0%}"]
            how, kind = "greedy" if score.is_greedy else "sampled", "all" if score.kind is None else score.kind
            row = [each.model, how, kind, str(score.num_tasks), _share(score.reward), half]
            rows.append([*row, *passes, *counts])
    return [table(head, rows), *(f"answers: {each.answers}" for each in tables)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
