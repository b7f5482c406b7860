"""One row, one reply; the reward is the user's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.jsonl.data import read_tasks
from rlflow.errors import ConfigError


def load(path: str, system_prompt: str = "", evaluation_path: str | None = None) -> EnvironmentSpec:
    """Tasks from a JSON Lines file, read on the driver's machine.

    path: the file; relative paths start at the current directory.
    system_prompt: put before each prompt that has none of its own.
    evaluation_path: tasks for `eval.every`, in a file of the same form.
    """
    evaluation = None
    if evaluation_path is not None:
        evaluation = partial(read_tasks, _existing("evaluation_path", evaluation_path), system_prompt)
    return EnvironmentSpec(
        tasks=partial(read_tasks, _existing("path", path), system_prompt),
        build=SingleTurn,
        evaluation_tasks=evaluation,
    )


def _existing(argument: str, path: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"env.args.{argument}={path} is not a file (from {Path.cwd()})")
    return str(file)
