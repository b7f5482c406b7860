"""Tasks from reasoning-gym; item i of a data set depends on (name, seed, i, options) alone."""

from collections.abc import Mapping
from typing import Any

from rlflow.envs.texts import prompt_of
from rlflow.errors import ConfigError
from rlflow.types import Task

DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def make_dataset(dataset: str, size: int, seed: int, options: Mapping[str, Any] | None) -> Any:
    """The reasoning-gym data set; ConfigError for an unknown name or a bad option.

    `options` None means DEFAULT_OPTIONS if they name this data set, else reasoning-gym's defaults.
    """
    from rlflow.envs.reasoning_gym.data import Part, dataset_of  # takes 3 s, which the reward's processes do not need

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
