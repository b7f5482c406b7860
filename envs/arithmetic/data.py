"""Tasks from reasoning-gym; item i of a data set depends on (name, seed, i, options) alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from rlflow.envs.texts import prompt_of
from rlflow.errors import ConfigError
from rlflow.types import Task

DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def make_dataset(dataset: str, size: int, seed: int, options: Mapping[str, Any] | None) -> Any:
    """The reasoning-gym data set; ConfigError for an unknown name or a bad option.

    `options` None means DEFAULT_OPTIONS where this data set has some, else reasoning-gym's defaults.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package below reasoning-gym, when it is first compiled
        from reasoning_gym.factory import DATASETS, create_dataset  # takes 3 s; the reward's processes do without

    if dataset not in DATASETS:
        close = get_close_matches(dataset, DATASETS, n=3)
        some = f"there are {len(DATASETS)}, such as chain_sum and gcd"
        hint = f"did you mean {' or '.join(close)}?" if close else some
        raise ConfigError(f"env.args.dataset={dataset} is not a data set of reasoning-gym; {hint}")
    if size < 1:
        raise ConfigError(f"env.args.size must be positive; got {size}")
    chosen = DEFAULT_OPTIONS.get(dataset, {}) if options is None else dict(options)
    accepted = [field.name for field in fields(DATASETS[dataset][1]) if field.name not in ("size", "seed")]
    for name in chosen:
        if name not in accepted:
            raise ConfigError(f"env.args.options.{name} is not an option of {dataset}; it takes {', '.join(accepted)}")
    try:
        return create_dataset(dataset, size=size, seed=seed, **chosen)
    except (AssertionError, TypeError, ValueError) as error:  # how reasoning-gym's configurations refuse a value
        reason = str(error) or type(error).__name__
        raise ConfigError(f"env.args.options of {dataset}: {reason}; got {chosen}") from error


def make_tasks(dataset: str, system_prompt: str, options: Mapping[str, Any] | None, size: int, seed: int) -> list[Task]:
    """One Task an item; its id is "<dataset>/<seed>/<index>"."""
    items = make_dataset(dataset, size, seed, options)
    return [
        Task(
            id=f"{dataset}/{seed}/{index}",
            prompt=prompt_of(system_prompt, item["question"]),
            answer=str(item["answer"]),
        )
        for index, item in ((index, items[index]) for index in range(size))
    ]
