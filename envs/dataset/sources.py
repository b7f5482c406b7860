"""A file, a folder, or a data set of the hub -> rows, each with its place for messages.

Folders and the hub are read by the library `datasets`.
"""

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rlflow.errors import ConfigError
from rlflow.plugins.given import find_given, is_given

BATCH_ROWS = 1024
"""Rows of a table that are turned into Python values at once."""

_HUB_NAME = re.compile(r"(?:hf://)?(?P<name>\w[\w.-]*(?:/[\w.-]+)?)(?:/(?P<subset>[\w.-]+))?(?::(?P<split>[^/]+))?")


class Kind(StrEnum):
    """The kind of thing that a path leads to; for files, the suffix."""

    lines = ".jsonl"
    json = ".json"
    parquet = ".parquet"
    folder = "folder"
    hub = "hub"
    given = "given"


_FILES = (Kind.lines, Kind.json, Kind.parquet)


class Row(NamedTuple):
    where: str
    """The place that messages name: the file and the line, or the number of the row counted from 0."""
    default_id: str
    """The task's id if the row has none of its own."""
    columns: dict[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """Where rows come from."""

    kind: Kind
    path: str
    """The file or folder; for the hub, the name; for rows that were given, the text that stands for them."""
    subset: str | None = None
    split: str = "train"
    argument: str = "env.args.path"
    """The setting that named it."""

    @property
    def name(self) -> str:
        """The beginning of the tasks' ids."""
        if self.kind is Kind.given:
            return self.path.rpartition(":")[2].partition(",")[0]
        return f"{self.path}/{self.split}" if self.kind is Kind.hub else Path(self.path).stem


def find_source(text: str, argument: str, default_split: str = "train") -> Source:
    """What `text`, the value of the setting `argument`, means. A file or folder that exists beats a name of the hub.

    Raises ConfigError for what is neither that nor a name of the hub.
    """
    if is_given(text):
        return Source(kind=Kind.given, path=text, argument=argument)
    path = Path(text).expanduser()
    before, colon, split = str(path).rpartition(":")
    if not text.startswith("hf://"):
        if path.exists():
            return _local(path, None, argument, default_split)
        if colon and split and Path(before).exists():
            return _local(Path(before), split, argument, default_split)
    match = _HUB_NAME.fullmatch(text)
    is_hub = text.startswith("hf://") or ("/" in text and path.suffix not in _FILES)
    if match is None or not is_hub:
        raise ConfigError(
            f"{argument}={text} is not a file or folder (from {Path.cwd()}), nor a name of the hub, such as "
            "openai/gsm8k/main:train"
        )
    split = match["split"] or default_split
    return Source(kind=Kind.hub, path=match["name"], subset=match["subset"], split=split, argument=argument)


def rows_of(source: Source) -> Iterator[Row]:
    """The rows in order, a bounded number of them at a time. Raises ConfigError for what cannot be read."""
    match source.kind:
        case Kind.lines:
            return _lines(source)
        case Kind.json:
            return _json(source)
        case Kind.parquet:
            return _parquet(source)
        case Kind.given:
            return _given(source)
        case Kind.folder | Kind.hub:
            return _table_rows(source, _dataset(source).with_format("arrow").iter(batch_size=BATCH_ROWS))


def _local(path: Path, split: str | None, argument: str, default_split: str) -> Source:
    if path.is_dir():
        return Source(kind=Kind.folder, path=str(path), split=split or default_split, argument=argument)
    suffix = ".jsonl" if path.suffix == ".ndjson" else path.suffix
    if suffix not in _FILES:
        raise ConfigError(f"{argument}={path} must end with .jsonl, .json or .parquet, which say what is in it")
    if split is not None:
        raise ConfigError(f"{argument}={path}:{split} is a file, and files have no splits; leave out :{split}")
    return Source(kind=Kind(suffix), path=str(path), argument=argument)


def _given(source: Source) -> Iterator[Row]:
    rows: Any = find_given(source.path)
    for index, row in enumerate(rows):
        yield Row(f"{source.name}, row {index}", f"{source.name}/{index}", row)


# -- JSON


def _lines(source: Source) -> Iterator[Row]:
    """One object a line; blank lines are skipped."""
    try:
        with open(source.path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where, cure = f"{source.path}:{number}", "write one JSON object on each line"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{where} is not JSON ({error}); {cure}") from error
                if not isinstance(row, dict):
                    raise ConfigError(f"{where} is a JSON {type(row).__name__}; {cure}")
                yield Row(where, f"{source.name}/{number}", row)
    except UnicodeDecodeError as error:
        raise _not_utf8(source, error) from error


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
    arrow, parquet = _package(source, "pyarrow"), _package(source, "pyarrow.parquet")
    try:
        with parquet.ParquetFile(source.path) as file:
            yield from _table_rows(source, file.iter_batches(batch_size=BATCH_ROWS))
    except arrow.ArrowException as error:
        raise ConfigError(f"{source.path} cannot be read as Parquet: {error}") from error


def _dataset(source: Source) -> Any:
    """A data set of the hub, one that `save_to_disk` saved, or a folder of files that `load_dataset` can read."""
    datasets, folder = _package(source, "datasets"), Path(source.path)
    was_saved = any((folder / name).exists() for name in ("dataset_dict.json", "dataset_info.json", "state.json"))
    hint = ""
    if source.kind is Kind.hub:
        was_saved = False
        hint = (
            "; without a connection only what this machine has loaded before is there, and a file or folder of this "
            f"name is not (from {Path.cwd()}); a copy goes by {source.argument}=FOLDER or FILE"
        )
    try:
        if not was_saved:
            return datasets.load_dataset(source.path, source.subset, split=source.split)
        saved = datasets.load_from_disk(source.path)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"{source.argument}={source.path} cannot be loaded by `datasets`: {error}{hint}") from error
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            raise ConfigError(
                f"{source.argument}={source.path} has no split {source.split}; put one of its own behind a colon, "
                f"{', '.join(saved)}"
            )
        return saved[source.split]
    if source.split != "train":
        raise ConfigError(f"{source.argument}={source.path} was saved without splits; leave out :{source.split}")
    return saved


def _table_rows(source: Source, batches: Iterator[Any]) -> Iterator[Row]:
    """From Arrow's tables, so that pictures and sounds are not decoded."""
    where = source.path if source.kind is Kind.parquet else f"{source.path}:{source.split}"
    index = 0
    for batch in batches:
        for columns in batch.to_pylist():
            yield Row(f"{where}, row {index}", f"{source.name}/{index}", columns)
            index += 1


def _package(source: Source, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{source.argument}={source.path} needs the package {error.name}, which is not installed; "
            "pip install rlflow[datasets], or give a .jsonl file"
        ) from error
