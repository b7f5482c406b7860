"""`rlflow bench async`: what asynchrony gains where episodes wait, as ratios within one benchmark.

The same tiny training run, with two engines and an environment that waits, at each setting in turn and seed after seed,
so that what else the machine does meets all settings alike.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from rlflow.tools.bench.end_to_end import WARM_UP_STEPS, run_recipe, summarize

SETTINGS: dict[str, tuple[str, ...]] = {
    "0_whole_batch": ("staleness.max_versions=0", "trainer.streaming=false"),
    "0": ("staleness.max_versions=0",),
    "1": ("staleness.max_versions=1",),
    "4": ("staleness.max_versions=4",),
}
"""Name in the figures -> what differs."""
BASELINE = "0_whole_batch"
RECIPE = "async_latency"
SEEDS = (0, 1, 2)
LAST_STEPS = 5
"""Steps at the end whose mean reward is the final one."""


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
