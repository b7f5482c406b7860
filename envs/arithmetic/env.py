"""One question, one reply.

Tasks come from reasoning-gym; item i of a data set depends on (name, seed, i, options) alone.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rlflow.envs.arithmetic.reward import answered
from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.seeds import seeded_tasks
from rlflow.envs.texts import prompt_of
from rlflow.errors import ConfigError
from rlflow.types import Task

DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
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
    return EnvironmentSpec(tasks=tasks, build=SingleTurn, reward=answered, evaluation_tasks=evaluation_tasks)


def make_dataset(dataset: str, size: int, seed: int, options: Mapping[str, Any] | None) -> Any:
    """The reasoning-gym data set; ConfigError for an unknown name or a bad option.

    `options` None means DEFAULT_OPTIONS if they name this data set, else reasoning-gym's defaults.
    """
    from rlflow.envs.reasoning_gym.data import Part, dataset_of  # takes 3 s, which only the driver needs

    if size < 1:
        raise ConfigError(f"env.args.size must be positive; got {size}")
    chosen = DEFAULT_OPTIONS.get(dataset, {}) if options is None else dict(options)
    try:
        return dataset_of(Part(dataset=dataset, seed=seed, size=size, options=chosen))
    except ConfigError as error:
        raise ConfigError(f"env.args.{error}") from error


def make_tasks(dataset: str, system_prompt: str, options: Mapping[str, Any] | None, size: int, seed: int) -> list[Task]:
    """One Task an item; its id is "<dataset>/<seed>/<index>"."""
    items = make_dataset(dataset, size, seed, options)
    tasks = []
    for index in range(size):
        item = items[index]
        prompt = prompt_of(system_prompt, item["question"])
        tasks.append(Task(id=f"{dataset}/{seed}/{index}", prompt=prompt, answer=str(item["answer"])))
    return tasks
