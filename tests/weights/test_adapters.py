"""Adapters sent alone: a trained one in a real engine, versions that change in flight, and updates that fail."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import PROMPT, differences, request, sample, tiny_config, tiny_llama, until_sampling
from transformers import LlamaForCausalLM

from rlflow.config import Config
from rlflow.errors import EngineLost, RunError, WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.rollout.requests import Completion
from rlflow.types import Sample, TrainSample
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.engine.setup import adapted_layers, engine_arguments
from rlflow.workers.trainer.fsdp import FsdpTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft"),
]

MEAN_TOLERANCE, TOLERANCE = 1e-4, 1e-3
"""Nats, over the tokens of a reply and of one token; what a version changes is 10 times as much."""


def adapter_config() -> Config:
    """A rank that vLLM has no size for, so that it pads; a scale that is no power of two."""
    config = tiny_config()
    config.lora.rank, config.lora.alpha, config.lora.rank_stabilised = 5, 12.0 / 5**0.5, True
    config.trainer.learning_rate = 5e-3
    config.trainer.max_grad_norm = 100.0
    return config


@dataclass(kw_only=True)
class Policy:
    """The trainer, and where it lays out its adapters."""

    trainer: FsdpTrainer
    arena: Arena
    folder: Path

    def stage(self, version: int) -> StagedWeights:
        return self.arena.stage(version, self.trainer.adapter_parameters())

    def merged(self) -> LlamaForCausalLM:
        """The policy of now by transformers alone."""
        model = LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model.load_state_dict(dict(self.trainer.full_parameters()), strict=False)
        return model

    def train(self, completions: list[Completion], seed: int) -> None:
        random = np.random.default_rng(seed)
        group = [replace(each, advantage=float(random.normal())) for each in samples_of(completions)]
        self.trainer.accumulate([[group]])
        assert self.trainer.step().applied

    def learn(self, seed: int) -> None:
        """One step away from where it is, on tokens that nobody sampled."""
        ids = np.random.default_rng(seed).integers(3, 128, 40).tolist()
        self.train(
            [
                Completion(
                    ids=ids, logprobs=[-5.0] * 40, versions=[0] * 40, cache_versions=[0] * 40, finish_reason="length"
                )
            ]
            * 2,
            seed=seed,
        )

    def logprobs(self, completions: list[Completion]) -> list[np.ndarray]:
        return self.trainer.per_token([[samples_of(completions)]])[0]


def samples_of(completions: list[Completion]) -> list[TrainSample]:
    return [
        TrainSample(
            sample=Sample(
                prompt_ids=np.array(PROMPT, np.int32),
                completion_ids=np.array(each.ids, np.int32),
                loss_mask=np.ones(len(each.ids), bool),
                logprobs=np.array(each.logprobs, np.float32),
                versions=np.array(each.versions, np.int32),
                cache_versions=np.array(each.cache_versions, np.int32),
            ),
            advantage=0.0,
        )
        for each in completions
    ]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(seed=1).save_pretrained(folder)
    trainer = FsdpTrainer(adapter_config(), str(folder), 0, 1, "")
    arena = Arena(trainer.adapter_specs())
    yield Policy(trainer=trainer, arena=arena, folder=folder)
    arena.close()


@dataclass(kw_only=True)
class Bench:
    runner: asyncio.Runner
    engine: RolloutEngine

    def load(self, staged: StagedWeights) -> None:
        assert self.runner.run(self.engine.load_weights(staged)) > 0

    def sample(self, count: int, max_new_tokens: int = 32) -> list[Completion]:
        return self.runner.run(sample(self.engine, [request(i, PROMPT, max_new_tokens) for i in range(count)]))


def run_engine(policy: Policy, tensor_parallel: int) -> Iterator[Bench]:
    config = adapter_config()
    config.rollout.tensor_parallel = tensor_parallel
    engine = RolloutEngine(config, str(policy.folder), index=0, threads=1)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield Bench(runner=runner, engine=engine)
        runner.run(engine.shutdown())


@pytest.fixture(scope="module")
def bench(policy: Policy) -> Iterator[Bench]:
    yield from run_engine(policy, tensor_parallel=1)


def check_versions(policy: Policy, bench: Bench) -> None:
    """Three versions, each trained on what the one before sampled; the trainer says what the engine says."""
    before = None
    for version in (1, 2, 3):
        bench.load(policy.stage(version))
        completions = bench.sample(8)
        assert all(set(each.versions) == {version} for each in completions)
        found = policy.logprobs(completions)
        worst = max(float(np.abs(ours - each.logprobs).mean()) for ours, each in zip(found, completions, strict=True))
        assert worst <= MEAN_TOLERANCE
        model = policy.merged()
        assert all(differences(model, each).max() <= TOLERANCE for each in completions)
        if before is not None:
            assert all(differences(before, each).max() > 10 * TOLERANCE for each in completions)
        before = model
        policy.train(completions, seed=version)


def test_the_engine_says_what_the_trainer_says_of_three_versions(policy: Policy, bench: Bench) -> None:
    check_versions(policy, bench)


def test_an_engine_of_two_ranks_cuts_the_adapters(policy: Policy) -> None:
    for bench in run_engine(policy, tensor_parallel=2):
        check_versions(policy, bench)


def test_requests_under_way_go_on_under_the_new_version(policy: Policy, bench: Bench) -> None:
    old = policy.merged()
    bench.load(policy.stage(1))
    policy.learn(seed=10)
    new, staged = policy.merged(), policy.stage(2)

    async def update_midway() -> tuple[list[Completion], Completion]:
        running = asyncio.create_task(sample(bench.engine, [request(i, max_new_tokens=140) for i in range(16)]))
        await until_sampling(bench.engine)
        await bench.engine.load_weights(staged)
        late = await bench.engine.generate(request(99))  # its prompt was in the cache
        return await running, late

    completions, late = bench.runner.run(update_midway())
    assert set(late.versions) == {2}
    assert differences(new, late).max() <= TOLERANCE
    both = [each for each in completions if set(each.versions) == {1, 2}]
    assert both, "the update came too late to meet a running request"
    for each in both:
        assert each.versions == sorted(each.versions)
        first_new = each.versions.index(2)
        assert differences(old, each)[:first_new].max() <= TOLERANCE
        assert differences(new, each)[first_new:].max() <= TOLERANCE
    assert any(differences(old, each).max() > 10 * TOLERANCE for each in both), "the versions are alike"


def test_what_the_engine_holds_is_what_was_staged(policy: Policy, bench: Bench) -> None:
    staged = policy.stage(1)
    bench.load(staged)
    report = bench.runner.run(bench.engine.compare_weights(staged))
    assert report == {"num_equal": 2 * 2 * 7, "different": [], "unverified": []}
    policy.learn(seed=11)
    report = bench.runner.run(bench.engine.compare_weights(policy.stage(2)))
    assert sorted(report["different"]) == sorted(slot.name for slot in staged.slots)


def test_a_failed_update_stops_the_engine_until_a_good_one(policy: Policy, bench: Bench) -> None:
    bench.load(policy.stage(1))
    policy.learn(seed=12)
    good = policy.stage(2)
    names = [slot.name for slot in good.slots]
    inner, outer = (next(slot for slot in good.slots if f"k_proj.{kind}" in slot.name) for kind in ("lora_A", "lora_B"))

    def with_slot(slot: object, **changes: object) -> StagedWeights:
        slots = [replace(each, **changes) if each is slot else each for each in good.slots]
        return replace(good, slots=tuple(slots))

    narrow = with_slot(inner, shape=(5, 64), num_bytes=5 * 64 * 4)
    short = with_slot(outer, shape=(32, 5), num_bytes=32 * 5 * 4)
    for bad, kind, message in [
        (narrow, RunError, r"A of the adapter of layer 'model.*k_proj' must have shape \(5, 128\); got \(5, 64\)"),
        (short, RunError, r"B of the adapter of layer 'model.*k_proj' must have shape \(64, 5\); got \(32, 5\)"),
        (with_slot(inner, name=inner.name.replace("k_proj", "nobody")), RunError, "has no layer 'model.*nobody'"),
        (replace(good, slots=good.slots[2:]), RunError, f"sent no adapter, such as '{names[0].split('.', 2)[2][:12]}"),
        (replace(good, version=7), WeightsOvertaken, "holds version 2, not 7"),
    ]:
        with pytest.raises(kind, match=message):
            bench.runner.run(bench.engine.load_weights(bad))
        with pytest.raises(EngineLost, match="no complete weights"):
            bench.sample(1)
    bench.load(good)
    (completion,) = bench.sample(1)
    assert completion.versions == [2] * len(completion.ids)
    assert differences(policy.merged(), completion).max() <= TOLERANCE


def test_a_sleeping_engine_goes_on_with_the_next_version(policy: Policy, bench: Bench) -> None:
    bench.load(policy.stage(1))
    policy.learn(seed=13)
    staged = policy.stage(2)

    async def sleep_midway() -> list[Completion]:
        running = asyncio.create_task(sample(bench.engine, [request(i, max_new_tokens=140) for i in range(8)]))
        await until_sampling(bench.engine)
        await bench.engine.sleep()
        await bench.engine.load_weights(staged)
        return await running

    new = policy.merged()
    completions = bench.runner.run(sleep_midway())
    both = [each for each in completions if set(each.versions) == {1, 2}]
    assert both
    for each in both:
        assert differences(new, each)[each.versions.index(2) :].max() <= TOLERANCE


def test_vllm_is_asked_for_the_next_larger_rank_and_for_the_adapted_layers_only(policy: Policy) -> None:
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert adapted_layers(tiny_config(), str(policy.folder)) == layers
    arguments = engine_arguments(adapter_config(), str(policy.folder), 0, on_gpu=False)
    assert arguments["max_lora_rank"] == 8
    assert arguments["lora_target_modules"] == layers
    assert arguments["load_format"] == "safetensors"
    config = adapter_config()
    config.lora.rank = None
    assert "enable_lora" not in engine_arguments(config, str(policy.folder), 0, on_gpu=False)
