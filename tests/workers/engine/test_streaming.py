"""The engine over vLLM's own output processor, with a made-up core: updates, drains and cancels at any token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from engines import whole_reply

from rlflow.config import Config
from rlflow.rollout.requests import PART_TOKENS, GenerateRequest, part_seed
from rlflow.workers.engine.engine import RolloutEngine

pytestmark = pytest.mark.slow  # importing vLLM takes most of the time


class Core:
    """Shaped like AsyncLLM. Each step gives every request a token, unless sampling is paused."""

    def __init__(self) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        self.output_processor = OutputProcessor(None, log_stats=False, stream_interval=PART_TOKENS)
        self.version = 1
        self.asked: list[Any] = []
        self._is_paused = False
        self._left: dict[str, int] = {}

    async def generate(self, prompt: Any, sampling: Any, name: str, lora_request: None) -> AsyncIterator[Any]:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        await asyncio.sleep(0)
        inner = f"{name}-inner"
        outputs = RequestOutputCollector(sampling.output_kind, inner)
        request = EngineCoreRequest(
            request_id=inner,
            external_req_id=name,
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.output_processor.add_request(request, None, None, 0, outputs)
        self.asked.append(sampling)
        self._left[inner] = sampling.max_tokens
        is_finished = False
        try:
            while not is_finished:
                output = outputs.get_nowait() or await outputs.get()
                is_finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            await self.abort([inner], internal=True)
            raise

    async def abort(self, names: str | Sequence[str], internal: bool = False) -> None:
        for inner in self.output_processor.abort_requests([names] if isinstance(names, str) else names, internal):
            self._left.pop(inner, None)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        while mode == "wait" and self._left:
            await asyncio.sleep(0)
        self._is_paused = True
        for _ in range(10):  # in which vLLM loads weights
            await asyncio.sleep(0)

    async def resume_generation(self) -> None:
        self._is_paused = False

    @property
    def num_requests(self) -> int:
        return len(self._left) + len(self.output_processor.request_states)

    async def run(self) -> None:
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists

        logprobs = LogprobsLists(np.array([[5]]), np.array([[-0.5]], dtype=np.float32), np.array([1]), None)
        while True:
            outputs = []
            for inner in [] if self._is_paused else list(self._left):
                self._left[inner] -= 1
                ended = FinishReason.LENGTH if self._left[inner] == 0 else None
                outputs.append(EngineCoreOutput(inner, [5], new_logprobs=logprobs, finish_reason=ended))
                if ended:
                    del self._left[inner]
            self.output_processor.process_outputs(outputs, 0.0, None, str(self.version))
            await asyncio.sleep(0)


def engine_over(core: Core) -> RolloutEngine:
    config = Config()
    config.model.max_length = 4000
    engine = RolloutEngine(config, "no model", index=0, threads=1)
    engine._llm, engine._version = core, 1  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def request(max_new_tokens: int, seed: int | None) -> GenerateRequest:
    return GenerateRequest(prompt_ids=[7] * 20, seed=seed, max_new_tokens=max_new_tokens, prefix_key=None)


async def update(engine: RolloutEngine, core: Core, version: int) -> None:
    await engine._pause(keeps=False)
    core.version = engine._version = version
    engine._replies.mark(version, engine._num_sampled())
    await core.resume_generation()


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_updates_drains_and_cancels_at_any_token() -> None:
    core = Core()
    engine = engine_over(core)
    running = asyncio.create_task(core.run())
    rng = random.Random(5)

    reply = await whole_reply(engine, request(600, seed=3))
    assert (len(reply.ids), reply.finish_reason) == (600, "length")
    # A seeded reply is a request for each part, and no other is.
    assert [(one.max_tokens, one.seed) for one in core.asked] == [
        (256, 3), (256, part_seed(3, 256)), (88, part_seed(3, 512)),
    ]  # fmt: skip
    await whole_reply(engine, request(600, seed=None))
    assert [one.max_tokens for one in core.asked[3:]] == [600]

    # Wherever an update falls, the engine asserts that its tags are those of vLLM's own spans.
    lengths = [rng.randrange(1, 1500) for _ in range(60)]
    replies = [asyncio.create_task(whole_reply(engine, request(each, rng.choice([None, 4])))) for each in lengths]
    version = 1
    while not all(each.done() for each in replies):
        await steps(rng.randrange(1, 60))
        version += 1
        await update(engine, core, version)
    assert version > 10
    for length, task in zip(lengths, replies, strict=True):
        reply = task.result()
        assert len(reply.ids) == len(reply.logprobs) == len(reply.versions) == len(reply.cache_versions) == length
        assert reply.versions == sorted(reply.versions)

    engine._config.rollout.drain = True
    parts = [asyncio.create_task(engine.generate(request(3000, seed))) for seed in (None, 4)]
    await steps(40)
    await update(engine, core, version + 1)
    for part in await asyncio.gather(*parts):
        assert (part.finish_reason, set(part.versions)) == ("abort", {version})
        assert 256 <= len(part.ids) <= 257

    cancelled = asyncio.create_task(engine.generate(request(3000, None)))
    await steps(40)
    assert core.num_requests == 2
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (core.num_requests, list(engine._replies), (await engine.stats()).running) == (0, [], 0)
    running.cancel()
