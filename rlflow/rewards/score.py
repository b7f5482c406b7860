"""The verdict of all reward functions of a run on an episode, in the process where they run."""

import asyncio
import base64
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlflow.errors import ConfigError, describe_failure
from rlflow.plugins.loading import load_object
from rlflow.processes.frames import Fields
from rlflow.rewards.call import (
    ChosenReward,
    Log,
    MissingColumn,
    Shape,
    call,
    combine,
    environment_verdict,
    shape_of,
    verdict_of,
    verdicts_of,
)
from rlflow.types import EpisodeEnd, Task, Transcript, Verdict


def load(content: tuple[Sequence[ChosenReward], float]) -> Mapping[str, Callable[..., object]]:
    """What a scoring process answers (`rlflow.processes.host`): transcripts -> fields of their Verdicts.

    "score" has one episode scored by the functions that look at one, and "score_group" a group by those that see it.
    `content`: the rewards, and the time for all of them together, for each episode. Raises ConfigError as
    `with_function` does.
    """
    rewards, timeout_s = [with_function(one) for one in content[0]], content[1]
    together = [one for one in rewards if sees_group(one)]
    alone = [one for one in rewards if not sees_group(one)]
    runner = asyncio.Runner()

    def answer(chosen: Sequence[ChosenReward], fields: dict[str, Any]) -> list[dict[str, Any]]:
        transcripts = transcripts_of(fields)
        task = transcripts[0].task
        applied = [one for one in chosen if one.scores(task)]
        verdicts = runner.run(score(applied, timeout_s * len(transcripts), transcripts))
        awaits_group = chosen is alone and any(one.scores(task) for one in together)
        return [dataclasses.asdict(dataclasses.replace(each, awaits_group=awaits_group)) for each in verdicts]

    return {"score": partial(answer, alone), "score_group": partial(answer, together)}


def fields_of(transcripts: Sequence[Transcript]) -> Fields:
    """Transcripts of one task, for JSON; `transcripts_of` reads them."""
    episodes = [dataclasses.asdict(each) for each in transcripts]
    for episode, transcript in zip(episodes, transcripts, strict=True):
        del episode["task"]
        # Many and seldom asked for: digits would take several times as long.
        episode["completion_ids"] = base64.b64encode(transcript.completion_ids.astype("<i4").tobytes()).decode()
    return {"task": dataclasses.asdict(transcripts[0].task), "episodes": episodes}


def transcripts_of(fields: Fields) -> list[Transcript]:
    task = Task(**{**fields["task"], "prompt": tuple(fields["task"]["prompt"])})
    transcripts: list[Transcript] = []
    for episode in fields["episodes"]:
        read = {name: tuple(episode[name]) for name in ("prompt", "completion")}
        ids = np.frombuffer(base64.b64decode(episode["completion_ids"]), "<i4")
        read |= {"task": task, "end": EpisodeEnd(episode["end"]), "completion_ids": ids}
        transcripts.append(Transcript(**{**episode, **read}))
    return transcripts


def with_function(one: ChosenReward) -> ChosenReward:
    """The reward with its function in place of a path. Raises ConfigError when it cannot be loaded or called."""
    function = load_object(one.function) if isinstance(one.function, str) else one.function
    if function is None:
        return one
    if not callable(function):
        raise ConfigError(f"reward.function: {one.name} must be a function; got {type(function).__name__}")
    shape_of(function)
    return dataclasses.replace(one, function=function)


def sees_group(one: ChosenReward) -> bool:
    """Whether a function, as `with_function` gives it, is called for all episodes of a group together."""
    return callable(one.function) and shape_of(one.function) is Shape.GROUP


async def score(
    rewards: Sequence[ChosenReward], timeout_s: float, transcripts: Sequence[Transcript]
) -> Sequence[Verdict]:
    """Call functions in their order; those that are asynchronous finish together. Raises nothing.

    `rewards` are as `with_function` gives them: either all see a group, or there is one transcript.
    """
    begun = [_begin(one, transcripts, timeout_s) for one in rewards]
    later = iter(await asyncio.gather(*(each for each in begun if not isinstance(each, list))))
    verdicts = [each if isinstance(each, list) else next(later) for each in begun]
    return [combine(rewards, [each[index] for each in verdicts]) for index in range(len(transcripts))]


def _begin(
    one: ChosenReward, transcripts: Sequence[Transcript], timeout_s: float
) -> list[Verdict] | Awaitable[list[Verdict]]:
    """Call a function; the verdicts of one that is asynchronous come later. Neither raises anything."""
    function = one.function
    if function is None:
        return [environment_verdict(transcripts[0])]
    assert not isinstance(function, str)
    log = Log(episodes=[{} for _ in transcripts])
    read = partial(verdicts_of, log=log) if sees_group(one) else lambda answer: [verdict_of(answer)]
    try:
        answer = call(function, transcripts, one.args, timeout_s, log)
        if not inspect.isawaitable(answer):
            return read(answer)
    except BaseException as error:  # SystemExit and time-outs of scoring libraries are not of Exception
        return [_failed(error)] * len(transcripts)

    async def finish() -> list[Verdict]:
        try:
            return read(await answer)
        except BaseException as error:  # as above; nobody cancels this task
            return [_failed(error)] * len(transcripts)

    return finish()


def _failed(error: BaseException) -> Verdict:
    detail = str(error) if isinstance(error, MissingColumn) else describe_failure(error)
    return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail=detail)
