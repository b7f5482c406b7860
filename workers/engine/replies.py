"""The replies that an engine has under way: their tokens are collected as vLLM delivers them, and fetched in parts.

    vLLM -> Reply.add -> take_part -> Completion        a new version of the weights -> mark

A reply keeps its place in vLLM, with its cache, however many parts it has.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlflow.rollout.requests import PART_TOKENS, Completion, FinishReason, GenerateRequest, part_seed
from rlflow.types import ExpertArray

ABANDONED_S = 60.0
"""A reply is given up when nobody has asked for its next part for this long. Who lives asks again at once."""


class Reply:
    """One reply under way."""

    def __init__(self, request: GenerateRequest, max_length: int) -> None:
        """The reply ends when prompt and reply together have `max_length` tokens, if not before."""
        self.request = request
        self._max_tokens = min(request.max_new_tokens, max_length - len(request.prompt_ids))
        self.name = uuid.uuid4().hex
        self.ids: list[int] = []  # [num_tokens], all that were delivered
        self.logprobs: list[float] = []  # [num_tokens]
        self.versions: list[int] = []  # [num_tokens]
        self.cache_versions: list[int] = []  # [num_tokens]
        self.support: list[list[int]] = []  # [num_tokens], or nothing if the engine does not report it
        self.num_routed = request.num_routed
        """Tokens of prompt and reply whose experts are known."""
        self._routes: list[ExpertArray] = []
        """Those that no part has brought yet."""
        self.steps_before: tuple[int, int] = (0, 0)
        """Steps and full steps of the engine before the part that is under way."""
        self.vllm_name = ""
        """The vLLM request that samples now."""
        self._first = 0
        """Tokens that were delivered before that request."""
        self._starts: list[tuple[int, int | None]] = []
        """The first token of that request under each version, and the version."""
        self.cache_version: int | None = None
        """Nothing older computes the cache of that request; None if the cache is never kept."""
        self._num_taken = 0
        self._sampling: asyncio.Task[FinishReason]
        self._changed = asyncio.Event()

    def start(self, sampling: asyncio.Task[FinishReason]) -> None:
        """`sampling` adds the tokens, and ends with the reason why no more come."""
        self._sampling = sampling
        sampling.add_done_callback(lambda _: self._changed.set())

    @property
    def num_left(self) -> int:
        """Most tokens that may still come."""
        return self._max_tokens - len(self.ids)

    @property
    def num_left_of_part(self) -> int:
        """Most tokens that may still come of the part that is sampled now."""
        return min(self.num_left, PART_TOKENS - (self.request.num_sampled + len(self.ids)) % PART_TOKENS)

    @property
    def seed(self) -> int | None:
        """The seed of that part: a seeded reply is one vLLM request a part, and each finds the cache of the last."""
        request = self.request
        return None if request.seed is None else part_seed(request.seed, request.num_sampled + len(self.ids))

    def begin(self, version: int | None, cache_version: int | None) -> None:
        """A new vLLM request goes on with the reply; `version` None if there are no complete weights now.

        `cache_version` is the oldest version of its cache, None if the cache is never kept.
        """
        self.vllm_name, self._first, self._starts = uuid.uuid4().hex, len(self.ids), [(0, version)]
        self.cache_version = cache_version

    def mark(self, version: int, num_tokens: int) -> None:
        """What vLLM samples after the first `num_tokens` tokens of its request, it samples under `version`."""
        self._starts.append((num_tokens, version))

    def add(self, ids: Sequence[int], logprobs: Sequence[float], support: Sequence[list[int]] = ()) -> None:
        """vLLM delivers the next tokens; `support` are the tokens that each was chosen among."""
        assert len(ids) == len(logprobs), "vLLM must give the log-probability of every token"
        assert len(support) in (0, len(ids)), "vLLM must say of every token what it was chosen among"
        first = len(self.ids) - self._first
        self.ids += ids
        self.logprobs += logprobs
        self.support += support
        versions, oldest = versions_between(self._starts, first, first + len(ids)), self.cache_version
        self.versions += versions
        self.cache_versions += versions if oldest is None else [min(oldest, version) for version in versions]
        self._changed.set()

    def add_routes(self, experts: ExpertArray) -> None:
        """vLLM says at the end of a request which experts the next tokens of prompt and reply went to."""
        self._routes.append(experts)
        self.num_routed += len(experts)

    @property
    def num_unrouted(self) -> int:
        """Tokens that the model has read, which are all but the last, and whose experts are not known."""
        return len(self.request.prompt_ids) + len(self.ids) - 1 - self.num_routed

    @property
    def versions_of_request(self) -> list[int]:
        """The version of each token that the vLLM request has delivered."""
        return self.versions[self._first :]

    async def take_part(self) -> Completion:
        """Wait for the next part: PART_TOKENS tokens or a multiple, or all that are left. Raises what sampling raises.

        Parts begin at a multiple of PART_TOKENS, so that a seeded reply that goes on at another engine repeats.
        """
        while not self._sampling.done() and self._num_whole == self._num_taken:
            self._changed.clear()
            await self._changed.wait()
        is_over = self._sampling.done()
        finish_reason: FinishReason = self._sampling.result() if is_over else "part"
        first, self._num_taken = self._num_taken, len(self.ids) if is_over else self._num_whole
        routes, self._routes = self._routes, []
        return Completion(
            ids=self.ids[first : self._num_taken],
            logprobs=self.logprobs[first : self._num_taken],
            versions=self.versions[first : self._num_taken],
            cache_versions=self.cache_versions[first : self._num_taken],
            support=self.support[first : self._num_taken] or None,
            experts=np.concatenate(routes) if routes else None,
            finish_reason=finish_reason,
            reply="" if is_over else self.name,
        )

    @property
    def _num_whole(self) -> int:
        """Tokens in whole parts, by the reply's own count."""
        before = self.request.num_sampled
        return max(0, (before + len(self.ids)) // PART_TOKENS * PART_TOKENS - before)

    async def stop(self) -> None:
        """Abort what still samples; safe when nothing does."""
        self._sampling.cancel()
        await asyncio.wait([self._sampling])
        if not self._sampling.cancelled():
            self._sampling.exception()  # asyncio would warn of a failure that nobody has seen


class Replies:
    """The replies under way of one engine."""

    def __init__(self) -> None:
        self._open: dict[str, Reply] = {}
        self._given_up: set[asyncio.Task[None]] = set()
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        """When each reply is given up whose next part nobody waits for now."""

    def __iter__(self) -> Iterator[Reply]:
        return iter(self._open.values())

    def add(self, reply: Reply) -> None:
        self._open[reply.name] = reply

    def take(self, name: str) -> Reply | None:
        """The reply whose next part is asked for; None if it was given up."""
        if name in self._deadlines:
            self._deadlines.pop(name).cancel()
        return self._open.get(name)

    def leave(self, reply: Reply) -> None:
        """A part was handed out, and the next one has not been asked for."""
        loop = asyncio.get_running_loop()
        self._deadlines[reply.name] = loop.call_later(ABANDONED_S, self._give_up, reply)

    def remove(self, reply: Reply) -> None:
        self._open.pop(reply.name, None)

    def mark(self, version: int, num_tokens: Mapping[str, int]) -> None:
        """From now on tokens are sampled under `version`; `num_tokens` is how many each vLLM request has so far.

        A request that vLLM does not know has not reached it yet, or is over and has delivered all.
        """
        for reply in self:
            reply.mark(version, num_tokens.get(reply.vllm_name, len(reply.versions_of_request)))

    def _give_up(self, reply: Reply) -> None:
        del self._deadlines[reply.name]
        self.remove(reply)
        stopping = asyncio.create_task(reply.stop())
        self._given_up.add(stopping)
        stopping.add_done_callback(self._given_up.discard)

    async def stop(self) -> None:
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._deadlines.clear()
        replies = list(self)
        self._open.clear()
        for reply in replies:
            await reply.stop()


def versions_between(starts: Sequence[tuple[int, int | None]], first: int, last: int) -> list[int]:
    """The versions of the tokens from `first` up to `last` of a request whose versions begin at `starts`.

    Example: versions_between([(0, 3), (5, 4)], 4, 7) == [3, 4, 4]
    """
    ends = [*(start for start, _ in starts[1:]), last]
    versions: list[int] = []
    for (start, version), end in zip(starts, ends, strict=True):
        count = min(end, last) - max(start, first)
        if count > 0:
            assert version is not None, "nothing is sampled without complete weights"
            versions += [version] * count
    return versions
