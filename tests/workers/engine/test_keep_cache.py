"""rollout.keep_cache with a real vLLM: what each token after an update was sampled with, and what is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engines import PROMPT, differences, request, sample, tiny_config, tiny_llama, until_sampling
from transformers import LlamaForCausalLM

from rlflow.rollout.requests import Completion
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine

BLOCK_TOKENS = 32


@dataclass(kw_only=True)
class Counts:
    """What vLLM's scheduler reports: one of the `stat_loggers` of its AsyncLLM."""

    hits: int = 0
    """Prompt tokens of new requests that were found in the cache."""
    recomputed: int = 0
    """Tokens of preempted requests that were not found in it."""

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None and (found := scheduler_stats.prefix_cache_stats) is not None:
            self.hits += found.hits
            self.recomputed += found.preempted_queries - found.preempted_hits


@dataclass(kw_only=True)
class Bench:
    runner: asyncio.Runner
    engine: RolloutEngine
    arena: Arena
    old: LlamaForCausalLM
    new: LlamaForCausalLM
    counts: Counts = field(default_factory=Counts)
    version: int = 0

    def load(self, model: LlamaForCausalLM) -> int:
        """The version that the model is loaded as: one more than before."""
        self.runner.run(self._load(model))
        return self.version

    def sample(self, num: int, max_new_tokens: int = 32) -> list[Completion]:
        return self.runner.run(
            sample(self.engine, [request(seed, max_new_tokens=max_new_tokens) for seed in range(num)])
        )

    def sample_during_update(self, num: int, model: LlamaForCausalLM) -> list[Completion]:
        async def update_midway() -> list[Completion]:
            requests = [request(seed, max_new_tokens=140) for seed in range(num)]
            running = asyncio.create_task(sample(self.engine, requests))
            await until_sampling(self.engine)
            await self._load(model)
            return await running

        return self.runner.run(update_midway())

    async def _load(self, model: LlamaForCausalLM) -> None:
        self.version += 1
        await self.engine.load_weights(self.arena.stage(self.version, model.named_parameters()))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    old, new = tiny_llama(seed=1), tiny_llama(seed=2)
    path = tmp_path_factory.mktemp("tiny")
    old.save_pretrained(path)
    config = tiny_config()
    config.staleness.max_versions = 4
    engine = RolloutEngine(config, str(path), index=0, threads=1)
    arena = Arena([(name, value.dtype, tuple(value.shape)) for name, value in old.named_parameters()])
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        bench = Bench(runner=runner, engine=engine, arena=arena, old=old, new=new)
        manager: Any = engine._engine.logger_manager
        manager.stat_loggers.append(bench.counts)
        yield bench
        runner.run(engine.shutdown())
    arena.close()


def differences_on_older_cache(
    old: LlamaForCausalLM, new: LlamaForCausalLM, reply: Completion, at: int
) -> torch.Tensor:
    """|engine's log-probability - transformers'| of the tokens from `at` on, which the new weights sampled.

    The old weights have computed the keys and values of all that stands before the last token of their own.
    """
    ids = torch.tensor([PROMPT + reply.ids])
    start = len(PROMPT) + at - 1
    with torch.no_grad():
        cache = old(ids[:, :start], use_cache=True).past_key_values
        logits = new(ids[:, start:-1], past_key_values=cache).logits[0]
    expected = logits.log_softmax(-1).gather(-1, ids[0, start + 1 :, None])[:, 0]
    return (expected - torch.tensor(reply.logprobs[at:])).abs()


@pytest.mark.slow
def test_a_reply_under_way_goes_on_with_the_cache_of_the_old_weights(bench: Bench) -> None:
    before = bench.load(bench.old)
    bench.counts.recomputed = 0
    replies = bench.sample_during_update(16, bench.new)
    assert bench.counts.recomputed == 0
    both = [reply for reply in replies if set(reply.versions) == {before, before + 1}]
    assert both, "the update came too late to meet a running request"
    for reply in both:
        first_new = reply.versions.index(before + 1)
        assert reply.cache_versions == [before] * len(reply.ids)
        assert differences(bench.old, reply)[:first_new].mean() <= 1e-4
        assert differences_on_older_cache(bench.old, bench.new, reply, first_new).mean() <= 1e-4
        assert differences(bench.new, reply)[first_new:].max() > 0.01, "the cache does not matter to this model"


@pytest.mark.slow
def test_a_new_request_never_finds_what_older_weights_computed(bench: Bench) -> None:
    bench.load(bench.old)
    bench.sample(2)
    version = bench.load(bench.new)
    bench.counts.hits = 0
    replies = bench.sample(4)
    assert bench.counts.hits == 3 * BLOCK_TOKENS, "requests of one version share the blocks of their prompt"
    assert bench.runner.run(bench.engine._engine.reset_prefix_cache())
    for reply, fresh in zip(replies, bench.sample(4), strict=True):
        assert reply.cache_versions == reply.versions == [version] * len(reply.ids)
        assert reply.ids == fresh.ids
        assert reply.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
        assert differences(bench.new, reply).mean() <= 1e-4


@pytest.mark.slow
def test_a_request_that_waited_for_the_update_has_a_cache_of_the_new_version(bench: Bench) -> None:
    """64 run at a time; the others come in after the update."""
    before = bench.load(bench.old)
    replies = bench.sample_during_update(80, bench.new)
    waited = [reply for reply in replies if before not in reply.cache_versions]
    assert waited
    for reply in waited:
        assert reply.cache_versions == reply.versions == [before + 1] * len(reply.ids)
        assert differences(bench.new, reply).mean() <= 1e-4


@pytest.mark.slow
def test_without_it_the_cache_is_computed_again(bench: Bench) -> None:
    before = bench.load(bench.old)
    bench.counts.recomputed = 0
    bench.engine._config.rollout.keep_cache = False
    try:
        replies = bench.sample_during_update(16, bench.new)
    finally:
        bench.engine._config.rollout.keep_cache = None
    both = [reply for reply in replies if set(reply.versions) == {before, before + 1}]
    assert bench.counts.recomputed > len(both) * (len(PROMPT) - BLOCK_TOKENS)
    for reply in both:
        assert reply.cache_versions == reply.versions
        assert differences(bench.new, reply)[reply.versions.index(before + 1) :].mean() <= 1e-4
