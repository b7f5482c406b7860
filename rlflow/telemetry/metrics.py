"""metrics.jsonl: one JSON object a step, names as TRL has them, slashes between group and name.

    StepRecord -> MetricsFile.append -> metrics.jsonl -> read -> the report, benchmarks, people's notebooks

`groups/*` count from the start of the run, as the ledger does; everything else is about the one step, except
`num_tokens`, which goes on counting. Times are seconds.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from rlflow.errors import RunError
from rlflow.groups.ledger import DropReason
from rlflow.runtime.disk import disk_errors

StepRecord: TypeAlias = dict[str, float | int | None]
"""Numbers of one step by name; None when there was nothing to measure."""

REQUIRED: tuple[str, ...] = (
    "step",
    "version",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "loss",
    "grad_norm",
    "kl",
    "entropy",
    "lr",
    "completions/mean_length",
    "completions/clipped_ratio",
    "num_tokens",
    "step_time",
    "time/rollout",
    "time/reward",
    "time/train",
    "time/weights",
    "throughput/tokens_per_s",
    "throughput/samples_per_s",
    "staleness/mean",
    "staleness/max",
    "queue/ready",
    "groups/admitted",
    "groups/trained",
    *(f"groups/dropped_{reason}" for reason in DropReason),
    "sampling/logp_difference_mean",
    "utilisation/rollout",
    "utilisation/train",
)
"""Names that every record has."""
EVALUATION: tuple[str, ...] = ("step", "version", "eval/reward", "eval/episodes", "eval/failed")
"""Names that every record of evaluations.jsonl has; `step` counts the steps done before it."""


@cache
def texts() -> dict[str, tuple[str, str, str]]:
    """Name of a metric -> its unit, what it is, and what is normal. A word in capitals stands for any name."""
    found = yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8"))
    return {name: (unit, meaning, normal) for name, (unit, meaning, normal) in found.items()}


def text_of(name: str) -> tuple[str, str, str] | None:
    """The text of one metric; None if it has none."""
    patterns = (re.sub("[A-Z]{2,}", ".+", each) for each in texts())
    found = next((each for each, fits in zip(texts(), patterns, strict=True) if re.fullmatch(fits, name)), None)
    return texts()[found] if found else None


class MetricsFile:
    """Appends records. Each is handed to the system before `append` returns, so that a killed run keeps them."""

    def __init__(self, path: Path, required: Sequence[str] = REQUIRED) -> None:
        self._path = path
        self._required = required
        with disk_errors("metrics", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="ascii")

    def append(self, record: Mapping[str, float | int | str | None]) -> None:
        """Write one step. A number that is not finite is written as null, because JSON has no other word for it.

        Raises AssertionError for a record that lacks a required name, RunError when the disk is full.
        """
        missing = [name for name in self._required if name not in record]
        assert not missing, f"the record of step {record.get('step')} lacks {', '.join(missing)}"
        known = {name: value if isinstance(value, str) else finite(value) for name, value in record.items()}
        line = json.dumps(known, allow_nan=False)
        with disk_errors("metrics", self._path.parent):
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        # After a full disk the buffer still holds the line; closing would try, and fail, once more.
        with disk_errors("metrics", self._path.parent):
            self._file.close()


def finite(value: float | int | None) -> float | int | None:
    """The value, or None if it is not a finite number."""
    return value if value is not None and math.isfinite(value) else None


def truncate_after(path: Path, step: int) -> None:
    """Remove the records after `step` and a torn last line, because a run goes on from `step`.

    Does nothing when there is no file. Raises RunError for a line that is not a record and not the last.
    """
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _parse(line, path, number)
            if record is None or record["step"] > step:
                break
            kept += len(line)
    with path.open("rb+") as file:
        file.truncate(kept)


def read(path: Path) -> list[dict[str, Any]]:
    """All records, oldest first; a torn last line, as a killed run leaves it, is not one.

    Raises RunError for a missing file and for a line that is not a record and not the last.
    """
    if not path.is_file():
        raise RunError(f"no metrics at {path}; give the directory of a run that has trained at least one step")
    with path.open("rb") as file:
        parsed = (_parse(line, path, number) for number, line in enumerate(file, start=1))
        return [record for record in parsed if record is not None]


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any] | None:
    """The record of a line; None for one without its newline, which only the last can be."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RunError(f"line {number} of {path} is not JSON ({error}); delete that line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise RunError(f"line {number} of {path} is not the record of a step; delete that line")
    return record
