"""What the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlflow.errors import ConfigError


class Level(StrEnum):
    ok = "ok"
    warning = "warning"
    """A run starts, but is slower than it could be, or fails later if more than usual comes together."""
    error = "error"
    """A run fails."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Finding:
    level: Level
    name: str
    """What was looked at, in one or two words."""
    found: str
    cure: str = ""
    """What to do; always there but for `ok`."""


def ok(name: str, found: str) -> Finding:
    return Finding(level=Level.ok, name=name, found=found)


def warning(name: str, found: str, cure: str) -> Finding:
    return Finding(level=Level.warning, name=name, found=found, cure=cure)


def error(name: str, found: str, cure: str) -> Finding:
    return Finding(level=Level.error, name=name, found=found, cure=cure)


def of_config_error(name: str, problem: ConfigError | str) -> Finding:
    """A ConfigError ends with what to do, after its last semicolon."""
    found, separator, cure = str(problem).rpartition("; ")
    return error(name, found, cure) if separator else error(name, cure, "change that setting")
