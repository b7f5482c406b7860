"""JSON Lines -> Tasks: one object a line, in the column names that other projects use too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError
from rlflow.types import Message, Task

_CONSUMED = ("id", "prompt", "question", "answer")


def read_tasks(path: str, system_prompt: str) -> list[Task]:
    """One Task a line; blank lines are skipped. ConfigError names file and line of a bad row."""
    tasks = []
    name = Path(path).stem
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    tasks.append(_task(line, f"{path}:{number}", f"{name}/{number}", system_prompt))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    return tasks


def _task(line: str, where: str, default_id: str, system_prompt: str) -> Task:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error}); write one JSON object on each line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a JSON {type(row).__name__}; write one JSON object on each line")
    messages = _messages(row, where)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, Message(role="system", content=system_prompt))
    return Task(
        id=str(row.get("id", default_id)),
        prompt=tuple(messages),
        answer=_answer(row, where),
        data={name: value for name, value in row.items() if name not in _CONSUMED},
    )


def _messages(row: dict[str, Any], where: str) -> list[Message]:
    column = next((name for name in ("prompt", "question") if row.get(name) is not None), None)
    if column is None:
        raise ConfigError(f"{where} has no prompt; give it the column `prompt` or `question`; found {sorted(row)}")
    value = row[column]
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or not value or not all(map(_is_message, value)):
        raise ConfigError(
            f"{where}: `{column}` must be text, or a list of messages with `role` and `content` as text; "
            f"got {value!r:.80}"
        )
    if not any(message["content"].strip() for message in value):
        raise ConfigError(f"{where}: `{column}` is empty")
    return [Message(role=message["role"], content=message["content"]) for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _answer(row: dict[str, Any], where: str) -> str | None:
    nested = row.get("reward_model")
    value = row.get("answer")
    if value is None and isinstance(nested, dict):
        value = nested.get("ground_truth")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(
            f"{where}: the answer must be text or a number; got {value!r:.80}; other columns reach the reward "
            "unchanged, as task.data"
        )
    return str(value)
