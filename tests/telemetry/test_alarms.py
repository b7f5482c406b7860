"""Which alarm comes at which step: runs written down by hand, and one that was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlflow.telemetry.health import Alarm, Health

HEALTHY = {
    "reward": 0.5,
    "reward_std": 0.5,
    "frac_reward_zero_std": 0.25,
    "entropy": 1.5,
    "grad_norm": 2.0,
    "clip_fraction": 0.0,
    "completions/mean_length": 100.0,
    "completions/clipped_ratio": 0.1,
    "staleness/max": 0,
    "sampling/logp_difference_mean": 1e-5,
    "update_skipped": 0,
}
RISING = [0.2, 0.1, 0.3, 0.4, 0.3, 0.4, 0.6, 0.5, 0.7, 0.6, 0.8, 0.7, 0.9, 0.8, 0.9, 0.95, 0.9, 1.0, 0.95, 0.9]


def run(count: int, **columns: float | Sequence[float | None]) -> list[dict[str, Any]]:
    """Eight groups a step; the last value of a column stays."""

    def at(column: float | Sequence[float | None], index: int) -> float | None:
        return column[min(index, len(column) - 1)] if isinstance(column, Sequence) else column

    rows = [{name: at(column, index) for name, column in (HEALTHY | columns).items()} for index in range(count)]
    return [{**row, "step": step, "groups/trained": 8 * step} for step, row in enumerate(rows, start=1)]


def told(records: list[dict[str, Any]], **health: Any) -> list[tuple[int, str, str, int]]:
    return [brief(alarm) for alarm in Health(**health).replay(records)]


def brief(alarm: Alarm) -> tuple[int, str, str, int]:
    return (alarm.step, alarm.name, alarm.state, alarm.since)


def test_a_run_that_learns_has_no_alarm() -> None:
    """As the demo: cut replies at first, a policy that becomes sure because it is right, groups of equal reward."""
    spread = [(reward * (1 - reward)) ** 0.5 for reward in RISING]
    records = run(
        40,
        reward=RISING,
        reward_std=spread,
        frac_reward_zero_std=[0.4] * 10 + [0.6] * 5 + [0.8],
        entropy=[1.8, 2.1, 2.3, 1.8, 1.7, 1.6, 1.3, 1.2, 1.0, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05],
        grad_norm=[1.8, 1.7, 2.5, 1.4, 3.1, 2.4, 3.7, 1.1, 2.0, 5.9, 0.6],
        **{
            "completions/clipped_ratio": [0.67, 0.63, 0.69, 0.73, 0.61, 0.58, 0.55, 0.52, 0.36, 0.28, 0.3, 0.2, 0.05],
            "completions/mean_length": [14.1, 13.8, 14.4, 13.5, 12.3, 11.9, 9.6, 10.6, 8.9, 8.4],
        },
    )
    assert told(records) == []


def test_tasks_that_are_all_solved_are_no_alarm() -> None:
    records = run(30, reward=[*RISING, 1.0], reward_std=[0.4] * 20 + [0.0], frac_reward_zero_std=[0.5] * 20 + [1.0])
    assert told(records) == []


def test_a_step_without_a_signal_is_chance_and_six_are_not() -> None:
    assert told(run(12, frac_reward_zero_std=[0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 0.5])) == []
    (alarm,) = Health().replay(run(11, frac_reward_zero_std=[0.5] * 5 + [1.0], **{"completions/clipped_ratio": 0.25}))
    assert brief(alarm) == (11, "no_signal", "began", 6)
    assert alarm.what == "no episode of the last 6 steps was better than its group; 25% of the replies were cut off"
    assert "algorithm.dynamic_sampling=true" in alarm.remedy


def test_three_steps_without_a_signal_are_enough_when_the_reward_has_fallen() -> None:
    fallen = {"reward": [0.5] * 5 + [0.0], "frac_reward_zero_std": [0.5] * 5 + [1.0]}
    assert (8, "no_signal", "began", 6) in told(run(9, **fallen))


def test_few_groups_without_a_signal_are_chance_for_longer() -> None:
    records = [record | {"groups/trained": 2 * record["step"]} for record in run(12, frac_reward_zero_std=1.0)]
    assert told(records[:11]) == []
    assert told(records) == [(12, "no_signal", "began", 1)]


def test_groups_of_equal_reward_carry_a_signal_if_the_batch_is_compared() -> None:
    assert told(run(20, frac_reward_zero_std=1.0), within_groups=False) == []
    assert told(run(4, frac_reward_zero_std=1.0, reward_std=0.0), within_groups=False) == [
        (3, "constant_reward", "began", 1)
    ]


def test_a_constant_reward_is_told_and_told_again_when_it_stays() -> None:
    records = run(40, reward=0.0, reward_std=0.0, frac_reward_zero_std=1.0, grad_norm=0.0)
    health = Health()
    assert [brief(alarm) for alarm in health.replay(records)] == [
        (3, "constant_reward", "began", 1),
        (12, "constant_reward", "worse", 1),
    ]
    assert not health.has_signal


def test_replies_that_are_all_cut_off() -> None:
    assert told(run(9, **{"completions/clipped_ratio": 1.0})) == [(5, "truncation", "began", 1)]


def test_cut_replies_that_stay_or_become_more() -> None:
    assert told(run(40, **{"completions/clipped_ratio": 0.6})) == [(25, "truncation", "began", 21)]
    assert told(run(40, **{"completions/clipped_ratio": [0.1] * 20 + [0.5]})) == [(24, "truncation", "began", 20)]


def test_a_limit_of_turns_is_no_truncation() -> None:
    records = run(30, **{"completions/clipped_ratio": 1.0, "episodes/max_turns": 64})
    assert told(records) == []


def test_a_policy_that_is_sure_of_wrong_answers() -> None:
    records = run(
        30,
        entropy=[1.8] * 10 + [0.6] * 5 + [0.1],
        frac_reward_zero_std=[0.3] * 15 + [0.8],
        reward_std=0.45,
    )
    assert told(records) == [(20, "entropy_collapse", "began", 16)]


COLLAPSED = {"entropy": [1.8] * 20 + [0.1], "frac_reward_zero_std": [0.3] * 20 + [0.8], "reward_std": 0.45}


def test_with_a_teacher_groups_of_equal_reward_and_a_sure_policy_are_no_alarm() -> None:
    teacher = {"distil/kl": 0.2}
    assert told(run(30, frac_reward_zero_std=1.0, **teacher)) == []
    assert told(run(45, **COLLAPSED, **teacher)) == []
    unscored = run(30, reward=[None], reward_std=[None], frac_reward_zero_std=[None], **teacher)
    health = Health()
    assert health.replay(unscored) == [] and health.has_signal


def test_a_policy_that_is_sure_and_still_gets_better() -> None:
    rising = [0.02 * step for step in range(31)]
    assert told(run(31, reward=rising, **COLLAPSED)) == []
    assert told(run(45, reward=rising, **COLLAPSED)) == [(38, "entropy_collapse", "began", 34)], "it rises no more"


def test_a_policy_that_is_sure_and_gets_better_on_held_out_tasks() -> None:
    health = Health()
    evaluations = {10: 0.6, 20: 0.7, 30: 0.7}
    told = []
    for record in run(34, **COLLAPSED):
        told += health.step(record)
        if (step := record["step"]) in evaluations:
            told += health.evaluated({"step": step, "eval/reward": evaluations[step]})
    assert [(alarm.name, alarm.step) for alarm in told] == [("entropy_collapse", 31)], "the newest is no better"


@pytest.mark.parametrize(
    ("columns", "expected", "sign"),
    [
        ({"update_skipped": [0] * 6 + [1, 0]}, 7, "the gradient was not finite"),
        ({"entropy": [1.5, 1.5, 6.0]}, 5, "entropy rose from 1.5 to 6"),
        ({"reward": [0.2] * 10 + [0.9] * 10 + [0.1]}, 23, "the reward fell from 0.9 at step 15 to 0.42"),
        ({"grad_norm": [2.0] * 12 + [50.0]}, 15, "the gradient's norm rose from 2 to 50"),
        ({"clip_fraction": 0.4}, 5, "40% of the tokens are clipped"),
    ],
)
def test_signs_of_a_learning_rate_that_is_too_high(columns: dict[str, Any], expected: int, sign: str) -> None:
    (first, *_) = Health().replay(run(28, **columns))
    assert (first.name, first.step, first.state) == ("learning_rate", expected, "began")
    assert sign in first.what


def test_a_policy_that_breaks_in_its_first_updates() -> None:
    """As SmolLM2 did at 100 times its learning rate: replies without an end that are never right again."""
    broken = {"reward": [0.2, 0.1, 0.0], "reward_std": [0.4, 0.3, 0.0], "frac_reward_zero_std": [0.5, 0.7, 1.0]}
    (_, alarm) = Health().replay(run(6, entropy=[1.6, 1.5, 0.4], **broken))
    assert brief(alarm) == (5, "learning_rate", "began", 5)
    assert alarm.what == "since step 3 every reply gets 0, and entropy is 0.4, not 1.6"
    assert "learning_rate" not in {alarm.name for alarm in Health().replay(run(6, **broken))}


def test_noise_of_eight_tasks_a_step_is_no_drop() -> None:
    assert told(run(25, reward=[0.2] * 10 + [0.6, 0.9, 0.5, 0.9, 0.7, 0.9, 0.6, 0.4, 0.5, 0.5, 0.5])) == []


def test_kl() -> None:
    assert told(run(20, kl=[0.01] * 8 + [0.6])) == [(13, "kl", "began", 9)]
    assert told(run(20, kl=[None])) == []


def test_replies_that_grow_for_nothing() -> None:
    lengths = {"completions/mean_length": [100.0] * 10 + [150.0] * 5 + [250.0]}
    assert told(run(20, **lengths)) == [(18, "longer_replies", "began", 6)]
    assert told(run(20, reward=RISING, **lengths)) == []


def test_a_reward_that_rises_on_one_part_only() -> None:
    parts = {"rewards/right/mean": [0.5] * 10 + [0.2], "rewards/brief/mean": [0.1] * 10 + [0.9]}
    (alarm,) = Health().replay(run(24, reward=[0.6] * 10 + [1.1], **parts))
    assert (alarm.step, alarm.name) == (20, "one_component")
    assert "rewards/brief/mean 0.1 -> 0.9, rewards/right/mean 0.5 -> 0.2" in alarm.what
    both = {"rewards/right/mean": [0.2] * 10 + [0.5], "rewards/brief/mean": [0.1] * 10 + [0.9]}
    assert told(run(24, reward=[0.3] * 10 + [1.4], **both)) == []
    never = {"rewards/right/mean": 0.0, "rewards/format/mean": [0.1] * 10 + [0.9]}
    assert told(run(24, reward=[0.1] * 10 + [0.9], **never)) == [(20, "one_component", "began", 1)]
    full = {"rewards/right/mean": [0.1] * 10 + [0.9], "rewards/format/mean": 1.0}
    assert told(run(24, reward=[1.1] * 10 + [1.9], **full)) == []


def test_held_out_reward_that_falls_while_training_rises() -> None:
    def evaluations(*rewards: float) -> list[dict[str, Any]]:
        return [
            {"step": 10 * index, "eval/reward": reward, "eval/episodes": 200} for index, reward in enumerate(rewards)
        ]

    records = run(45, reward=[0.2] * 10 + [0.5] * 10 + [0.7] * 10 + [0.8])
    (alarm,) = Health().replay(records, evaluations(0.2, 0.4, 0.7, 0.5, 0.4))
    assert (alarm.step, alarm.name) == (40, "held_out_falls")
    assert "fell from 0.7 at step 20 to 0.4, while training's went from 0.5 to 0.8" in alarm.what
    assert Health().replay(records, evaluations(0.2, 0.4, 0.7, 0.65, 0.62)) == []


def test_engine_and_trainer_disagree() -> None:
    same = "sampling/logp_difference_mean"
    assert told(run(3, **{same: [1e-5, 0.5, 1e-5]})) == [(2, "mismatch", "began", 2)]
    assert told(run(3, **{same: 0.5}), has_dropout=True) == []  # the trainer computes another model on purpose
    assert told(run(3, **{same: 0.05}), dtype="bfloat16") == []


def test_engine_and_trainer_disagree_while_tokens_are_older() -> None:
    older = {"staleness/max": 2, "sampling/logp_difference_mean": 0.15}
    assert told(run(3, **older)) == []  # what two updates may do
    assert told(run(3, **older | {"sampling/logp_difference_mean": 0.6})) == [(1, "mismatch", "began", 1)]
    (alarm,) = Health().replay(run(3, **older, **{"sampling/current_logp_difference_mean": 0.02}))
    assert alarm.what == (
        "engine and trainer disagree at the same version: mean |log-probability difference| 0.02, expected below 0.001"
    )


def test_episodes_that_fail() -> None:
    ends = {"episodes/completed": 48, "episodes/environment_error": [0] * 5 + [16], "episodes/reward_timeout": 2}
    (alarm,) = Health().replay(run(12, **ends))
    assert (alarm.step, alarm.name) == (10, "failed_episodes")
    assert alarm.what == "27% of the episodes have no verdict (environment_error 80, reward_timeout 10)"


def test_an_alarm_that_comes_and_goes_is_told_less_and_less() -> None:
    """It ends after 5 quiet steps, then after 10, then after 20: one that flickers forever is told a few times."""
    records = run(600, **{"sampling/logp_difference_mean": ([0.5] + [1e-5] * 6) * 90})
    assert told(records) == [
        (1, "mismatch", "began", 1),
        (6, "mismatch", "ended", 1),
        (8, "mismatch", "began", 8),
    ]


def test_a_run_of_any_length_keeps_few_records() -> None:
    health = Health()
    health.replay(run(300))
    assert len(health._seen.records) == 50
