"""One question of reasoning-gym, one reply with an <answer>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.reasoning_gym.data import Part, check_style, dataset_of, make_tasks, options_of
from rlflow.envs.reasoning_gym.reward import score
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

EVALUATION_SEED = 1_000_003
"""Added to the seed of the training tasks."""


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
    if size < 1 or evaluation_size < 1:
        raise ConfigError(f"env.args.size and evaluation_size must be positive; got {size} and {evaluation_size}")
    check_style(prompt_style)
    entries = {dataset: {"options": options}} if dataset is not None else dict(mix or {})

    def parts(count: int, first: int) -> list[Part]:
        made = []
        for name, entry in entries.items():
            weight, chosen = options_of(entry or {})
            for level in levels or (None,):
                part = Part(dataset=name, seed=first, size=count, options=chosen, level=level, weight=weight)
                dataset_of(part)  # a wrong name or option shows now, not when the run is up
                made.append(part)
        return made

    held_out = seed + EVALUATION_SEED
    return EnvironmentSpec(
        tasks=partial(make_tasks, parts(size, seed), size, seed, prompt_style),
        build=SingleTurn,
        reward=score,
        expert=tagged,
        evaluation_tasks=partial(make_tasks, parts(evaluation_size, held_out), evaluation_size, held_out, prompt_style),
    )


def tagged(task: Task, messages: Sequence[Message]) -> str:
    """The answer where the reward looks for it."""
    return f"<answer>{task.answer}</answer>"
