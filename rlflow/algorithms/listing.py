"""What `rlflow algorithms` prints: every name, its options with their defaults, and what it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from rlflow.algorithms.names import NAMES, Kind, resolve

_SETTINGS = {
    Kind.advantage: "algorithm.advantage, options in algorithm.advantage_args",
    Kind.token_advantage: "algorithm.advantage with a critic, options in algorithm.advantage_args",
    Kind.loss: "algorithm.loss, options in algorithm.loss_args",
    Kind.correction: "algorithm.corrections, as name: {option: value}",
    Kind.kl: "algorithm.kl, with algorithm.kl_coefficient above 0",
}


def lines() -> Iterator[str]:
    """Imports torch."""
    for kind, names in NAMES.items():
        yield f"{_SETTINGS[kind]}:"
        for name in names:
            function = resolve(kind, name).function
            options = ", ".join(_options(function))
            yield f"  {name}{f' ({options})' if options else ''}"
            yield f"      {_summary(function)}"


def _options(function: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            default = "null" if parameter.default is None else parameter.default
            yield f"{name}={default}"


def _summary(function: Callable[..., Any]) -> str:
    """The first paragraph of the docstring, in one line."""
    text = inspect.getdoc(function)
    assert text, f"{function.__name__} has no docstring"
    return " ".join(text.partition("\n\n")[0].split())
