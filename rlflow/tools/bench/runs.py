"""Training runs that are measured whole: `rlflow bench e2e`, and `rlflow bench async`, which compares them.

`async` is what asynchrony gains where episodes wait, as ratios within one benchmark: the same tiny training run, with
two engines and an environment that waits, at each setting in turn and seed after seed, so that what else the machine
does meets all settings alike.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import RunError
from rlflow.telemetry import metrics

WARM_UP_STEPS = 2
"""Steps left out of the figures, because the first ones pay for caches and first allocations."""
E2E_TIMEOUT_S = 3600.0
_FIGURES = {
    "samples_per_s": "throughput/samples_per_s",
    "tokens_per_s": "throughput/tokens_per_s",
    "step_time_s": "step_time",
    "rollout_s": "time/rollout",
    "reward_s": "time/reward",
    "train_s": "time/train",
    "weights_s": "time/weights",
    "pause_s": "weights/pause_s",
    "utilisation_rollout": "utilisation/rollout",
    "utilisation_train": "utilisation/train",
}
"""Figure -> metric of a step."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "0_whole_batch": ("staleness.max_versions=0", "trainer.streaming=false"),
    "0": ("staleness.max_versions=0",),
    "0_oversample": ("staleness.max_versions=0", "rollout.oversample=1.25"),
    "0_oversample_episodes": ("staleness.max_versions=0", "rollout.oversample_episodes=1.25"),
    "1": ("staleness.max_versions=1",),
    "4": ("staleness.max_versions=4",),
}
"""Name in the figures -> what differs."""
BASELINE = "0_whole_batch"
RECIPE = "async_latency"
SEEDS = (0, 1, 2)
LAST_STEPS = 5
"""Steps at the end whose mean reward is the final one."""


def end_to_end(overrides: Sequence[str]) -> dict[str, Any]:
    """Medians over the steps of a run (the grpo_arithmetic recipe unless `recipe=` is given).

    Raises RunError when the run fails.
    """
    recipes = [argument for argument in overrides if argument.startswith("recipe=")]
    recipe = recipes[-1].removeprefix("recipe=") if recipes else "grpo_arithmetic"
    others = [argument for argument in overrides if argument not in recipes]
    if not any(argument.startswith("run.steps=") for argument in others):
        others.append("run.steps=12")
    return summarize(run_recipe(recipe, others))


def run_recipe(recipe: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Train in a process and a directory of its own; the records of its steps. Raises RunError when the run fails."""
    with tempfile.TemporaryDirectory(prefix="rlflow-bench-") as folder:
        command = [sys.executable, "-m", "rlflow", "train", f"recipe={recipe}", *overrides]
        command += [f"run.dir={folder}/run", "run.checkpoint_every=0", "eval.every=0"]
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=E2E_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise too_slow("the measured run", E2E_TIMEOUT_S) from error
        if done.returncode:
            raise RunError(f"the measured run ended with exit code {done.returncode}; its message is above")
        return metrics.read(Path(folder) / "run" / "metrics.jsonl")


def too_slow(what: str, timeout_s: float) -> RunError:
    return RunError(f"{what} took longer than {timeout_s:g} s and was ended; try again when the machine is less busy")


def summarize(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps after the warm-up; times in seconds a step."""
    steady = records[WARM_UP_STEPS:]
    if not steady:
        raise RunError(f"a measurement needs more than {WARM_UP_STEPS} steps; got {len(records)}; raise run.steps")
    medians = {name: statistics.median(record[key] for record in steady) for name, key in _FIGURES.items()}
    return {"steps": len(steady), **medians}


def asynchrony(overrides: Sequence[str]) -> dict[str, Any]:
    """Samples a second and final reward at each setting: medians over the seeds, and the ratio to the baseline.

    Raises RunError when a run fails.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for seed in SEEDS:
        for name, settings in SETTINGS.items():
            found[name].append(figures_of(run_recipe(RECIPE, [*settings, f"run.seed={seed}", *overrides])))
    return compare(found)


def figures_of(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """One run: all samples over all seconds, so that the slowest steps count in full, and the medians of its steps."""
    steady = records[WARM_UP_STEPS:]
    seconds = sum(record["step_time"] for record in steady)
    samples = sum(record["throughput/samples_per_s"] * record["step_time"] for record in steady)
    final_reward = statistics.fmean(record["reward"] for record in records[-LAST_STEPS:])
    return {**summarize(records), "samples_per_s": samples / seconds, "final_reward": final_reward}


def compare(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The figures of each setting, and each one's speed over the baseline's."""
    base = statistics.median(run["samples_per_s"] for run in found[BASELINE])
    figures: dict[str, Any] = {"seeds": len(found[BASELINE])}
    for name, runs in found.items():
        speed = statistics.median(run["samples_per_s"] for run in runs)
        figures |= {
            f"{name}/samples_per_s": speed,
            f"{name}/speed_up": speed / base,
            f"{name}/step_time_s": statistics.median(run["step_time_s"] for run in runs),
            f"{name}/train_s": statistics.median(run["train_s"] for run in runs),
            f"{name}/final_reward": [round(run["final_reward"], 3) for run in runs],
        }
    return figures
