"""What the doctor says of one thing, and how all of it is shown: as aligned lines, or as a JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rlflow.errors import ConfigError
from rlflow.tools.doctor.facts import Problem


class Level(StrEnum):
    ok = "ok"
    warning = "warning"
    """A run starts, but is slower than it could be, or fails later if more than usual comes together."""
    error = "error"
    """A run fails."""


_LEVEL_WIDTH = max(map(len, Level)) + 2


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


def untried(name: str, problem: Problem) -> Finding:
    return warning(name, problem.text, "mend what is wrong above, and look again")


def as_text(places: Mapping[str, Sequence[Finding]]) -> str:
    """Place (a machine, a node, the cluster) -> what was found there; one line each, its cure on the next.

    Of the second and further machines only what is wrong is shown.
    """
    findings = [finding for each in places.values() for finding in each]
    width = max(len(finding.name) for finding in findings) + 2
    lines: list[str] = []
    for number, (place, found) in enumerate(places.items()):
        is_whole = number in (0, len(places) - 1)
        shown = found if is_whole else [each for each in found if each.level is not Level.ok]
        lines += [f"{place}:"] if len(places) > 1 else []
        lines += [line for finding in shown for line in _lines(finding, width)]
        if not is_whole:
            names = dict.fromkeys(each.name for each in found if each.level is Level.ok)
            lines.append(f"{Level.ok.value:{_LEVEL_WIDTH}}{', '.join(names)}")
    return "\n".join([*lines, _summary(findings)])


def as_json(places: Mapping[str, Sequence[Finding]]) -> dict[str, Any]:
    """{"ok": whether there is no error, "places": {place: [finding]}}"""
    return {
        "ok": not has_error(places),
        "places": {place: [asdict(each) for each in found] for place, found in places.items()},
    }


def has_error(places: Mapping[str, Sequence[Finding]]) -> bool:
    return any(finding.level is Level.error for found in places.values() for finding in found)


def _lines(finding: Finding, width: int) -> list[str]:
    line = f"{finding.level.value:{_LEVEL_WIDTH}}{finding.name:{width}}{finding.found}"
    return [line, f"{'':{_LEVEL_WIDTH + width}}cure: {finding.cure}"] if finding.cure else [line]


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    return ", ".join(f"{counts[level]} {level.value}" for level in (Level.error, Level.warning, Level.ok))
