"""Whether values from YAML or the command line fit the parameters of a function, by its annotations."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Its annotations; {} for those that only a type checker understands."""
    try:
        return get_type_hints(function)
    except (NameError, TypeError):
        return {}


def fits(value: object, hint: object) -> bool:
    """Whether a value is of the annotated type; what is no plain type is left to the function itself."""
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if get_origin(hint) is not None or not isinstance(hint, type):
        return get_origin(hint) is not Mapping or isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def shown(hint: object) -> str:
    """An annotation in words: `int | None` -> "a whole number or null"."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", NoneType: "null"}
    return " or ".join(words.get(part, str(part)) for part in parts)


def nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"did you mean {near[0]}?" if near else "nothing has a similar name"
