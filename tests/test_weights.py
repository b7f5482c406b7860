"""From real trainers of several layouts into real engines of several layouts, through shared memory."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_engine import PROMPT, differences, request, sample
from test_engine import tiny_llama as engine_llama
from test_trainer_contract import Layout, build, needs_deepspeed, run_ranks, take_step

from rlflow.config import Backend, Config, Dtype
from rlflow.roles import StagedWeights
from rlflow.weights.shm_sender import SharedMemorySender
from rlflow.workers.rollout import RolloutEngine

FSDP_2 = Layout(name="fsdp_2", backend=Backend.fsdp)
ZERO_3_2 = Layout(name="zero3_2", backend=Backend.deepspeed, zero_stage=3)

KEPT: list[SharedMemorySender] = []


def engine_config(dtype: Dtype, tensor_parallel: int) -> Config:
    config = Config()
    config.model.dtype, config.model.max_length = dtype, 192
    config.rollout.kv_cache_gb, config.rollout.max_new_tokens = 0.05, 64
    config.rollout.tensor_parallel = tensor_parallel
    return config


def train_and_stage(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    """The arena outlives the ranks, which never let go of it."""
    trainer = build(rank, layout, config, folder, rendezvous)
    take_step(trainer, rank, layout)
    target = folder / layout.name
    target.mkdir(exist_ok=True)
    sender = SharedMemorySender(trainer, rank, layout.ranks, rendezvous, target)
    KEPT.append(sender)
    staged = sender.stage(1)
    whole = {name: tensor.contiguous() for name, tensor in trainer.full_parameters()}
    if staged is not None:
        save_file(whole, target / "whole.safetensors")
        (target / "staged.pickle").write_bytes(pickle.dumps(staged))


@dataclass(kw_only=True)
class Engines:
    runner: asyncio.Runner
    by_size: dict[int, RolloutEngine]


@pytest.fixture(scope="module", params=[Dtype.float32, Dtype.bfloat16])
def dtype(request: pytest.FixtureRequest) -> Dtype:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dtype: Dtype) -> Path:
    folder = tmp_path_factory.mktemp(f"weights_{dtype}")
    engine_llama(seed=1).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path, dtype: Dtype) -> Iterator[Engines]:
    """Two of them, with one worker and with two."""
    with asyncio.Runner() as runner:
        found: dict[int, RolloutEngine] = {}
        for size in (1, 2):
            found[size] = RolloutEngine(engine_config(dtype, size), str(folder / "model"), index=size, threads=1)
            runner.run(found[size].start())
        yield Engines(runner=runner, by_size=found)
        for engine in found.values():
            runner.run(engine.shutdown())


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FSDP_2, pytest.param(ZERO_3_2, marks=needs_deepspeed)], ids=lambda each: each.name)
def test_two_ranks_fill_both_engines(layout: Layout, folder: Path, dtype: Dtype, engines: Engines) -> None:
    """Every parameter of every worker is equal to the bit, cast where the engine holds bfloat16."""
    run_ranks(train_and_stage, layout, layout.config(dtype), folder)
    written = folder / layout.name
    staged: StagedWeights = pickle.loads((written / "staged.pickle").read_bytes())
    whole = load_file(written / "whole.safetensors")
    assert {slot.name for slot in staged.slots} == set(whole)
    model = engine_llama(seed=2)
    model.load_state_dict(whole, strict=False)
    for engine in engines.by_size.values():
        assert engines.runner.run(engine.load_weights(staged)) > 0
        report = engines.runner.run(engine.compare_weights(staged))
        assert report == {"num_equal": len(whole), "different": [], "unverified": []}
        if dtype is Dtype.float32:
            (completion,) = engines.runner.run(sample(engine, [request(0)]))
            assert differences(model, completion, PROMPT).max() <= 1e-4
