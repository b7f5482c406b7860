"""One question, one reply."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rlflow.envs.arithmetic.data import make_dataset, make_tasks
from rlflow.envs.arithmetic.reward import is_right
from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.seeds import seeded_tasks

SYSTEM_PROMPT = "You are a calculator. You reply with a single number."


def load(
    dataset: str = "chain_sum",
    size: int = 2000,
    seed: int = 0,
    system_prompt: str = SYSTEM_PROMPT,
    options: Mapping[str, Any] | None = None,
    evaluation_size: int = 64,
) -> EnvironmentSpec:
    """Questions of one reasoning-gym data set.

    dataset: any name of reasoning-gym, such as chain_sum, gcd or word_sorting.
    size: number of tasks; seed: which ones.
    system_prompt: "" leaves it out.
    options: the data set's own options; None asks chain_sum for sums of two one-digit numbers.
    evaluation_size: number of tasks for `eval.every`, from another seed.
    """
    make_dataset(dataset, size, seed, options)  # a wrong name or option shows now, not when the run is up
    make = partial(make_tasks, dataset, system_prompt, options)
    tasks, evaluation_tasks = seeded_tasks(make, size, seed, evaluation_size)
    return EnvironmentSpec(tasks=tasks, build=SingleTurn, reward=is_right, evaluation_tasks=evaluation_tasks)
