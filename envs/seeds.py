"""Tasks that a seed tells apart: some to train on, and others to evaluate on."""

from collections.abc import Callable, Sequence
from functools import partial

from rlflow.errors import ConfigError
from rlflow.types import Json, Message, Task

EVALUATION_SEED = 1_000_003
"""Added to the seed of the training tasks."""

MakeTasks = Callable[[], list[Task]]


def seeded_tasks(
    make_tasks: Callable[[int, int], list[Task]], size: int, seed: int, evaluation_size: int
) -> tuple[MakeTasks, MakeTasks]:
    """What makes the training tasks, and what makes the evaluation tasks, from `make_tasks(size, seed)`.

    Raises ConfigError when a size is not positive.
    """
    if size < 1 or evaluation_size < 1:
        raise ConfigError(f"env.args.size and evaluation_size must be positive; got {size} and {evaluation_size}")
    return partial(make_tasks, size, seed), partial(make_tasks, evaluation_size, seed + EVALUATION_SEED)


def variant_tasks(
    name: str, prompt: tuple[Message, ...], key: str, variants: Sequence[dict[str, Json]], size: int, seed: int
) -> list[Task]:
    """`size` tasks with the same prompt. Task i has seed `seed + i`, and under `key` variant i modulo their number."""
    return [
        Task(
            id=f"{name}/{seed + index}",
            prompt=prompt,
            data={"seed": seed + index, key: variants[index % len(variants)] if variants else {}},
        )
        for index in range(size)
    ]
