"""Rows that hold the replies too: conversations to learn from, not to play (supervised fine-tuning, preferences).

messages                        a conversation; everything from the first message of the assistant on is given
prompt, completion | response   as texts, or as lists of messages
chosen, rejected                two replies to a prompt, or two conversations that differ from a reply on
tools                           schemas of what the assistant may call
weight                          what the row counts, 1 without it
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.dataset.env import PROMPTS, messages_of, read_tasks, task_of
from rlflow.envs.dataset.sources import Row, find_source
from rlflow.errors import ConfigError
from rlflow.types import Json, Message, Task

CONVERSATION = "messages"
REPLIES = ("completion", "response")
"""The first one that a row has holds what follows its prompt."""
PAIR = ("chosen", "rejected")


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
    """The task of a row, with what is given. Raises ConfigError, which names the row, without a reply."""
    columns = dict(row.columns)
    names = _columns_of_replies(row)
    wheres = [f"{row.where}: `{name}`" for name in names]
    talks = [messages_of(columns.pop(name), where, "assistant") for name, where in zip(names, wheres, strict=True)]
    if names == (CONVERSATION,) or (names == PAIR and talks[0][0]["role"] != "assistant"):
        length = _prompt_length(talks, wheres)
        columns.pop(PROMPTS[0], None)  # the conversation holds it
        columns[CONVERSATION] = row.columns[names[0]][:length]
        talks = [talk[length:] for talk in talks]
    if columns.get("tools") is not None:
        columns["tools"] = _tools(columns["tools"], f"{row.where}: `tools`")
    weight = columns.get("weight")
    if weight is not None and not (isinstance(weight, (int, float)) and 0 <= weight < math.inf):
        raise ConfigError(f"{row.where}: `weight` must be a number from 0 on; got {weight!r:.40}")
    if weight is not None and names == PAIR:
        raise ConfigError(f"{row.where}: `weight` has no effect beside `chosen` and `rejected`; leave it out")
    for talk, where in zip(talks, wheres, strict=True):
        if not talk or talk[0]["role"] != "assistant" or talk[-1]["role"] != "assistant":
            raise ConfigError(
                f"{where} must end with a reply of the assistant, and what follows a prompt begin with one"
            )
    task = task_of(row._replace(columns=columns), system_prompt, folder)
    return replace(task, demonstrations=tuple(tuple(talk) for talk in talks))


def _prompt_length(talks: Sequence[list[Message]], wheres: Sequence[str]) -> int:
    """Messages before the first reply, with which every conversation of a row begins. Raises ConfigError."""
    first = talks[0]
    length = next((index for index, message in enumerate(first) if message["role"] == "assistant"), len(first))
    if not length:
        raise ConfigError(f"{wheres[0]} begins with the assistant, who replies to nothing; put a question before it")
    for talk, where in zip(talks, wheres, strict=True):
        if talk[:length] != first[:length]:
            raise ConfigError(f"{where} must begin with the same messages as `chosen`, up to the first reply")
    return length


def _columns_of_replies(row: Row) -> tuple[str, ...]:
    """Those of a pair, or the one column with what is given. Raises ConfigError if there is none, or half a pair."""
    found = tuple(name for name in (*PAIR, *REPLIES, CONVERSATION) if row.columns.get(name) is not None)
    if found[:2] == PAIR:
        return PAIR
    if found and found[0] in PAIR:
        raise ConfigError(f"{row.where} has `{found[0]}` alone; a preference needs `chosen` and `rejected`")
    if not found:
        raise ConfigError(
            f"{row.where} has no reply; give it the column `messages` with a whole conversation, `completion` or "
            f"`response` beside its prompt ({', '.join(PROMPTS)}), or `chosen` and `rejected`; found "
            f"{sorted(row.columns)}"
        )
    return found[:1]


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
