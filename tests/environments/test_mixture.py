"""Several environments in one run: whose task is whose, which world and reward each gets, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.environments.mixture import name_of
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Environment, EnvironmentSpec, SingleTurn, takes_task
from rlflow.envs.guess_number.env import GuessNumber
from rlflow.errors import ConfigError
from rlflow.rewards.choose import choose_rewards
from rlflow.rewards.pool import ScorerPool
from rlflow.types import EpisodeEnd, Message, Task, Transcript

WORLDS = """
from rlflow.envs.base import EnvironmentSpec, Prompt, Environment, Step, SingleTurn
from rlflow.types import Task

TASKS = [Task(id=str(index), prompt=({"role": "user", "content": "hi"},), kind=kind) for index, kind in enumerate("ab")]

class Coloured(Environment):
    def __init__(self, task, shade: str = "dark"):
        self.colour = f"{shade} {task.data['colour']}"

    async def reset(self, task):
        return Prompt(messages=[{"role": "user", "content": self.colour}])

    async def step(self, reply):
        return Step(done=True, reward=0.25)

class Silent(SingleTurn):
    @staticmethod
    def tasks():
        return TASKS

def leased():
    return EnvironmentSpec(tasks=lambda: TASKS, build=SingleTurn, leases=("one",))

def of_two_kinds():
    return EnvironmentSpec(tasks=of_two_kinds_tasks, build=SingleTurn, reward=ends_well)

def of_two_kinds_tasks():
    return TASKS

def ends_well(completion):
    return float(completion.endswith("."))

def all_alike(completions):
    return [float(completions[0] == each) for each in completions]
"""


@pytest.fixture
def worlds(tmp_path: Path) -> str:
    (tmp_path / "worlds.py").write_text(WORLDS)
    return str(tmp_path / "worlds.py")


def load(environments: object, reward: RewardConfig | None = None, **arguments: Any) -> EnvironmentSpec:
    config = EnvConfig(name="mixture", args={"environments": environments, **arguments})
    return load_environment(config, reward or RewardConfig())


def told(task: Task, text: str) -> Transcript:
    message = Message(role="assistant", content=text)
    return Transcript(
        task=task, prompt=task.prompt, completion=(message,), environment_reward=0.75, end=EpisodeEnd.COMPLETED,
        num_sampled=1,
    )  # fmt: skip


def test_tasks_go_by_the_name_of_their_environment(worlds: str) -> None:
    spec = load({
        "sums": {"name": "arithmetic", "args": {"size": 3, "evaluation_size": 2}},
        "two": {"name": f"{worlds}:of_two_kinds"},
        "guess": {"name": "guess_number", "args": {"size": 2}},
    })  # fmt: skip
    tasks = spec.tasks()
    assert [(task.id, task.kind) for task in tasks[:5]] == [
        ("sums/chain_sum/0/0", "sums"),
        ("sums/chain_sum/0/1", "sums"),
        ("sums/chain_sum/0/2", "sums"),
        ("two/0", "two/a"),
        ("two/1", "two/b"),
    ]
    assert [name_of(task) for task in tasks] == ["sums"] * 3 + ["two"] * 2 + ["guess"] * 2
    assert spec.evaluation_tasks is not None
    held_out = {name_of(task) for task in spec.evaluation_tasks()}
    assert "sums" in held_out and "two" not in held_out  # it has no evaluation tasks
    assert isinstance(spec.build(task=tasks[0]), SingleTurn)
    assert isinstance(spec.build(task=tasks[-1]), GuessNumber)
    assert spec.expert is not None
    assert spec.expert(tasks[0], ()) == str(tasks[0].answer)


@pytest.mark.slow
async def test_each_environment_has_its_own_reward_beside_those_of_the_run(worlds: str) -> None:
    spec = load({
        "sums": {"name": "arithmetic", "args": {"size": 1}},
        "two": {"name": f"{worlds}:of_two_kinds"},
        "guess": {"name": "guess_number", "args": {"size": 1}},
        "alike": {"name": f"{worlds}:of_two_kinds", "reward": f"{worlds}:all_alike"},
    })  # fmt: skip
    sums, dots, _, guess, alike, _ = spec.tasks()
    config = RewardConfig(function=["environment", "length"], weights=[1, 0.5], args={"length": {"target": 9}})
    chosen = choose_rewards(config, spec.reward)
    assert [(one.name, one.kind, one.weight) for one in chosen] == [
        *((name, name, 1.0) for name in ("sums", "two", "guess", "alike")),
        ("length", "", 0.5),
    ]
    pool = ScorerPool([one for one in chosen if one.name != "length"], workers=1, timeout_s=30)
    try:
        right = await pool.score(told(sums, f"it is {sums.answer}"))
        assert (right.reward, right.metrics, right.awaits_group) == (1.0, {"rewards/sums": 1.0}, False)
        assert (await pool.score(told(dots, "well."))).metrics == {"rewards/two": 1.0}
        assert (await pool.score(told(guess, "5"))).metrics == {"rewards/guess": 0.75}
        waits = await pool.score(told(alike, "well."))
        assert waits.awaits_group and waits.reward is None
        together = await pool.score_group([told(alike, "a"), told(alike, "a")])
        assert [each.reward for each in together] == [1.0, 1.0]
    finally:
        await pool.close()


@pytest.mark.slow
async def test_a_column_names_the_environment_of_each_row(worlds: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "2 + 3 =", "answer": 5, "env_class": "sums"},
        {"prompt": "Which colour?", "colour": "red", "env_class": "painted"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environments = {
        "sums": {"name": "dataset", "reward": "math"},
        "painted": {"name": f"{worlds}:Coloured", "args": {"shade": "pale"}},
    }
    spec = load(environments, path=str(path))
    sums, painted = spec.tasks()
    assert [name_of(task) for task in (sums, painted)] == ["sums", "painted"]
    pool = EnvironmentPool(spec.build)
    await pool.start()
    try:
        world = await pool.open(3, painted)
        assert isinstance(world, Environment)
        prompt = await world.reset(painted)
        assert prompt.messages == [{"role": "user", "content": "pale red"}]
        assert (await world.step(Message(role="assistant", content="x"))).reward == 0.25
        await world.close()
        other = await pool.open(4, sums)
        assert isinstance(other, Environment)
        assert (await other.reset(sums)).messages == list(sums.prompt)
        await other.close()
    finally:
        await pool.close()
    with pytest.raises(ConfigError, match="environments.painted: env.args.shades is not an argument"):
        load({**environments, "painted": {"name": f"{worlds}:Coloured", "args": {"shades": 1}}}, path=str(path))
    path.write_text(json.dumps({**rows[0], "env_class": "sum"}) + "\n")
    with pytest.raises(ConfigError, match=r"row 0 .* in the column 'env_class', one of sums, painted; got 'sum'"):
        load(environments, path=str(path)).tasks()


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ({}, "env.args.environments is empty"),
        ({"a/b": {"name": "arithmetic"}}, "has the name 'a/b'; give a name without a slash"),
        ({"a": "arithmetic"}, r"environments.a must be \{name: as env.name"),
        ({"a": {"name": "arithmetic", "arg": {}}}, "environments.a.arg has no effect; did you mean args?"),
        ({"a": {"name": "arithmetic_"}}, "environments.a: env.name=arithmetic_ is not an environment; did you mean"),
        ({"a": {"name": "arithmetic", "args": {"sizes": 3}}}, "environments.a: env.args.sizes is not an argument"),
        ({"a": {"name": "WORLDS:leased"}}, "leased has leases, which a mixture cannot have"),
        ({"a": {"name": "mixture", "args": {"environments": {"b": {"name": "arithmetic"}}}}}, "is a mixture itself"),
        ({"a": {"name": "WORLDS:Silent"}}, "reward.function is required .* no reward of its own for a; give"),
        ({"a": {"name": "arithmetic", "reward": "maths"}}, "maths is not a reward; did you mean math"),
    ],
)
def test_what_cannot_be_mixed_is_refused_by_name(worlds: str, environments: dict[str, Any], message: str) -> None:
    given = json.loads(json.dumps(environments).replace("WORLDS", worlds))
    with pytest.raises(ConfigError, match=message):
        load(given)


def test_the_rewards_of_the_run_can_stand_in_for_those_of_an_environment(worlds: str) -> None:
    given = {"sums": {"name": "arithmetic", "reward": "math"}, "quiet": {"name": f"{worlds}:Silent"}}
    spec = load(given, RewardConfig(function=["environment", "format"]))
    chosen = choose_rewards(RewardConfig(function=["environment", "format"]), spec.reward)
    assert [(one.name, one.kind) for one in chosen] == [("sums", "sums"), ("format", "")]
    assert load({"quiet": given["quiet"]}, RewardConfig(model="somewhere")).silent_kinds == ("quiet",)
    with pytest.raises(ConfigError, match="the reward of sums has no effect, because reward.function and reward.model"):
        load(given, RewardConfig(function="format"))
    with pytest.raises(ConfigError, match="reward.function and reward.model both name 'sums'"):
        load(given, RewardConfig(function=["environment", "format"], model={"sums": "a"}, weights=[1, 1, 1]))


def test_build_is_given_the_task_if_it_requires_one() -> None:
    def optional(task: str = "count") -> None: ...

    def required(lease: str, task: Task) -> None: ...

    assert [takes_task(each) for each in (optional, required, SingleTurn, dict)] == [False, True, False, False]


def test_a_kind_that_begins_alike_is_another_one() -> None:
    (one,) = choose_rewards(RewardConfig(), {"sum": None})
    task = Task(id="t", prompt=())
    assert [one.scores(replace(task, kind=kind)) for kind in ("sum", "sum/a", "sums", "")] == [True, True, False, False]
