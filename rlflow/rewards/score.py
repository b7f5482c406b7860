"""The verdict of all reward functions of a run on one episode, in the process where they run."""

from __future__ import annotations

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


@dataclass(kw_only=True, slots=True, frozen=True)
class _Pending:
    """What an asynchronous function has yet to say."""

    answer: Awaitable[object]
    metrics: dict[str, float]


class Scoring:
    """Reward functions, loaded and ready to be called."""

    def __init__(self, chosen: Sequence[ChosenReward], timeout_s: float) -> None:
        """Raises ConfigError for a function that cannot be loaded or called."""
        self._chosen = chosen
        self._timeout_s = timeout_s
        self._loaded = [_load(one) for one in chosen]

    async def score(self, transcript: Transcript) -> Verdict:
        """Functions are called in their order; those that are asynchronous finish together. Raises nothing."""
        said = [self._call(one, transcript) for one in self._loaded]
        verdicts = await asyncio.gather(*(_said(one, each) for one, each in zip(self._loaded, said, strict=True)))
        return combine(self._chosen, verdicts)

    def _call(self, one: _Loaded, transcript: Transcript) -> Verdict | _Pending:
        if one.function is None:
            return environment_verdict(transcript)
        metrics: dict[str, float] = {}
        try:
            answer = call(one.function, transcript, one.chosen.args, self._timeout_s, metrics.__setitem__)
            if inspect.isawaitable(answer):
                return _Pending(answer=answer, metrics=metrics)
            return verdict_of(answer, one.is_batched, metrics)
        except BaseException as error:  # SystemExit and time-outs of scoring libraries are not of Exception
            return _failed(error)


async def _said(one: _Loaded, said: Verdict | _Pending) -> Verdict:
    if isinstance(said, Verdict):
        return said
    try:
        return verdict_of(await said.answer, one.is_batched, said.metrics)
    except BaseException as error:  # as above; nobody cancels this task
        return _failed(error)


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
