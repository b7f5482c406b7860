"""The verdict of all reward functions of a run on one episode, in the process where they run."""

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlflow.errors import ConfigError, describe_failure
from rlflow.plugins.loading import load_object
from rlflow.rewards.call import (
    ChosenReward,
    MissingColumn,
    Shape,
    call,
    combine,
    environment_verdict,
    shape_of,
    verdict_of,
)
from rlflow.types import EpisodeEnd, Task, Transcript, Verdict


def load(content: tuple[Sequence[ChosenReward], float]) -> Mapping[str, Callable[..., object]]:
    """What a scoring process answers (`rlflow.processes.host`): fields of a Transcript -> fields of the Verdict.

    `content`: the rewards, and the time for all of them together. Raises ConfigError as `with_function` does.
    """
    rewards, timeout_s = [with_function(one) for one in content[0]], content[1]
    runner = asyncio.Runner()

    def answer(transcript: dict[str, Any]) -> dict[str, Any]:
        task = Task(**{**transcript["task"], "prompt": tuple(transcript["task"]["prompt"])})
        texts = {name: tuple(transcript[name]) for name in ("prompt", "completion")}
        episode = Transcript(**{**transcript, **texts, "task": task, "end": EpisodeEnd(transcript["end"])})
        return dataclasses.asdict(runner.run(score(rewards, timeout_s, episode)))

    return {"score": answer}


def with_function(one: ChosenReward) -> ChosenReward:
    """The reward with its function in place of a path. Raises ConfigError when it cannot be loaded or called."""
    function = load_object(one.function) if isinstance(one.function, str) else one.function
    if function is None:
        return one
    if not callable(function):
        raise ConfigError(f"reward.function: {one.name} must be a function; got {type(function).__name__}")
    shape_of(function)
    return dataclasses.replace(one, function=function)


async def score(rewards: Sequence[ChosenReward], timeout_s: float, transcript: Transcript) -> Verdict:
    """Call functions in their order; those that are asynchronous finish together. Raises nothing.

    `rewards` are as `with_function` gives them.
    """
    begun = [_begin(one, transcript, timeout_s) for one in rewards]
    later = iter(await asyncio.gather(*(each for each in begun if not isinstance(each, Verdict))))
    return combine(rewards, [each if isinstance(each, Verdict) else next(later) for each in begun])


def _begin(one: ChosenReward, transcript: Transcript, timeout_s: float) -> Verdict | Awaitable[Verdict]:
    """Call a function; the verdict of one that is asynchronous comes later. Neither raises anything."""
    function = one.function
    if function is None:
        return environment_verdict(transcript)
    assert not isinstance(function, str)
    metrics: dict[str, float] = {}
    try:
        is_batched = shape_of(function) is Shape.BATCHED
        answer = call(function, transcript, one.args, timeout_s, metrics.__setitem__)
        if not inspect.isawaitable(answer):
            return verdict_of(answer, is_batched, metrics)
    except BaseException as error:  # SystemExit and time-outs of scoring libraries are not of Exception
        return _failed(error)

    async def finish() -> Verdict:
        try:
            return verdict_of(await answer, is_batched, metrics)
        except BaseException as error:  # as above; nobody cancels this task
            return _failed(error)

    return finish()


def _failed(error: BaseException) -> Verdict:
    detail = str(error) if isinstance(error, MissingColumn) else describe_failure(error)
    return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=detail)
