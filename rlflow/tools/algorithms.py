"""What `rlflow algorithms` prints: every name, its options with their defaults, what it is and where it comes from."""

import argparse
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from rlflow.algorithms.registry import CATALOGS, Kind, resolve
from rlflow.errors import ConfigError

_SETTINGS = {
    Kind.advantage: "algorithm.advantage, options in algorithm.advantage_args",
    Kind.token_advantage: "algorithm.advantage with a critic, options in algorithm.advantage_args",
    Kind.loss: "algorithm.loss, options in algorithm.loss_args",
    Kind.correction: "algorithm.corrections, as name: {option: value}",
    Kind.kl: "algorithm.kl, with algorithm.kl_coefficient above 0",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(options: argparse.Namespace) -> int:
    print("\n".join(_lines()))
    return 0


def _lines() -> Iterator[str]:
    """Imports torch, and the packages that register algorithms. One that cannot be used is listed with the reason."""
    for kind, catalog in CATALOGS.items():
        group = f"; packages register more as {catalog.group}" if catalog.group else ""
        yield f"{_SETTINGS[kind]}{group}:"
        for name, offers in catalog.offers().items():
            try:
                function = resolve(kind, name).function
                text = inspect.getdoc(function) or "It has no docstring."
                options, summary = ", ".join(_options(function)), " ".join(text.partition("\n\n")[0].split())
            except ConfigError as error:
                options, summary = "", f"cannot be used: {error}"
            packages = ", ".join(f"{path} of {package}" for path, package in offers.items() if package != "rlflow")
            yield f"  {name}{f' ({options})' if options else ''}{f'   [{packages}]' if packages else ''}"
            yield f"      {summary}"


def _options(function: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = "required" if parameter.default is parameter.empty else parameter.default
            yield f"{name}={'null' if default is None else default}"
