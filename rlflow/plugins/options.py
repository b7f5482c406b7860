"""Options that were typed, checked against the parameters of the functions that take them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from rlflow.errors import ConfigError
from rlflow.plugins.names import did_you_mean

Result = TypeVar("Result")
_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", NoneType: "null"}
"""The types that YAML has, and what messages call them."""


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters that can be given by name, and `**keywords`.

    Annotations are types if they can be evaluated; those that only a type checker understands stay text.
    """
    try:
        found = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, AttributeError):
        found = inspect.signature(function)
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    return [each for each in found.parameters.values() if each.kind in by_name]


def check_options(options: Mapping[str, object], parameters: Sequence[Parameter], setting: str, owner: str) -> None:
    """Check options against the parameters that take them; `owner`, which has these, is named in messages.

    Raises ConfigError for an option that no parameter takes, one of the wrong type, and one that is missing.
    """
    named = [each for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
    names = list(dict.fromkeys(each.name for each in named))
    takes_any = len(named) < len(parameters)
    for name in options:
        if name not in names and not takes_any:
            raise ConfigError(
                f"{setting}.{name} is not an argument of {owner}, which takes {', '.join(names) or 'none'}"
                f"{did_you_mean(name, names)}"
            )
    for each in named:
        if each.name not in options:
            if each.default is Parameter.empty:
                raise ConfigError(f"{setting}.{each.name} is required by {owner}")
        elif not _fits(options[each.name], each.annotation):
            value = options[each.name]
            raise ConfigError(f"{setting}.{each.name} must be {_in_words(each.annotation)}; got {value!r:.80}")


def bind(
    function: Callable[..., Result], options: Mapping[str, object], setting: str, owner: str
) -> Callable[..., Result]:
    """The function with its options set, which are its keyword-only parameters. Raises ConfigError for wrong ones."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"{setting} must be options as name: value; got {options!r:.80}")
    takers = [each for each in parameters_of(function) if each.kind is not Parameter.POSITIONAL_OR_KEYWORD]
    check_options(options, takers, setting, owner)
    return partial(function, **options)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of the annotated type. Types that YAML does not have are left to the function itself."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping)
    if hint not in _WORDS:
        return True
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def _in_words(hint: Any) -> str:
    """An annotation in words: `int | None` -> "a whole number or null"."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(_WORDS.get(part, str(part)) for part in parts)
