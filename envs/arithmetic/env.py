"""One question, one reply."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rlflow.envs.arithmetic.data import make_dataset, make_tasks
from rlflow.envs.arithmetic.reward import is_right
from rlflow.envs.base import EnvironmentSpec, SingleTurn

SYSTEM_PROMPT = "You are a calculator. You reply with a single number."


def load(
    dataset: str = "chain_sum",
    size: int = 2000,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
    options: Mapping[str, Any] | None = None,
) -> EnvironmentSpec:
    """Questions of one reasoning-gym data set.

    dataset: any name of reasoning-gym, such as chain_sum, gcd or word_sorting.
    size: number of tasks; seed: which ones.
    system_prompt: "" leaves it out.
    options: the data set's own options; None asks chain_sum for sums of two one-digit numbers.
    """
    make_dataset(dataset, size, seed, options)  # a wrong name or option shows now, not when the run is up
    tasks = partial(make_tasks, dataset, size, seed, system_prompt, options)
    return EnvironmentSpec(tasks=tasks, build=SingleTurn, reward=is_right)
