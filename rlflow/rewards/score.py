"""The verdict of all reward functions of a run on one episode, in the process where they run."""

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.errors import ConfigError, describe_failure
from rlflow.plugins.loading import load_object
from rlflow.rewards.call import (
    ChosenReward,
    MissingColumn,
    Reward,
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

    `content` is what Scoring takes. Raises ConfigError as it does.
    """
    scoring = Scoring(*content)
    runner = asyncio.Runner()

    def score(transcript: dict[str, Any]) -> dict[str, Any]:
        task = Task(**{**transcript["task"], "prompt": tuple(transcript["task"]["prompt"])})
        texts = {name: tuple(transcript[name]) for name in ("prompt", "completion")}
        episode = Transcript(**{**transcript, **texts, "task": task, "end": EpisodeEnd(transcript["end"])})
        return dataclasses.asdict(runner.run(scoring.score(episode)))

    return {"score": score}


@dataclass(kw_only=True, slots=True, frozen=True)
class _Loaded:
    chosen: ChosenReward
    function: Reward | None
    is_batched: bool


class Scoring:
    """Reward functions, loaded and ready to be called."""

    def __init__(self, chosen: Sequence[ChosenReward], timeout_s: float) -> None:
        """Raises ConfigError for a function that cannot be loaded or called."""
        self._chosen = chosen
        self._timeout_s = timeout_s
        self._loaded = [_load(one) for one in chosen]

    async def score(self, transcript: Transcript) -> Verdict:
        """Functions are called in their order; those that are asynchronous finish together. Raises nothing."""
        begun = [_begin(one, transcript, self._timeout_s) for one in self._loaded]
        later = iter(await asyncio.gather(*(each for each in begun if not isinstance(each, Verdict))))
        return combine(self._chosen, [each if isinstance(each, Verdict) else next(later) for each in begun])


def _begin(one: _Loaded, transcript: Transcript, timeout_s: float) -> Verdict | Awaitable[Verdict]:
    """Call a function; the verdict of one that is asynchronous comes later. Neither raises anything."""
    if one.function is None:
        return environment_verdict(transcript)
    metrics: dict[str, float] = {}
    try:
        answer = call(one.function, transcript, one.chosen.args, timeout_s, metrics.__setitem__)
        if not inspect.isawaitable(answer):
            return verdict_of(answer, one.is_batched, metrics)
    except BaseException as error:  # SystemExit and time-outs of scoring libraries are not of Exception
        return _failed(error)

    async def finish() -> Verdict:
        try:
            return verdict_of(await answer, one.is_batched, metrics)
        except BaseException as error:  # as above; nobody cancels this task
            return _failed(error)

    return finish()


def _load(chosen: ChosenReward) -> _Loaded:
    function = load_object(chosen.function) if isinstance(chosen.function, str) else chosen.function
    if function is None:
        return _Loaded(chosen=chosen, function=None, is_batched=False)
    if not callable(function):
        raise ConfigError(f"reward.function: {chosen.name} must be a function; got {type(function).__name__}")
    return _Loaded(chosen=chosen, function=function, is_batched=shape_of(function) is Shape.BATCHED)


def _failed(error: BaseException) -> Verdict:
    detail = str(error) if isinstance(error, MissingColumn) else describe_failure(error)
    return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=detail)
