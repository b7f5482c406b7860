"""What Hydra and OmegaConf raise -> one sentence with the key, the value found and what to do."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from rlflow.config import Config, PoolConfig, ProcessKind
from rlflow.plugins.names import did_you_mean

_GROUPS = ("recipe", "algorithm", "cluster")
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[float]: "a list of numbers",
    list[int]: "a list of whole numbers",
    list[str]: "a list of texts",
    list[ProcessKind]: f"a list of {', '.join(ProcessKind)}",
    Any: "a name, or a list of names",
}


def leaf_keys(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every setting as a dotted key, with its annotation; env.args, which is free, counts as one."""
    hints = get_type_hints(section)
    found: dict[str, Any] = {}
    for each in fields(section):
        kind, key = hints[each.name], f"{prefix}{each.name}"
        is_section = isinstance(kind, type) and is_dataclass(kind)
        found |= leaf_keys(kind, f"{key}.") if is_section else {key: kind}
    return found


def explain(error: Exception, typed: Sequence[str] = ()) -> str:
    """One line for the person who typed the command, with the keys `typed`, or wrote the recipe."""
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if not group or error.options is None:
            return _one_line(error)
        near = did_you_mean(name, error.options) or "."
        return f"there is no {group} {name}{near} There are: {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}; write key=value, and quote values with special characters"
    if isinstance(error, yaml.YAMLError):
        return f"not valid YAML: {_one_line(error)}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None or isinstance(cause, InterpolationResolutionError):
        no_group = re.match(r"Could not override '(\w+)'. No match in the defaults list", str(error))
        return _explain_value(no_group[1], "it is not a config group") if no_group else _one_line(error)
    where = re.search(r"In '([^']+)'", str(error))
    prefix = f"in {where[1]}: " if where else ""
    key = (cause.full_key or "").lstrip("+~")
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        if where and key in _GROUPS:
            return f"in {where[1]}: the keys are below `{key}`; make `# @package _global_` the first line of that file"
        # Hydra names the first part that does not exist.
        whole = next((each for each in typed if each.startswith(f"{key}.")), key)
        return f"{prefix}{unknown_key(key if where else whole)}"
    if isinstance(cause, ValidationError) and key:
        return f"{prefix}{_explain_value(key, _one_line(cause))}"
    return _one_line(error)


def _explain_value(key: str, message: str) -> str:
    kind = leaf_keys().get(key)
    if kind is None:
        example = next((leaf for leaf in leaf_keys() if leaf.startswith(f"{key}.")), None)
        if example:
            return f"{key} is a section and takes no value itself; set one of its keys, such as {example}"
        return f"{key}: {message}"
    if "is not Optional" in message:
        return f"{key} must be {takes(key, kind)}; got null"
    found = re.search(r"[Vv]alue '(.*?)'(?: \(| of type| is not|,)", message)
    return f"{key} must be {takes(key, kind)}" + (f"; got {found[1]}" if found else f": {message}")


def takes(key: str, kind: Any) -> str:
    """What a setting with this annotation takes, in words."""
    return "a path, or a mapping of names to paths, or null" if key == "reward.model" else expected(kind)


def expected(kind: Any) -> str:
    """An annotation in words: `int | None` -> "a whole number, or null"."""
    choices = [each for each in get_args(kind) if each is not NoneType] if NoneType in get_args(kind) else [kind]
    if inspect.isclass(choices[0]) and issubclass(choices[0], Enum):
        words = f"one of {', '.join(member.name for member in choices[0])}"
    else:
        words = _TYPE_NAMES.get(choices[0], "a mapping")
    return f"{words}, or null" if NoneType in get_args(kind) else words


def unknown_key(key: str) -> str:
    """That there is no such setting, and the one that was probably meant."""
    if key.startswith("cluster.pools."):
        keys = ", ".join(each.name for each in fields(PoolConfig))
        return (
            f"{key} is not a setting here; a pool has {keys}, and pools of other names come from a file "
            "cluster/NAME.yaml in --config-dir"
        )
    known = [*leaf_keys(), *_GROUPS]
    # Last to first, so that of equal names the first counts: the trainer's learning rate, not the critic's.
    ends = {leaf.rpartition(".")[2]: leaf for leaf in reversed(known)}
    section, _, name = key.rpartition(".")
    beside = {leaf.rpartition(".")[2]: leaf for leaf in known if leaf.startswith(f"{section}.")}
    near = (
        _elsewhere(key)
        # A setting named without its section, or under another one; or misspelt, with or without its section.
        or did_you_mean(name, ends, cutoff=1.0)
        or did_you_mean(name, beside)
        or did_you_mean(key, known, cutoff=0.85)
        or did_you_mean(name, ends, cutoff=0.75)
    )
    return f"{key} is not a setting{near or '; `rlflow train --help` lists them all'}"


@cache
def other_names() -> dict[str, dict[str, list[str | None]]]:
    """Library -> the name of its setting -> the key here, or None, and perhaps a note."""
    return yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))


def _elsewhere(key: str) -> str:
    """What a setting of another library is called here, as the end of a sentence, or "" if nothing else."""
    section, name = key.partition(".")[0], key.rpartition(".")[2]
    rows = [(library, theirs, *row) for library, names in other_names().items() for theirs, row in names.items()]
    found = (
        [row for row in rows if row[1] == key]
        or [row for row in rows if row[1].endswith(f".{key}")]
        or [row for row in rows if row[1].rpartition(".")[2] == name]
    )
    if not found:
        return ""
    # The first, unless another one is in the section that was typed.
    library, theirs, here, *note = max(found, key=lambda row: (row[2] or "").startswith(f"{section}."))
    if (here or "").rpartition(".")[2] == name:
        return ""
    if here is None:
        return f"; {library}'s {theirs} has no counterpart: {note[0]}"
    return f"; {library}'s {theirs} is {here} here{f' ({note[0]})' if note else ''}"


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    details = ("full_key:", "object_type=", "reference_type=")
    return " ".join(line for line in lines if not line.startswith(details)) or type(error).__name__
