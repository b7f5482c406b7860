"""reasoning-gym's data sets, mixes, levels and scores."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from playing import play

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.answers import tagged_answer
from rlflow.envs.base import EnvironmentSpec
from rlflow.envs.reasoning_gym.env import score
from rlflow.errors import ConfigError
from rlflow.types import Task


def gym(**arguments: Any) -> EnvironmentSpec:
    spec = load_environment(EnvConfig(name="reasoning_gym", args=arguments), RewardConfig())
    return pickle.loads(pickle.dumps(spec))


def answer(task: Task) -> str:
    return f"<think>It may be <answer>0</answer>.</think>It is <answer> {task.answer} </answer>"


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "countdown", "word_sorting", "maze"])
async def test_twenty_episodes(dataset: str) -> None:
    spec = gym(dataset=dataset, size=20)
    assert spec.reward is score
    rewards = []
    for number, task in enumerate(spec.tasks()):
        reply = answer(task) if number % 2 else "I do not know"
        episode = await play(spec, task, lambda _, reply=reply: reply)
        assert [message["role"] for message in episode.messages] == ["system", "user", "assistant"]
        rewards.append(score(task, episode.messages[-1]["content"]))
    assert rewards == [0.0, 1.0] * 10


def test_without_a_system_prompt_the_whole_reply_is_the_answer() -> None:
    spec = gym(dataset="chain_sum", options={"max_terms": 2, "min_digits": 1, "max_digits": 1}, prompt_style="", size=3)
    for task in spec.tasks():
        assert [message["role"] for message in task.prompt] == ["user"]
        right = str(task.answer)
        assert spec.expert is not None and spec.expert(task, []) == right
        padded = f"it is {right}."
        assert [score(task, text) for text in (f" {right}\n", padded, "I do not know")] == [
            1.0,
            len(right) / len(padded),  # reasoning-gym's credit for a text that contains the answer
            0.0,
        ]


def test_tasks_are_the_same_each_time_and_held_out_ones_are_others() -> None:
    spec = gym(dataset="gcd", size=5, seed=3)
    assert [task.id for task in spec.tasks()] == [f"gcd/3/{index}" for index in range(5)]
    assert spec.tasks() == gym(dataset="gcd", size=5, seed=3).tasks()
    assert spec.evaluation_tasks is not None
    assert not {task.prompt for task in map(freeze, spec.evaluation_tasks())} & {
        task.prompt for task in map(freeze, spec.tasks())
    }


def freeze(task: Task) -> Any:
    return replace(task, prompt=tuple(message["content"] for message in task.prompt))  # pyright: ignore


def test_a_mix_draws_by_weight_and_keeps_options() -> None:
    mix = {"chain_sum": {"weight": 3, "options": {"min_terms": 2, "max_terms": 2}}, "gcd": None}
    tasks = gym(mix=mix, size=400).tasks()
    counts = Counter(task.kind for task in tasks)
    assert set(counts) == {"chain_sum", "gcd"}
    assert 270 <= counts["chain_sum"] <= 330, "300, 3 standard deviations of 8.7 either side"
    assert all(
        task.prompt[1]["content"].count(" + ") + task.prompt[1]["content"].count(" - ") == 1
        for task in tasks
        if task.kind == "chain_sum"
    )
    assert {score(task, answer(task)) for task in tasks[:20]} == {1.0}


def test_levels_are_kinds() -> None:
    tasks = gym(dataset="chain_sum", levels=[0, 3], size=200).tasks()
    assert {task.kind for task in tasks} == {"chain_sum/level_0", "chain_sum/level_3"}
    longest = {
        kind: max(len(task.prompt[1]["content"]) for task in tasks if task.kind == kind)
        for kind in ("chain_sum/level_0", "chain_sum/level_3")
    }
    assert longest["chain_sum/level_0"] < longest["chain_sum/level_3"]
    assert {score(task, answer(task)) for task in tasks[:20]} == {1.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>1</answer> no, <answer>\n 5\n6 </answer>", "5\n6"),
        ("<answer></answer>", ""),
        ("5", None),
        ("<answer>5", None),
    ],
)
def test_answer_of(text: str, expected: str | None) -> None:
    assert tagged_answer(text) == expected


def test_an_answer_that_cannot_be_read_is_wrong() -> None:
    (task,) = gym(dataset="prime_factorization", size=1).tasks()
    assert score(task, "<answer>I do not know</answer>") == 0.0
    assert score(task, answer(task)) == 1.0


def test_a_question_that_changed_is_an_error() -> None:
    (task,) = gym(dataset="gcd", size=1).tasks()
    other = replace(task, data={**task.data, "question": "another one"})
    with pytest.raises(ValueError, match="made another question for gcd/0/0 .*PYTHONHASHSEED=0"):
        score(other, answer(task))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "need one of `dataset` and `mix`"),
        ({"dataset": "gcd", "mix": {"gcd": {}}}, "need one of `dataset` and `mix`"),
        ({"dataset": "gdc"}, "gdc is not a data set of reasoning-gym; did you mean gcd"),
        ({"dataset": "composite"}, "give the data sets of a mix as env.args.mix"),
        (
            {"dataset": "gcd", "options": {"min_numbrs": 2}},
            "min_numbrs is not an option of gcd.*did you mean min_numbers",
        ),
        ({"dataset": "gcd", "options": {"min_numbers": 0}}, "options of gcd: "),
        ({"mix": {"gcd": {"wait": 1}}}, "takes a positive `weight` and `options` for each data set"),
        ({"mix": {"gcd": {"weight": 0}}}, "takes a positive `weight` and `options` for each data set"),
        ({"mix": {"gcd": {}}, "options": {"min_numbers": 2}}, "env.args.options belong to `dataset`"),
        ({"dataset": "chain_sum", "levels": [99]}, "levels of chain_sum go from 0 to 10; got 99"),
        ({"dataset": "gcd", "size": 0}, "must be positive; got 0 and 64"),
        ({"dataset": "gcd", "prompt_style": "defalt"}, "is not a system prompt of reasoning-gym; there are"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gym(**arguments)
