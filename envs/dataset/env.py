"""One row, one reply; the reward is the user's."""

from functools import partial

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.dataset.data import read_tasks
from rlflow.envs.dataset.sources import find_source


def load(path: str, system_prompt: str = "", evaluation_path: str | None = None) -> EnvironmentSpec:
    """Tasks from rows, read on the driver's machine; see `rlflow.envs.dataset.data` for their columns.

    path: a .jsonl, .json or .parquet file, a folder that the library `datasets` saved or can load, or a name of the hub
        such as openai/gsm8k/main or hf://gsm8k. `:split` behind a folder or a name; without it `train`. Relative paths
        start at the current directory.
    system_prompt: put before each prompt that has none of its own.
    evaluation_path: tasks for `eval.every`; as `path`.
    """
    evaluation = None
    if evaluation_path is not None:
        evaluation = partial(read_tasks, find_source(evaluation_path, "env.args.evaluation_path"), system_prompt)
    source = find_source(path, "env.args.path")
    return EnvironmentSpec(
        tasks=partial(read_tasks, source, system_prompt), build=SingleTurn, evaluation_tasks=evaluation
    )
