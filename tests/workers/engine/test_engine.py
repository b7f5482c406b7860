"""The rollout engine on a tiny random model: parity with transformers, updates in flight, failed updates."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    PROMPT,
    differences,
    request,
    sample,
    tiny_config,
    tiny_llama,
    tiny_mixture,
    until_sampling,
    whole_reply,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlflow.config import Placement, Send
from rlflow.errors import ConfigError, EngineLost, RunError, WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.rollout.requests import Completion
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.engine.setup import cache_shape, check_engine, stop_token_ids

SMALL_BUCKET = 60_000
"""Bytes; cuts the tiny models inside a layer, so that q, k and v come in different buckets."""


def arena_for(model: PreTrainedModel) -> Arena:
    specs = [(name, value.dtype, tuple(value.shape)) for name, value in model.named_parameters()]
    return Arena(specs, bucket_bytes=SMALL_BUCKET)


@dataclass(kw_only=True)
class Bench:
    """An engine with the loop it lives in, and the two policies that it is given."""

    runner: asyncio.Runner
    engine: RolloutEngine
    arena: Arena
    old: LlamaForCausalLM
    new: LlamaForCausalLM

    def stage(self, version: int, model: PreTrainedModel) -> StagedWeights:
        return self.arena.stage(version, model.named_parameters())

    def load(self, version: int, model: PreTrainedModel) -> None:
        pause_s = self.runner.run(self.engine.load_weights(self.stage(version, model)))
        assert pause_s > 0


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    old, new = tiny_llama(seed=1), tiny_llama(seed=2)
    path = tmp_path_factory.mktemp("tiny")
    old.save_pretrained(path)
    engine = RolloutEngine(tiny_config(), str(path), index=0, threads=1)
    arena = arena_for(old)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield Bench(runner=runner, engine=engine, arena=arena, old=old, new=new)
        runner.run(engine.shutdown())
    arena.close()


@pytest.mark.slow
def test_more_prompts_than_one_step_takes(bench: Bench) -> None:
    """A prompt cut in two would kill vLLM on a CPU: it cannot take back what a seeded request has drawn too early."""
    bench.load(1, bench.old)
    prompts = [[3 + index, *(3 + (index * place) % 100 for place in range(1, 150))] for index in range(60)]
    completions = bench.runner.run(sample(bench.engine, [request(7, prompt, 4) for prompt in prompts]))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert differences(bench.old, completion, prompt).max() < 1e-3


@pytest.mark.slow
def test_sampled_logprobs_equal_transformers(bench: Bench) -> None:
    bench.load(1, bench.old)
    prompts = [PROMPT, [5, 6, 7], [9]]
    completions = bench.runner.run(sample(bench.engine, [request(i, prompt) for i, prompt in enumerate(prompts)]))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert differences(bench.old, completion, prompt).mean() <= 1e-4
        assert completion.versions == [1] * len(completion.ids)
        assert len(completion.ids) == 32 or completion.ids[-1] == 2
        assert completion.finish_reason == ("stop" if completion.ids[-1] == 2 else "length")


@pytest.mark.slow
def test_effective_weights_equal_what_was_staged(bench: Bench) -> None:
    bench.load(1, bench.old)
    report = bench.runner.run(bench.engine.compare_weights(bench.stage(1, bench.old)))
    assert report == {"num_equal": len(bench.arena.slots), "different": [], "unverified": []}
    report = bench.runner.run(bench.engine.compare_weights(bench.stage(2, bench.new)))
    # Norms start at one in both policies.
    assert report["different"] == [slot.name for slot in bench.arena.slots if "norm" not in slot.name]
    assert report["unverified"] == []


@pytest.mark.slow
def test_a_stop_token_ends_the_reply(bench: Bench) -> None:
    with torch.no_grad():
        certain = tiny_llama(seed=3)
        for name, value in certain.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value.zero_()
        # Without layers the logits of a token are its embedding's products: let the stop token win after token 40.
        certain.model.embed_tokens.weight[2] = 20 * certain.model.embed_tokens.weight[40]
    bench.load(1, certain)
    (completion,) = bench.runner.run(sample(bench.engine, [request(0, [40])]))
    assert (completion.ids, completion.finish_reason) == ([2], "stop")


@pytest.mark.slow
def test_update_in_flight_loses_no_request_and_tags_every_token(bench: Bench) -> None:
    bench.load(1, bench.old)
    staged = bench.stage(2, bench.new)

    async def update_midway() -> list[Completion]:
        running = asyncio.create_task(sample(bench.engine, [request(i, max_new_tokens=140) for i in range(16)]))
        await until_sampling(bench.engine)
        await bench.engine.load_weights(staged)
        return await running

    completions = bench.runner.run(update_midway())
    assert len(completions) == 16
    both = [completion for completion in completions if set(completion.versions) == {1, 2}]
    assert both, "the update came too late to meet a running request"
    for completion in both:
        assert completion.versions == sorted(completion.versions)
        first_new = completion.versions.index(2)
        assert differences(bench.old, completion)[:first_new].mean() <= 1e-4
        assert differences(bench.new, completion)[first_new:].mean() <= 1e-4
    report = bench.runner.run(bench.engine.compare_weights(staged))
    assert report["different"] == []


@pytest.mark.slow
def test_a_crowd_outlives_an_update(bench: Bench) -> None:
    """64 replies under way, as many as the engine takes at a time, and 16 that wait."""
    bench.load(1, bench.old)
    staged = bench.stage(2, bench.new)

    async def update_midway() -> tuple[float, list[Completion]]:
        running = asyncio.create_task(sample(bench.engine, [request(i, max_new_tokens=140) for i in range(80)]))
        await until_sampling(bench.engine)
        return await bench.engine.load_weights(staged), await running

    pause_s, completions = bench.runner.run(update_midway())
    both = [completion for completion in completions if set(completion.versions) == {1, 2}]
    print(f"pause of {1000 * pause_s:.0f} ms with 64 requests running; {len(both)} of 80 replies met the update")
    assert len(completions) == 80
    assert both
    for completion in completions:
        assert completion.finish_reason == ("stop" if completion.ids[-1] == 2 else "length")
        assert len(completion.ids) == len(completion.versions) == len(completion.logprobs)
        assert completion.versions == sorted(completion.versions)


@pytest.mark.slow
def test_a_drained_engine_takes_no_version_in_the_middle_of_a_reply(bench: Bench) -> None:
    bench.load(1, bench.old)
    staged = bench.stage(2, bench.new)

    async def update_midway() -> list[Completion]:
        running = asyncio.create_task(sample(bench.engine, [request(i, max_new_tokens=100) for i in range(240)]))
        await until_sampling(bench.engine)
        await bench.engine.load_weights(staged)
        return await running

    bench.engine._config.rollout.drain = True
    try:
        completions = bench.runner.run(update_midway())
    finally:
        bench.engine._config.rollout.drain = False
    assert {version for completion in completions for version in completion.versions} == {1, 2}
    assert all(len(set(completion.versions)) == 1 for completion in completions)


@pytest.mark.slow
def test_a_sleeping_engine_goes_on_with_the_next_version(bench: Bench) -> None:
    bench.load(1, bench.old)
    staged = bench.stage(2, bench.new)

    async def sleep_midway() -> tuple[bool, list[Completion]]:
        running = asyncio.create_task(sample(bench.engine, [request(i, max_new_tokens=140) for i in range(8)]))
        await until_sampling(bench.engine)
        await bench.engine.sleep()
        late = asyncio.create_task(bench.engine.generate(request(0)))
        slept = await bench.engine._engine.is_paused() and not late.done()
        await bench.engine.load_weights(staged)
        return slept, [*await running, await late]

    slept, completions = bench.runner.run(sleep_midway())
    assert slept
    assert any(set(completion.versions) == {1, 2} for completion in completions)
    assert set(completions[-1].versions) == {2}


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's memory is given back")
def test_a_sleeping_engine_gives_its_memory_back(tmp_path: Path) -> None:
    old, new = tiny_llama(seed=1), tiny_llama(seed=2)
    old.save_pretrained(tmp_path)
    arena = arena_for(old)
    config = tiny_config()
    config.rollout.kv_cache_gb = 1.0
    config.cluster.placement = Placement.colocated

    async def scenario() -> None:
        engine = RolloutEngine(config, str(tmp_path), index=0, threads=1)
        await engine.start()
        try:
            await engine.load_weights(arena.stage(1, old.named_parameters()))
            running = asyncio.create_task(sample(engine, [request(i, max_new_tokens=140) for i in range(8)]))
            await until_sampling(engine)
            free_awake, _ = torch.cuda.mem_get_info()
            await engine.sleep()
            free_asleep, _ = torch.cuda.mem_get_info()
            await engine.load_weights(arena.stage(2, new.named_parameters()))
            free_again, _ = torch.cuda.mem_get_info()
            completions = await running
        finally:
            await engine.shutdown()
        print(f"asleep, an engine gave back {(free_asleep - free_awake) / 2**30:.2f} GiB")
        assert free_asleep - free_awake > 0.9 * 2**30
        assert free_asleep - free_again > 0.9 * 2**30
        assert any(set(completion.versions) == {1, 2} for completion in completions)
        for completion in completions:
            first_new = completion.versions.index(2) if 2 in completion.versions else len(completion.ids)
            assert differences(new, completion)[first_new:].sum() <= 1e-2 * max(1, len(completion.ids) - first_new)

    asyncio.run(scenario())
    arena.close()


@pytest.mark.slow
def test_an_engine_whose_cache_is_full_says_so_and_answers_all(tmp_path: Path) -> None:
    model = tiny_llama(seed=1)
    model.save_pretrained(tmp_path)
    arena = arena_for(model)
    config = tiny_config()
    config.rollout.kv_cache_gb = 0.0012  # about 38 blocks of 32 tokens; a reply grows to 6

    async def scenario() -> None:
        engine = RolloutEngine(config, str(tmp_path), index=0, threads=1)
        await engine.start()
        try:
            await engine.load_weights(arena.stage(1, model.named_parameters()))
            (alone,) = await sample(engine, [request(0)])
            completions = await sample(engine, [request(i, max_new_tokens=140) for i in range(64)])
            stats = await engine.stats()
        finally:
            await engine.shutdown()
        assert not alone.is_crowded
        assert len(completions) == 64
        assert sum(completion.is_crowded for completion in completions) > 32
        assert stats.taken_back > 0
        for completion in completions:
            assert differences(model, completion).mean() <= 1e-4

    asyncio.run(scenario())
    arena.close()


@pytest.mark.slow
def test_a_long_reply_arrives_in_parts_and_outlives_an_update_a_drain_and_a_move(tmp_path: Path) -> None:
    old, new = tiny_llama(seed=1), tiny_llama(seed=2)
    old.config.eos_token_id = old.generation_config.eos_token_id = None  # replies run to their end
    old.save_pretrained(tmp_path)
    arena = arena_for(old)
    first, last = (request(seed, max_new_tokens=400) for seed in (0, 1))
    unseeded = replace(first, seed=None)

    async def scenario() -> None:
        engine = RolloutEngine(tiny_config(max_length=480), str(tmp_path), index=0, threads=1)
        await engine.start()
        try:
            await engine.load_weights(arena.stage(1, old.named_parameters()))
            one, two = await asyncio.gather(whole_reply(engine, first), whole_reply(engine, last))
            assert (len(one.ids), one.finish_reason, one.versions) == (400, "length", [1] * 400)
            assert differences(old, one).mean() <= 1e-4
            # Another engine would go on after the first part with the same tokens.
            moved = replace(first, prompt_ids=PROMPT + one.ids[:256], num_sampled=256, max_new_tokens=144)
            assert (await engine.generate(moved)).ids == one.ids[256:]
            assert one.ids != two.ids

            running = [asyncio.create_task(whole_reply(engine, unseeded)) for _ in range(8)]
            await until_sampling(engine)
            await engine.load_weights(arena.stage(2, new.named_parameters()))
            for reply in await asyncio.gather(*running):
                assert (len(reply.ids), len(reply.logprobs), set(reply.versions)) == (400, 400, {1, 2})
                split = reply.versions.index(2)
                assert differences(old, reply)[:split].mean() <= 1e-4
                assert differences(new, reply)[split:].mean() <= 1e-4

            engine._config.rollout.drain = True
            parts = [asyncio.create_task(engine.generate(each)) for each in (unseeded, first)]
            await until_sampling(engine)
            await engine.load_weights(arena.stage(3, old.named_parameters()))
            for part in await asyncio.gather(*parts):
                # What vLLM sampled while it was told to stop is not thrown away.
                assert (part.finish_reason, part.reply, set(part.versions)) == ("abort", "", {2})
                assert 256 <= len(part.ids) < 400
            assert list(engine._replies) == []
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
    arena.close()


@pytest.mark.slow
def test_the_watch_ends_when_vllm_is_killed_and_its_replies_are_lost(tmp_path: Path) -> None:
    model = tiny_llama(seed=1)
    model.save_pretrained(tmp_path)
    arena = arena_for(model)

    async def scenario() -> None:
        engine = RolloutEngine(tiny_config(), str(tmp_path), index=0, threads=1)
        await engine.start()
        try:
            await engine.load_weights(arena.stage(1, model.named_parameters()))
            watch = asyncio.create_task(engine.watch())
            answered = asyncio.create_task(engine.wait_until_answered())
            running = asyncio.create_task(engine.generate(request(0, [3], max_new_tokens=180)))
            await until_sampling(engine)
            assert answered.done()
            assert not watch.done()
            manager: Any = engine._engine.engine_core.resources.engine_manager
            os.kill(manager.processes[0].pid, signal.SIGKILL)
            with pytest.raises(EngineLost, match="vLLM's process ended"):
                await asyncio.wait_for(watch, timeout=30)
            with pytest.raises(EngineLost, match="vLLM died"):
                await asyncio.wait_for(running, timeout=30)
            with pytest.raises(EngineLost, match="vLLM died"):
                await engine.generate(request(1))
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
    arena.close()


@pytest.mark.slow
def test_failed_updates_stop_the_engine_until_a_complete_one(bench: Bench) -> None:
    bench.load(1, bench.old)
    good = bench.stage(2, bench.new)
    odd = [replace(slot, shape=(3, *slot.shape)) if "k_proj" in slot.name else slot for slot in good.slots]
    short = replace(good, buckets=good.buckets[:-2])
    for bad, kind, message in [
        (replace(good, version=7), WeightsOvertaken, "holds version 2, not 7"),
        (replace(good, slots=tuple(odd)), RunError, "could not load weights of version 2"),
        (short, RunError, "parameters were not sent"),
        (replace(good, slots=(replace(good.slots[0], name="nobody.weight"), *good.slots[1:])), RunError, "nobody"),
    ]:
        with pytest.raises(kind, match=message):
            bench.runner.run(bench.engine.load_weights(bad))
        with pytest.raises(EngineLost, match="no complete weights"):
            bench.runner.run(bench.engine.generate(request(0)))
    bench.load(2, bench.new)
    report = bench.runner.run(bench.engine.compare_weights(good))
    assert report == {"num_equal": len(good.slots), "different": [], "unverified": []}
    (completion,) = bench.runner.run(sample(bench.engine, [request(0)]))
    assert differences(bench.new, completion).mean() <= 1e-4


@pytest.mark.slow
def test_requests_outlive_a_failed_update(bench: Bench) -> None:
    bench.load(1, bench.old)
    good = bench.stage(2, bench.new)

    async def fail_midway() -> list[Completion]:
        running = asyncio.create_task(sample(bench.engine, [request(i, max_new_tokens=140) for i in range(4)]))
        await until_sampling(bench.engine)
        with pytest.raises(RunError):
            await bench.engine.load_weights(replace(good, buckets=good.buckets[:2]))
        await bench.engine.load_weights(good)
        return await running

    for completion in bench.runner.run(fail_midway()):
        split = completion.versions.index(2) if 2 in completion.versions else len(completion.ids)
        assert differences(bench.old, completion)[:split].sum() <= 1e-4 * max(1, split)
        assert differences(bench.new, completion)[split:].sum() <= 1e-4 * max(1, len(completion.ids) - split)


@pytest.mark.slow
def test_seeds_repeat_and_differ(bench: Bench) -> None:
    bench.load(1, bench.old)
    first = bench.runner.run(sample(bench.engine, [request(i) for i in range(4)]))
    again = bench.runner.run(sample(bench.engine, [request(i) for i in reversed(range(4))]))
    assert [completion.ids for completion in first] == [completion.ids for completion in reversed(again)]
    assert len({tuple(completion.ids) for completion in first}) == 4


@pytest.mark.slow
def test_group_that_meets_an_update_never_mixes_cached_prompts(bench: Bench) -> None:
    async def sample_during_update() -> list[Completion]:
        # Requests that arrive while an update runs are prefilled in one step after it; a few may come before it.
        loading = asyncio.create_task(bench.engine.load_weights(bench.stage(4, bench.old)))
        running = asyncio.create_task(sample(bench.engine, [request(i) for i in range(8)]))
        await loading
        return await running

    bench.load(3, bench.new)
    for completion in bench.runner.run(sample_during_update()):
        of_old, of_new = differences(bench.old, completion), differences(bench.new, completion)
        assert set(completion.versions) <= {3, 4}
        for position, version in enumerate(completion.versions):
            assert (of_new if version == 3 else of_old)[position] <= 1e-3


@pytest.mark.slow
def test_cancelling_aborts_the_request(bench: Bench) -> None:
    bench.load(1, bench.old)

    async def cancel_midway() -> None:
        running = asyncio.create_task(bench.engine.generate(request(0, [3], max_new_tokens=180)))
        await until_sampling(bench.engine)
        assert (await bench.engine.stats()).running == 1
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    bench.runner.run(cancel_midway())
    stats = bench.runner.run(bench.engine.stats())
    assert stats.running == 0
    assert stats.busy_s > 0
    assert bench.engine._engine.get_num_unfinished_requests() == 0


@pytest.mark.slow
def test_stats_count_sampled_tokens(bench: Bench) -> None:
    bench.load(1, bench.old)
    before = bench.runner.run(bench.engine.stats()).tokens
    completions = bench.runner.run(sample(bench.engine, [request(i) for i in range(3)]))
    after = bench.runner.run(bench.engine.stats()).tokens
    assert after - before == sum(len(completion.ids) for completion in completions)


@pytest.mark.slow
def test_prompt_without_room_is_refused(bench: Bench) -> None:
    bench.load(1, bench.old)
    with pytest.raises(ValueError, match=r"shorter than model.max_length \(192\); got 192 tokens"):
        bench.runner.run(bench.engine.generate(request(0, [3] * 192)))


@pytest.mark.slow
def test_mixture_of_experts_takes_two_versions(tmp_path: Path) -> None:
    old, new = tiny_mixture(seed=1), tiny_mixture(seed=2)
    old.save_pretrained(tmp_path)
    arena = arena_for(old)

    async def scenario() -> None:
        engine = RolloutEngine(tiny_config(), str(tmp_path), index=0, threads=1)
        await engine.start()
        try:
            for version, model in ((1, old), (2, new)):
                await engine.load_weights(arena.stage(version, model.named_parameters()))
                (completion,) = await sample(engine, [request(version)])
                assert completion.versions == [version] * len(completion.ids)
                assert differences(model, completion).mean() <= 1e-4
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
    arena.close()


def test_engine_refuses_before_its_first_version(tmp_path: Path) -> None:
    engine = RolloutEngine(tiny_config(), str(tmp_path), index=3, threads=1)
    with pytest.raises(EngineLost, match="rollout engine 3 cannot answer: it has no complete weights yet"):
        asyncio.run(engine.generate(request(0)))


def test_missing_model_folder_says_so(tmp_path: Path) -> None:
    engine = RolloutEngine(tiny_config(), str(tmp_path / "absent"), index=0, threads=1)
    with pytest.raises(ConfigError, match=r"model.path must be a folder with a config.json; found none in .*absent"):
        asyncio.run(engine.start())


def test_cache_that_holds_no_sequence_says_how_much_it_takes(tmp_path: Path) -> None:
    tiny_llama(seed=1).config.save_pretrained(tmp_path)
    shape = cache_shape(tiny_config(), str(tmp_path))
    assert shape.num_bytes(33, bytes_per_element=4) == 64 * 2 * 2 * 2 * 32 * 4
    config = tiny_config()
    config.rollout.kv_cache_gb = 0.0001
    with pytest.raises(ConfigError, match=r"kv_cache_gb \(0.0001\) does not hold .* \(192\) tokens, which takes"):
        check_engine(config, shape, str(tmp_path), on_gpu=False)
    config.rollout.kv_cache_gb = 1e6
    with pytest.raises(ConfigError, match="more than the memory that is free"):
        check_engine(config, shape, str(tmp_path), on_gpu=False)


def test_unsupported_head_size_is_refused_on_a_cpu_only(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has head_dim 16, which vLLM cannot run on a CPU"):
        check_engine(tiny_config(), cache_shape(tiny_config(), str(tmp_path)), str(tmp_path), on_gpu=False)
    check_engine(tiny_config(), cache_shape(tiny_config(), str(tmp_path)), str(tmp_path), on_gpu=True)


def test_a_mixture_takes_no_adapters_on_a_cpu(tmp_path: Path) -> None:
    tiny_mixture(seed=1).config.save_pretrained(tmp_path)
    config = tiny_config()
    config.lora.rank = 4
    shape = cache_shape(tiny_config(), str(tmp_path))
    with pytest.raises(ConfigError, match=r"is a mixture of experts, which .* set lora.send=merged"):
        check_engine(config, shape, str(tmp_path), on_gpu=False)
    check_engine(config, shape, str(tmp_path), on_gpu=True)
    config.lora.send = Send.merged
    check_engine(config, shape, str(tmp_path), on_gpu=False)


def test_stop_tokens_come_from_generation_config_first(tmp_path: Path) -> None:
    assert stop_token_ids(str(tmp_path)) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert stop_token_ids(str(tmp_path)) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert stop_token_ids(str(tmp_path)) == [7, 0]
