"""One question of reasoning-gym, one reply with an <answer>."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.reasoning_gym.data import Part, check_style, dataset_of, make_tasks, options_of
from rlflow.envs.reasoning_gym.reward import score
from rlflow.envs.seeds import seeded_tasks
from rlflow.errors import ConfigError
from rlflow.types import Message, Task


def load(
    dataset: str | None = None,
    options: Mapping[str, Any] | None = None,
    mix: Mapping[str, Mapping[str, Any] | None] | None = None,
    levels: Sequence[int] = (),
    prompt_style: str = "default",
    size: int = 2000,
    seed: int = 0,
    evaluation_size: int = 64,
) -> EnvironmentSpec:
    """Questions of one data set of reasoning-gym, or of several.

    dataset: a name of reasoning-gym, with its own options; or
    mix: names, each with a `weight` and `options`, such as {chain_sum: {weight: 2}, gcd: {options: {max_numbers: 3}}}.
    levels: of the data sets' curricula; equally many tasks of each, and a kind of their own for each.
    prompt_style: a system prompt of reasoning-gym, which asks for <answer> tags; "" for none.
    size, seed: how many tasks, and which; evaluation_size: number of tasks for `eval.every`, from another seed.
    """
    if (dataset is None) == (not mix):
        raise ConfigError("env.args of reasoning_gym need one of `dataset` and `mix`")
    if mix and options:
        raise ConfigError("env.args.options belong to `dataset`; with `mix`, give each data set its own")
    check_style(prompt_style)
    entries = {dataset: {"options": options}} if dataset is not None else dict(mix or {})
    parts = []
    for name, entry in entries.items():
        weight, chosen = options_of(entry or {})
        for level in levels or (None,):
            parts.append(Part(dataset=name, seed=seed, size=size, options=chosen, level=level, weight=weight))
    tasks, evaluation_tasks = seeded_tasks(partial(make_tasks, parts, prompt_style), size, seed, evaluation_size)
    for part in parts:
        dataset_of(part)  # a wrong name or option shows now, not when the run is up
    return EnvironmentSpec(
        tasks=tasks, build=SingleTurn, reward=score, expert=tagged, evaluation_tasks=evaluation_tasks
    )


def tagged(task: Task, messages: Sequence[Message]) -> str:
    """The answer between the tags that the reward looks for."""
    return f"<answer>{task.answer}</answer>"
