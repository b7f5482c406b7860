"""Errors that a person reads. Each says what is wrong, what was found and what to do."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWN_FOLDER = os.path.dirname(__file__)
_PYTHON_FOLDER = sysconfig.get_path("stdlib")


class ConfigError(ValueError):
    """A setting is wrong, contradictory or without effect."""


class TemplateRefused(ConfigError):
    """The model's chat template does not take a conversation."""


class RunError(RuntimeError):
    """The run cannot go on; what was saved is still good."""


class WorkerError(RunError):
    """A call to a worker failed; the call may be tried again."""


class WorkerLost(WorkerError):
    """The process of a worker ended; trying again cannot help."""


class PayloadLost(WorkerError):
    """What a worker was to read, or has answered, was stored on a machine that is lost. The worker itself may live."""


class TeacherLost(RunError):
    """The server of a teacher is away, or refuses; no process of the run can be started again for it."""


class EngineLost(WorkerError):
    """A rollout engine cannot answer: it died, or holds no complete weights. Another engine can."""


class RewardLost(WorkerError):
    """A process that scores died, or does not come back."""


class EnvironmentFailure(Exception):
    """The environment's code raised, or returned what it must not; the text says in which call, what and where."""


class EnvironmentLost(EnvironmentFailure):
    """The environment's process ended, because of this episode or another one."""


class NoReply(Exception):
    """An episode's limits allow no further reply; the chat's `EpisodeEnd` says which limit."""


class SandboxError(RunError):
    """The sandbox failed to run a program; this says nothing about the program."""


def report_error(error: ConfigError | RunError) -> int:
    """Show an error to the person at the terminal; returns the exit code that it means."""
    if os.environ.get("RLFLOW_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    print("\n".join([f"rlflow: error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
    return 2 if isinstance(error, ConfigError) else 1


class WeightsOvertaken(RunError):
    """The staged weights were rewritten while an engine read them; the engine waits for the next version."""


class WeightsDamaged(RunError):
    """Weights on disk are not what was written. None of them was applied, and the next anchor does not need them."""


class NotACopy(RunError):
    """An engine does more than copy a weight when it loads it, so the weight must be sent whole."""


class StaleGroup(RunError):
    """A group was ended because it holds tokens that are too old for any update."""


class CheckpointDamaged(RunError):
    """Files of a checkpoint are not what was written."""

    def __init__(self, folder: Path, damage: str) -> None:
        super().__init__(folder, damage)
        self.folder = folder
        self.damage = damage
        """Which files, and what is wrong with them."""

    def __str__(self) -> str:
        return (
            f"checkpoint {self.folder} is damaged: {self.damage}; use another one: `rlflow checkpoint verify "
            f"{self.folder.parent.parent}` says which are whole"
        )


class DeadlineError(RunError):
    """A named wait took longer than its deadline."""

    def __init__(self, stage: str, seconds: float, hint: str = "") -> None:
        super().__init__(stage, seconds, hint)
        self.stage = stage
        self.seconds = seconds
        self.hint = hint

    def __str__(self) -> str:
        message = f"{self.stage} did not finish within its deadline of {self.seconds:g} s"
        return f"{message}; {self.hint}" if self.hint else message


class WorkerHung(DeadlineError, WorkerLost):
    """A rank of the trainer, the critic or a frozen model did not answer in time. Its process may live, but nothing
    ends a collective that is stuck, so that it counts as lost."""


VITAL_LOST = (WorkerHung, TeacherLost)
"""What ends more than the group that it was raised for, because every other group needs it too."""


@contextmanager
def first_error_stands() -> Iterator[None]:
    """While an exception is being handled, what the block raises becomes a note on it instead of taking its place."""
    first = sys.exception()
    try:
        yield
    except Exception as second:
        if first is None:
            raise
        first.add_note(f"then: {describe_failure(second)}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe_failure(error: BaseException) -> str:
    """Type, message and place of an error in other people's code.

    The place is the innermost one outside Python's library and rlflow, if there is one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_theirs(frame.filename)] or frames
    place = f" ({os.path.basename(theirs[-1].filename)}:{theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {str(error)[:500]}{place}"


def _is_theirs(file: str) -> bool:
    is_installed = os.sep + "site-packages" + os.sep in file
    is_python = file.startswith((_PYTHON_FOLDER, "<frozen")) and not is_installed
    return not is_python and not file.startswith(_OWN_FOLDER)
