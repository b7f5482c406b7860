"""The experts that an engine chose, on their way from its requests into samples, files and rows.

The engines here say of each token that it went to the experts [its position, 100 + the number of the request].
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from checkpoints import load_episodes
from letters import LetterRenderer, ids_of, limits

from rlflow.batching.pack import pack
from rlflow.config import Config, Order
from rlflow.envs.base import Environment, SingleTurn
from rlflow.groups.grading import Grader
from rlflow.groups.ready import ReadyQueue
from rlflow.rollout.chat import Chat
from rlflow.rollout.client import RemoteCalls
from rlflow.rollout.payloads import payload_bytes, save_payloads
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.rollout.samples import chains_of, sample_of, turns_before
from rlflow.types import (
    EpisodePayload,
    ExpertArray,
    GroupOrder,
    Message,
    PlayedGroup,
    Sample,
    Task,
    TrainSample,
    Transcript,
    Verdict,
)
from rlflow.workers.runner import EpisodeRunner

NONE = [255, 255]


def rows(first: int, last: int, number: int) -> list[list[int]]:
    """Of the tokens from `first` up to `last`, as request `number` says them."""
    return [[position, 100 + number] for position in range(first, last)]


def routes(first: int, last: int, number: int) -> ExpertArray:
    return np.array(rows(first, last, number), np.uint8).reshape(-1, 1, 2)


@dataclass
class RoutingEngine:
    """Answers with the scripted replies in turn, and says the experts that are not known yet."""

    replies: list[str]
    requests: list[GenerateRequest] = field(default_factory=list)

    async def __call__(self, request: GenerateRequest, /) -> Completion:
        number = len(self.requests)
        self.requests.append(request)
        ids = ids_of(self.replies[number % len(self.replies)])
        last = len(request.prompt_ids) + len(ids) - 1
        return Completion(
            ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[0] * len(ids),
            cache_versions=[0] * len(ids),
            experts=routes(request.num_routed, last, number),
            finish_reason="stop",
        )

    @property
    def generate(self) -> Remote:
        return Remote(self.__call__)


@dataclass
class Remote:
    """Shaped like an actor handle's method."""

    remote: Callable[[GenerateRequest], Awaitable[Completion]]


def said(*texts: str) -> list[Message]:
    """Users and the policy in turn."""
    return [Message(role="assistant" if i % 2 else "user", content=text) for i, text in enumerate(texts)]


def samples_of(chat: Chat) -> list[Sample]:
    return [sample_of(chain, turns_before(chat.turns, chain[0])) for chain in chains_of(chat.turns)]


def listed(sample: Sample) -> list[list[int]]:
    assert sample.experts is not None
    assert sample.experts.shape == (sample.num_tokens, 1, 2)
    return sample.experts[:, 0].tolist()


async def test_three_turns_are_joined() -> None:
    engine = RoutingEngine(["c.", "e.", "g."])
    chat = Chat(engine, LetterRenderer(), limits())
    await chat.reply(said("x"))
    await chat.reply(said("x", "c", "d"))
    await chat.reply(said("x", "c", "d", "e", "f"))
    (sample,) = samples_of(chat)
    assert sample.completion_ids.tolist() == ids_of("c." + "d.>" + "e." + "f.>" + "g.")
    # The last token of a reply is read with the next turn, whose request says its experts.
    assert [request.num_routed for request in engine.requests] == [0, 4, 9]
    assert listed(sample) == [*rows(0, 4, 0), *rows(4, 9, 1), *rows(9, 14, 2), NONE]


async def test_a_fork_has_the_routes_of_what_it_continues() -> None:
    engine = RoutingEngine(["c.", "e.", "h.", "k."])
    chat = Chat(engine, LetterRenderer(), limits())
    await chat.reply(said("x"))
    await chat.reply(said("x", "c", "d"))
    await chat.reply(said("x", "c", "d"))
    await chat.reply(said("x", "c", "d", "h", "i"))
    first, second = samples_of(chat)
    assert listed(first) == [*rows(0, 4, 0), *rows(4, 9, 1), NONE]
    assert second.prompt_ids.tolist() == ids_of("x.>c.d.>")
    assert [request.num_routed for request in engine.requests] == [0, 4, 4, 9]
    assert listed(second) == [*rows(0, 4, 0), *rows(4, 9, 2), *rows(9, 14, 3), NONE]


async def test_an_engine_that_says_nothing_leaves_no_routes() -> None:
    async def silent(request: GenerateRequest) -> Completion:
        return replace(await RoutingEngine(["c."])(request), experts=None)

    chat = Chat(silent, LetterRenderer(), limits())
    await chat.reply(said("x"))
    (sample,) = samples_of(chat)
    assert sample.experts is None


def sample(prompt: list[int], completion: list[int], experts: ExpertArray | None) -> Sample:
    size = len(completion)
    return Sample(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        loss_mask=np.ones(size, np.bool_),
        logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        cache_versions=np.zeros(size, np.int32),
        experts=experts,
    )


def with_end(experts: ExpertArray) -> ExpertArray:
    return np.concatenate([experts, np.full((1, 1, 2), 255, np.uint8)])


def test_a_row_has_the_routes_of_its_segments() -> None:
    group = [
        sample([5, 6], [7, 8], None),
        sample([5, 6], [7, 8], with_end(routes(0, 3, 1))),
        sample([5, 6], [7, 8], with_end(routes(0, 3, 2))),  # the same tokens by another way
        sample([5, 6], [9, 4, 3], with_end(routes(0, 4, 3))),
        sample([5, 6], [7, 8], with_end(routes(0, 3, 1))),  # shared with the second
    ]
    packed = pack([[TrainSample(sample=one, advantage=1.0) for one in group]])
    assert packed.input_ids.tolist() == [5, 6, 7, 5, 6, 7, 7, 9, 4]
    assert packed.experts is not None
    assert packed.experts[:, 0].tolist() == [
        *[NONE] * 3,  # a sample without routes shares nothing with others
        *rows(0, 2, 1),  # the prompt of the others, of the first of them
        *rows(2, 3, 1),
        *rows(2, 3, 2),
        *rows(2, 4, 3),
    ]
    assert packed.loss_positions.tolist() == [1, 2, 4, 5, 4, 6, 4, 7, 8, 4, 5]
    assert pack([[TrainSample(sample=group[0], advantage=1.0)]]).experts is None


def test_routes_survive_the_disk(tmp_path: Path) -> None:
    wide = np.array([[[300, 2]], [[65535, 65535]]], np.uint16)
    for routed in (with_end(routes(0, 1, 0)), wide):
        samples = [sample([5], [6], routed), sample([5], [6, 7], None)]
        save_payloads(tmp_path / "group", [EpisodePayload(samples=samples, messages=[])])
        ((first, second),) = (payload.samples for payload in load_episodes(tmp_path / "group"))
        assert first.experts is not None and second.experts is None
        assert first.experts.dtype == routed.dtype
        assert first.experts.tolist() == routed.tolist()


def test_a_token_of_a_large_mixture_takes_a_byte_for_each_expert() -> None:
    experts = np.zeros((10, 48, 8), np.uint8)  # Qwen3-30B-A3B
    dense, mixture = (EpisodePayload(samples=[sample([1, 2], [3] * 8, each)], messages=[]) for each in (None, experts))
    print(f"bytes a token: {payload_bytes(dense) / 10} dense, {payload_bytes(mixture) / 10} with routes")
    assert payload_bytes(mixture) - payload_bytes(dense) == 10 * 48 * 8


@dataclass
class World:
    """Opens what `play` needs, and scores it with 1."""

    def lease(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def open(self, seed: int, task: Task) -> Environment:
        return SingleTurn()

    async def score(self, transcript: Transcript) -> Verdict:
        return Verdict(reward=1.0)

    async def score_group(self, transcripts: list[Transcript]) -> list[Verdict]:
        raise AssertionError("no verdict awaits the group")


async def test_the_ready_queue_counts_the_bytes_of_routes() -> None:
    world = World()
    runner = EpisodeRunner(
        Config(),
        "",
        world,
        world,  # pyright: ignore[reportArgumentType]
        RoutingEngine(["c."]),  # pyright: ignore[reportArgumentType]
        renderer=LetterRenderer(),
        calls=RemoteCalls(cancel=lambda call: None, is_lost=lambda error: False),
    )
    task = Task(id="t/0", prompt=(Message(role="user", content="x"),))
    played, *payloads = await runner.play(GroupOrder(group_id=1, task=task, num_episodes=2, seed=7))
    assert isinstance(played, PlayedGroup)
    each = 3 * 4 + 2 * (4 + 1 + 4 + 4 + 4) + 5 * 2  # prompt, completion, two experts for each of five tokens
    assert played.num_bytes == 2 * each
    ready = Grader(Config()).ready(task, replace(played, payloads=list(payloads)))
    assert ready is not None
    queue = ReadyQueue(order=Order.oldest_first, max_versions=0, groups_per_step=1)
    queue.put(ready)
    assert queue.num_bytes == 2 * each
