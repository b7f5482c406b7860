"""What a program says of its episode -> Result."""

from __future__ import annotations

import json

from rlflow.envs.base import Result
from rlflow.errors import EnvironmentFailure


def printed_result(output: str) -> Result:
    """What a program's last line says: {"reward": ..., "metrics": {...}}; without such a line there is no verdict.

    Only the very last line counts, as what a program prints before it may be the model's own words.
    """
    lines = output.rstrip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return Result()
    return result_of(found) if isinstance(found, dict) and "reward" in found else Result()


def result_of(value: object) -> Result:
    """What a function's answer means: a Result, a dict of its fields, a number, or None for no verdict."""
    if isinstance(value, Result):
        return value
    if value is None or isinstance(value, int | float):
        return Result(reward=value)
    if not isinstance(value, dict) or not set(value) <= {"reward", "metrics"}:
        raise EnvironmentFailure(
            f'run: expected {{"reward": ..., "metrics": {{...}}}}, a number or None; got {value!r:.200}'
        )
    metrics = value.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise EnvironmentFailure(f"run: `metrics` must be an object of numbers; got {metrics!r:.200}")
    return Result(reward=value.get("reward"), metrics=metrics)
