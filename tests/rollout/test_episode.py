"""One episode, with a scripted engine and a renderer whose tokens are letters."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from checkpoints import digests_of, load_episodes
from letters import limits

from rlflow.config import Config
from rlflow.envs.base import Environment, Prompt, SingleTurn, Step
from rlflow.errors import EngineLost, EnvironmentFailure, EnvironmentLost, NoReply, StaleGroup
from rlflow.rollout.chat import Chat, anchor_of, episode_seed
from rlflow.rollout.client import RemoteCalls
from rlflow.rollout.episode import PlayedEpisode, play_episode, summarize
from rlflow.rollout.payloads import payload_bytes, save_payloads
from rlflow.rollout.render import ToolSchemas
from rlflow.rollout.requests import Completion, FinishReason, GenerateRequest
from rlflow.rollout.samples import chains_of, sample_of
from rlflow.types import (
    EpisodeEnd,
    EpisodePayload,
    FunctionCall,
    GroupOrder,
    Message,
    PlayedGroup,
    Sample,
    Task,
    Transcript,
    Turn,
    Verdict,
)
from rlflow.workers.runner import EpisodeRunner

TASK = Task(id="t/0", prompt=(Message(role="user", content="ab"),), answer="c")
STOP = ord(".")
OPEN = ord(">")


def ids_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@dataclass
class LetterRenderer:
    """One token a letter; a message is its text and ".", a prompt ends with ">"."""

    breaks_prefix: bool = False

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        return [*ids_of("".join(message["content"] + "." for message in messages)), OPEN]

    def extend(
        self,
        held_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas = (),
    ) -> list[int] | None:
        return None if self.breaks_prefix else self.prompt(new_messages)

    def given(self, messages: Sequence[Message], reply: Message, tools: ToolSchemas = ()) -> list[int]:
        return [*ids_of(reply["content"]), STOP]

    def parse(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != STOP)

    def calls(self, text: str) -> list[FunctionCall]:
        return [FunctionCall(name=text[1:], arguments="{}")] if text.startswith("!") else []


@dataclass
class ScriptedEngine:
    """Answers with the scripted replies, one after the other; version and log-probability say which one it was."""

    replies: list[str]
    finish_reason: FinishReason = "stop"
    cache_lag: int = 0
    """Versions by which the cache is older than what samples."""
    requests: list[GenerateRequest] = field(default_factory=list)

    async def __call__(self, request: GenerateRequest, /) -> Completion:
        number = len(self.requests)
        self.requests.append(request)
        ids = ids_of(self.replies[number])
        logprobs, versions = [-1.0 - number] * len(ids), [5 + number] * len(ids)
        return Completion(
            ids=ids,
            logprobs=logprobs,
            versions=versions,
            cache_versions=[version - self.cache_lag for version in versions],
            finish_reason=self.finish_reason,
        )


@dataclass
class ScriptedEnvironment(Environment):
    """Says each of `says` after a reply, and is done when there is no more; counts how often it is closed."""

    says: list[str] = field(default_factory=list)
    closed: int = 0

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        if not self.says:
            return Step(done=True, metrics={"last_reply_length": float(len(reply["content"]))})
        return Step(done=False, messages=[Message(role="user", content=self.says.pop(0))])

    async def close(self) -> None:
        self.closed += 1


@dataclass
class OneWorld:
    environment: Environment

    def lease(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def open(self, seed: int, task: Task) -> Environment:
        return self.environment


async def play(
    environment: Environment,
    engine: ScriptedEngine,
    *,
    breaks_prefix: bool = False,
    **changes: Any,
) -> PlayedEpisode:
    room = {"max_length": 64, "max_new_tokens": 8, "max_turns": 8, "max_observation_chars": 100}
    config = limits(**{**room, "setup_s": 30.0, "step_s": 30.0, "episode_s": 30.0, **changes})
    chat = Chat(engine, LetterRenderer(breaks_prefix=breaks_prefix), config, seed=7, prefix_key="12")

    return await play_episode(OneWorld(environment), TASK, chat, config)


def columns(sample: Sample) -> tuple[list[int], list[int], list[int], list[float], list[int]]:
    return (
        sample.prompt_ids.tolist(),
        sample.completion_ids.tolist(),
        sample.loss_mask.astype(int).tolist(),
        sample.logprobs.tolist(),
        sample.versions.tolist(),
    )


async def test_a_single_turn_is_one_sample() -> None:
    engine = ScriptedEngine(["cd."])
    played = await play(SingleTurn(), engine)
    assert played.end is EpisodeEnd.COMPLETED
    assert played.transcript.text == "cd"
    (sample,) = played.payload.samples
    assert columns(sample) == (ids_of("ab.>"), ids_of("cd."), [1, 1, 1], [-1.0, -1.0, -1.0], [5, 5, 5])
    assert played.payload.messages == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    assert engine.requests == [GenerateRequest(prompt_ids=ids_of("ab.>"), seed=7, max_new_tokens=8, prefix_key="12")]


async def test_observations_between_replies_carry_no_loss() -> None:
    engine = ScriptedEngine(["c.", "e."])
    environment = ScriptedEnvironment(says=["d"])
    played = await play(environment, engine)
    assert played.end is EpisodeEnd.COMPLETED
    assert played.transcript.text == "e"
    assert played.transcript.response == "c\nd\ne"
    assert played.transcript.completion_ids.tolist() == ids_of("c." + "d.>" + "e.")
    (sample,) = played.payload.samples
    assert columns(sample) == (
        ids_of("ab.>"),
        ids_of("c." + "d.>" + "e."),
        [1, 1, 0, 0, 0, 1, 1],
        [-1.0, -1.0, 0.0, 0.0, 0.0, -2.0, -2.0],
        [5, 5, -1, -1, -1, 6, 6],
    )
    assert engine.requests[1].prompt_ids == ids_of("ab.>c.d.>")
    assert engine.requests[1].seed == episode_seed(7, 1)
    assert played.metrics == {"last_reply_length": 1.0, "turns": 2.0, "forks": 0.0, "branches": 0.0}
    assert [turn.num_loss_tokens for turn in played.turns] == [2, 2]
    assert played.turns[1].anchor == anchor_of([{"role": "user", "content": "d"}]) != played.turns[0].anchor
    assert environment.closed == 1


async def test_a_broken_prefix_forks_into_a_second_sample() -> None:
    played = await play(ScriptedEnvironment(says=["d"]), ScriptedEngine(["c.", "e."]), breaks_prefix=True)
    first, second = played.payload.samples
    assert columns(first)[:3] == (ids_of("ab.>"), ids_of("c."), [1, 1])
    assert columns(second)[:3] == (ids_of("ab.c.d.>"), ids_of("e."), [1, 1])
    assert played.metrics["forks"] == 1.0
    summary = summarize(played, Verdict(reward=0.5))
    # Of "ab.>c." and "ab.c.d.>e." the first three tokens count once.
    assert (summary.num_prompt_tokens, summary.num_completion_tokens, summary.num_loss_tokens) == (4, 2 + 7, 4)
    assert (summary.oldest_version, summary.newest_version) == (5, 6)


async def test_an_episode_is_as_old_as_the_oldest_cache_of_its_tokens() -> None:
    played = await play(ScriptedEnvironment(says=["d"]), ScriptedEngine(["c.", "e."], cache_lag=2))
    (sample,) = played.payload.samples
    assert sample.versions.tolist() == [5, 5, -1, -1, -1, 6, 6]
    assert sample.cache_versions.tolist() == [3, 3, -1, -1, -1, 4, 4]
    summary = summarize(played, Verdict(reward=0.5))
    assert (summary.oldest_version, summary.newest_version) == (3, 4)


def turn(prompt: str, output: str, continues: int | None = None) -> Turn:
    logprobs, versions = [-1.0] * len(output), [0] * len(output)
    return Turn(
        prompt_ids=ids_of(prompt),
        output_ids=ids_of(output),
        logprobs=logprobs,
        versions=versions,
        cache_versions=versions,
        finish_reason="stop",
        continues=continues,
    )


def samples_of(turns: Sequence[Turn]) -> list[Sample]:
    return [sample_of(chain) for chain in chains_of(turns)]


def test_a_fork_in_the_middle_continues_as_its_own_sample() -> None:
    samples = samples_of([turn("p", "a"), turn("q", "b"), turn("qbx", "c", 1)])
    assert [columns(sample)[:3] for sample in samples] == [
        (ids_of("p"), ids_of("a"), [1]),
        (ids_of("q"), ids_of("bxc"), [1, 0, 1]),
    ]
    assert samples_of([]) == []


async def test_a_prompt_without_room_is_not_sent() -> None:
    engine = ScriptedEngine(["c."])
    played = await play(SingleTurn(), engine, max_length=4)
    assert played.end is EpisodeEnd.PROMPT_TOO_LONG
    assert played.detail == "the prompt has 4 tokens, which leaves no room within model.max_length (4)"
    assert (engine.requests, played.payload.samples) == ([], [])


async def test_new_tokens_are_capped_by_the_room_left() -> None:
    engine = ScriptedEngine(["c"], finish_reason="length")
    await play(SingleTurn(), engine, max_length=5)
    assert engine.requests[0].max_new_tokens == 1


async def test_a_conversation_out_of_room_is_truncated_and_ends_with_a_reply() -> None:
    played = await play(ScriptedEnvironment(says=["dddd"]), ScriptedEngine(["c."]), max_length=12)
    assert played.end is EpisodeEnd.TRUNCATED_LENGTH
    assert played.payload.samples[0].completion_ids.tolist() == ids_of("c.")


async def test_a_cut_off_reply_ends_the_episode_and_is_scored() -> None:
    environment = ScriptedEnvironment(says=["d"])
    played = await play(environment, ScriptedEngine(["cd"], finish_reason="length"))
    assert played.end is EpisodeEnd.TRUNCATED_LENGTH
    assert (played.transcript.text, environment.says) == ("cd", ["d"])
    summary = summarize(played, Verdict(reward=1.0))
    assert (summary.end, summary.reward, summary.is_trainable) == (EpisodeEnd.TRUNCATED_LENGTH, 1.0, True)


async def test_no_token_is_an_empty_completion() -> None:
    played = await play(SingleTurn(), ScriptedEngine([""]))
    assert played.end is EpisodeEnd.EMPTY_COMPLETION
    assert played.detail == "generation of reply 1 gave no token"
    summary = summarize(played, None)
    assert (summary.reward, summary.oldest_version, summary.newest_version) == (None, -1, -1)


class Raises(ScriptedEnvironment):
    async def step(self, reply: Message) -> Step:
        raise TimeoutError("sandbox is gone")


class ForgetsMessages(ScriptedEnvironment):
    async def step(self, reply: Message) -> Step:
        return Step(done=False)


class BadReward(ScriptedEnvironment):
    async def step(self, reply: Message) -> Step:
        return Step(done=True, reward=float("nan"))


class BadMetric(ScriptedEnvironment):
    async def step(self, reply: Message) -> Step:
        return Step(done=True, metrics={"score": float("nan")})


class CannotClose(ScriptedEnvironment):
    async def close(self) -> None:
        self.closed += 1
        raise OSError("no such container")


@pytest.mark.parametrize(
    ("environment", "detail"),
    [
        (Raises(), "step: TimeoutError: sandbox is gone"),
        (ForgetsMessages(), "step: expected at least one message, or done; got []"),
        (BadReward(), "step: a reward is None, or a number from -1e+15 to 1e+15; got nan (float)"),
        (BadMetric(), "step: metric 'score' must be a number from -1e+15 to 1e+15; got nan (float)"),
    ],
)
async def test_a_failing_environment_is_an_outcome(environment: ScriptedEnvironment, detail: str) -> None:
    played = await play(environment, ScriptedEngine(["c."]))
    assert (played.end, played.detail) == (EpisodeEnd.ENVIRONMENT_ERROR, detail)
    assert environment.closed == 1
    assert not summarize(played, None).is_trainable


class NeverCloses(ScriptedEnvironment):
    async def close(self) -> None:
        self.closed += 1
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("environment", "failure"),
    [
        (CannotClose(), "close: OSError: no such container"),
        (NeverCloses(), "close: did not finish within 0.05 s (env.setup_timeout_s)"),
    ],
)
async def test_an_episode_whose_environment_does_not_close_counts(
    environment: ScriptedEnvironment, failure: str
) -> None:
    played = await play(environment, ScriptedEngine(["c."]), setup_s=0.05)
    summary = summarize(played, Verdict(reward=1.0))
    assert (summary.end, summary.reward, summary.is_trainable) == (EpisodeEnd.COMPLETED, 1.0, True)
    assert (summary.close_failure, environment.closed) == (failure, 1)


class WrongMessage(ScriptedEnvironment):
    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=[{"role": "user"}])  # pyright: ignore[reportArgumentType]


class StrangeRole(ScriptedEnvironment):
    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=[Message(role="human", content="ab")])


async def test_a_message_of_a_role_that_templates_leave_out_is_a_failure() -> None:
    played = await play(StrangeRole(), ScriptedEngine([]))
    roles = "('system', 'developer', 'user', 'assistant', 'tool')"
    detail = f"reset: the role of a message is one of {roles}; got {{'role': 'human', 'content': 'ab'}} (dict)"
    assert (played.end, played.detail) == (EpisodeEnd.SETUP_ERROR, detail)


class HangsAtReset(ScriptedEnvironment):
    async def reset(self, task: Task) -> Prompt:
        await asyncio.Event().wait()
        raise AssertionError("never reached")


async def test_a_failing_set_up_is_an_outcome_of_its_own() -> None:
    detail = "reset: a message needs the texts `role` and `content`; got {'role': 'user'} (dict)"
    environment = WrongMessage()
    played = await play(environment, ScriptedEngine([]))
    assert (played.end, played.detail, environment.closed) == (EpisodeEnd.SETUP_ERROR, detail, 1)
    environment = HangsAtReset()
    played = await play(environment, ScriptedEngine([]), setup_s=0.05)
    detail = "building and resetting the environment took longer than 0.05 s (env.setup_timeout_s)"
    assert (played.end, played.detail, environment.closed) == (EpisodeEnd.SETUP_TIMEOUT, detail, 1)


class Hangs(ScriptedEnvironment):
    async def step(self, reply: Message) -> Step:
        await asyncio.Event().wait()
        raise AssertionError("never reached")


async def test_the_episode_deadline_says_where_it_struck() -> None:
    environment = Hangs()
    played = await play(environment, ScriptedEngine(["c."]), episode_s=0.05)
    assert played.end is EpisodeEnd.EPISODE_TIMEOUT
    assert played.detail == "the episode took longer than 0.05 s (env.episode_timeout_s); it was in step 1"
    assert environment.closed == 1
    assert len(played.payload.samples) == 1


async def test_a_step_that_takes_too_long_is_named() -> None:
    played = await play(Hangs(), ScriptedEngine(["c."]), step_s=0.05)
    assert played.end is EpisodeEnd.STEP_TIMEOUT
    assert played.detail == "step 1 took longer than 0.05 s (env.step_timeout_s)"


class Pays(ScriptedEnvironment):
    async def step(self, reply: Message) -> Step:
        step = await ScriptedEnvironment.step(self, reply)
        step.reward, step.metrics = 0.25, {"tools": 1.0}
        return step


async def test_rewards_and_metrics_of_steps_add_up() -> None:
    played = await play(Pays(says=["d", "f"]), ScriptedEngine(["c.", "e.", "g."]))
    assert played.transcript.environment_reward == 0.75
    assert played.metrics["tools"] == 3.0
    assert played.transcript.num_sampled == 6
    assert [message["content"] for message in played.transcript.completion] == ["c", "d", "e", "f", "g"]
    assert played.transcript.prompt == TASK.prompt


async def test_turns_are_limited() -> None:
    played = await play(ScriptedEnvironment(says=["d", "f"]), ScriptedEngine(["c.", "e."]), max_turns=2)
    assert (played.end, played.metrics["turns"], played.transcript.text) == (EpisodeEnd.MAX_TURNS, 2.0, "e")
    assert summarize(played, Verdict(reward=1.0)).is_trainable


async def test_long_observations_lose_their_middle() -> None:
    engine = ScriptedEngine(["c.", "e."])
    played = await play(ScriptedEnvironment(says=["0123456789"]), engine, max_length=200, max_observation_chars=4)
    said = "01\n[... 6 characters left out ...]\n89"
    assert played.transcript.completion[1] == {"role": "user", "content": said}
    assert engine.requests[1].prompt_ids == ids_of(f"ab.>c.{said}.>")
    assert played.metrics["observations_shortened"] == 1.0


class Forgets(ScriptedEnvironment):
    """Keeps a summary of what was said in place of it (arXiv:2511.07327)."""

    async def step(self, reply: Message) -> Step:
        if not self.says:
            return Step(done=True)
        said = Message(role="user", content=self.says.pop(0))
        return Step(context=[Message(role="user", content="sum")], messages=[said])


async def test_a_rewritten_context_goes_on_in_a_sample_of_its_own() -> None:
    engine = ScriptedEngine(["c.", "e."])
    played = await play(Forgets(says=["d"]), engine)
    assert [columns(sample)[:3] for sample in played.payload.samples] == [
        (ids_of("ab.>"), ids_of("c."), [1, 1]),
        (ids_of("sum.d.>"), ids_of("e."), [1, 1]),
    ]
    assert (played.metrics["branches"], played.metrics["forks"]) == (1.0, 0.0)
    assert [message["content"] for message in played.transcript.completion] == ["c", "d", "e"]


class PaysEachReply(ScriptedEnvironment):
    """Gives 0.25 for each reply but the last, and 0.5 for that."""

    async def step(self, reply: Message) -> Step:
        step = await super().step(reply)
        return replace(step, reward=0.5 if step.done else 0.25)


async def test_each_turn_keeps_its_reward_if_the_verdict_is_their_sum() -> None:
    played = await play(PaysEachReply(says=["d"]), ScriptedEngine(["c.", "e."]))
    assert played.transcript.environment_reward == 0.75
    assert [turn.reward for turn in summarize(played, Verdict(reward=0.75)).turns] == [0.25, 0.5]
    assert [turn.reward for turn in summarize(played, Verdict(reward=1.0)).turns] == [0.0, 0.0]


class AsksAnother(ScriptedEnvironment):
    """A user who is the policy too, to whom what the policy said is said by the other side."""

    trainable: bool = False

    async def step(self, reply: Message) -> Step:
        if not self.says:
            return Step(done=True)
        self.says.pop()
        heard = Message(role="user", content=reply["content"])
        answer = await self.ask([heard], agent="user", trainable=self.trainable)
        return Step(messages=[Message(role="user", content=answer["content"])])


async def test_another_agent_of_the_episode_is_not_trained_on_unless_it_is_to() -> None:
    engine = ScriptedEngine(["c.", "u.", "e."])
    played = await play(AsksAnother(says=["x"]), engine)
    assert [bytes(request.prompt_ids).decode() for request in engine.requests] == ["ab.>", "c.>", "ab.>c.u.>"]
    (sample,) = played.payload.samples
    assert columns(sample)[:3] == (ids_of("ab.>"), ids_of("c.u.>e."), [1, 1, 0, 0, 0, 1, 1])
    environment = AsksAnother(says=["x"])
    environment.trainable = True
    played = await play(environment, ScriptedEngine(["c.", "u.", "e."]))
    assert [columns(sample)[:2] for sample in played.payload.samples] == [
        (ids_of("ab.>"), ids_of("c.u.>e.")),
        (ids_of("c.>"), ids_of("u.")),
    ]
    assert [(turn.num_loss_tokens, turn.place) for turn in played.turns] == [(2, 0), (2, 2), (2, 1)]
    assert played.metrics["branches"] == 0.0


class SlowEngine(ScriptedEngine):
    async def __call__(self, request: GenerateRequest, /) -> Completion:
        await asyncio.sleep(0.2)
        return await super().__call__(request)


async def test_the_clock_of_a_step_stands_still_while_it_asks() -> None:
    played = await play(AsksAnother(says=["x"]), SlowEngine(["c.", "u.", "e."]), step_s=0.1)
    assert played.end is EpisodeEnd.COMPLETED


class AsksTwiceThenHangs(ScriptedEnvironment):
    async def step(self, reply: Message) -> Step:
        question = [Message(role="user", content="q")]
        await asyncio.gather(self.ask(question, agent="one"), self.ask(question, agent="two"))
        await asyncio.Event().wait()
        raise AssertionError("never reached")


async def test_the_clock_of_a_step_goes_on_after_replies_that_overlap() -> None:
    played = await play(AsksTwiceThenHangs(), ScriptedEngine(["c.", "u.", "v."]), step_s=0.1)
    assert (played.end, played.detail) == (
        EpisodeEnd.STEP_TIMEOUT,
        "step 1 took longer than 0.1 s (env.step_timeout_s)",
    )


class DiesAfterARefusal(Environment):
    """Is refused a reply, copes, and is then lost, or fails at something else."""

    def __init__(self, error: Exception, *, asks_again: bool) -> None:
        self.error = error
        self.asks_again = asks_again

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        with suppress(NoReply):
            await self.ask([Message(role="user", content="x" * 200)], agent="user")
        if self.asks_again:
            await self.ask([Message(role="user", content="x")], agent="user")
        raise self.error


@pytest.mark.parametrize(
    ("error", "asks_again", "end"),
    [
        (RuntimeError("the conversation is full"), False, EpisodeEnd.TRUNCATED_LENGTH),
        (RuntimeError("database down"), True, EpisodeEnd.ENVIRONMENT_ERROR),
        (EnvironmentLost("killed by SIGKILL"), False, EpisodeEnd.ENVIRONMENT_ERROR),
    ],
)
async def test_only_who_was_just_refused_a_reply_was_cut_off(
    error: Exception, asks_again: bool, end: EpisodeEnd
) -> None:
    played = await play(DiesAfterARefusal(error, asks_again=asks_again), ScriptedEngine(["c.", "u."]))
    assert played.end is end


@pytest.mark.parametrize("calls", [None, [], [{"id": "1"}]])
async def test_tool_calls_of_an_environment_are_checked(calls: object) -> None:
    said = {"role": "assistant", "content": "d", "tool_calls": calls}
    environment = ScriptedEnvironment(says=["d"])

    async def step(reply: Message) -> Step:
        return Step(messages=[said], done=True)  # pyright: ignore[reportArgumentType]

    environment.step = step
    played = await play(environment, ScriptedEngine(["c."]))
    if calls:
        assert played.end is EpisodeEnd.ENVIRONMENT_ERROR
        assert played.detail.startswith("step: a tool call has an `id`, and a `function`")
    else:
        assert played.transcript.completion[-1] == {"role": "assistant", "content": "d"}


class Calls(ScriptedEnvironment):
    """Answers calls."""

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt), tools=[{"type": "function", "function": {"name": "f"}}])

    async def step(self, reply: Message) -> Step:
        calls = reply.get("tool_calls", [])
        return Step(
            done=not calls,
            messages=[
                Message(role="tool", content=call["function"]["name"], tool_call_id=call["id"]) for call in calls
            ],
        )


async def test_tool_calls_are_read_from_the_reply() -> None:
    played = await play(Calls(), ScriptedEngine(["!f.", "e."]))
    function = {"name": "f", "arguments": "{}"}
    assert played.transcript.completion == (
        {
            "role": "assistant",
            "content": "!f",
            "tool_calls": [{"id": "call_0_0", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "f", "tool_call_id": "call_0_0"},
        {"role": "assistant", "content": "e"},
    )


async def test_parallel_replies_train_each_token_once() -> None:
    """A program may ask twice in one place: the second reply has the first one's beginning as its prompt."""
    engine = ScriptedEngine(["c.", "e.", "f."])
    chat = Chat(engine, LetterRenderer(), Config(), seed=7)
    first = await chat.reply(TASK.prompt)
    further = [*TASK.prompt, first.message, Message(role="user", content="d")]
    await asyncio.gather(chat.reply(further), chat.reply(further))
    assert [columns(sample)[:3] for sample in samples_of(chat.turns)] == [
        (ids_of("ab.>"), ids_of("c.d.>e."), [1, 1, 0, 0, 0, 1, 1]),
        (ids_of("ab.>c.d.>"), ids_of("f."), [1, 1]),
    ]
    assert (chat.num_forks, chat.num_branches) == (0, 0)


async def test_cancellation_closes_the_environment_once() -> None:
    environment = Hangs()
    task = asyncio.create_task(play(environment, ScriptedEngine(["c."])))
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.closed == 1


class BrokenEngine(ScriptedEngine):
    async def __call__(self, request: GenerateRequest, /) -> Completion:
        raise TimeoutError("engine 0 is gone")


async def test_an_engine_exception_is_raised_not_scored() -> None:
    environment = CannotClose()
    with pytest.raises(TimeoutError, match="engine 0 is gone") as caught:
        await play(environment, BrokenEngine([]))
    assert environment.closed == 1
    assert caught.value.__notes__ == ["close: OSError: no such container"]


async def test_a_verdict_decides_reward_end_and_detail() -> None:
    played = await play(SingleTurn(), ScriptedEngine(["c."]))
    failed = summarize(played, Verdict(reward=None, end=EpisodeEnd.REWARD_TIMEOUT, detail="too slow"))
    assert (failed.end, failed.reward, failed.detail) == (EpisodeEnd.REWARD_TIMEOUT, None, "too slow")
    assert summarize(played, Verdict(reward=None)).end is EpisodeEnd.NO_VERDICT
    scored = summarize(played, Verdict(reward=0.0, metrics={"format": 1.0}))
    assert (scored.end, scored.reward) == (EpisodeEnd.COMPLETED, 0.0)
    assert scored.metrics == {"turns": 1.0, "forks": 0.0, "branches": 0.0, "format": 1.0}


def test_episode_seeds_are_31_bits() -> None:
    assert episode_seed(7, 2) == 7000023
    assert episode_seed(2**31 - 1, 5) == ((2**31 - 1) * 1000003 + 5) % 2**31


def test_payloads_survive_the_disk(tmp_path: Path) -> None:
    samples = samples_of([turn("p", "a"), turn("pax", "b", 0), turn("q", "c")])
    payloads = [
        EpisodePayload(samples=samples, messages=[Message(role="user", content="é")]),
        EpisodePayload(samples=[], messages=[]),
        EpisodePayload(samples=samples[1:], messages=[]),
    ]
    path = tmp_path / "group" / "7.safetensors"
    save_payloads(path, payloads)
    loaded = load_episodes(path)
    assert [payload.messages for payload in loaded] == [payload.messages for payload in payloads]
    for before, after in zip(payloads, loaded, strict=True):
        assert [columns(sample) for sample in after.samples] == [columns(sample) for sample in before.samples]
        assert payload_bytes(after) == payload_bytes(before)
    assert [child.name for child in path.parent.iterdir()] == ["7.safetensors"]
    assert loaded[0].samples[0].loss_mask.dtype == np.bool_
    save_payloads(path, [])
    assert load_episodes(path) == []


@dataclass
class Remote:
    """Shaped like an actor handle's method."""

    call: object

    def remote(self, *arguments: object) -> object:
        return self.call(*arguments)  # pyright: ignore[reportCallIssue]


@dataclass
class FakeActors:
    """An engine, as an actor handle, that answers "c."; and a scorer that gives 1 to "c"."""

    requests: list[GenerateRequest] = field(default_factory=list)
    fails: bool = False

    @property
    def generate(self) -> Remote:
        return Remote(self._generate)

    async def _generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        if self.fails:
            raise RuntimeError("engine died")
        return Completion(
            ids=ids_of("c."), logprobs=[-1.0, -2.0], versions=[3, 4], cache_versions=[3, 4], finish_reason="stop"
        )

    async def score(self, transcript: Transcript) -> Verdict:
        return Verdict(reward=float(transcript.text == transcript.task.answer))

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        raise AssertionError("no verdict awaits the group")


@dataclass
class RankingActors(FakeActors):
    """Half a point for each episode, and its rank in the group."""

    failing: int = -1
    scored: int = 0

    async def score(self, transcript: Transcript) -> Verdict:
        self.scored += 1
        if self.scored - 1 == self.failing:
            return Verdict(reward=None, end=EpisodeEnd.REWARD_ERROR, detail="boom")
        return Verdict(reward=0.5, metrics={"rewards/one": 0.5}, awaits_group=True)

    async def score_group(self, transcripts: Sequence[Transcript]) -> list[Verdict]:
        return [Verdict(reward=float(rank), metrics={"rewards/rank": rank}) for rank in range(len(transcripts))]


@dataclass
class ThirdFails:
    """Fails on every third environment."""

    built: list[ScriptedEnvironment] = field(default_factory=list)
    calls: int = 0

    def lease(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def open(self, seed: int, task: Task) -> Environment:
        self.calls += 1
        if self.calls == 3:
            raise EnvironmentFailure("build: RuntimeError: no licence")
        self.built.append(ScriptedEnvironment())
        return self.built[-1]


def runner(actors: FakeActors, build: ThirdFails) -> EpisodeRunner:
    return EpisodeRunner(
        Config(),
        "",
        build,
        actors,
        actors,  # pyright: ignore[reportArgumentType]
        renderer=LetterRenderer(),
        calls=RemoteCalls(cancel=lambda call: None, is_lost=lambda error: False),
    )


async def test_a_runner_plays_and_scores_a_group() -> None:
    actors, build = FakeActors(), ThirdFails()
    group, *payloads = await runner(actors, build).play(GroupOrder(group_id=12, task=TASK, num_episodes=3, seed=7))
    assert isinstance(group, PlayedGroup)
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0, None]
    assert group.episodes[2].end is EpisodeEnd.SETUP_ERROR
    assert group.episodes[2].detail == "build: RuntimeError: no licence"
    assert (group.group_id, group.payloads, len(payloads)) == (12, [], 3)
    assert (group.episodes[0].oldest_version, group.episodes[0].newest_version) == (3, 4)
    assert group.num_bytes == 2 * (4 * 4 + 2 * (4 + 1 + 4 + 4 + 4))
    assert [request.seed for request in actors.requests] == [episode_seed(7, 0), episode_seed(7, 1)]
    assert {request.prefix_key for request in actors.requests} == {"12"}
    assert group.spans[0].name == "rollout"
    assert {span.name for span in group.spans[1:]} == {"reward"}
    assert {span.actor for span in group.spans} == {"runner"}
    told = {"group": 12, "version": 4, "oldest_version": 3, "tokens": 4, "outcome": "2 completed, 1 setup_error"}
    assert group.spans[0].facts == told and group.spans[1].facts == {"group": 12}
    assert [environment.closed for environment in build.built] == [1, 1]


async def test_what_sees_the_group_scores_the_episodes_that_were_played_to_their_end() -> None:
    group, *_ = await runner(RankingActors(), ThirdFails()).play(
        GroupOrder(group_id=1, task=TASK, num_episodes=4, seed=7)
    )
    assert isinstance(group, PlayedGroup)
    assert [episode.reward for episode in group.episodes] == [0.5, 1.5, None, 2.5]
    assert group.episodes[2].end is EpisodeEnd.SETUP_ERROR
    assert group.episodes[1].metrics["rewards/one"] == 0.5
    assert group.episodes[1].metrics["rewards/rank"] == 1.0


async def test_an_episode_that_failed_alone_is_seen_by_the_group_and_has_no_verdict() -> None:
    group, *_ = await runner(RankingActors(failing=0), ThirdFails(calls=3)).play(
        GroupOrder(group_id=1, task=TASK, num_episodes=3, seed=7)
    )
    assert isinstance(group, PlayedGroup)
    assert [episode.reward for episode in group.episodes] == [None, 1.5, 2.5]
    assert (group.episodes[0].end, group.episodes[0].detail) == (EpisodeEnd.REWARD_ERROR, "boom")


async def test_the_last_episode_of_a_group_is_greedy_where_it_is_a_baseline() -> None:
    actors = FakeActors()
    order = GroupOrder(group_id=1, task=TASK, num_episodes=3, seed=0, is_last_greedy=True)
    await runner(actors, ThirdFails(calls=3)).play(order)
    assert [request.is_greedy for request in actors.requests] == [False, False, True]


async def test_a_runner_saves_payloads_and_loads_them_after_their_number(tmp_path: Path) -> None:
    saved = EpisodePayload(samples=samples_of([turn("p", "a")]), messages=[Message(role="user", content="p")])
    one = runner(FakeActors(), ThirdFails())
    digest = await one.save_payloads(tmp_path / "ready", saved, saved)
    assert digests_of(tmp_path) == {"ready": digest}
    count, *loaded = await one.load_payloads(tmp_path / "ready")
    assert count == 2
    for payload in loaded:
        assert isinstance(payload, EpisodePayload)
        assert await one.transcript(payload) == saved.messages
        assert columns(payload.samples[0]) == columns(saved.samples[0])


async def test_a_runner_loses_the_group_when_an_engine_fails_and_closes_all() -> None:
    build = ThirdFails()
    with pytest.raises(RuntimeError, match="engine died"):
        await runner(FakeActors(fails=True), build).play(GroupOrder(group_id=1, task=TASK, num_episodes=2, seed=0))
    assert [environment.closed for environment in build.built] == [1, 1]


@dataclass
class SlicedEngine:
    """Answers when told to: with a slice of the version given, the whole of what was asked for or less."""

    calls: list[asyncio.Future[Completion]] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)

    @property
    def generate(self) -> Remote:
        return Remote(self._generate)

    def _generate(self, request: GenerateRequest) -> asyncio.Future[Completion]:
        self.requests.append(request)
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]

    async def give(self, call: int, version: int) -> None:
        """One token, with the reply to go on."""
        self.calls[call].set_result(
            Completion(ids=[1], logprobs=[-1.0], versions=[version], cache_versions=[version], finish_reason="abort")
        )
        for _ in range(10):
            await asyncio.sleep(0)


async def under_way(one: EpisodeRunner, group_id: int, engine: int | None = None) -> asyncio.Task[object]:
    order = GroupOrder(group_id=group_id, task=TASK, num_episodes=2, seed=0, engine=engine)
    playing = asyncio.create_task(one.play(order))
    for _ in range(10):
        await asyncio.sleep(0)
    return playing


def sliced_runner(engine: SlicedEngine, build: ThirdFails) -> EpisodeRunner:
    return EpisodeRunner(
        Config(),
        "",
        build,
        FakeActors(),
        engine,  # pyright: ignore[reportArgumentType]
        renderer=LetterRenderer(),
        calls=RemoteCalls(cancel=lambda call: None, is_lost=lambda error: False),
    )


async def test_only_groups_that_hold_a_token_too_old_are_ended() -> None:
    engine, build = SlicedEngine(), ThirdFails(calls=10)
    one = sliced_runner(engine, build)
    old, fresh, new, pinned = [
        await under_way(one, number, engine=named) for number, named in enumerate((None, None, None, 0))
    ]
    assert [request.engine for request in engine.requests] == [None] * 6 + [0] * 2
    await engine.give(0, version=5)
    await engine.give(1, version=4)
    await engine.give(2, version=5)
    await engine.give(6, version=1)
    await one.cancel_stale(5)
    for _ in range(10):
        await asyncio.sleep(0)
    assert [each.done() for each in (old, fresh, new, pinned)] == [True, False, False, False]
    with pytest.raises(StaleGroup, match="group 0 holds tokens of version 4"):
        await old
    assert [environment.closed for environment in build.built] == [1, 1, 0, 0, 0, 0, 0, 0]
    await one.cancel_stale(6)
    with pytest.raises(StaleGroup, match="group 1 holds tokens of version 5"):
        await fresh
    for each in (new, pinned):
        each.cancel()
    await asyncio.gather(new, pinned, return_exceptions=True)
    assert {environment.closed for environment in build.built} == {1}


class Asks(ScriptedEnvironment):
    """Asks another agent while it is set up."""

    async def reset(self, task: Task) -> Prompt:
        await self.ask([Message(role="user", content="q")], agent="one")
        return await super().reset(task)


@dataclass
class Builds(ThirdFails):
    world: type[ScriptedEnvironment] = ScriptedEnvironment

    async def open(self, seed: int, task: Task) -> Environment:
        self.built.append(self.world())
        return self.built[-1]


@pytest.mark.parametrize(
    ("world", "config", "phase"),
    [(ScriptedEnvironment, limits(episode_s=0.2), "episode"), (Asks, limits(setup_s=0.2), "setup")],
)
async def test_a_silent_engine_loses_the_group_and_is_no_fault_of_the_episode(
    world: type[ScriptedEnvironment], config: Config, phase: str
) -> None:
    engine, build = SlicedEngine(), Builds(world=world)
    one = sliced_runner(engine, build)
    one._config = config
    with pytest.raises(EngineLost, match=f"for a token, and failed: .*took longer than 0.2 s .env.{phase}_timeout_s"):
        await one.play(GroupOrder(group_id=1, task=TASK, num_episodes=2, seed=0))
    assert [environment.closed for environment in build.built] == [1, 1]


async def test_an_episode_that_takes_too_long_by_itself_has_no_verdict() -> None:
    one = runner(FakeActors(), Builds(world=Hangs))
    one._config = limits(episode_s=0.2)
    group, *_ = await one.play(GroupOrder(group_id=1, task=TASK, num_episodes=2, seed=0))
    assert isinstance(group, PlayedGroup)
    assert [episode.end for episode in group.episodes] == [EpisodeEnd.EPISODE_TIMEOUT] * 2


async def test_a_group_says_what_share_of_its_parts_came_from_engines_without_room() -> None:
    engine = SlicedEngine()
    playing = await under_way(sliced_runner(engine, ThirdFails(calls=10)), 1)
    for call, (is_crowded, finish_reason) in enumerate([(True, "abort"), (False, "stop"), (False, "stop")]):
        engine.calls[call].set_result(
            Completion(
                ids=ids_of("c."),
                logprobs=[-1.0, -2.0],
                versions=[3, 3],
                cache_versions=[3, 3],
                finish_reason=cast(FinishReason, finish_reason),
                is_crowded=is_crowded,
            )
        )
        for _ in range(10):
            await asyncio.sleep(0)
    group, *_ = cast(tuple[PlayedGroup, ...], await playing)
    assert group.crowded_share == 1 / 3


async def test_a_runner_sends_nothing_to_engines_that_do_not_serve() -> None:
    engine, build = SlicedEngine(), ThirdFails(calls=10)
    one = sliced_runner(engine, build)
    await one.set_serving([])
    playing = await under_way(one, 1)
    assert engine.requests == []
    await one.set_serving([0])
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(engine.requests) == 2
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


@dataclass
class SomeHang(Builds):
    """The environments of these numbers never answer."""

    hanging: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()

    async def open(self, seed: int, task: Task) -> Environment:
        self.calls += 1
        if self.calls - 1 in self.refused:
            raise EnvironmentFailure("build: RuntimeError: no licence")
        self.world = Hangs if self.calls - 1 in self.hanging else ScriptedEnvironment
        return await super().open(seed, task)


@pytest.mark.parametrize(
    ("hanging", "refused", "ends"),
    [
        ({0}, set(), ["cancelled", "completed", "completed"]),
        ({2}, set(), ["completed", "completed", "cancelled"]),
        (set(), {1}, ["completed", "setup_error", "completed"]),  # a spare one takes the place of one that failed
        (set(), set(), ["completed", "completed", "cancelled"]),  # all end at the same moment
    ],
)
async def test_the_slowest_episodes_of_a_group_with_spare_ones_are_cancelled(
    hanging: set[int], refused: set[int], ends: list[str]
) -> None:
    build = SomeHang(hanging=frozenset(hanging), refused=frozenset(refused))
    order = GroupOrder(group_id=1, task=TASK, num_episodes=3, num_spare=1, seed=7)
    group, *payloads = await runner(RankingActors(), build).play(order)
    assert isinstance(group, PlayedGroup)
    assert [episode.end.value for episode in group.episodes] == ends
    rewards = iter([0.5, 1.5])  # half a point and the rank among those that were kept
    assert [episode.reward for episode in group.episodes] == [
        next(rewards) if end == "completed" else None for end in ends
    ]
    assert [len(cast(EpisodePayload, payload).samples) for payload in payloads] == [end == "completed" for end in ends]
    assert {environment.closed for environment in build.built} == {1}


async def test_a_greedy_baseline_is_waited_for_and_is_no_spare_episode() -> None:
    engine, build = SlicedEngine(), ThirdFails(calls=10)
    order = GroupOrder(group_id=1, task=TASK, num_episodes=4, num_spare=1, seed=0, is_last_greedy=True)
    playing = asyncio.create_task(sliced_runner(engine, build).play(order))
    reply = Completion(
        ids=ids_of("c."), logprobs=[-1.0, -2.0], versions=[3, 3], cache_versions=[3, 3], finish_reason="stop"
    )
    for call in (0, 2, 3):
        for _ in range(30):
            await asyncio.sleep(0)
        assert not playing.done()
        engine.calls[call].set_result(reply)
    group, *_ = await playing
    assert isinstance(group, PlayedGroup)
    assert [episode.end.value for episode in group.episodes] == ["completed", "cancelled", "completed", "completed"]
