"""Rows -> Tasks with one reply each, in the column names of other projects; the reward is the user's.

TRL             prompt, image | images, and whatever else
verifiers       prompt | question, answer, info, task, example_id
verl            data_source, prompt, ability, reward_model {style, ground_truth}, extra_info
SkyRL           prompt, env_class, reward_spec {method, ground_truth}
reasoning-gym   question, answer, metadata {source_dataset}
slime, AReaL    prompt | messages, label | answer
MATH, AIME      problem, answer
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.envs.dataset.images import MAX_INLINE_BYTES, place_images
from rlflow.envs.dataset.sources import Row, Source, find_source, rows_of
from rlflow.envs.images import with_images
from rlflow.errors import ConfigError
from rlflow.types import ROLES, FunctionCall, Json, Message, Task, ToolCall

PROMPTS = ("prompt", "messages", "question", "problem")
"""The first one that a row has is its prompt."""
ANSWERS = (("label", None), ("reward_model", "ground_truth"), ("reward_spec", "ground_truth"))
"""(column, key within it) of the answer, if there is no column `answer`."""
KINDS = (("kind", None), ("data_source", None), ("task", None), ("env_class", None), ("metadata", "source_dataset"))
"""(column, key within it) of the task's kind."""

Columns = dict[str, Any]


def load(path: str, system_prompt: str = "", evaluation_path: str | None = None) -> EnvironmentSpec:
    """Tasks from rows, read on the driver's machine; their columns are listed at the top of this file.

    path: a .jsonl, .json or .parquet file, a folder that the library `datasets` saved or can load, or a name of the hub
        such as openai/gsm8k/main or hf://gsm8k. `:split` behind a folder or a name; without it `train`. Relative paths
        start at the current directory.
    system_prompt: put before each prompt that has none of its own.
    evaluation_path: tasks for `eval.every`; as `path`.
    """
    evaluation = None
    if evaluation_path is not None:
        evaluation = partial(read_tasks, find_source(evaluation_path, "env.args.evaluation_path"), system_prompt)
    tasks = partial(read_tasks, find_source(path, "env.args.path"), system_prompt)
    return EnvironmentSpec(tasks=tasks, build=SingleTurn, evaluation_tasks=evaluation)


def read_tasks(source: Source, system_prompt: str, make: Callable[[Row, str, Path], Task] | None = None) -> list[Task]:
    """One Task for each row, which `make` turns into one as `task_of` does; None: as `task_of`.

    Raises ConfigError, which names the file and the row, for a row that cannot be used.
    """
    tasks: list[Task] = []
    num_bytes, folder = 0, Path(source.path).parent
    for row in rows_of(source):
        task = (make or task_of)(row, system_prompt, folder)
        tasks.append(task)
        messages = (*task.prompt, *chain(*task.demonstrations))
        shown = [part["image"] for each in messages for part in each.get("parts", ()) if part["type"] == "image"]
        num_bytes += sum(len(image) for image in shown if image.startswith("data:"))
        if num_bytes > MAX_INLINE_BYTES:
            raise ConfigError(
                f"{row.where}: the images up to here have more than {MAX_INLINE_BYTES} bytes as base64; save them as "
                "files, and put their paths in the rows"
            )
    return tasks


def task_of(row: Row, system_prompt: str, folder: Path) -> Task:
    """The task of a row; images that it names by relative paths are in `folder`. Raises ConfigError."""
    prompt_column = next((name for name in PROMPTS if row.columns.get(name) is not None), None)
    placed = row.columns
    if prompt_column is not None:
        placed = place_images(row.columns, prompt_column, folder, f"{row.where}: `{prompt_column}`")
    columns = {name: _plain(value, f"{row.where}: the column `{name}`") for name, value in placed.items()}
    if prompt_column is None:
        raise ConfigError(
            f"{row.where} has no prompt; give it the column `prompt`, `messages`, `question` or `problem`, and for "
            f"the answer `answer`, `label`, `reward_model.ground_truth` or `reward_spec.ground_truth`; found "
            f"{sorted(columns)}"
        )
    where = f"{row.where}: `{prompt_column}`"
    messages = messages_of(columns[prompt_column], where)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where} ends with a message of the assistant, which is asked to reply; leave that one out, or train on "
            "it with env.name=demonstrations"
        )
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, Message(role="system", content=system_prompt))
    id_column = next((name for name in ("id", "example_id") if columns.get(name) is not None), None)
    id_ = row.default_id if id_column is None else columns[id_column]
    if isinstance(id_, bool) or not isinstance(id_, (str, int)):
        raise ConfigError(f"{row.where}: `{id_column}` must be text or a whole number; got {id_!r:.80}")
    kinds = (value for value in _values(columns, KINDS) if isinstance(value, str) and value)
    consumed = ("id", "answer", *({prompt_column} - {"question", "problem"}))  # rewards and environments may ask for it
    return Task(
        id=str(id_),
        prompt=tuple(messages),
        prompt_is_text=isinstance(columns[prompt_column], str),
        answer=_answer(columns, row.where),
        kind=next(kinds, ""),
        data={name: value for name, value in columns.items() if name not in consumed},
    )


# -- the answer


def _answer(columns: Columns, where: str) -> Json:
    """The answer as the row has it. A value that is neither text nor a number is an error in the column `answer`; in
    the other columns it is left to the reward.
    """
    value = columns.get("answer")
    if value is not None and not _is_answer(value):
        raise ConfigError(
            f"{where}: the answer must be text or a number; got {value!r:.80}; other columns reach the reward "
            "unchanged, as task.data"
        )
    return next((each for each in (value, *_values(columns, ANSWERS)) if _is_answer(each)), None)


def _is_answer(value: Json) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str) or is_number or (isinstance(value, float) and math.isfinite(value))


def _values(columns: Columns, places: Iterable[tuple[str, str | None]]) -> Iterable[Json]:
    for column, key in places:
        value = columns.get(column)
        if key is not None:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            yield value


# -- the prompt


def messages_of(value: Json, where: str, role: str = "user") -> list[Message]:
    """The messages of a column: a list of them, or a text that somebody of `role` says. Raises ConfigError."""
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    messages = [_message(one) for one in value] if isinstance(value, list) else []
    usable = [message for message in messages if message is not None]
    if not usable or len(usable) < len(messages):
        raise ConfigError(
            f"{where} must be text, or a list of messages with `role` and `content` as text or parts; got {value!r:.80}"
        )
    if strange := [message["role"] for message in usable if message["role"] not in ROLES]:
        raise ConfigError(f"{where} has a message of the role {strange[0]!r:.80}; roles are {', '.join(ROLES)}")
    if not any(message["content"].strip() for message in usable):
        raise ConfigError(f"{where} is empty")
    return usable


def _message(value: Json) -> Message | None:
    """None if it is no message. A field that is null counts as missing, because columns of Parquet have all fields."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return None
    calls, content = value.get("tool_calls"), value.get("content")
    if calls and content is None:
        content = ""
    try:
        message = with_images({"role": value["role"], "content": content}, read=False)
    except ValueError:
        return None
    if not isinstance(message["content"], str):
        return None
    if calls:
        parsed = [_tool_call(call, index) for index, call in enumerate(calls)] if isinstance(calls, list) else [None]
        message["tool_calls"] = [call for call in parsed if call is not None]
        if len(message["tool_calls"]) < len(parsed):
            return None
    for name in ("tool_call_id", "name"):
        if isinstance(text := value.get(name), str):
            message[name] = text
    return message


def _tool_call(value: Json, index: int) -> ToolCall | None:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    call_id = value.get("id") or f"call_{index}"
    return ToolCall(id=str(call_id), type="function", function=FunctionCall(name=str(function["name"]), arguments=text))


# -- values


def _plain(value: object, where: str) -> Json:
    """The value as JSON has it: numpy's and Arrow's numbers as Python's, points in time as ISO 8601."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one, where) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, where) for one in value]
    if callable(convert := getattr(value, "tolist", None)):
        return _plain(convert(), where)
    if callable(convert := getattr(value, "isoformat", None)):
        return str(convert())
    if type(value).__name__ == "Decimal":
        return str(value)
    raise ConfigError(
        f"{where} holds a value of type {type(value).__name__}, such as {value!r:.40}, which is neither text nor a "
        "number nor a list or table of them; leave the column out"
    )
