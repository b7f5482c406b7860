"""Images in the rows of a data set: where they stand in the prompt, and what the driver holds of them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from vision_models import picture

from rlflow.environments.wire import fields_of_task, plain, prompt_of, task_of
from rlflow.envs.base import Prompt, SingleTurn
from rlflow.envs.dataset import env as dataset
from rlflow.envs.images import file_of
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

FIRST, SECOND = picture(1), picture(2)
TEXT = base64.b64encode(FIRST).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "1.png").write_bytes(FIRST)
    (tmp_path / "shots" / "2.png").write_bytes(SECOND)
    return tmp_path


def tasks_of(folder: Path, *rows: dict[str, Any]) -> list[Task]:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return list(dataset.load(str(path)).tasks())


async def shown(task: Task) -> list[Message]:
    """What the policy is shown, in the runner, once the task went to a process and its prompt came back."""
    there = task_of(json.loads(json.dumps(fields_of_task(task))))
    return prompt_of(plain("reset", await SingleTurn().reset(there), Prompt)).messages


def outline(message: Message) -> list[str | bytes]:
    parts = message.get("parts", [])
    return [file_of(part["image"]) if part["type"] == "image" else part["text"] for part in parts]


IMAGE = {"type": "image"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # As TRL has it: the images come before the text.
        ({"prompt": "what?", "images": ["shots/1.png", "shots/2.png"]}, [FIRST, SECOND, "what?"]),
        ({"prompt": [{"role": "user", "content": "what?"}], "image": "shots/1.png"}, [FIRST, "what?"]),
        # As verl has it: a text marks the places.
        (
            {"prompt": "this <image> and <image>?", "images": ["shots/1.png", TEXT]},
            ["this ", FIRST, " and ", FIRST, "?"],
        ),
        (
            {"prompt": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "what?"}]}], "images": [TEXT]},
            [FIRST, "what?"],
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "shots/2.png"}]}]}, [SECOND]),
    ],
)
async def test_where_images_stand(folder: Path, row: dict[str, Any], expected: list[str | bytes]) -> None:
    (task,) = tasks_of(folder, {**row, "answer": "a cat"})
    (message,) = await shown(task)
    assert outline(message) == expected
    assert message["content"] == "".join("[image]" if isinstance(part, bytes) else part for part in expected)
    assert (task.answer, task.data) == ("a cat", {})


def test_a_path_stays_a_path_in_the_driver(folder: Path) -> None:
    (task,) = tasks_of(folder, {"prompt": "what?", "images": ["shots/1.png"]})
    (part, _) = task.prompt[0]["parts"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
    assert part == {"type": "image", "image": str(folder / "shots" / "1.png")}


async def test_parquet_as_the_library_datasets_writes_it(folder: Path) -> None:
    content = [[{"type": "image", "text": None}, {"type": "text", "text": "what?"}]]
    table = arrow.table(
        {
            "prompt": [[{"role": "user", "content": each}] for each in content],
            "images": [[{"bytes": FIRST, "path": None}]],
            "answer": ["a cat"],
        }
    )
    parquet.write_table(table, folder / "rows.parquet")
    (task,) = dataset.load(str(folder / "rows.parquet")).tasks()
    (message,) = await shown(task)
    assert outline(message) == [FIRST, "what?"]


def test_a_column_may_name_another_kind_of_image(folder: Path) -> None:
    (task,) = tasks_of(folder, {"prompt": "fix it", "image": "python:3.11-slim"})
    assert (task.prompt, task.data) == ((Message(role="user", content="fix it"),), {"image": "python:3.11-slim"})


def test_a_text_with_the_mark_and_no_image_is_a_text(folder: Path) -> None:
    (task,) = tasks_of(folder, {"prompt": "what is <image> in HTML?"})
    assert task.prompt == (Message(role="user", content="what is <image> in HTML?"),)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "<image> and <image>", "images": ["shots/1.png"]}, "fewer images than its prompt has places"),
        ({"prompt": "<image>", "images": ["shots/1.png", "shots/2.png"]}, "has 1 more images than its prompt"),
        ({"prompt": "what?", "images": ["shots/3.png"]}, "must be a path, base64 or a data URL"),
        ({"prompt": "what?", "images": [7]}, "a picture of Pillow; got 7"),
    ],
)
def test_a_row_whose_images_do_not_fit_is_named(folder: Path, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        tasks_of(folder, {"prompt": "fine"}, row)
    assert "rows.jsonl:2" in str(caught.value)


def test_rows_that_hold_too_much_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MAX_INLINE_BYTES", len(TEXT) + 100)
    tasks_of(folder, {"prompt": "what?", "images": [TEXT]})
    with pytest.raises(ConfigError, match="save them as files, and put their paths in the rows"):
        tasks_of(folder, *[{"prompt": "what?", "images": [TEXT]}] * 2)
