"""Rows that hold the replies too: conversations to learn from, not to play (supervised fine-tuning).

messages                        a conversation; everything from the first message of the assistant on is given
prompt, completion | response   as texts, or as lists of messages
tools                           schemas of what the assistant may call
weight                          what the row counts, 1 without it
"""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.dataset.env import PROMPTS, messages_of, read_tasks, task_of
from rlflow.envs.dataset.sources import Row, find_source
from rlflow.errors import ConfigError
from rlflow.types import Json, Task

CONVERSATION = "messages"
REPLIES = ("completion", "response")
"""The first one that a row has holds what follows its prompt."""


def load(path: str, system_prompt: str = "", evaluation_path: str | None = None) -> EnvironmentSpec:
    """Demonstrations from rows; their columns are listed at the top of this file.

    path: as for the environment `dataset`.
    system_prompt: put before each prompt that has none of its own.
    evaluation_path: tasks without replies for `eval.every`; as `path`.
    """
    evaluation = None
    if evaluation_path is not None:
        evaluation = partial(read_tasks, find_source(evaluation_path, "env.args.evaluation_path"), system_prompt)
    tasks = partial(read_tasks, find_source(path, "env.args.path"), system_prompt, demonstration_of)
    return EnvironmentSpec(tasks=tasks, build=SingleTurn, evaluation_tasks=evaluation, gives_replies=True)


def demonstration_of(row: Row, system_prompt: str, folder: Path) -> Task:
    """The task of a row, with its demonstration. Raises ConfigError, which names the row, without a reply."""
    columns = dict(row.columns)
    column = next((name for name in REPLIES if columns.get(name) is not None), CONVERSATION)
    where = f"{row.where}: `{column}`"
    if columns.get(column) is None:
        raise ConfigError(
            f"{row.where} has no reply; give it the column `messages` with a whole conversation, or `completion` or "
            f"`response` beside its prompt ({', '.join(PROMPTS)}); found {sorted(columns)}"
        )
    told = messages_of(columns.pop(column), where, "assistant")
    if column == CONVERSATION:
        first = next((index for index, message in enumerate(told) if message["role"] == "assistant"), len(told))
        columns[CONVERSATION], told = row.columns[CONVERSATION][:first], told[first:]
        if not first:
            raise ConfigError(f"{where} begins with the assistant, who replies to nothing; put a question before it")
    if columns.get("tools") is not None:
        columns["tools"] = _tools(columns["tools"], f"{row.where}: `tools`")
    weight = columns.get("weight")
    if weight is not None and not (isinstance(weight, (int, float)) and 0 <= weight < math.inf):
        raise ConfigError(f"{row.where}: `weight` must be a number from 0 on; got {weight!r:.40}")
    if not told or told[0]["role"] != "assistant" or told[-1]["role"] != "assistant":
        raise ConfigError(f"{where} must end with a reply of the assistant, and what follows a prompt begin with one")
    return replace(task_of(row._replace(columns=columns), system_prompt, folder), demonstration=tuple(told))


def _tools(value: object, where: str) -> list[dict[str, Json]]:
    """The schemas of a column, which may be JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} must be a list of schemas, or JSON of one; it is no JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(f"{where} must be a list of schemas, or JSON of one; got {value!r:.80}")
    return value
