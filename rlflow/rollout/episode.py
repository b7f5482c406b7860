"""One episode from its task to a payload for training and a transcript for the reward.

    Environment: open -> reset -> [reply -> step] ... -> close      this module runs the loop
    Program:     open -> run -> close                               the program runs it, through the gateway
    both:        Chat (tokens) -> samples -> EpisodePayload;  messages -> Transcript

Rules: the environment sees messages only, and `chat.py` holds the tokens. An environment that was opened is closed,
however the episode ends. A failure of the environment ends its episode with a reason; a failure of an engine or of the
chat template is raised, because the group cannot be trusted.

Example: a task "2+2", the reply "4" and a step with reward 1.0 and done give end=COMPLETED, one sample whose loss mask
covers the tokens of "4", and a transcript with environment_reward=1.0.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from rlflow.batching.tree import num_distinct_tokens
from rlflow.config import Config
from rlflow.environments.wire import conversation_of, plain, prompt_of, result_of, step_of
from rlflow.envs.base import POLICY, Endpoint, Environment, Program, Prompt, Result, Step, ToolSchema
from rlflow.errors import EnvironmentFailure, EnvironmentLost, NoReply
from rlflow.rewards.client import Scorer, with_group
from rlflow.rollout.chat import Chat
from rlflow.rollout.samples import chains_of, sample_of, turns_before
from rlflow.types import (
    NO_VERSION,
    EpisodeEnd,
    EpisodePayload,
    EpisodeSummary,
    Message,
    Part,
    Task,
    TextPart,
    Transcript,
    TurnSummary,
    Verdict,
)

Value = TypeVar("Value")


class EnvironmentSource(Protocol):
    """Opens environments; `rlflow.environments.pool` does in a run."""

    def lease(self) -> AbstractAsyncContextManager[None]:
        """Hold this around an episode: it reserves what an environment needs for itself alone, if anything."""
        ...

    async def open(self, seed: int, task: Task) -> Environment | Program:
        """A new environment for `task`, with `seed` set."""
        ...


class ProgramGateway(Protocol):
    """Lets a program speak to the policy; `rlflow.rollout.gateway.server` does in a run."""

    def open(self, chat: Chat) -> Endpoint: ...

    def close(self, endpoint: Endpoint) -> Mapping[str, float]:
        """End the program's access; returns metrics."""
        ...

    async def wait_until_failed(self, endpoint: Endpoint) -> None:
        """Returns when the chat has failed."""
        ...


@dataclass(kw_only=True, slots=True)
class PlayedEpisode:
    """One episode before it is scored."""

    end: EpisodeEnd
    payload: EpisodePayload
    transcript: Transcript
    detail: str = ""
    close_failure: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    turns: tuple[TurnSummary, ...] = ()
    """All turns, in the order of the samples."""


async def play_episode(
    environments: EnvironmentSource,
    task: Task,
    chat: Chat,
    config: Config,
    *,
    seed: int = 0,
    gateway: ProgramGateway | None = None,
) -> PlayedEpisode:
    """Play one episode and close its environment, whatever happens.

    `seed` is the environment's own. A failure of the environment is an outcome of the episode; an exception of the
    engine or of the chat template is raised. Programs need a `gateway`.
    """
    play = _Play(environments=environments, seed=seed, task=task, chat=chat, config=config, gateway=gateway)
    try:
        async with environments.lease():
            end, detail = await play.run_and_close()
    except EnvironmentFailure as failure:
        end, detail = EpisodeEnd.SETUP_ERROR, str(failure)
    if chat.failure is not None:
        raise chat.failure
    played = recorded(chat, task, play.prompt, play.completion, end, detail, play.reward)
    played.close_failure, played.metrics = play.close_failure, play.metrics | played.metrics
    return played


def recorded(
    chat: Chat,
    task: Task,
    prompt: Sequence[Message],
    completion: Sequence[Message],
    end: EpisodeEnd,
    detail: str = "",
    reward: float | None = None,
) -> PlayedEpisode:
    """An episode that is over, from what its chat has recorded; `reward` is the environment's."""
    chains = chains_of(chat.turns)
    places = {id(turn): place for place, turn in enumerate(chat.turns)}
    samples = [sample_of(chain, turns_before(chat.turns, chain[0])) for chain in chains]
    counts = {"turns": len(chat.turns), "forks": chat.num_forks, "branches": chat.num_branches}
    return PlayedEpisode(
        end=end,
        payload=EpisodePayload(samples=samples, messages=[*prompt, *completion]),
        transcript=Transcript(
            task=task,
            prompt=tuple(prompt),
            completion=tuple(completion),
            environment_reward=reward,
            end=end,
            num_sampled=sum(len(turn.output_ids) for turn in chat.turns),
            completion_ids=np.concatenate([np.zeros(0, np.int32), *(sample.completion_ids for sample in samples)]),
        ),
        detail=detail,
        metrics={name: float(count) for name, count in counts.items()},
        turns=tuple(
            TurnSummary(
                anchor=one.anchor, num_loss_tokens=len(one.output_ids), place=places[id(one)], reward=one.reward
            )
            for chain in chains
            for one in chain
        ),
    )


async def summarized(scorer: Scorer, group: Sequence[tuple[PlayedEpisode, Verdict | None]]) -> list[EpisodeSummary]:
    """The metadata of a group, once the functions that see all of it have scored it too."""
    scored = [(played.transcript, verdict) for played, verdict in group if verdict is not None]
    verdicts = iter(await with_group(scorer, scored))
    return [summarize(played, verdict and next(verdicts)) for played, verdict in group]


def summarize(played: PlayedEpisode, verdict: Verdict | None) -> EpisodeSummary:
    """The metadata of a played episode. `verdict` is None if the episode ended in an error and so was not scored.

    Both versions are -1 if nothing was sampled.
    """
    assert (verdict is None) == played.end.is_error, "exactly the episodes without an error are scored"
    end, reward, detail, metrics = played.end, None, played.detail, dict(played.metrics)
    if verdict is not None:
        no_verdict = EpisodeEnd.NO_VERDICT if verdict.reward is None else end
        end, reward, detail = verdict.end or no_verdict, verdict.reward, verdict.detail or detail
        metrics |= verdict.metrics
    turns, samples = played.turns, played.payload.samples
    if reward != played.transcript.environment_reward:
        turns = tuple(replace(turn, reward=0.0) for turn in turns)
    num_prompt_tokens = len(samples[0].prompt_ids) if samples else 0
    versions = [int(version) for sample in samples for version in sample.cache_versions[sample.loss_mask]]
    return EpisodeSummary(
        end=end,
        reward=reward,
        num_prompt_tokens=num_prompt_tokens,
        num_completion_tokens=num_distinct_tokens(samples) - num_prompt_tokens,
        num_loss_tokens=len(versions),
        oldest_version=min(versions, default=NO_VERSION),
        newest_version=max(versions, default=NO_VERSION),
        detail=detail,
        close_failure=played.close_failure,
        metrics=metrics,
        turns=turns,
    )


@dataclass(kw_only=True, slots=True)
class _Play:
    """An episode under way. What it has recorded outlives the exception that ends it."""

    environments: EnvironmentSource
    seed: int
    task: Task
    chat: Chat
    config: Config
    gateway: ProgramGateway | None
    world: Environment | Program | None = None
    close_failure: str = ""
    context: list[Message] = field(default_factory=list)
    """The conversation that the policy sees."""
    prompt: list[Message] = field(default_factory=list)
    completion: list[Message] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    step_deadline: asyncio.Timeout | None = None
    asking: int = 0
    """Replies of other agents that the step under way waits for."""
    left_s: float = 0.0
    """Seconds that the step had left when its clock was stopped."""

    async def run_and_close(self) -> tuple[EpisodeEnd, str]:
        """How the episode ended, and the detail of a failure."""
        try:
            end, detail = await self._run_in_time()
        except BaseException as error:
            if failure := await self._close():
                error.add_note(failure)
            raise
        self.close_failure = await self._close()
        return end, detail

    async def _run_in_time(self) -> tuple[EpisodeEnd, str]:
        deadline = asyncio.timeout(self.config.env.episode_timeout_s)
        try:
            async with deadline:
                return await self._run()
        except EnvironmentLost as error:
            return EpisodeEnd.ENVIRONMENT_ERROR, str(error)
        except (EnvironmentFailure, NoReply) as error:
            # An environment that was refused its last reply may report that as a failure of its own.
            return self._refused() or (EpisodeEnd.ENVIRONMENT_ERROR, str(error))
        except TimeoutError:
            if not deadline.expired():
                raise
            limit = f"{self.config.env.episode_timeout_s:g} s (env.episode_timeout_s)"
            detail = f"the episode took longer than {limit}; it was in {self.chat.phase}"
            return EpisodeEnd.EPISODE_TIMEOUT, detail

    async def _close(self) -> str:
        """Close the environment; returns what went wrong, or ""."""
        if self.world is None:
            return ""
        deadline = asyncio.timeout(self.config.env.setup_timeout_s)
        try:
            async with deadline:
                await self.world.close()
        except TimeoutError as error:
            if not deadline.expired():
                return _describe("close", error)
            return f"close: did not finish within {self.config.env.setup_timeout_s:g} s (env.setup_timeout_s)"
        except Exception as error:
            return _describe("close", error)
        return ""

    async def _run(self) -> tuple[EpisodeEnd, str]:
        prompt = Prompt(messages=[])
        deadline = asyncio.timeout(self.config.env.setup_timeout_s)
        try:
            async with deadline:
                self.world = await self.environments.open(self.seed, self.task)
                if isinstance(self.world, Environment):
                    self.world.ask = self._ask
                    prompt = prompt_of(plain("reset", await _call("reset", self.world.reset, self.task), Prompt))
                    if not prompt.messages:
                        raise EnvironmentFailure("reset: expected at least one message; got []")
        except EnvironmentFailure as failure:
            return EpisodeEnd.SETUP_ERROR, str(failure)
        except TimeoutError:
            if not deadline.expired():
                raise
            limit = f"{self.config.env.setup_timeout_s:g} s (env.setup_timeout_s)"
            return EpisodeEnd.SETUP_TIMEOUT, f"building and resetting the environment took longer than {limit}"
        if isinstance(self.world, Program):
            return await self._run_program(self.world)
        return await self._turns(self.world, prompt)

    async def _turns(self, world: Environment, prompt: Prompt) -> tuple[EpisodeEnd, str]:
        self.prompt = await self.chat.taken_up(prompt.messages)
        self.context = list(self.prompt)
        while True:
            reply = await self.chat.reply(self.context, prompt.tools)
            self.context.append(reply.message)
            self.completion.append(reply.message)
            if reply.turn.finish_reason == "length":
                # The environment must not act on a reply that was cut off: it may hold half an action.
                return EpisodeEnd.TRUNCATED_LENGTH, ""
            self.chat.phase = f"step {len(self.chat.turns)}"
            step, failure = await self._step(world, reply.message)
            if step is None:
                return EpisodeEnd.STEP_TIMEOUT, failure
            messages = await self.chat.taken_up(step.messages)
            for index, message in enumerate(messages):
                messages[index] = shorter(message, self.config.env.max_observation_chars)
                if messages[index] is not message:
                    self._add_outcome(None, {"observations_shortened": 1.0})
            self.completion += messages
            if step.context is not None:
                self.context = await self.chat.taken_up(step.context)
            self.context += messages
            self._add_outcome(step.reward, step.metrics)
            reply.turn.reward = step.reward or 0.0
            if step.done:
                return EpisodeEnd.COMPLETED, ""

    async def _step(self, world: Environment, reply: Message) -> tuple[Step | None, str]:
        """The step; or None and what took too long."""
        self.asking = 0
        try:
            async with asyncio.timeout(self.config.env.step_timeout_s) as self.step_deadline:
                step = step_of(plain("step", await _call("step", world.step, reply), Step))
        except TimeoutError:
            assert self.step_deadline is not None
            if not self.step_deadline.expired():
                raise
            return None, f"{self.chat.phase} took longer than {self.config.env.step_timeout_s:g} s (env.step_timeout_s)"
        finally:
            self.step_deadline = None
        if not (step.done or step.messages or step.context):
            raise EnvironmentFailure("step: expected at least one message, or done; got []")
        return step, ""

    def _add_outcome(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        if reward is not None:
            self.reward = (self.reward or 0.0) + reward
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    async def _ask(
        self,
        messages: Sequence[Message],
        *,
        agent: str,
        tools: Sequence[ToolSchema] = (),
        trainable: bool = False,
    ) -> Message:
        """The environment's `ask`: a reply of another agent, during which the clock of the step stands still."""
        if agent == POLICY:
            raise EnvironmentFailure(f"ask: {POLICY!r} replies to reset and step; give the other agent another name")
        messages, _ = conversation_of({"messages": list(messages), "tools": list(tools)})
        if not messages:
            raise EnvironmentFailure("ask: expected at least one message; got []")
        messages = await self.chat.taken_up(messages)
        deadline, phase = self.step_deadline, self.chat.phase
        self._hold(deadline, 1)
        try:
            return (await self.chat.reply(messages, tools, agent=agent, trainable=trainable)).message
        finally:
            self._hold(deadline, -1)
            self.chat.phase = phase

    def _hold(self, deadline: asyncio.Timeout | None, change: int) -> None:
        """Stop the clock of a step at the first reply that its environment asks for, and restart it after the last."""
        if deadline is None or deadline is not self.step_deadline:
            return
        now_s = asyncio.get_running_loop().time()
        self.asking += change
        when_s = deadline.when()
        if change > 0 and self.asking == 1 and when_s is not None:
            self.left_s = when_s - now_s
            deadline.reschedule(None)
        elif self.asking == 0:
            deadline.reschedule(now_s + self.left_s)

    async def _run_program(self, program: Program) -> tuple[EpisodeEnd, str]:
        assert self.gateway is not None, "programs need a gateway"
        endpoint = self.gateway.open(self.chat)
        try:
            run = _call("run", program.run, self.task, endpoint)
            failed = self.gateway.wait_until_failed(endpoint)
            ran = await unless(failed, run, lambda: EnvironmentFailure("run: was stopped because a reply failed"))
            result = result_of(plain("run", ran, Result))
        finally:
            self._add_outcome(None, self.gateway.close(endpoint))
            messages = self.chat.last
            first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), 0)
            self.prompt, self.completion = list(messages[:first]), list(messages[first:])
        self._add_outcome(result.reward, result.metrics)
        if not messages:
            return EpisodeEnd.EMPTY_COMPLETION, "the program ended without having asked for a reply"
        is_cut_off = self.chat.turns[-1].finish_reason == "length"
        return self._refused() or ((EpisodeEnd.TRUNCATED_LENGTH if is_cut_off else EpisodeEnd.COMPLETED), "")

    def _refused(self) -> tuple[EpisodeEnd, str] | None:
        """How the episode ends if a limit refused the last reply that was asked for."""
        end = self.chat.end
        return None if end is None else (end, self.chat.end_detail if end.is_error else "")


def shorter(message: Message, limit: int) -> Message:
    """The message with each of its texts `shortened`; itself if none is longer."""
    content = shortened(message["content"], limit)
    if "parts" not in message:
        return message if content is message["content"] else Message(**{**message, "content": content})
    parts: list[Part] = [
        TextPart(type="text", text=shortened(part["text"], limit)) if part["type"] == "text" else part
        for part in message["parts"]
    ]
    is_short = parts == message["parts"]
    return message if is_short else Message(**{**message, "content": content, "parts": parts})


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and its end with a note between them, `limit` characters and the note long.

    Example: shortened("abcdefgh", 4) == "ab\\n[... 4 characters left out ...]\\ngh"
    """
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    note = f"\n[... {len(text) - limit} characters left out ...]\n"
    return text[:head] + note + text[len(text) - tail :]


async def _call(name: str, method: Callable[..., Awaitable[Value]], *arguments: object) -> Value:
    try:
        return await method(*arguments)
    except (EnvironmentFailure, NoReply):
        raise
    except Exception as error:
        raise EnvironmentFailure(_describe(name, error)) from error


async def unless(
    stopped: Coroutine[Any, Any, object], awaited: Coroutine[Any, Any, Value], failure: Callable[[], Exception]
) -> Value:
    """What `awaited` returns. If `stopped` returns first, `awaited` is cancelled and `failure` raised."""
    stopping, working = asyncio.create_task(stopped), asyncio.create_task(awaited)
    try:
        await asyncio.wait((stopping, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise failure()
        return working.result()
    finally:
        for task in (stopping, working):
            task.cancel()
        await asyncio.wait((stopping, working))


def _describe(call: str, error: Exception) -> str:
    return f"{call}: {type(error).__name__}: {error}"
