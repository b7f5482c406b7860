"""The figures of `rlflow bench async`, from records of runs made by hand."""

from __future__ import annotations

import pytest

from rlflow.telemetry import metrics
from rlflow.tools.bench.runs import SETTINGS, compare, figures_of


def records(step_times: list[float], samples: int) -> list[dict[str, float]]:
    zeros = {**dict.fromkeys(metrics.REQUIRED, 0.0), "weights/pause_s": 0.0}
    return [
        {**zeros, "step_time": time, "throughput/samples_per_s": samples / time, "reward": number / 10}
        for number, time in enumerate(step_times)
    ]


def test_slow_steps_count_in_full_and_the_warm_up_does_not() -> None:
    figures = figures_of(records([100.0, 50.0, 1.0, 1.0, 1.0, 5.0], samples=8))
    assert figures["samples_per_s"] == pytest.approx(4 * 8 / 8.0)
    assert figures["step_time_s"] == 1.0
    assert figures["final_reward"] == pytest.approx(0.3)


def test_each_setting_is_compared_with_the_synchronous_one_by_medians_over_seeds() -> None:
    speeds = {
        "0_whole_batch": [1.0, 2.0, 9.0],
        "0": [3.0, 3.0, 3.0],
        "0_oversample": [5.0, 4.0, 5.0],
        "0_oversample_episodes": [8.0, 8.0, 8.0],
        "1": [4.0, 1.0, 5.0],
        "4": [6.0, 6.0, 7.0],
    }
    assert list(SETTINGS) == list(speeds)
    other = {"step_time_s": 1.0, "train_s": 0.5, "final_reward": 0.1234}
    figures = compare({name: [{"samples_per_s": one, **other} for one in runs] for name, runs in speeds.items()})
    assert [figures[f"{name}/speed_up"] for name in speeds] == [1.0, 1.5, 2.5, 4.0, 2.0, 3.0]
    assert figures["4/final_reward"] == [0.123, 0.123, 0.123]
