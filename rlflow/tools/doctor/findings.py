"""What the doctor says about one thing, and how all of it is shown: as aligned lines, or as a JSON object."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rlflow.errors import ConfigError

ORDER = (
    *("Python", "packages", "torch", "GPUs", "NCCL", "GPU memory", "vLLM", "Ray", "sandbox", "clock", "open files"),
    *("loopback", "host name", "processors", "memory", "shared memory", "run directory", "Ray's directory"),
    *("left behind", "environment", "placement", "model", "chat template", "reward model", "engine", "tasks"),
)
"""Names of findings about a machine, as they are shown."""


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
    """What to do; always there unless the level is `ok`."""


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


def check_placement(place: Callable[[], Sequence[str]]) -> Iterator[Finding]:
    """`place` returns a line for each machine that something of the run would be on. It raises ConfigError for a run
    that does not fit."""
    try:
        yield from [ok("placement", line) for line in place()]
    except ConfigError as problem:
        yield of_config_error("placement", problem)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Those of one machine, as they are shown. What two checks found alike is said once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: ORDER.index(finding.name))


def as_text(places: Mapping[str, Sequence[Finding]]) -> str:
    """Place (a machine, a node, the cluster) -> what was found there; one line each, its cure on the next.

    Between the first place and the last, which is the cluster, only what is wrong is shown.
    """
    findings = [finding for each in places.values() for finding in each]
    width = max(len(finding.name) for finding in findings) + 2
    lines: list[str] = []
    for number, (place, found) in enumerate(places.items()):
        is_whole = number in (0, len(places) - 1)
        lines += [f"{place}:"] if len(places) > 1 else []
        for each in found:
            if is_whole or each.level is not Level.ok:
                lines.append(f"{each.level.value:{_LEVEL_WIDTH}}{each.name:{width}}{each.found}")
                lines += [f"{'':{_LEVEL_WIDTH + width}}cure: {each.cure}"] if each.cure else []
        if not is_whole:
            names = dict.fromkeys(each.name for each in found if each.level is Level.ok)
            lines.append(f"{Level.ok.value:{_LEVEL_WIDTH}}{', '.join(names)}")
    counts = Counter(finding.level for finding in findings)
    summary = ", ".join(f"{counts[level]} {level.value}" for level in (Level.error, Level.warning, Level.ok))
    return "\n".join([*lines, summary])


def as_json(places: Mapping[str, Sequence[Finding]]) -> dict[str, Any]:
    """{"ok": whether there is no error, "places": {place: [finding]}}"""
    return {
        "ok": not any(each.level is Level.error for found in places.values() for each in found),
        "places": {place: [asdict(each) for each in found] for place, found in places.items()},
    }
