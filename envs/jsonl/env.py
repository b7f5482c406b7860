"""One row, one reply; the reward is the user's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.jsonl.data import read_tasks
from rlflow.envs.jsonl.reward import no_reward
from rlflow.errors import ConfigError


def load(path: str, system_prompt: str = "") -> EnvironmentSpec:
    """Tasks from a JSON Lines file, read on the driver's machine.

    path: the file; relative paths start at the current directory.
    system_prompt: put before each prompt that has none of its own.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"env.args.path={path} is not a file (from {Path.cwd()})")
    return EnvironmentSpec(tasks=partial(read_tasks, str(file), system_prompt), build=SingleTurn, reward=no_reward)
