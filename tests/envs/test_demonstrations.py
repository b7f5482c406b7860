"""Rows that hold the replies, and the runs that they go with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.algorithms.registry import check_functions
from rlflow.config import Aggregation, Config, EnvConfig, RewardConfig
from rlflow.environments.find import held_out_tasks, load_environment
from rlflow.errors import ConfigError
from rlflow.settings.checks import check
from rlflow.settings.compose import composed_config
from rlflow.settings.demonstrations import check_demonstrations
from rlflow.types import Message, Task


def said(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def load(path: Path, *rows: object, **arguments: Any) -> list[Task]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    args = {"path": str(path), **arguments}
    return list(load_environment(EnvConfig(name="demonstrations", args=args), RewardConfig()).tasks())


def test_a_conversation_is_given_from_its_first_reply_on(tmp_path: Path) -> None:
    talk = [said("user", "2 + 3?"), said("assistant", "5"), said("user", "And 1?"), said("assistant", "6")]
    (task,) = load(tmp_path / "talks.jsonl", {"messages": talk, "level": 2}, system_prompt="Add.")
    assert task.prompt == (said("system", "Add."), talk[0])
    assert task.demonstrations == (tuple(talk[1:]),)
    assert (task.id, task.data) == ("talks/1", {"level": 2})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 3?", "completion": "5"},
        {"question": "2 + 3?", "response": "5"},
        {"prompt": [said("user", "2 + 3?")], "completion": [said("assistant", "5")]},
    ],
)
def test_a_reply_may_have_a_column_of_its_own(row: dict[str, Any], tmp_path: Path) -> None:
    (task,) = load(tmp_path / "rows.jsonl", row)
    assert task.prompt == (said("user", "2 + 3?"),)
    assert task.demonstrations == ((said("assistant", "5"),),)
    assert not {"completion", "response"} & task.data.keys()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2 + 3?"}, "has no reply; give it the column `messages`"),
        ({"messages": [said("user", "2 + 3?")]}, "`messages` must end with a reply of the assistant"),
        ({"messages": [said("assistant", "5")]}, "`messages` begins with the assistant, who replies to nothing"),
        ({"prompt": "2?", "completion": [said("user", "5")]}, "`completion` must end with a reply"),
        ({"prompt": "2?", "completion": "2", "tools": "add"}, "`tools` must be a list of schemas"),
        ({"prompt": "2?", "completion": "2", "tools": ["add"]}, "`tools` must be a list of schemas"),
        ({"prompt": "2?", "completion": "2", "weight": -1}, "`weight` must be a number from 0 on; got -1"),
    ],
)
def test_a_row_without_a_reply_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.jsonl.*{message}"):
        load(tmp_path / "rows.jsonl", row)


def test_tools_may_be_json(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "add"}}
    (task,) = load(tmp_path / "rows.jsonl", {"prompt": "2?", "completion": "2", "tools": json.dumps([schema])})
    assert task.data == {"tools": [schema]}


GIVEN = Task(id="a", prompt=(said("user", "2?"),), demonstrations=((said("assistant", "2"),),))
PLAYED = Task(id="b", prompt=(said("user", "2?"),))


def settings(**algorithm: Any) -> Config:
    config = Config()
    config.rollout.engines = 0
    chosen = {"group_size": 1, "advantage": "reward", "loss": "reinforce", **algorithm}
    for name, value in chosen.items():
        setattr(config.algorithm, name, value)
    return config


def test_demonstrations_need_no_engine() -> None:
    check(settings())
    check_demonstrations(settings(), [GIVEN])
    with_engines = settings()
    with_engines.rollout.engines = 1
    check_demonstrations(with_engines, [GIVEN])


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"group_size": 8}, "algorithm.group_size must be the number of demonstrations that each task has"),
        ({"advantage": "gae"}, "algorithm.advantage=gae judges what a policy sampled"),
        ({"advantage": "remax"}, "algorithm.advantage=remax judges what a policy sampled"),
        ({"loss": "ppo_clip"}, "algorithm.loss=ppo_clip compares with the policy that sampled"),
        ({"corrections": {"tis": {}}}, "algorithm.corrections needs the log-probabilities"),
    ],
)
def test_an_algorithm_that_needs_a_sampler_is_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_demonstrations(settings(**algorithm), [GIVEN])


@pytest.mark.parametrize("name", ["oversample", "oversample_episodes"])
def test_all_demonstrations_are_shown(name: str) -> None:
    config = settings()
    config.rollout.engines = 1
    setattr(config.rollout, name, 1.25)
    with pytest.raises(ConfigError, match=f"^rollout.{name} must be 1 with demonstrations"):
        check_demonstrations(config, [GIVEN])


def test_a_teacher_judges_what_was_sampled() -> None:
    config = settings()
    config.teacher.models = {"default": "tiny"}
    with pytest.raises(ConfigError, match="^teacher.args.kl=sampled needs .*; set it to reverse or forward$"):
        check_demonstrations(config, [GIVEN])
    config.teacher.args = {"kl": "forward"}
    check_demonstrations(config, [GIVEN])


def test_somebody_must_reply() -> None:
    with pytest.raises(ConfigError, match="^rollout.engines=0 leaves nobody to reply"):
        check_demonstrations(settings(), [PLAYED])
    with pytest.raises(ConfigError, match="^1 of 2 tasks have a demonstration"):
        check_demonstrations(settings(), [PLAYED, GIVEN])
    config = settings()
    config.eval.every = 5
    with pytest.raises(ConfigError, match="^eval.every needs an engine that replies"):
        check_demonstrations(config, [GIVEN])


def test_evaluations_need_a_reward(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2?", "completion": "2"}))
    config = settings()
    config.env.name, config.env.args = "demonstrations", {"path": str(path), "evaluation_path": str(path)}
    config.rollout.engines, config.eval.every = 1, 5
    with pytest.raises(ConfigError, match="has no reward of its own to evaluate with; give a reward.function"):
        held_out_tasks(config, load_environment(config.env, config.reward))
    config.reward.function = "exact_match"
    assert [task.demonstrations for task in held_out_tasks(config, load_environment(config.env, config.reward))] == [()]


@pytest.mark.parametrize("key", ["stop=[x]", "update=all", "tensor_parallel=2"])
def test_what_engines_would_do_has_no_effect_without_them(key: str) -> None:
    with pytest.raises(ConfigError, match="has no effect with rollout.engines=0, where nothing is sampled"):
        check(composed_config(["recipe=sft", "env.args.path=x.jsonl", f"rollout.{key}"]))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
        {"prompt": [said("user", "2 + 3?")], "chosen": [said("assistant", "5")], "rejected": [said("assistant", "6")]},
        {
            "prompt": "2 + 3?",
            "chosen": [said("user", "2 + 3?"), said("assistant", "5")],
            "rejected": [said("user", "2 + 3?"), said("assistant", "6")],
        },
    ],
)
def test_a_pair_is_two_replies_to_one_prompt_the_better_one_first(row: dict[str, Any], tmp_path: Path) -> None:
    (task,) = load(tmp_path / "rows.jsonl", row)
    assert task.prompt == (said("user", "2 + 3?"),)
    assert task.demonstrations == ((said("assistant", "5"),), (said("assistant", "6"),))
    assert not {"chosen", "rejected"} & task.data.keys()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2?", "chosen": "2"}, "has `chosen` alone; a preference needs `chosen` and `rejected`"),
        ({"prompt": "2?", "chosen": "2", "rejected": [said("user", "3")]}, "`rejected` must end with a reply"),
        ({"prompt": "2?", "chosen": "2", "rejected": "3", "weight": 1}, "`weight` has no effect beside `chosen`"),
        (
            {
                "chosen": [said("user", "2?"), said("assistant", "2")],
                "rejected": [said("user", "3?"), said("assistant", "2")],
            },
            "`rejected` must begin with the same messages as `chosen`",
        ),
    ],
)
def test_half_a_pair_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.jsonl.*{message}"):
        load(tmp_path / "rows.jsonl", row)


PAIR = Task(id="a", prompt=(said("user", "2?"),), demonstrations=((said("assistant", "2"),), (said("assistant", "3"),)))
OF_PAIRS = {
    "group_size": 2, "advantage": "dpo", "kl_coefficient": 0.1, "kl_in_reward": True,
    "aggregation": Aggregation.token_sum,
}  # fmt: skip


def test_pairs_are_for_an_advantage_that_compares_likelihoods() -> None:
    check(settings(**OF_PAIRS))
    check_functions(settings(**OF_PAIRS))
    check_demonstrations(settings(**OF_PAIRS), [PAIR])
    with pytest.raises(ConfigError, match="must be the number .* got 2, and tasks with 1 and 2"):
        check_demonstrations(settings(**OF_PAIRS), [PAIR, GIVEN])
    with pytest.raises(ConfigError, match="^algorithm.advantage=grpo would push rejected replies away without bound"):
        check_demonstrations(settings(group_size=2, advantage="grpo"), [PAIR])


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"kl_coefficient": 0.0}, "algorithm.kl_coefficient must be above 0, because it is the beta"),
        ({"kl_in_reward": False}, "algorithm.kl_in_reward must be true, because the KL is part of the loss"),
        ({"aggregation": Aggregation.token_mean}, "algorithm.aggregation must be token_sum"),
        ({"loss": "gmpo"}, "algorithm.loss must be reinforce, because likelihoods are compared"),
        ({"corrections": {"low_entropy": {}}}, "algorithm.corrections must be left out"),
        ({"mask_truncated": True}, "algorithm.mask_truncated must be false, because a pair is trained whole"),
        ({"entropy_low": 0.1, "entropy_high": 1.0}, "algorithm.entropy_high must be null"),
        ({"epochs": 2}, "algorithm.epochs must be 1, because a comparison holds for one update"),
        ({"advantage_args": {"beta": 0.2}}, "algorithm.advantage_args.beta is algorithm.kl_coefficient here"),
    ],
)
def test_what_a_loss_of_pairs_needs(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_functions(settings(**(OF_PAIRS | algorithm)))
