"""What a reward function is given, what its answer means, and how several make one verdict. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transcripts import QUESTION, TASK, said, task_with

from rlflow.errors import ConfigError
from rlflow.rewards.call import (
    ChosenReward,
    Log,
    MissingColumn,
    Shape,
    call,
    combine,
    needed_columns,
    shape_of,
    verdict_of,
    verdicts_of,
)
from rlflow.types import EpisodeEnd, Json, Transcript, Verdict


def given(function: Callable[..., Any], transcript: Transcript | None = None, **args: object) -> Any:
    """What the function returns, which in these tests is what it was given."""
    return call(function, [transcript or said("a", "4")], args, 10.0, Log(episodes=[{}]))


def test_shapes_are_told_by_parameter_names() -> None:
    assert shape_of(lambda task, completion: 0.0) is Shape.EPISODE
    assert shape_of(lambda **columns: 0.0) is Shape.EPISODE
    assert shape_of(lambda completions, **columns: 0.0) is Shape.GROUP
    assert shape_of(lambda completion_ids, **columns: 0.0) is Shape.GROUP
    assert shape_of(lambda data_source, solution_str, ground_truth, extra_info=None: 0.0) is Shape.SOLUTION
    assert shape_of(partial(lambda completion, limit: 0.0, limit=3)) is Shape.EPISODE


def needs_worlds(environments: list[Any], **columns: Any) -> list[float]:
    return [0.0]


def looks_at_the_trainer(completions: list[str], trainer_state: Any = None) -> list[float]:
    return [0.0]


class Constructed:
    def __init__(self, completion: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda task, text, /: 0.0, "cannot be called: task has no name to callers, and arguments are given by name"),
        (needs_worlds, "cannot be called: there is no environments: rewards run apart from environments; let `step`"),
        (looks_at_the_trainer, "cannot be called: there is no trainer_state: rewards run apart from the trainer"),
        (Constructed, "Constructed is a class; give a function, or an object that can be called"),
        (min, "cannot read the signature of min; accepted are:"),
    ],
)
def test_what_cannot_be_called_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(function)


def test_a_function_gets_what_it_asks_for() -> None:
    episode = said("a", "4", end=EpisodeEnd.MAX_TURNS, environment_reward=0.5, num_sampled=7)
    assert given(lambda task, prompt: (task, prompt), episode) == (TASK, [QUESTION])
    assert given(lambda completion, answer: (completion, answer), episode) == ("4", "4")
    assert given(lambda messages: [message["content"] for message in messages], episode) == ["a", "go on", "4"]
    found = given(
        lambda end, num_sampled, environment_reward, timeout_s: (end, num_sampled, environment_reward), episode
    )
    assert found == (EpisodeEnd.MAX_TURNS, 7, 0.5)
    assert given(lambda level: level) == 3
    assert given(lambda tools_used=0: tools_used) == 0
    assert given(lambda **everything: sorted(everything)) == [
        *("answer", "completion", "end", "environment_reward", "level", "messages", "num_sampled", "prompt", "task"),
        "timeout_s",
    ]


def test_an_answer_may_be_a_column_and_names_that_are_known_win_over_columns() -> None:
    task = replace(TASK, answer=None, data={"answer": [1, 2], "completion": "column", "task": "column"})
    episode = said("4", task=task)
    assert given(lambda answer, completion: (answer, completion), episode) == ([1, 2], "4")


def test_arguments_win_over_columns() -> None:
    assert given(lambda level: level, level=5) == 5
    assert given(lambda **everything: everything["level"], level=5) == 5


def test_a_parameter_that_nothing_fills_is_named() -> None:
    with pytest.raises(MissingColumn, match="^parameter 'colour' is none of task, .* no such column; it has level$"):
        given(lambda completion, colour: 0.0)
    assert needed_columns(lambda completion, colour, size, shade=1, **rest: 0.0, {"size": 2}) == ["colour"]


def trl(prompts: Any, completions: Any, completion_ids: Any, log_metric: Any, log_extra: Any, **columns: Any) -> Any:
    log_metric("words", 3)
    log_extra("parsed", ["x", 7])
    assert (prompts, completion_ids) == ([[QUESTION]] * 2, [[8, 9], [9]])
    assert (columns["answer"], columns["level"]) == (["4", "4"], [3, 3])
    return [reply[-1]["content"] == right for reply, right in zip(completions, columns["answer"], strict=True)]


def test_trl_gets_the_group_and_its_callables() -> None:
    log = Log(episodes=[{}, {}])
    group = [said("a", "4", completion_ids=np.array([8, 9])), said("5", completion_ids=np.array([9]))]
    assert verdicts_of(call(trl, group, {}, 10.0, log), log) == [
        Verdict(reward=1.0, metrics={"words": 3.0}),
        Verdict(reward=0.0, metrics={"words": 3.0, "parsed": 7.0}),
    ]


def test_a_function_of_a_group_may_ask_for_what_others_ask_for() -> None:
    def ours(completions: Any, messages: Any, end: Any, environment_reward: Any, num_sampled: Any, task: Any) -> Any:
        return completions == messages, end, environment_reward, num_sampled, task

    group = [said("4", environment_reward=0.5, num_sampled=7), said("5", end=EpisodeEnd.MAX_TURNS, num_sampled=9)]
    ends = [EpisodeEnd.COMPLETED, EpisodeEnd.MAX_TURNS]
    expected = (True, ends, [0.5, None], [7, 9], [TASK, TASK])
    assert call(ours, group, {}, 10.0, Log(episodes=[{}, {}])) == expected


def test_a_column_wins_over_what_only_rlflow_gives_a_group() -> None:
    episode = said("4", task=task_with(end="column", completions="column"))
    assert given(lambda completions, end: (completions, end), episode) == ([list(episode.completion)], ["column"])


@pytest.mark.parametrize(
    ("answer", "data", "expected"),
    [
        ("4", {"reward_model": {"ground_truth": "5"}}, "5"),
        ("4", {}, "4"),
        (None, {"reward_model": {"ground_truth": "5"}}, "5"),
        (None, {}, None),
    ],
)
def test_ground_truth_is_the_nested_column_else_the_answer(
    answer: str | None, data: dict[str, Json], expected: str | None
) -> None:
    def verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Any:
        return data_source, solution_str, ground_truth, extra_info

    task = task_with(answer, data_source="mine", extra_info={"split": "x"}, **data)
    assert given(verl, said("a", "reply", task=task)) == ("mine", "a\ngo on\nreply", expected, {"split": "x"})


ONES = [1, 1.0, True, np.float64(1), np.int64(1), np.bool_(True), Fraction(1), torch.tensor(1.0), np.array(1.0)]


@pytest.mark.parametrize("value", [*ONES, {"score": np.float32(1)}, {"reward": 1}])
def test_numbers_of_every_type_are_rewards(value: object) -> None:
    verdict = verdict_of(value)
    assert (verdict.reward, type(verdict.reward)) == (1.0, float)


@pytest.mark.parametrize("value", [[True], (1,), np.array([1.0]), torch.tensor([1.0]), [torch.tensor(1.0)]])
def test_lists_of_every_type_are_rewards_of_a_group(value: object) -> None:
    assert verdicts_of(value, Log(episodes=[{}])) == [Verdict(reward=1.0)]


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (np.float32("inf"), "a reward is None, or a number from -1e+15 to 1e+15; got inf (float)"),
        (float("nan"), "a reward is None, or a number from -1e+15 to 1e+15; got nan (float)"),
        ("1", "a reward is None, or a number from -1e+15 to 1e+15; got '1' (str)"),
        ([0.5], "a reward is None, or a number from -1e+15 to 1e+15; got [0.5] (list)"),
        (np.array([0.5]), "a reward is None, or a number from -1e+15 to 1e+15; got [0.5] (list)"),
        ({"x": 2, "y": 3}, 'a dict needs the key "score" or "reward"; got the keys x, y'),
        ({"score": "1"}, "a reward is None, or a number from -1e+15 to 1e+15; got '1' (str)"),
        (1e308, "a reward is None, or a number from -1e+15 to 1e+15; got 1e+308 (float)"),
        (-1.1e15, "a reward is None, or a number from -1e+15 to 1e+15; got -1100000000000000.0 (float)"),
    ],
)
def test_anything_else_is_invalid(value: object, detail: str) -> None:
    assert verdict_of(value) == Verdict(reward=None, end=EpisodeEnd.REWARD_INVALID, detail=detail)


@pytest.mark.parametrize(
    ("value", "shown"), [([1.0], "[1.0] (list)"), (1.0, "1.0 (float)"), ("12", "'12' (str)"), ([], "[] (list)")]
)
def test_an_answer_for_another_number_of_episodes_is_invalid_for_all(value: object, shown: str) -> None:
    what = "a function with `completions` returns a list with one number for each of the 2 episodes"
    verdict = Verdict(reward=None, end=EpisodeEnd.REWARD_INVALID, detail=f"{what}; got {shown}")
    assert verdicts_of(value, Log(episodes=[{}, {}])) == [verdict] * 2


def test_one_wrong_number_for_a_group_costs_one_episode() -> None:
    first, second, third = verdicts_of([0.5, float("nan"), None], Log(episodes=[{}, {}, {}]))
    assert first == Verdict(reward=0.5)
    assert (second.end, third.end) == (EpisodeEnd.REWARD_INVALID, EpisodeEnd.NO_VERDICT)


@pytest.mark.parametrize("value", [10**400, "x" * 10_000_000, [0] * 1_000_000, {str(key): 0 for key in range(10_000)}])
def test_what_is_too_large_is_invalid_and_said_in_few_words(value: object) -> None:
    verdict = verdict_of(value)
    assert verdict.end is EpisodeEnd.REWARD_INVALID
    assert len(verdict.detail) < 400


def test_metrics_are_finite_numbers_and_not_without_end() -> None:
    said_beside = {"score": 1.0, "reward": 2.0, "right": True, "text": "x", "loss": float("nan"), "huge": 1e308}
    logged = {"words": 3, "none": None}
    assert verdict_of(said_beside, logged).metrics == {"words": 3.0, "reward": 2.0, "right": 1.0}
    assert len(verdict_of({"score": 1.0, **{str(key): 0 for key in range(1000)}}).metrics) == 64


def rewards(*weights: float) -> list[ChosenReward]:
    return [ChosenReward(name=name, function=None, weight=weight) for name, weight in zip("abc", weights, strict=False)]


SILENT = Verdict(reward=None, end=EpisodeEnd.NO_VERDICT, detail="returned None", metrics={"seen": 1.0})
LATE = Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail="too late")


def test_the_reward_is_the_weighted_sum_of_those_that_have_a_say() -> None:
    verdicts = [Verdict(reward=1.0, metrics={"x": 5.0}), SILENT, Verdict(reward=0.5)]
    assert combine(rewards(1.0, 9.0, -0.5), verdicts) == Verdict(
        reward=0.75, metrics={"rewards/a": 1.0, "rewards/a/x": 5.0, "rewards/b/seen": 1.0, "rewards/c": 0.5}
    )


def test_what_no_function_with_a_weight_has_a_say_on_has_no_verdict() -> None:
    verdict = combine(rewards(1.0, 0.0), [SILENT, Verdict(reward=1.0)])
    assert (verdict.reward, verdict.end, verdict.detail) == (None, EpisodeEnd.NO_VERDICT, "a: returned None")
    assert verdict.metrics == {"rewards/a/seen": 1.0, "rewards/b": 1.0}


def test_a_failure_of_one_is_the_failure_of_all() -> None:
    verdict = combine(rewards(1.0, 0.0), [Verdict(reward=1.0), LATE])
    assert verdict == Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail="b: too late")


def test_a_sum_that_is_too_large_is_invalid() -> None:
    verdict = combine(rewards(10.0), [Verdict(reward=1e15)])
    sum_ = "the weighted sum of the rewards is 1e+16; a reward is None, or a number from -1e+15 to 1e+15"
    assert verdict == Verdict(reward=None, end=EpisodeEnd.REWARD_INVALID, detail=sum_)
