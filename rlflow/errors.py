"""Errors that a person reads. Each says what is wrong, what was found and what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting is wrong, contradictory or without effect."""


class RunError(RuntimeError):
    """The run cannot go on; what was saved is still good."""


class WorkerError(RunError):
    """A call to a worker failed; the call may be tried again."""


class EngineLost(WorkerError):
    """A rollout engine cannot answer: it died, or holds no complete weights. Another engine can."""


class RewardLost(WorkerError):
    """A process that scores died, or will not come back."""


class SandboxError(RunError):
    """A program could not be run in its sandbox; this says nothing about the program."""


class WeightsOvertaken(RunError):
    """The staged weights were rewritten while an engine read them; the engine waits for the next version."""


class WeightsDamaged(RunError):
    """Weights on disk are not what was written; nothing of them was applied, and the next anchor needs none of them."""


class NotACopy(RunError):
    """An engine does more with a weight than to copy it when it loads it, so that it must be sent whole."""


class StaleGroup(RunError):
    """A group was ended because it holds tokens that no update may use any more."""


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


def first_line(error: BaseException) -> str:
    """Of its message; its kind where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
