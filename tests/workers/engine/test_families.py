"""Engines on models of the current families: what transformers has saved, they load; what they sample has its numbers.

Four families stand for the rest in the suite; `make proof` has them all.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from engines import differences, request, sample, tiny_config
from families import FAMILIES, tiny_model

from rlflow.config import Dtype, Transport
from rlflow.runtime.derived import MISMATCH, without_training
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine

SUITE = ("Qwen3.5", "Gemma 3", "gpt-oss", "Qwen3-MoE")
IN_BFLOAT16 = ("Qwen3.5", "Qwen3-Next")
"""Those with linear layers, which vLLM computes on a CPU in bfloat16 only."""
REFUSED = ("DeepSeek-V3",)
"""On a CPU; `test_engine_setup` says why."""
NOT_TRAINED = ("gpt-oss",)
"""Refused on a CPU if versions of the weights are to come."""
ROUNDING = {Dtype.float32: 1e-4, Dtype.bfloat16: 0.04}
"""Mean differences of log-probabilities."""

DIFFERENT = 0.3
"""What those of the other model exceed."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.slow if each in SUITE else [pytest.mark.slow, pytest.mark.proof])
        for each in FAMILIES
        if each not in REFUSED
    ],
)
def test_an_engine_samples_what_transformers_computes(family: str, tmp_path: Path) -> None:
    """From the model's files, and then from a version that a trainer sends."""
    config = tiny_config()
    dtype = Dtype.bfloat16 if family in IN_BFLOAT16 else Dtype.float32
    config.model.dtype = dtype
    old, new = (tiny_model(family, seed).to(getattr(torch, dtype.value)) for seed in (1, 2))
    old.save_pretrained(tmp_path)
    arena = Arena([(name, each.dtype, tuple(each.shape)) for name, each in new.named_parameters()])

    async def scenario() -> None:
        engine = RolloutEngine(without_training(config), str(tmp_path), index=0, threads=1)
        await engine.start()
        try:
            await engine.load_weights(arena.stage(1, old.named_parameters()))  # reads nothing: it has the files
            for completion in await sample(engine, [request(1), request(2)]):
                assert differences(old, completion).mean() <= ROUNDING[dtype]
                assert differences(new, completion).mean() > DIFFERENT
            if family in NOT_TRAINED:
                return
            engine._config.trainer.ranks, engine._config.weights.transport = 1, Transport.shm
            staged = arena.stage(2, new.named_parameters())
            await engine.load_weights(staged)
            report = await engine.compare_weights(staged)
            assert report["different"] == []
            assert all("conv1d" in name or "experts" in name for name in report["unverified"])
            for completion in await sample(engine, [request(1), request(2)]):
                assert differences(new, completion).mean() <= ROUNDING[dtype]
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
    arena.close()


@pytest.mark.slow
@pytest.mark.proof
def test_an_engine_with_permuted_experts_differs_by_more_than_a_start_allows(tmp_path: Path) -> None:
    config = tiny_config()
    config.model.dtype = Dtype.float32
    model, permuted = (tiny_model("Qwen3-MoE", seed=1) for _ in range(2))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for name, weights in permuted.named_parameters():
            if "layers.1.mlp.experts." in name:  # and the router stays as it is
                weights.copy_(weights.roll(1, 0))
    arena = Arena([(name, each.dtype, tuple(each.shape)) for name, each in permuted.named_parameters()])

    async def scenario() -> None:
        engine = RolloutEngine(without_training(config), str(tmp_path), index=0, threads=1)
        await engine.start()
        try:
            engine._config.trainer.ranks, engine._config.weights.transport = 1, Transport.shm
            await engine.load_weights(arena.stage(1, permuted.named_parameters()))
            for completion in await sample(engine, [request(1), request(2)]):
                assert differences(permuted, completion).mean() <= ROUNDING[Dtype.float32]
                difference = differences(model, completion).mean()
                print(f"{difference:.2g} nats")
                assert difference > MISMATCH["float32"]
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
    arena.close()
