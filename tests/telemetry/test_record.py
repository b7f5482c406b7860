"""Numbers of a step from its episodes."""

from __future__ import annotations

from dataclasses import replace

from fakes import make_episode

from rlflow.telemetry.record import rewards_of


def test_each_reward_has_mean_and_deviation_as_in_trl() -> None:
    first = replace(make_episode(1.5, 0), metrics={"rewards/math": 1.0, "rewards/brief/words": 4.0, "turns": 1.0})
    second = replace(make_episode(0.5, 0), metrics={"rewards/math": 0.0, "turns": 2.0})
    assert rewards_of([first, second]) == {
        "reward": 1.0,
        "reward_std": 0.5,
        "rewards/brief/words/mean": 4.0,
        "rewards/brief/words/std": 0.0,
        "rewards/math/mean": 0.5,
        "rewards/math/std": 0.5,
        "episode/turns": 1.5,
    }
