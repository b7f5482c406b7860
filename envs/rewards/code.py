"""Does the reply's program pass its tests? It runs in a sandbox (`rlflow.processes.sandbox.run`)."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import cast

from rlflow.errors import SandboxError
from rlflow.processes.sandbox.exchange import LOST
from rlflow.processes.sandbox.run import (
    Linked,
    Outcome,
    SandboxLimits,
    SandboxResult,
    command_of_python,
    run,
    run_linked,
)

Pair = tuple[str, str]
"""What a program reads, and what it must print."""

_BLOCK = re.compile(
    r"^[ \t]*```(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
MAX_ERROR = 1000
START_SECONDS = 60.0
"""What the two processes of a program and its tests may take to start, each waiting for the other."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Tested:
    """How a program did in its tests."""

    passed: tuple[bool, ...]  # [num_tests]
    error: str = ""
    """What the first test that failed, or the program itself, had to say; at most MAX_ERROR characters."""
    is_timed_out: bool = False

    @property
    def share(self) -> float:
        return sum(self.passed) / len(self.passed)


async def code(
    completion: str, tests: object, *, share: bool = False, seconds: float = 6.0, memory_mb: int = 512
) -> dict[str, float]:
    """1 when the last Python block of the reply passes all tests, else 0; with `share` the share that it passes.

    tests: a column of the data: Python statements that raise when they fail, such as ["assert add(2, 3) == 5"] or one
        text for all; or what a program reads and prints, as [{"input": "2 3", "output": "5"}] or as
        {"inputs": ["2 3"], "outputs": ["5"]}.
    seconds: for program and tests of a reply together; less than reward.timeout_s.
    memory_mb: of each process.

    A program that is missing, crashes, hangs or takes too much has failed its tests.

    Statements run in a process of their own. What they name and neither define nor import is the program's: functions,
    classes, values. The program is sent the arguments of each call and returns plain values, which are compared where
    it cannot reach; it never sees a test or an expected value. `check(f)`, functions test_* without parameters and
    unittest work too. The program's changes to an argument reach the test only if it returns None. Objects of the
    program's own classes, named tuples among them, have attributes, calls, items, iteration and comparisons with each
    other; an operator with a plain value beside one fails, because the program could answer it as it likes.

    Raises SandboxError when the program could not be run, and ValueError when `tests` has another form, is empty, asks
    nothing of the program, or needs what does not cross: printed text, files, eval, asyncio, fixtures, its own objects.
    """
    statements = statements_of(tests)
    program = last_program(completion)
    if program is None:
        return {"score": 0.0, "tests_passed": 0.0, "timed_out": 0.0}
    limits = SandboxLimits(seconds=seconds, cpu_seconds=max(1, round(seconds)), memory_mb=memory_mb)
    if statements is None:
        tested = await run_pairs(program, pairs_of(tests), limits)
    else:
        tested = await run_statements(program, statements, limits)
    score = tested.share if share else float(all(tested.passed))
    return {"score": score, "tests_passed": tested.share, "timed_out": float(tested.is_timed_out)}


def last_program(text: str) -> str | None:
    """The content of the last fenced block that is Python or says no language; None when there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def statements_of(tests: object) -> list[str] | None:
    """Tests that are Python; None when they are pairs."""
    if isinstance(tests, str) and tests.strip():
        return [tests]
    if isinstance(tests, Sequence) and tests and all(isinstance(test, str) for test in tests):
        return list(tests)
    return None


def pairs_of(tests: object) -> list[Pair]:
    """Tests that are input and output; ValueError for any other form."""
    rows: list[tuple[object, object]] = []
    if isinstance(tests, Mapping) and isinstance(tests.get("inputs"), Sequence):
        rows = list(zip(tests["inputs"], tests.get("outputs", ()), strict=True))
    elif isinstance(tests, Sequence) and not isinstance(tests, str):
        rows = [
            (test.get("input"), test.get("output")) if isinstance(test, Mapping) else (None, None) for test in tests
        ]
    if not rows or not all(isinstance(text, str) for row in rows for text in row):
        raise ValueError(
            "tests must be Python statements as text, a list of them, a list of {input, output}, or {inputs, outputs}; "
            f"got {tests!r:.200}"
        )
    return [(cast(str, given), cast(str, wanted)) for given, wanted in rows]


async def run_statements(program: str, statements: Sequence[str], limits: SandboxLimits) -> Tested:
    """Run statements beside a process that has the program, and nothing of them but the calls that they make.

    Raises ValueError when a statement cannot be run in this way, or asks nothing of the program.
    """
    patient = replace(limits, seconds=limits.seconds + START_SECONDS, output_bytes=2**16 + 64 * len(statements))
    request = json.dumps([limits.seconds, list(statements)])
    tests = Linked(command=_command("tests_process"), files={**_sources(), "tests.json": request}, limits=patient)
    solution = Linked(
        command=_command("solution_process"), files={**_sources(), "solution.py": program}, limits=patient
    )
    judged, ended = await run_linked(tests, solution)
    is_late = judged.exit_code == -signal.SIGALRM or Outcome.TIMED_OUT in (judged.outcome, ended and ended.outcome)
    if not is_late and judged.outcome in (Outcome.KILLED, Outcome.EXITED) and judged.exit_code not in (0, LOST):
        raise SandboxError(
            f"the process that runs the tests ended with {judged.exit_code}: {judged.stderr[-MAX_ERROR:]}"
        )
    errors: dict[int | str, str] = dict(json.loads(line) for line in judged.stdout.splitlines())
    if "refused" in errors:
        raise ValueError(f"these tests cannot judge a program: {errors['refused']}")
    passed = tuple(errors.get(index) == "" for index in range(len(statements)))
    error = next((text for text in errors.values() if text), "")
    if not all(passed) and not error:
        error = _too_long(limits) if is_late else _why(ended or judged, limits)
    sendable = error[:MAX_ERROR].encode(errors="replace").decode()  # without lone surrogates
    return Tested(passed=passed, error=sendable, is_timed_out=is_late)


@cache
def _sources() -> dict[str, str]:
    """The modules of both processes, with empty packages around them."""
    folder = "rlflow/processes/sandbox"
    modules = ("exchange", "solution_process", "tests_process")
    packages = ("rlflow", "rlflow/processes", folder)
    return {f"{each}/__init__.py": "" for each in packages} | {
        f"{folder}/{each}.py": files("rlflow.processes.sandbox").joinpath(f"{each}.py").read_text() for each in modules
    }


def _command(module: str) -> list[str]:
    return [*command_of_python()[:-1], "-c", f"from rlflow.processes.sandbox.{module} import main; main()"]


async def run_pairs(program: str, pairs: Sequence[Pair], limits: SandboxLimits) -> Tested:
    """Run the program for each pair, several at a time; `limits.seconds` is for all together."""
    deadline = time.monotonic() + limits.seconds
    passed: list[bool] = []
    error = ""
    is_timed_out = False
    at_once = len(os.sched_getaffinity(0))
    for start in range(0, len(pairs), at_once):
        chunk = pairs[start : start + at_once]
        left = deadline - time.monotonic()
        if left <= 0:
            is_timed_out = True
            error = error or "the program took too long"
            passed += [False] * len(chunk)
            continue
        bounded = SandboxLimits(seconds=left, cpu_seconds=limits.cpu_seconds, memory_mb=limits.memory_mb)
        results = await asyncio.gather(*(run(program, stdin=given, limits=bounded) for given, _ in chunk))
        for (given, wanted), result in zip(chunk, results, strict=True):
            is_right = result.is_success and _lines(result.stdout) == _lines(wanted)
            passed.append(is_right)
            is_timed_out |= result.outcome is Outcome.TIMED_OUT
            if not is_right and not error:
                printed = f"for the input {given!r:.200} it printed {result.stdout!r:.200}, not {wanted!r:.200}"
                error = printed if result.is_success else _why(result, limits)
    return Tested(passed=tuple(passed), error=error[:MAX_ERROR], is_timed_out=is_timed_out)


def _lines(text: str) -> list[str]:
    """Space at the ends of lines, and empty lines at the end, do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _too_long(limits: SandboxLimits) -> str:
    return f"the program took longer than {limits.seconds:g} s"


def _why(result: SandboxResult, limits: SandboxLimits) -> str:
    match result.outcome:
        case Outcome.TIMED_OUT:
            return _too_long(limits)
        case Outcome.OUT_OF_MEMORY:
            return f"the program needed more than {limits.memory_mb} MB of memory"
        case Outcome.TOO_MUCH_OUTPUT:
            return f"the program wrote more than {limits.output_bytes} bytes"
        case Outcome.KILLED:
            return f"the program was ended by signal {-(result.exit_code or -9)}"
        case Outcome.EXITED:
            return result.stderr.strip()[-MAX_ERROR:] or f"the program exited with code {result.exit_code}"
