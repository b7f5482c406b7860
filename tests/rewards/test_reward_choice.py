"""Which functions score: names, weights and arguments from the settings, and what is refused before anything starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from packages import install
from transcripts import TASK, said, task_with

from rlflow.cluster.devices import Devices
from rlflow.cluster.rewards import scorer_of, start_rewards
from rlflow.config import Config, RewardConfig
from rlflow.environments.find import checked_tasks
from rlflow.errors import ConfigError
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.choose import REWARDS, check_columns, choose_rewards, columns_to_check, is_environment_alone, load
from rlflow.rewards.score import score, with_function
from rlflow.settings.checks import check
from rlflow.settings.compose import train

OWN = """
limit = 3

def exact(task, completion):
    return completion == task.answer

def brief(completion, limit: int = 40):
    return len(completion) <= limit

def picky(completion, colour, *, depth):
    return 1.0

class Late:
    @staticmethod
    def brief(completion):
        return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def choose(function: Any = None, own: Any = None, **settings: Any) -> list[ChosenReward]:
    return choose_rewards(RewardConfig(function=function, **settings), own)


def mine(completion: str) -> float:
    return float(len(completion))


def test_without_a_name_the_environment_scores() -> None:
    assert choose() == [ChosenReward(name="environment", function=None)]
    assert choose("environment", mine) == [ChosenReward(name="environment", function=mine)]
    assert is_environment_alone(choose())
    assert not is_environment_alone(choose(None, mine))


async def test_no_process_is_started_where_only_the_steps_of_an_environment_count() -> None:
    config = Config()
    assert start_rewards(config, None, {}, cast(Devices, None), threads=1, max_calls=1) == {}
    config.reward.weights = [3.0]
    scorer = scorer_of(config, [])
    assert (await scorer.score(said("4", environment_reward=0.5))).reward == 1.5


def test_names_weights_and_arguments(own: str) -> None:
    chosen = choose(
        ["exact_match", f"{own}:brief", "environment"],
        weights=[1.0, 0.1, 0.5],
        args={"brief": {"limit": 10}, "exact_match": {"normalised": True}},
    )
    assert chosen == [
        ChosenReward(
            name="exact_match",
            function="rlflow.envs.rewards.exact_match:exact_match",
            args={"normalised": True},
        ),
        ChosenReward(name="brief", function=f"{own}:brief", weight=0.1, args={"limit": 10}),
        ChosenReward(name="environment", function=None, weight=0.5),
    ]
    assert not is_environment_alone(chosen)


async def test_what_was_chosen_scores(own: str) -> None:
    chosen = choose([f"{own}:exact", f"{own}:brief"], weights=[1.0, 0.5], args={"brief": {"limit": 0}})
    (verdict,) = await score([with_function(one) for one in chosen], 10.0, [said("4")])
    assert (verdict.reward, verdict.metrics) == (1.0, {"rewards/exact": 1.0, "rewards/brief": 0.0})


def test_a_file_is_found_from_any_directory(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(own).parent)
    (chosen,) = choose("own.py:exact")
    assert chosen.function == f"{own}:exact"


@pytest.mark.parametrize("name", REWARDS.shipped)
def test_every_shipped_reward_is_a_documented_function(name: str) -> None:
    function = load(ChosenReward(name=name, function=f"rlflow.envs.rewards.{name}:{name}"))
    assert function.__doc__
    assert function.__name__ == name


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"function": []}, "reward.function must be a name, or a list of names; got []"),
    ({"function": 3}, "reward.function must be a name, or a list of names; got 3"),
    ({"function": ["math", None]}, "reward.function must be a name, or a list of names; got ['math', None]"),
    ({"function": "exact_matc"}, "reward.function=exact_matc is not a reward; did you mean exact_match? There are env"),
    ({"function": "OWN:exactly"}, "reward.function: OWN has no attribute 'exactly' (from 'OWN:exactly'); did you mean"),
    ({"function": "OWN:limit"}, "reward.function=OWN:limit must be a function; got 3"),
    ({"function": ["OWN:brief", "OWN:Late.brief"]}, "reward.function names 2 functions 'brief', and metrics and"),
    (
        {"function": "OWN:brief", "weights": [1.0, 2.0]},
        "reward.weights has 2 numbers and reward.function 1 names; give one weight for each",
    ),
    (
        {"function": "OWN:brief", "args": {"brieff": {"limit": 3}}},
        "reward.args.brieff has no effect: reward.function names no 'brieff'; did you mean brief?; it names brief",
    ),
    (
        {"function": "OWN:brief", "args": {"brief": 3}},
        "reward.args.brief must be arguments as name: value; got 3",
    ),
    (
        {"function": "OWN:brief", "args": {"brief": {"limits": 3}}},
        "reward.args.brief.limits is not an argument of brief, which takes limit; did you mean limit?",
    ),
    (
        {"function": "OWN:brief", "args": {"brief": {"limit": "three"}}},
        "reward.args.brief.limit must be a whole number; got 'three'",
    ),
    (
        {"function": "OWN:brief", "args": {"brief": {"completion": "x"}}},
        "reward.args.brief.completion cannot be set: it is different in every episode; leave it out",
    ),
    ({"args": {"environment": {"x": 1}}}, "reward.args.environment has no effect; an environment takes its arguments"),
    ({"function": "overlong", "args": {"overlong": {"max_length": 4, "cache": 5}}}, "cache must be from 1 to max_len"),
    ({"function": "length"}, "reward.args.length needs either target or limit, a positive number of tokens; got"),
    ({"function": "format", "args": {"format": {"pattern": "("}}}, "reward.args.format.pattern is no regular express"),
    (
        {"function": "judge", "args": {"judge": {"url": "localhost", "model": "m"}}},
        "reward.args.judge.url must begin with http:// or https://; got 'localhost'",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_score_is_refused_with_the_cure(settings: dict[str, Any], message: str, own: str) -> None:
    function = settings.get("function")
    if isinstance(function, str):
        function = function.replace("OWN", own)
    elif isinstance(function, list):
        function = [name and name.replace("OWN", own) for name in function]
    with pytest.raises(ConfigError) as raised:
        choose(**{**settings, "function": function})
    assert str(raised.value).replace(own, "OWN").startswith(message)


def test_a_column_that_no_task_has_shows_before_the_start(own: str) -> None:
    columns = columns_to_check(choose(f"{own}:picky", args={"picky": {"depth": 2}}))
    assert columns == {"colour": "picky"}
    check_columns(columns, [TASK, task_with(colour="red")])
    message = (
        "the reward picky has the parameter 'colour', which no task has as a column; did you mean color?; columns are "
        "color, level; else set reward.args.picky.colour"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        checked_tasks("mine", lambda: [TASK, task_with(color="red")], columns)


def test_rewards_of_installed_packages_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    points = {"polite": f"{__name__}:mine", "f1": "theirs:f1"}
    install(tmp_path, "theirs", "", {"rlflow.rewards": points})
    assert choose("polite") == [ChosenReward(name="polite", function=f"{__name__}:mine")]
    with pytest.raises(ConfigError, match="did you mean polite"):
        choose("polit")
    with pytest.raises(ConfigError, match="rlflow.envs.rewards.f1:f1 and theirs:f1; name the one you mean by its path"):
        choose("f1")
    assert choose("rlflow.envs.rewards.f1:f1")[0].name == "f1"


def test_two_packages_may_not_use_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("one", "other"):
        install(tmp_path, package, "", {"rlflow.rewards": {"polite": "polite"}})
    with pytest.raises(ConfigError, match="two installed packages register 'polite' in rlflow.rewards: one:polite and"):
        choose("polite")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"the reward math needs math-verify; pip install rlflow\[math\]"):
        choose("math")


def composed(*overrides: str) -> RewardConfig:
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_module("rlflow.recipes", version_base="1.3"):
        found = OmegaConf.to_object(compose("config", ["run.name=test", "recipe=smoke", *overrides]))
    assert isinstance(found, Config)
    check(found)
    return found.reward


def test_a_list_on_the_command_line() -> None:
    reward = composed("reward.function=[math,my.py:brief]", "reward.weights=[1,0.1]", "++reward.args.brief.limit=40")
    assert (reward.function, reward.weights) == (["math", "my.py:brief"], [1.0, 0.1])
    assert reward.args == {"brief": {"limit": 40}}


def test_arguments_need_no_plus_on_the_command_line() -> None:
    seen: list[RewardConfig] = []

    def run(config: Config) -> int:
        seen.append(config.reward)
        return 0

    def report(error: Exception) -> int:
        raise error

    assert train(["recipe=smoke", "reward.function=my.py:brief", "reward.args.brief.limit=40"], report, run) == 0
    assert (seen[0].function, seen[0].args) == ("my.py:brief", {"brief": {"limit": 40}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": [1.0, float("inf")]}, "reward.weights must be finite numbers; got [1.0, inf]"),
        ({"weights": [0.0, 0.0]}, "reward.weights must not all be 0, because then there is no reward; got [0.0, 0.0]"),
        (
            {"model": "mine", "weights": [2.0]},
            "reward.weights=[2.0] has no effect with reward.model alone; leave it out",
        ),
        (
            {"model": "mine", "args": {"f1": {}}},
            "reward.args.f1 is not an argument of reward.model, which takes mean, deviation, clip",
        ),
    ],
)
def test_settings_that_contradict(settings: dict[str, Any], message: str) -> None:
    config = Config()
    config.reward = RewardConfig(**settings)
    with pytest.raises(ConfigError) as raised:
        check(config)
    assert str(raised.value) == message
