"""The benchmark of environments: its figures, and a small round of it."""

from __future__ import annotations

import pytest

from rlflow.cli import main
from rlflow.tools.bench import envs
from rlflow.types import EpisodeEnd, EpisodeSummary, PlayedGroup


def episode(end: EpisodeEnd, late_s: float) -> EpisodeSummary:
    return EpisodeSummary(
        end=end,
        reward=1.0,
        num_prompt_tokens=0,
        num_completion_tokens=0,
        num_loss_tokens=0,
        oldest_version=0,
        newest_version=0,
        metrics={"late_1": late_s, "late_2": late_s, "turns": 4.0},
    )


def test_figures_count_what_was_lost_and_how_late_both_loops_were() -> None:
    episodes = [episode(EpisodeEnd.COMPLETED, 0.001), episode(EpisodeEnd.STEP_TIMEOUT, 0.003)]
    group = PlayedGroup(group_id=0, episodes=episodes, payloads=[], num_bytes=0)
    figures = envs.figures([group], [0.002] * 3, seconds=4.0, num_open=1)
    assert figures == {
        "episodes": 2,
        "seconds": 4.0,
        "episodes_per_s": 0.5,
        "steps_per_s": 2.0,
        "runner_lag_p50_ms": 2.0,
        "runner_lag_p99_ms": 2.0,
        "runner_lag_max_ms": 2.0,
        "environments_lag_p50_ms": 2.0,
        "environments_lag_p99_ms": pytest.approx(3.0),
        "environments_lag_max_ms": 3.0,
        "lost": 1,
        "open_at_end": 1,
    }


def test_bench_envs_takes_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "envs", "run.steps=3"]) == 2
    error = "rlflow: error: bench envs takes no settings; got run.steps=3; leave them out\n"
    assert capsys.readouterr().err == error


@pytest.mark.slow
async def test_no_episode_is_lost_and_none_stays_open() -> None:
    figures = await envs.measure(16, tool_s=(0.0, 0.01))
    assert (figures["episodes"], figures["lost"], figures["open_at_end"]) == (16, 0, 0)
