"""Benchmarks by name, on rows of our own that have their columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import ENVIRONMENTS, load_environment
from rlflow.envs.base import EnvironmentSpec
from rlflow.envs.benchmarks.env import BENCHMARKS, INSTRUCTION
from rlflow.envs.rewards.math import math
from rlflow.errors import ConfigError
from rlflow.tools.env.check import NONSENSE

GSM8K = [
    {
        "question": "A ferry carries 48 cars on each of 25 trips. How many cars is that?",
        "answer": "On 25 trips it carries 25*48 = <<25*48=1200>>1,200 cars.\n#### 1,200",
    },
    {
        "question": "Ada had 3 coins and owes her brother 10. How many coins does she have if she counts the debt?",
        "answer": "She has 3-10 = <<3-10=-7>>-7 coins.\n#### -7",
    },
]
MATH500 = [
    {
        "problem": "A bag holds $6$ red balls and $2$ blue ones. What share of them is red?",
        "solution": "Of $8$ balls $6$ are red, so it is $\\boxed{\\frac{3}{4}}$.",
        "answer": "\\frac{3}{4}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    {
        "problem": "Write the point $(0, 2)$ in polar coordinates $(r, \\theta)$.",
        "solution": "It is 2 up, so it is $\\boxed{\\left( 2, \\frac{\\pi}{2} \\right)}$.",
        "answer": "\\left( 2, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/2.json",
    },
]
AIME24 = [
    {
        "id": 60,
        "problem": "Find the remainder when $2^{10}$ is divided by $991$.",
        "solution": "$1024 - 991 = \\boxed{033}$",
        "answer": "033",
        "url": "https://example.org/1",
        "year": "2024",
    }
]
AIME25 = [{"problem": "Find the sum of all divisors of $12$.", "answer": "28", "id": "0"}]
OTHERS = {
    "gsm8k": ["So it is 1200.", "$-7$"],
    "math500": ["It is $\\frac34$, which is 0.75: \\boxed{0.75}", "\\boxed{(2, \\pi/2)}"],
    "aime24": ["<think>33?</think> \\boxed{33}"],
    "aime25": ["The sum is \\boxed{28}."],
}
"""Right replies that are written otherwise than the answers."""
ROWS = {"gsm8k": GSM8K, "math500": MATH500, "aime24": AIME24, "aime25": AIME25}


def spec_of(name: str, **args: Any) -> EnvironmentSpec:
    return load_environment(EnvConfig(name=name, args=args), RewardConfig())


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_solutions_score_1_and_nonsense_0(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, evaluation_path=write_rows(tmp_path / "rows.jsonl", ROWS[name]))
    assert spec.reward is math and spec.expert is not None and spec.evaluation_tasks is not None
    tasks = spec.evaluation_tasks()
    assert len(tasks) == len(ROWS[name])
    for task, row, other in zip(tasks, ROWS[name], OTHERS[name], strict=True):
        wrong = [NONSENSE, "", "\\boxed{}", "\\boxed{41}", task.prompt[-1]["content"].replace("$", "")]
        right = [spec.expert(task, task.prompt), other, row.get("solution", row["answer"])]
        assert [math(reply, task.answer) for reply in right] == [1.0] * len(right)
        assert [math(reply, task.answer) for reply in wrong] == [0.0] * len(wrong)


def test_a_task_is_the_problem_with_an_instruction_and_the_final_answer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GSM8K)
    spec = spec_of("gsm8k", path=path, evaluation_path=path)
    assert (spec.reply_tokens, spec.evaluation_tasks) != (0, None)
    first, second = spec.tasks()
    assert [message["role"] for message in first.prompt] == ["user"]
    assert first.prompt[0]["content"] == f"{GSM8K[0]['question']}\n\n{INSTRUCTION}"
    assert (first.answer, second.answer) == ("1,200", "-7")
    assert spec.expert is not None and spec.expert(first, first.prompt) == GSM8K[0]["answer"] + "\n\\boxed{1,200}"
    plain, _ = spec_of("gsm8k", path=path, instruction="", system_prompt="Be brief.").tasks()
    assert [message["content"] for message in plain.prompt] == ["Be brief.", GSM8K[0]["question"]]
    spec = spec_of("math500", evaluation_path=write_rows(tmp_path / "math.jsonl", MATH500))
    assert spec.evaluation_tasks is not None
    assert [task.kind for task in spec.evaluation_tasks()] == ["Prealgebra", "Precalculus"]


@pytest.mark.parametrize(
    ("name", "split", "own"),
    [("gsm8k", "test", "question"), ("math500", "test", "problem"), ("aime24", "train", "problem")],
)
def test_a_folder_is_read_by_the_benchmarks_own_split(name: str, split: str, own: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import datasets

    rows = datasets.Dataset.from_list(ROWS[name])
    other = datasets.Dataset.from_list([{own: "What is 1 + 1?", "answer": "2"}])
    datasets.DatasetDict({split: rows, "other": other}).save_to_disk(str(tmp_path / "copy"))
    tasks = spec_of(name, evaluation_path=str(tmp_path / "copy")).evaluation_tasks
    others = spec_of(name, evaluation_path=f"{tmp_path / 'copy'}:other").evaluation_tasks
    assert tasks is not None and others is not None
    assert (len(tasks()), [task.answer for task in others()]) == (len(ROWS[name]), ["2"])


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_cannot_be_had_are_one_line_with_a_cure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    tasks = spec_of(name).evaluation_tasks
    assert tasks is not None
    message = (
        r"^env.args.evaluation_path=\S+ cannot be loaded by `datasets`: .* a copy goes by env.args.evaluation_path="
    )
    with pytest.raises(ConfigError, match=message) as raised:
        tasks()
    assert "\n" not in str(raised.value)


def test_what_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(BENCHMARKS) == set(ROWS)
    with pytest.raises(ConfigError, match="env.name=aime24 has no tasks to train on, because it is there to measure"):
        spec_of("aime24").tasks()
    path = write_rows(tmp_path / "rows.jsonl", [{"problem": "2 + 2 =", "result": "4"}])
    tasks = spec_of("aime25", evaluation_path=path).evaluation_tasks
    assert tasks is not None
    with pytest.raises(ConfigError, match="task rows/1 has no answer; give each row an `answer`; its columns are prob"):
        tasks()
    with pytest.raises(ConfigError, match="env.name=math50 is not an environment; did you mean math500"):
        ENVIRONMENTS.find("math50")
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"needs math-verify; pip install rlflow\[math\]"):
        spec_of("gsm8k")
