"""Every setting with its meaning, default and choices: the texts below the fields and choices in rlflow/config.

-> `rlflow train --help [SECTION|WORD]`, and docs/settings.md through scripts/reference.py
"""

import ast
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml

from rlflow.config import Config, PoolConfig
from rlflow.errors import ConfigError
from rlflow.settings.explain import takes
from rlflow.settings.recipe_files import recipe_names

_USAGE = """\
usage: rlflow train recipe=NAME [key=value ...] [--dry-run [--json]] [--cfg job]
                    [--multirun] [--config-dir DIR] [--help [SECTION|WORD]]

--dry-run   what the run would need of GPUs and memory; starts nothing
--multirun  one run for each combination of key=a,b
--cfg job   print the settings with those of the recipe, and start nothing
--help      all settings, or those of a section, or with a word in their text
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    key: str
    default: str
    """As YAML writes it."""
    takes: str
    """The type or the choices, in words."""
    meaning: str


def sections() -> dict[str, str]:
    """Each section, and what it is about."""
    return {name: _texts(kind).get("", "") for name, kind in get_type_hints(Config).items()}


def settings(kind: type = Config, prefix: str = "") -> Iterator[Setting]:
    """All of them, or those of one class, in the order in which they are declared."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        hint, key = hints[each.name], f"{prefix}{each.name}"
        if isinstance(hint, type) and is_dataclass(hint):
            yield from settings(hint, f"{key}.")
            continue
        meaning = _meaning(kind, each.name, hint)
        yield Setting(key=key, default=_default(each), takes=takes(key, hint), meaning=meaning)
        if hint == dict[str, PoolConfig]:
            yield from settings(PoolConfig, f"{key}.NAME.")


def help_page(words: list[str]) -> str:
    """What `rlflow train --help WORDS` prints, at most 80 columns wide. Raises ConfigError for a word of no setting."""
    lines = [] if words else [_USAGE, *_wrapped(f"Recipes: {', '.join(recipe_names())}", "  ")]
    found = 0
    for name, about in sections().items():
        chosen = [each for each in settings() if each.key.startswith(f"{name}.") and _fits(each, name, words)]
        found += len(chosen)
        lines += ["", *_wrapped(f"{name}: {about}", "")] if chosen else []
        for each in chosen:
            lines += [f"  {each.key}={each.default}", *_wrapped(f"({each.takes}) {each.meaning}", " " * 6)]
    if not found:
        raise ConfigError(f"no setting has {' '.join(words)} in its text; the sections are {', '.join(sections())}")
    return "\n".join(lines).lstrip("\n")


def _fits(setting: Setting, section: str, words: list[str]) -> bool:
    if len(words) == 1 and words[0] in sections():
        return words == [section]
    return all(word.lower() in f"{setting.key} {setting.meaning}".lower() for word in words)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _meaning(kind: type, name: str, hint: Any) -> str:
    """The text of the field, and those of its choices that have one."""
    kinds = [each for each in (get_args(hint) or (hint,)) if each is not NoneType]
    told = [_texts(kind).get(name, "")]
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        told += [f"`{choice}`: {text}" for choice, text in _texts(kinds[0]).items() if choice]
    return " ".join(text for text in told if text)


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    shown = yaml.safe_dump(value.value if isinstance(value, Enum) else value, default_flow_style=True, width=1000)
    return shown.removesuffix("\n").removesuffix("\n...")


def _texts(kind: type) -> dict[str, str]:
    """Field or choice -> the text below it; "" -> the text of the class."""
    return _classes(sys.modules[kind.__module__].__file__ or "").get(kind.__name__, {})


@cache
def _classes(file: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for kind in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not isinstance(kind, ast.ClassDef):
            continue
        texts = found[kind.name] = {"": " ".join((ast.get_docstring(kind) or "").split())}
        for line, below in zip(kind.body, kind.body[1:], strict=False):
            name = ast.unparse(line).partition(" = ")[0].partition(":")[0]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and name.isidentifier():
                texts[name] = " ".join(str(below.value.value).split())
    return found
