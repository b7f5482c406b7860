"""Finding an environment, refusing rows that cannot be used, and the arithmetic reward."""

from __future__ import annotations

import pickle
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rlflow.config import Config, EnvConfig, RewardConfig
from rlflow.environments.find import checked_tasks, held_out_tasks, load_environment
from rlflow.envs.arithmetic.reward import answered, is_right, last_number, share_of_digits
from rlflow.envs.base import Environment, SingleTurn
from rlflow.errors import ConfigError
from rlflow.types import EpisodeEnd, Message, Task

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


def test_a_reply_that_is_cut_off_is_no_answer() -> None:
    ends = (EpisodeEnd.COMPLETED, EpisodeEnd.TRUNCATED_LENGTH)
    assert [answered(task("5"), "2 + 3 = 5", end) for end in ends] == [1.0, 0.0]
    assert [answered(task("5"), "2 + 3 = 6", end) for end in ends] == [0.0, 0.0]
    assert answered(task(None), "5", EpisodeEnd.TRUNCATED_LENGTH) is None


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
    assert spec.reward is answered
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
    with pytest.raises(ConfigError, match="the reward score has the parameter 'text', which no task has as a column"):
        load("arithmetic", reward=f"{tmp_path / 'own.py'}:score")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "env.name=mine has no tasks; check env.args"),
        ([task("5"), task("6", "u", ())], r"row 1 \(id 'u'\) has no prompt; give it at least one message"),
        ([task("5", "t", (Message(role="user", content=" "),))], r"row 0 \(id 't'\) has an empty prompt"),
        ([task("5", "a"), task("6", "b"), task("7", "a")], "rows 0 and 2 have the same id 'a'"),
        ([task("5", "a\ud800")], r"row 0 \(id 'a\\ud800'\) has half a character in its id, which no file can hold"),
        ([{"prompt": "hi"}], "row 0 must be a Task; got dict"),
        ([Task(id="t", prompt=({"role": "user"},))], "row 0 .* has a message without `role`, or whose `content`"),  # pyright: ignore
        (iter([task("5")]), "must return a sequence such as a list; got list_iterator"),
    ],
)
def test_tasks_that_cannot_be_used_are_named(rows: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_tasks("mine", lambda: rows)


def test_held_out_tasks_are_other_tasks_than_those_of_training() -> None:
    config = Config()
    spec = load_environment(config.env, config.reward)
    assert held_out_tasks(config, spec) == ()
    config.eval.every = 5
    held_out = held_out_tasks(config, spec)
    assert len(held_out) == 64
    assert not {task.id for task in held_out} & {task.id for task in spec.tasks()}


async def test_the_latency_environment_waits_and_then_ends() -> None:
    spec = load_environment(
        EnvConfig(name="latency", args={"median_s": 1e-3, "sigma": 0.0, "longest_s": 1e-3, "context": 300}),
        RewardConfig(),
    )
    task = spec.tasks()[0]
    assert len(task.prompt[0]["content"]) == len("You are a calculator. You reply with a single number. ") + 300
    environment = spec.build()
    assert isinstance(environment, Environment)
    assert (await environment.reset(task)).messages == list(task.prompt)
    assert (await environment.step({"role": "assistant", "content": "5"})).done
    with pytest.raises(ConfigError, match="longest_s >= median_s; got 1, 1.1 and 0.5"):
        load_environment(EnvConfig(name="latency", args={"median_s": 1.0, "longest_s": 0.5}), RewardConfig())
