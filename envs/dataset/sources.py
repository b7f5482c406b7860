"""Where rows come from: a file, a folder, or the hub of the library `datasets` -> rows with a name and a place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rlflow.errors import ConfigError

BATCH_ROWS = 1024
"""Rows of a table that are turned into Python values at once."""

_HUB_NAME = re.compile(r"(?:hf://)?(?P<name>\w[\w.-]*(?:/[\w.-]+)?)(?:/(?P<subset>[\w.-]+))?(?::(?P<split>[^/]+))?")


class Kind(StrEnum):
    """What a path leads to; the values of the files are their suffixes."""

    lines = ".jsonl"
    json = ".json"
    parquet = ".parquet"
    folder = "folder"
    hub = "hub"


_FILES = (Kind.lines, Kind.json, Kind.parquet)


class Row(NamedTuple):
    where: str
    """For messages: the file and the line, or the number of the row counted from 0."""
    default_id: str
    """Of a row that has no id of its own."""
    columns: dict[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """Where rows come from."""

    kind: Kind
    path: str
    """Of a file or folder; of the hub the name."""
    subset: str | None = None
    split: str = "train"
    argument: str = "env.args.path"
    """The setting that named it."""

    @property
    def name(self) -> str:
        """Of the tasks' ids."""
        return f"{self.path}/{self.split}" if self.kind is Kind.hub else Path(self.path).stem


def find_source(text: str, argument: str) -> Source:
    """What `text`, the value of the setting `argument`, means. A file or folder that exists comes first.

    Raises ConfigError for what is neither that nor a name of the hub.
    """
    path = Path(text).expanduser()
    before, colon, split = str(path).rpartition(":")
    if not text.startswith("hf://"):
        if path.exists():
            return _local(path, None, argument)
        if colon and split and Path(before).exists():
            return _local(Path(before), split, argument)
    match = _HUB_NAME.fullmatch(text)
    is_hub = text.startswith("hf://") or ("/" in text and path.suffix not in _FILES)
    if match is None or not is_hub:
        raise ConfigError(
            f"{argument}={text} is not a file or folder (from {Path.cwd()}), nor a name of the hub, such as "
            "openai/gsm8k/main:train"
        )
    return Source(
        kind=Kind.hub, path=match["name"], subset=match["subset"], split=match["split"] or "train", argument=argument
    )


def rows_of(source: Source) -> Iterator[Row]:
    """The rows in order, a bounded number of them at a time. Raises ConfigError for what cannot be read."""
    readers: dict[Kind, Callable[[Source], Iterator[Row]]] = {
        Kind.lines: _lines,
        Kind.json: _json,
        Kind.parquet: _parquet,
        Kind.folder: _folder,
        Kind.hub: _hub,
    }
    return readers[source.kind](source)


def _local(path: Path, split: str | None, argument: str) -> Source:
    if path.is_dir():
        return Source(kind=Kind.folder, path=str(path), split=split or "train", argument=argument)
    suffix = ".jsonl" if path.suffix == ".ndjson" else path.suffix
    if suffix not in _FILES:
        raise ConfigError(f"{argument}={path} must end with .jsonl, .json or .parquet, which say what is in it")
    if split is not None:
        raise ConfigError(f"{argument}={path}:{split} is a file, and files have no splits; leave out :{split}")
    return Source(kind=Kind(suffix), path=str(path), argument=argument)


# -- JSON


def _lines(source: Source) -> Iterator[Row]:
    """One object a line; blank lines are skipped."""
    try:
        with open(source.path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{source.path}:{number}"
                    yield Row(where, f"{source.name}/{number}", _object(line, where))
    except UnicodeDecodeError as error:
        raise _not_utf8(source, error) from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error}); write one JSON object on each line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a JSON {type(row).__name__}; write one JSON object on each line")
    return row


def _json(source: Source) -> Iterator[Row]:
    """An array of objects, or one object a line, which some files of this suffix hold."""
    try:
        text = Path(source.path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(source, error) from error
    if not text.lstrip().startswith("["):
        yield from _lines(source)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source.path} is not JSON ({error}); write one array of objects") from error
    for index, row in enumerate(rows):
        where = f"{source.path}, row {index}"
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is a JSON {type(row).__name__}; write one array of objects")
        yield Row(where, f"{source.name}/{index}", row)


def _not_utf8(source: Source, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"{source.path} is not UTF-8 text ({error}); save it as UTF-8")


# -- tables


def _parquet(source: Source) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise _needs_extra(source, error) from error
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            yield from _table_rows(source, file.iter_batches(batch_size=BATCH_ROWS))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{source.path} cannot be read as Parquet: {error}") from error


def _folder(source: Source) -> Iterator[Row]:
    """Saved by `save_to_disk`, or files that `load_dataset` finds its way in."""
    datasets = _library(source)
    folder = Path(source.path)
    if not any((folder / name).exists() for name in ("dataset_dict.json", "dataset_info.json", "state.json")):
        return _table_rows(
            source, _batches(_loaded(source, lambda: datasets.load_dataset(str(folder), split=source.split)))
        )
    saved = _loaded(source, lambda: datasets.load_from_disk(str(folder)))
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            raise ConfigError(
                f"{source.argument}={source.path} has no split {source.split}; put one of its own behind a colon, "
                f"{', '.join(saved)}"
            )
        saved = saved[source.split]
    elif source.split != "train":
        raise ConfigError(f"{source.argument}={source.path} was saved without splits; leave out :{source.split}")
    return _table_rows(source, _batches(saved))


def _hub(source: Source) -> Iterator[Row]:
    datasets = _library(source)
    found = _loaded(source, lambda: datasets.load_dataset(source.path, source.subset, split=source.split))
    return _table_rows(source, _batches(found))


def _table_rows(source: Source, batches: Iterator[Any]) -> Iterator[Row]:
    where = source.path if source.kind is Kind.parquet else f"{source.path}:{source.split}"
    index = 0
    for batch in batches:
        for columns in batch.to_pylist():
            yield Row(f"{where}, row {index}", f"{source.name}/{index}", columns)
            index += 1


def _batches(dataset: Any) -> Iterator[Any]:
    """Arrow's tables, so that pictures and sounds are not decoded."""
    return dataset.with_format("arrow").iter(batch_size=BATCH_ROWS)


def _library(source: Source) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise _needs_extra(source, error) from error
    return datasets


def _loaded(source: Source, load: Callable[[], Any]) -> Any:
    from datasets.exceptions import DatasetsError

    try:
        return load()
    except (OSError, ValueError, DatasetsError) as error:
        hint = ""
        if source.kind is Kind.hub:
            hint = (
                "; without a connection only what this machine has loaded before is there, and a file or folder of "
                f"this name is not (from {Path.cwd()})"
            )
        raise ConfigError(f"{source.argument}={source.path} cannot be loaded by `datasets`: {error}{hint}") from error


def _needs_extra(source: Source, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"{source.argument}={source.path} needs the package {error.name}, which is not installed; "
        "pip install rlflow[datasets], or give a .jsonl file"
    )
