"""Tasks from reasoning-gym, and the data sets again where they are scored.

    load's arguments -> one Part for each data set and level -> tasks, each with its Part -> score

An item depends on its Part and its index alone; so the reward builds the item anew instead of sending its metadata
along, some of which JSON cannot hold.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from random import Random
from typing import Any

from rlflow.envs.texts import prompt_of
from rlflow.errors import ConfigError
from rlflow.types import Json, Task

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # of a package below reasoning-gym, when it is first compiled
    from reasoning_gym.factory import CURRICULA, DATASETS, create_dataset
    from reasoning_gym.utils import SYSTEM_PROMPTS


@dataclass(kw_only=True, slots=True, frozen=True)
class Part:
    """One data set with its options; several of them make a mix."""

    dataset: str
    seed: int
    size: int
    options: dict[str, Json] = field(default_factory=dict)
    level: int | None = None
    """A level of the data set's curriculum, which sets some of the options."""
    weight: float = 1.0

    @property
    def kind(self) -> str:
        return self.dataset if self.level is None else f"{self.dataset}/level_{self.level}"


def dataset_of(part: Part) -> Any:
    """The data set of a part; ConfigError for a wrong name, option or level."""
    return _dataset(json.dumps(asdict(part), sort_keys=True))


@lru_cache(maxsize=256)
def _dataset(key: str) -> Any:
    part = Part(**json.loads(key))
    if part.dataset == "composite":
        raise ConfigError("dataset=composite is no single data set; give the data sets of a mix as env.args.mix")
    if part.dataset not in DATASETS:
        close = get_close_matches(part.dataset, DATASETS, n=3)
        some = f"there are {len(DATASETS) - 1}, such as chain_sum and gcd"
        hint = f"did you mean {' or '.join(close)}?" if close else some
        raise ConfigError(f"dataset={part.dataset} is not a data set of reasoning-gym; {hint}")
    options = {**_level_options(part), **part.options}
    accepted = [each.name for each in fields(DATASETS[part.dataset][1]) if each.name not in ("size", "seed")]
    for name in options:
        if name not in accepted:
            close = get_close_matches(name, accepted, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            takes = ", ".join(accepted)
            raise ConfigError(f"options.{name} is not an option of {part.dataset}; it takes {takes}{hint}")
    try:
        return create_dataset(part.dataset, size=part.size, seed=part.seed, **options)
    except (AssertionError, TypeError, ValueError) as error:  # how reasoning-gym's configurations refuse a value
        reason = str(error) or type(error).__name__
        raise ConfigError(f"options of {part.dataset}: {reason}; got {options}") from error


def make_tasks(mix: Sequence[Part], prompt_style: str, size: int, seed: int) -> list[Task]:
    """`size` tasks, each from a part of the mix that is drawn by weight; `seed` and `size` replace those of the parts.
    Their ids are "<kind>/<seed>/<index in the part>".
    """
    parts = [replace(part, size=size, seed=seed) for part in mix]
    system = SYSTEM_PROMPTS.get(prompt_style, "")
    chosen = Random(seed).choices(range(len(parts)), weights=[part.weight for part in parts], k=size)
    next_index = [0] * len(parts)
    tasks = []
    for number in chosen:
        part, index = parts[number], next_index[number]
        item = dataset_of(part)[index]
        tasks.append(
            Task(
                id=f"{part.kind}/{part.seed}/{index}",
                prompt=prompt_of(system, item["question"]),
                answer=None if item["answer"] is None else str(item["answer"]),
                kind=part.kind,
                data={"part": asdict(part), "index": index, "question": item["question"], "has_tags": bool(system)},
            )
        )
        next_index[number] += 1
    return tasks


def _level_options(part: Part) -> dict[str, Any]:
    if part.level is None:
        return {}
    if part.dataset not in CURRICULA:
        raise ConfigError(f"{part.dataset} has no curriculum in reasoning-gym; leave out env.args.levels")
    kind: Any = CURRICULA[part.dataset]
    curriculum = kind()
    highest = max((len(each.levels) for each in curriculum.attributes.values()), default=1) - 1
    if not 0 <= part.level <= highest:
        raise ConfigError(f"levels of {part.dataset} go from 0 to {highest}; got {part.level}")
    curriculum.set_global_level(part.level)
    chosen = curriculum.generate_configuration()
    names = (each.name for each in fields(chosen) if each.name not in ("size", "seed"))
    return {name: getattr(chosen, name) for name in names}
