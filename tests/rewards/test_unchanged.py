"""Functions of TRL and verl, unchanged, over the rows that they were written for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlflow.envs.dataset.env import load
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.score import score
from rlflow.types import EpisodeEnd, Message, Task, Transcript


def task_of(folder: Path, row: dict[str, Any]) -> Task:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    (task,) = load(path=str(path)).tasks()
    return task


def reply(task: Task, text: str, **changes: Any) -> Transcript:
    fields: dict[str, Any] = {
        "task": task,
        "prompt": task.prompt,
        "completion": (Message(role="assistant", content=text),),
        "environment_reward": None,
        "end": EpisodeEnd.COMPLETED,
        "num_sampled": len(text),
    }
    return Transcript(**{**fields, **changes})


async def rewards_of(function: Callable[..., Any], *transcripts: Transcript) -> list[float | None]:
    verdicts = await score([ChosenReward(name="mine", function=function)], 10.0, transcripts)
    return [verdict.reward for verdict in verdicts]


async def test_trl_gets_text_for_a_prompt_that_is_text(tmp_path: Path) -> None:
    def lengths(prompts: list[str], completions: list[str], **columns: Any) -> list[int]:
        assert prompts == ["Name a city."] * len(completions)
        return [len(each) for each in completions]

    task = task_of(tmp_path, {"prompt": "Name a city."})
    assert await rewards_of(lengths, reply(task, "Paris"), reply(task, "Rio")) == [5.0, 3.0]


async def test_trl_gets_messages_for_a_prompt_of_messages(tmp_path: Path) -> None:
    def lengths(prompts: list[list[Message]], completions: list[list[Message]], **columns: Any) -> list[int]:
        assert prompts[0][-1]["content"] == "Name a city."
        return [len(each[0]["content"]) for each in completions]

    task = task_of(tmp_path, {"prompt": [{"role": "user", "content": "Name a city."}]})
    assert await rewards_of(lengths, reply(task, "Paris"), reply(task, "Rio")) == [5.0, 3.0]


async def test_trl_compares_numbers_with_the_numbers_of_the_file(tmp_path: Path) -> None:
    def right(completions: list[str], answer: list[int], **columns: Any) -> list[float]:
        return [float(int(each) == value) for each, value in zip(completions, answer, strict=True)]

    task = task_of(tmp_path, {"prompt": "2 + 3 =", "answer": 5})
    assert await rewards_of(right, reply(task, "5"), reply(task, "6")) == [1.0, 0.0]


@pytest.mark.parametrize("column", [{"reward_model": {"ground_truth": 5}}, {"answer": 5}, {"label": 5}])
async def test_verl_compares_numbers_with_the_numbers_of_the_file(tmp_path: Path, column: dict[str, Any]) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: int, extra_info: Any = None) -> float:
        return float(int(solution_str) == ground_truth)

    task = task_of(tmp_path, {"prompt": "2 + 3 =", "data_source": "sums", **column})
    assert await rewards_of(compute_score, reply(task, "5")) == [1.0]


async def test_verl_compares_with_its_own_column_before_any_other(tmp_path: Path) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(solution_str == ground_truth)

    row = {"prompt": "2 + 3 =", "answer": "It is 5. #### 5", "reward_model": {"ground_truth": "5"}}
    assert await rewards_of(compute_score, reply(task_of(tmp_path, row), "5")) == [1.0]


async def test_verl_sees_the_whole_response_and_what_the_environment_said(tmp_path: Path) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        assert solution_str == "search: capital\nParis is the capital.\nParis"
        return 1.0

    messages = (
        Message(role="assistant", content="search: capital"),
        Message(role="tool", content="Paris is the capital.", tool_call_id="call_0"),
        Message(role="assistant", content="Paris"),
    )
    task = task_of(tmp_path, {"prompt": "Which city?", "answer": "Paris"})
    assert await rewards_of(compute_score, reply(task, "", completion=messages)) == [1.0]


def best_of(completions: Sequence[str], **columns: Any) -> list[float]:
    longest = max(map(len, completions))
    return [float(len(each) == longest) for each in completions]


async def test_a_function_that_compares_gets_the_group(tmp_path: Path) -> None:
    task = task_of(tmp_path, {"prompt": "Write."})
    assert await rewards_of(best_of, *(reply(task, text) for text in ("a", "abc", "ab"))) == [0.0, 1.0, 0.0]


async def test_the_example_of_the_documentation_compares_a_group(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    (example,) = [block for block in page.split("```python\n")[1:] if block.startswith("def shortest")]
    names: dict[str, Any] = {}
    exec(example.partition("```")[0], names)
    task = task_of(tmp_path, {"prompt": "Write."})
    cut_off = reply(task, "a", end=EpisodeEnd.TRUNCATED_LENGTH)
    assert await rewards_of(names["shortest"], cut_off, reply(task, "ab"), reply(task, "abc")) == [0.0, 1.0, 0.0]
