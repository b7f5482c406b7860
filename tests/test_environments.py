"""Finding an environment, refusing rows that cannot be used, and the arithmetic reward."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rlflow.config import Config, EnvConfig, RewardConfig
from rlflow.environments import checked_tasks, held_out_tasks, load_environment
from rlflow.envs.arithmetic.reward import is_right, last_number, share_of_digits
from rlflow.envs.base import SingleTurn
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

SUM = Message(role="user", content="2 + 3 =")
SCORE = "rlflow.envs.arithmetic.reward:is_right"


def task(answer: str | None, name: str = "t", prompt: tuple[Message, ...] = (SUM,)) -> Task:
    return Task(id=name, prompt=prompt, answer=answer)


def load(name: str, reward: str | None = None, **arguments: Any) -> list[Task]:
    return list(load_environment(EnvConfig(name=name, args=arguments), RewardConfig(function=reward)).tasks())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", "5"),
        ("The answer is 12.", "12"),
        ("2 + 3 = 5", "5"),
        ("10-4", "4"),
        ("10 - 4 = -6", "-6"),
        ("it is -7!", "-7"),
        ("it is \u22127", "-7"),
        ("(5)-2", "2"),
        ("1,234.50 dollars", "1234.50"),
        ("1, 2, 3", "3"),
        ("x = .5", "0.5"),
        ("1e3", "1000"),
        ("3 apples", "3"),
    ],
)
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_no_number() -> None:
    assert last_number("five") is None


@pytest.mark.parametrize(
    ("answer", "reply", "reward"),
    [
        ("5", "5", 1.0),
        ("5", "2 + 3 = 5.0", 1.0),
        ("1000", "1,000", 1.0),
        ("-4", "-4", 1.0),
        ("-4", "4", 0.0),
        ("5", "5 or 6", 0.0),
        ("5", "five", 0.0),
        ("5", "", 0.0),
        ("2/3", " 2/3\n", 1.0),
        ("2/3", "3", 0.0),
        ("apple pear", "apple pear", 1.0),
        ("apple pear", "pear", 0.0),
        (None, "5", None),
    ],
)
def test_is_right(answer: str | None, reply: str, reward: float | None) -> None:
    assert is_right(task(answer), reply) == reward


def test_share_of_digits() -> None:
    assert [share_of_digits(task(None), text) for text in ("", "abcd", "a1b2", "12")] == [0.0, 0.0, 0.5, 1.0]


def test_the_reward_imports_nothing_heavy() -> None:
    code = (
        "import sys, rlflow.envs.arithmetic.reward\n"
        "print([name for name in ('torch', 'ray', 'reasoning_gym', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_arithmetic_defaults() -> None:
    tasks = load("arithmetic", size=3)
    assert tasks[0] == Task(
        id="chain_sum/0/0",
        prompt=(
            Message(role="system", content="You are a calculator. You reply with a single number."),
            Message(role="user", content="State the final answer to the following arithmetic problem: 0 - 4 ="),
        ),
        answer="-4",
    )
    assert [each.id for each in tasks] == ["chain_sum/0/0", "chain_sum/0/1", "chain_sum/0/2"]
    assert load("arithmetic", size=3) == tasks
    assert load("arithmetic", size=3, seed=1) != tasks


def test_arithmetic_takes_any_data_set_and_no_system_prompt() -> None:
    (first,) = load("arithmetic", dataset="word_sorting", size=1, system_prompt="")
    assert first.id == "word_sorting/0/0"
    assert [message["role"] for message in first.prompt] == ["user"]


def test_an_environment_travels_to_the_workers() -> None:
    spec = pickle.loads(pickle.dumps(load_environment(EnvConfig(args={"size": 2}), RewardConfig())))
    assert isinstance(spec.build(), SingleTurn)
    assert spec.reward is is_right
    assert len(spec.tasks()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "chainsum"}, "is not a data set of reasoning-gym; did you mean chain_sum or decimal_chain_sum?"),
        ({"dataset": "zzz"}, "is not a data set of reasoning-gym; there are [0-9]+, such as chain_sum and gcd"),
        ({"options": {"terms": 2}}, "env.args.options.terms is not an option of chain_sum; it takes min_terms"),
        ({"options": {"min_terms": 0}}, "env.args.options of chain_sum: min_terms must be positive; got"),
        ({"size": 0}, "env.args.size must be positive; got 0"),
        ({"sizes": 3}, "env.args.sizes is not an argument of env.name=arithmetic, .*; did you mean size?"),
    ],
)
def test_arithmetic_refuses_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("arithmetic", **arguments)


def test_an_unknown_environment() -> None:
    with pytest.raises(ConfigError, match=r"aritmetic is not an environment; did you mean arithmetic\? There are"):
        load("aritmetic")


OWN = """
from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.types import Task

def score(task, completion):
    return 1.0

def tasks():
    return [Task(id="a", prompt=({"role": "user", "content": "hi"},))]

def load(greeting="hi"):
    return EnvironmentSpec(tasks=tasks, build=SingleTurn, reward=score)

def wrong():
    return 3
"""


def test_an_environment_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert [each.id for each in load(f"{tmp_path / 'own.py'}:load", greeting="ho")] == ["a"]
    with pytest.raises(ConfigError, match="must return an EnvironmentSpec; it returned int"):
        load(f"{tmp_path / 'own.py'}:wrong")
    with pytest.raises(ConfigError, match=r"env.name: .*did you mean load?"):
        load(f"{tmp_path / 'own.py'}:lode")


def test_a_reward_that_cannot_be_called_shows_at_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("limit = 3\ndef score(text): return 1.0\n")
    with pytest.raises(ConfigError, match=r"reward.function: there is no file"):
        load("arithmetic", reward=f"{tmp_path / 'none.py'}:score")
    with pytest.raises(ConfigError, match="must be a function; got 3"):
        load("arithmetic", reward=f"{tmp_path / 'own.py'}:limit")
    with pytest.raises(ConfigError, match="has none of the accepted shapes"):
        load("arithmetic", reward=f"{tmp_path / 'own.py'}:score")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "env.name=mine has no tasks; check env.args"),
        ([task("5"), task("6", "u", ())], r"row 1 \(id 'u'\) has no prompt; give it at least one message"),
        ([task("5", "t", (Message(role="user", content=" "),))], r"row 0 \(id 't'\) has an empty prompt"),
        ([task("5", "a"), task("6", "b"), task("7", "a")], "rows 0 and 2 have the same id 'a'"),
        ([{"prompt": "hi"}], "row 0 must be a Task; got dict"),
        ([Task(id="t", prompt=({"role": "user"},))], "row 0 .* has a message without `role`, or whose `content`"),  # pyright: ignore
        (iter([task("5")]), "must return a sequence such as a list; got list_iterator"),
    ],
)
def test_tasks_that_cannot_be_used_are_named(rows: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_tasks("mine", lambda: rows)


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_jsonl_reads_the_columns_of_other_projects(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3 ="}]
    path = write_rows(
        tmp_path / "sums.jsonl",
        {"id": "first", "prompt": "2 + 3 =", "answer": 5},
        {"prompt": messages, "answer": "5", "level": 2},
        {"question": "2 + 3 =", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "5"}},
        {"prompt": "Say hello."},
    )
    found = load("jsonl", reward=SCORE, path=path, system_prompt="Be brief.")
    brief = Message(role="system", content="Be brief.")
    assert [each.id for each in found] == ["first", "sums/2", "sums/3", "sums/4"]
    assert [each.answer for each in found] == ["5", "5", "5", None]
    assert found[0].prompt == (brief, SUM)
    assert found[1].prompt == (Message(role="system", content="Add."), SUM)
    assert found[1].data == {"level": 2}
    assert found[2].data == {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "5"}}


def test_jsonl_needs_a_path_and_a_reward(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "hi"})
    with pytest.raises(ConfigError, match=r"reward.function is required with env.name=jsonl"):
        load("jsonl", path=path)
    with pytest.raises(ConfigError, match=r"env.args.path is required by env.name=jsonl"):
        load("jsonl", reward=SCORE)
    with pytest.raises(ConfigError, match=r"none.jsonl is not a file"):
        load("jsonl", reward=SCORE, path=str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "is not JSON .*; write one JSON object on each line"),
        ("[1]", "is a JSON list; write one JSON object on each line"),
        ('{"text": "hi"}', r"has no prompt; give it the column `prompt` or `question`; found \['text'\]"),
        ('{"prompt": 5}', "`prompt` must be text, or a list of messages with `role` and `content` as text; got 5"),
        ('{"prompt": []}', "`prompt` must be text, or a list of messages"),
        ('{"prompt": [{"role": "user"}]}', "`prompt` must be text, or a list of messages"),
        ('{"question": " "}', "`question` is empty"),
        ('{"prompt": "hi", "answer": [1]}', "the answer must be text or a number; got"),
        ('{"prompt": "hi", "answer": true}', "the answer must be text or a number; got True"),
    ],
)
def test_a_bad_row_names_file_and_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "hi"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=rf"rows.jsonl:3:? {message}"):
        load("jsonl", reward=SCORE, path=str(path))


def test_an_empty_file_has_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.name=jsonl has no tasks"):
        load("jsonl", reward=SCORE, path=write_rows(tmp_path / "rows.jsonl"))


def test_held_out_tasks_are_other_tasks_than_those_of_training() -> None:
    config = Config()
    spec = load_environment(config.env, config.reward)
    assert held_out_tasks(config, spec) == ()
    config.eval.every = 5
    held_out = held_out_tasks(config, spec)
    assert len(held_out) == 64
    assert not {task.id for task in held_out} & {task.id for task in spec.tasks()}


def test_an_evaluation_without_tasks_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    config = Config()
    config.eval.every = 5
    config.env = EnvConfig(name="jsonl", args={"path": str(rows)})
    config.reward = RewardConfig(function="rlflow.envs.arithmetic.reward:is_right")
    with pytest.raises(ConfigError, match="env.name=jsonl with these env.args has no evaluation tasks"):
        held_out_tasks(config, load_environment(config.env, config.reward))
    config.env.args["evaluation_path"] = str(rows)
    assert [task.answer for task in held_out_tasks(config, load_environment(config.env, config.reward))] == ["2"]


async def test_the_latency_environment_waits_and_then_ends() -> None:
    spec = load_environment(
        EnvConfig(name="latency", args={"median_s": 1e-3, "sigma": 0.0, "longest_s": 1e-3, "context": 300}),
        RewardConfig(),
    )
    task = spec.tasks()[0]
    assert len(task.prompt[0]["content"]) == len("You are a calculator. You reply with a single number. ") + 300
    environment = spec.build()
    assert await environment.reset(task) == list(task.prompt)
    assert (await environment.step({"role": "assistant", "content": "5"})).done
    with pytest.raises(ConfigError, match="longest_s >= median_s; got 1, 1.1 and 0.5"):
        load_environment(EnvConfig(name="latency", args={"median_s": 1.0, "longest_s": 0.5}), RewardConfig())
