"""A conversation that is given becomes the episode that a policy would have played."""

from __future__ import annotations

from dataclasses import replace

from letters import LetterRenderer, ids_of, limits

from rlflow.rollout.chat import Chat
from rlflow.rollout.demonstration import show
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import NO_VERSION, EpisodeEnd, Message, Task

TALK = Task(
    id="t/0",
    prompt=(Message(role="user", content="x"),),
    demonstrations=(
        (
            Message(role="assistant", content="yes"),
            Message(role="user", content="q"),
            Message(role="assistant", content="no"),
        ),
    ),
)


async def nobody(request: GenerateRequest, /) -> Completion:
    raise AssertionError("an engine was asked")


def chat(max_length: int = 100) -> Chat:
    return Chat(nobody, LetterRenderer(), limits(max_length=max_length))


async def test_every_reply_is_learned_and_what_stands_between_is_context() -> None:
    played = await show(TALK, 0, chat())
    assert played.end is EpisodeEnd.COMPLETED
    (sample,) = played.payload.samples
    assert sample.prompt_ids.tolist() == ids_of("x.>")
    assert sample.completion_ids.tolist() == ids_of("yes.q.>no.")
    assert sample.loss_mask.tolist() == [True] * 4 + [False] * 3 + [True] * 3
    assert set(sample.versions.tolist()) == set(sample.cache_versions.tolist()) == {NO_VERSION}
    assert sample.logprobs.tolist() == [0.0] * 10
    assert [message["content"] for message in played.payload.messages] == ["x", "yes", "q", "no"]


async def test_a_row_may_weigh_more_and_talk_longer_than_a_policy_might() -> None:
    config = limits(max_turns=1)
    played = await show(replace(TALK, data={"weight": 2.5}), 0, Chat(nobody, LetterRenderer(), config))
    assert (played.end, played.transcript.environment_reward) == (EpisodeEnd.COMPLETED, 2.5)
    assert (await show(TALK, 0, Chat(nobody, LetterRenderer(), config))).transcript.environment_reward == 1.0


async def test_a_demonstration_that_is_too_long_is_an_error_of_its_own() -> None:
    played = await show(TALK, 0, chat(max_length=12))
    assert played.end is EpisodeEnd.PROMPT_TOO_LONG
    assert played.detail == "a demonstration has 13 tokens, more than model.max_length (12)"
