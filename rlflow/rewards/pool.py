"""Scoring in processes that can be killed.

    ScorerPool.score -> idle process -> reward functions -> Verdict

A reward function may raise, hang, crash or return nonsense. Each of these is a Verdict without a reward, and none
reaches the process that asks. A process that overruns its deadline is killed with all that it started.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from rlflow.errors import ConfigError
from rlflow.processes.frames import FrameTooLong
from rlflow.processes.pool import Call, CallFailed, HostedCode, HostedProcess, Pool, ProcessLost, payload_of
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.score import fields_of
from rlflow.types import EpisodeEnd, Transcript, Verdict

MAX_ANSWER_BYTES = 1 << 20
"""A verdict is far smaller; a process that announces more has been meddled with."""
_PROCESS = "the scoring process"
_WHAT = "the function of reward.function"
_CURE = "define it at the top level of an importable module, or give reward.function=file.py:function"


class ScorerPool:
    """Processes that score, one episode or group at a time each; callers wait for an idle one. Also a Ray actor.

    Each process loads all functions. What they print goes to standard error, up to a bound. `timeout_s` is for all
    functions of an episode together; those that see a group have as long for each episode of it.
    """

    def __init__(self, rewards: Sequence[ChosenReward], workers: int, timeout_s: float) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1; got {workers}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive; got {timeout_s}")
        cure = f"{_CURE}, and load what is large in its module"
        code = HostedCode(
            module="rlflow.rewards.score",
            payload=payload_of((list(rewards), timeout_s), f"{_WHAT} with its reward.args", _PROCESS, cure),
            process=_PROCESS,
            what=_WHAT,
            cure=_CURE,
            answer="verdict",
            max_answer_bytes=MAX_ANSWER_BYTES,
        )
        self._pool = Pool(
            lambda: HostedProcess(code), workers, lambda: ProcessLost("the scoring processes were closed")
        )
        self._names = ", ".join(one.name for one in rewards)
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Start the processes, unless they are, and wait until each has loaded the functions.

        Raises:
            ConfigError: a function cannot be loaded, or has none of the accepted shapes.
            DeadlineError: loading them takes too long.
        """
        await self._pool.start()

    async def score(self, transcript: Transcript) -> Verdict:
        """Score one episode; starts the processes if need be. Only scoring counts towards the deadline.

        Raises:
            ConfigError: the task cannot be sent, or a process cannot load the functions.
        """
        (verdict,) = await self._ask("score", [transcript])
        return verdict

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        """What the functions that see a group say of these episodes of one task; raises as `score` does."""
        return await self._ask("score_group", transcripts)

    async def _ask(self, operation: str, transcripts: Sequence[Transcript]) -> list[Verdict]:
        task, count = transcripts[0].task.id, len(transcripts)
        try:
            call = Call(operation, _read_verdicts, fields=fields_of(transcripts))
        except FrameTooLong as error:
            if count > 1:  # the next group may be shorter
                detail = f"the {count} episodes of the group cannot be sent to the scoring process: {error}"
                return [Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=detail)] * count
            raise ConfigError(
                f"task {task!r}: its episode cannot be sent to the scoring process: {error}; keep the columns of "
                "`data` short, and load large ones in the reward function"
            ) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"task {task!r} has data that JSON cannot hold ({error}); keep the columns of `data` to plain values"
            ) from error
        await self.start()
        timeout_s, failure = self._timeout_s * count, EpisodeEnd.REWARD_ERROR
        try:
            async with self._pool.idle() as process, asyncio.timeout(timeout_s):
                return await process.answer_to(call)
        except TimeoutError:
            each = f" for each of {count} episodes" if count > 1 else ""
            failure = EpisodeEnd.REWARD_TIMEOUT
            detail = f"{self._names}: took longer than {timeout_s:g} s (reward.timeout_s{each})"
        except (CallFailed, ProcessLost) as error:
            detail = str(error)
        return [Verdict(reward=None, end=failure, detail=detail)] * count

    async def close(self) -> None:
        """Kill the processes and all that they started; what is being scored fails."""
        await self._pool.close()


def _read_verdicts(verdicts: list[dict[str, Any]]) -> list[Verdict]:
    return [Verdict(**{**each, "end": EpisodeEnd(each["end"]) if each["end"] else None}) for each in verdicts]
