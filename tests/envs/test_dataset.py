"""Rows of files, folders and the hub, in the column names of other projects."""

from __future__ import annotations

import datetime
import json
import pickle
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.config import Config, EnvConfig, RewardConfig
from rlflow.environments.find import held_out_tasks, load_environment
from rlflow.envs.base import SingleTurn
from rlflow.envs.dataset.sources import Kind, Source, find_source
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

SUM = Message(role="user", content="2 + 3 =")
SCORE = "rlflow.envs.arithmetic.reward:is_right"


def load(reward: str | None = SCORE, **arguments: Any) -> list[Task]:
    return list(load_environment(EnvConfig(name="dataset", args=arguments), RewardConfig(function=reward)).tasks())


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("column", ["question", "problem"])
def test_a_reward_may_ask_for_the_question_that_is_the_prompt(column: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {column: "2 + 3 =", "answer": 5})
    rewards = tmp_path / "own.py"
    rewards.write_text(f"def repeats(completion, {column}):\n    return float({column} in completion)\n")
    (task,) = load(f"{rewards}:repeats", path=path)
    assert (task.prompt, task.data) == ((SUM,), {column: "2 + 3 ="})


def test_rows_read_the_columns_of_other_projects(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3 ="}]
    path = write_rows(
        tmp_path / "sums.jsonl",
        {"id": "first", "prompt": "2 + 3 =", "answer": 5},
        {"prompt": messages, "answer": "5", "level": 2},
        {"question": "2 + 3 =", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "5"}},
        {"prompt": "Say hello."},
    )
    found = load(path=path, system_prompt="Be brief.")
    brief = Message(role="system", content="Be brief.")
    assert [each.id for each in found] == ["first", "sums/2", "sums/3", "sums/4"]
    assert [each.answer for each in found] == [5, "5", "5", None]
    assert [each.prompt_is_text for each in found] == [True, False, True, True]
    assert found[0].prompt == (brief, SUM)
    assert found[1].prompt == (Message(role="system", content="Add."), SUM)
    assert found[1].data == {"level": 2}
    question = {"question": "2 + 3 ="}
    assert found[2].data == question | {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "5"}}


MESSAGES = [{"role": "user", "content": "2 + 3 ="}]
SHAPES: dict[str, tuple[dict[str, Any], Task]] = {
    "trl": (
        {"prompt": MESSAGES, "solution": "5", "hints": ["add"]},
        Task(id="rows/1", prompt=(SUM,), data={"solution": "5", "hints": ["add"]}),
    ),
    "verifiers": (
        {"question": "2 + 3 =", "answer": "5", "info": {"level": 1}, "task": "sums", "example_id": 7},
        Task(
            id="7",
            prompt=(SUM,),
            prompt_is_text=True,
            answer="5",
            kind="sums",
            data={"question": "2 + 3 =", "info": {"level": 1}, "task": "sums", "example_id": 7},
        ),
    ),
    "verifiers with both": (
        {"prompt": MESSAGES, "question": "2 + 3 =", "answer": "5"},
        Task(id="rows/1", prompt=(SUM,), answer="5", data={"question": "2 + 3 ="}),
    ),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": MESSAGES,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"split": "train", "index": 0},
        },
        Task(
            id="rows/1",
            prompt=(SUM,),
            answer="5",
            kind="openai/gsm8k",
            data={
                "data_source": "openai/gsm8k",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "5"},
                "extra_info": {"split": "train", "index": 0},
            },
        ),
    ),
    "verl with a structured answer": (
        {"prompt": MESSAGES, "reward_model": {"ground_truth": {"target": ["5", "five"]}}},
        Task(id="rows/1", prompt=(SUM,), data={"reward_model": {"ground_truth": {"target": ["5", "five"]}}}),
    ),
    "skyrl": (
        {"prompt": MESSAGES, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "5"}},
        Task(
            id="rows/1",
            prompt=(SUM,),
            answer="5",
            kind="gsm8k",
            data={"env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "5"}},
        ),
    ),
    "reasoning-gym": (
        {"question": "2 + 3 =", "answer": "5", "metadata": {"source_dataset": "chain_sum", "source_index": 3}},
        Task(
            id="rows/1",
            prompt=(SUM,),
            prompt_is_text=True,
            answer="5",
            kind="chain_sum",
            data={"question": "2 + 3 =", "metadata": {"source_dataset": "chain_sum", "source_index": 3}},
        ),
    ),
    "slime": (
        {"messages": MESSAGES, "label": 5},
        Task(id="rows/1", prompt=(SUM,), answer=5, data={"label": 5}),
    ),
    "areal": ({"messages": MESSAGES, "answer": "5"}, Task(id="rows/1", prompt=(SUM,), answer="5")),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_of_rows(shape: str, tmp_path: Path) -> None:
    row, task = SHAPES[shape]
    assert load(path=write_rows(tmp_path / "rows.jsonl", row)) == [task]


@pytest.mark.parametrize("shape", SHAPES)
def test_parquet_gives_the_same_tasks(shape: str, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row, task = SHAPES[shape]
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([row]), path)
    (found,) = load(path=str(path))
    assert found.id == task.id.replace("rows/1", "rows/0")
    assert (found.prompt, found.answer, found.kind, found.data) == (task.prompt, task.answer, task.kind, task.data)


def test_values_of_tables_become_plain(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {
        "prompt": "2 + 3 =",
        "answer": Decimal("5.00"),
        "day": datetime.date(2024, 2, 29),
        "scores": np.array([0.5, 1.0], dtype=np.float32),
        "empty": None,
    }
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (found,) = load(path=str(tmp_path / "rows.parquet"))
    assert found.answer == "5.00"
    assert found.data == {"day": "2024-02-29", "scores": [0.5, 1.0], "empty": None}
    json.dumps(found.data, allow_nan=False)
    parquet.write_table(arrow.Table.from_pylist([{"prompt": "hi", "picture": b"\x89PNG"}]), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match=r"p.parquet, row 0: the column `picture` holds a value of type bytes"):
        load(path=str(tmp_path / "p.parquet"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="torn.parquet cannot be read as Parquet"):
        load(path=str(tmp_path / "torn.parquet"))


def test_tool_calls_of_a_prompt_are_kept(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    prompt = [
        {"role": "user", "content": "2 + 3 =", "name": "Ann", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "call_0"},
    ]
    (found,) = load(path=write_rows(tmp_path / "rows.jsonl", {"prompt": prompt}))
    function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert found.prompt == (
        {"role": "user", "content": "2 + 3 =", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "call_0"},
    )


def test_a_path_and_a_reward_are_needed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "hi"})
    with pytest.raises(ConfigError, match=r"reward.function is required with env.name=dataset"):
        load(reward=None, path=path)
    with pytest.raises(ConfigError, match=r"env.args.path is required by env.name=dataset"):
        load()
    with pytest.raises(ConfigError, match=r"none.jsonl is not a file"):
        load(path=str(tmp_path / "none.jsonl"))
    model = RewardConfig(model="a-reward-model")
    spec = load_environment(EnvConfig(name="dataset", args={"path": path}), model)
    assert isinstance(pickle.loads(pickle.dumps(spec)).build(), SingleTurn)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "is not JSON .*; write one JSON object on each line"),
        ("[1]", "is a JSON list; write one JSON object on each line"),
        ('{"text": "hi"}', r"has no prompt; .* `prompt`, `messages`, `question` or `problem`, .*; found \['text'\]"),
        (
            '{"prompt": 5}',
            "`prompt` must be text, or a list of messages with `role` and `content` as text or parts; got 5",
        ),
        ('{"prompt": []}', "`prompt` must be text, or a list of messages"),
        ('{"prompt": [{"role": "user"}]}', "`prompt` must be text, or a list of messages"),
        ('{"prompt": [{"role": "tool", "content": "", "tool_calls": [3]}]}', "`prompt` must be text, or a list of"),
        (
            '{"prompt": [{"role": "human", "content": "hi"}]}',
            "`prompt` has a message of the role 'human'; roles are system,",
        ),
        ('{"question": " "}', "`question` is empty"),
        ('{"messages": [{"role": "assistant", "content": "5"}]}', "`messages` ends with a message of the assistant"),
        ('{"prompt": "hi", "answer": [1]}', "the answer must be text or a number; got"),
        ('{"prompt": "hi", "answer": true}', "the answer must be text or a number; got True"),
        ('{"prompt": "hi", "answer": NaN}', "the answer must be text or a number; got nan"),
        ('{"prompt": "hi", "id": 0.5}', "`id` must be text or a whole number; got 0.5"),
    ],
)
def test_a_bad_row_names_file_and_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "hi"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=rf"rows.jsonl:3:? {message}"):
        load(path=str(path))


def test_rows_with_one_id_and_files_without_rows(tmp_path: Path) -> None:
    row = {"prompt": "hi", "id": "a"}
    with pytest.raises(ConfigError, match="rows 0 and 1 have the same id 'a'"):
        load(path=write_rows(tmp_path / "rows.jsonl", row, row))
    with pytest.raises(ConfigError, match=r"env.name=dataset has no tasks"):
        load(path=write_rows(tmp_path / "rows.jsonl"))


def test_a_json_file_is_an_array_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(' [{"prompt": "hi"},\n {"prompt": "ho"}]')
    assert [task.id for task in load(path=str(path))] == ["rows/0", "rows/1"]
    write_rows(path, {"prompt": "hi"}, {"prompt": "ho"})
    assert [task.id for task in load(path=str(path))] == ["rows/1", "rows/2"]
    for text, message in (
        ("[3]", "rows.json, row 0 is a JSON int; write one array of objects"),
        ("[3", r"rows.json is not JSON \(.*; write one array of objects"),
        ("\xff", "rows.json is not UTF-8 text"),
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=message):
            load(path=str(path))


def test_an_evaluation_without_tasks_is_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "1 + 1 =", "answer": "2"})
    config = Config()
    config.eval.every = 5
    config.env = EnvConfig(name="dataset", args={"path": rows})
    config.reward = RewardConfig(function=SCORE)
    with pytest.raises(ConfigError, match="env.name=dataset with these env.args has no evaluation tasks"):
        held_out_tasks(config, load_environment(config.env, config.reward))
    config.env.args["evaluation_path"] = rows
    assert [task.answer for task in held_out_tasks(config, load_environment(config.env, config.reward))] == ["2"]
    config.env.args["evaluation_path"] = "none.jsonl"
    with pytest.raises(ConfigError, match="env.args.evaluation_path=none.jsonl is not a file or folder"):
        load_environment(config.env, config.reward)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("openai/gsm8k", Source(kind=Kind.hub, path="openai/gsm8k")),
        ("openai/gsm8k/main:test[:9]", Source(kind=Kind.hub, path="openai/gsm8k", subset="main", split="test[:9]")),
        ("hf://squad", Source(kind=Kind.hub, path="squad")),
        ("hf://openai/gsm8k:test", Source(kind=Kind.hub, path="openai/gsm8k", split="test")),
        ("here", Source(kind=Kind.folder, path="here")),
        ("here:test", Source(kind=Kind.folder, path="here", split="test")),
        ("here/rows.ndjson", Source(kind=Kind.lines, path="here/rows.ndjson")),
    ],
)
def test_what_a_path_means(text: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here/rows.ndjson").touch()
    assert find_source(text, "env.args.path") == source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gsm8k", "env.args.path=gsm8k is not a file or folder .* nor a name of the hub, such as openai/gsm8k"),
        ("data/rows.parquet", "env.args.path=data/rows.parquet is not a file"),
        ("/no/such/folder", "env.args.path=/no/such/folder is not a file"),
        ("hf://a/b/c/d", "nor a name of the hub"),
        ("rows.csv", "env.args.path=rows.csv must end with .jsonl, .json or .parquet"),
        ("rows.jsonl:test", "rows.jsonl:test is a file, and files have no splits; leave out :test"),
    ],
)
def test_a_path_that_means_nothing(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").touch()
    Path("rows.jsonl").touch()
    with pytest.raises(ConfigError, match=message):
        find_source(text, "env.args.path")


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"rows.parquet needs the package pyarrow, .*; pip install rlflow\[datasets\]"
    ):
        load(path=str(tmp_path / "rows.parquet"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"a/b needs the package datasets, .*; pip install rlflow\[datasets\]"):
        load(path="a/b")


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_list([{"prompt": MESSAGES, "answer": 5}, {"prompt": MESSAGES, "answer": 6}])
    rows.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    rows.to_parquet(tmp_path / "files" / "train-0.parquet")
    both = [("0", 5), ("1", 6)]
    for folder, found in (("plain", both), ("splits", both), ("splits:test", [("0", 6)]), ("files", both)):
        tasks = load(path=str(tmp_path / folder))
        name = folder.partition(":")[0]
        assert [(task.id, task.answer) for task in tasks] == [(f"{name}/{row}", answer) for row, answer in found]
        assert all(task.prompt == (SUM,) for task in tasks)
    with pytest.raises(ConfigError, match=r"splits has no split other; put one of its own behind a colon, train, test"):
        load(path=str(tmp_path / "splits:other"))
    with pytest.raises(ConfigError, match=r"plain was saved without splits; leave out :test"):
        load(path=str(tmp_path / "plain:test"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"env.args.path=.*empty cannot be loaded by `datasets`"):
        load(path=str(tmp_path / "empty"))


def test_a_name_of_the_hub_comes_from_the_cache_when_there_is_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "2 + 3 =", "answer": "5"})
    datasets.load_dataset("json", data_files=rows, cache_dir=str(tmp_path / "json"))
    (info,) = (tmp_path / "json").rglob("dataset_info.json")
    kept = tmp_path / "cache" / "acme___sums" / "default" / "0.0.0" / ("a" * 40)
    kept.parent.mkdir(parents=True)
    info.parent.rename(kept)
    (kept / "json-train.arrow").rename(kept / "sums-train.arrow")
    assert load(path="acme/sums") == [Task(id="acme/sums/train/0", prompt=(SUM,), prompt_is_text=True, answer="5")]
    with pytest.raises(ConfigError, match="env.args.path=acme/products cannot be loaded by `datasets`: .*connection"):
        load(path="acme/products")
