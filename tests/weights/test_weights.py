"""From real trainers of several layouts into real engines of several layouts, through shared memory and disk."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from back_ends import Layout, build, needs_deepspeed, run_ranks, take_step
from engines import PROMPT, differences, request, sample
from engines import tiny_llama as engine_llama
from one_rank import OneRank
from safetensors.torch import load_file, save_file

from rlflow.config import Backend, Config, Dtype, Transport, Verify
from rlflow.errors import EngineLost, RunError, WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.weights.disk.sender import DiskSender
from rlflow.weights.shm.sender import SharedMemorySender
from rlflow.workers.engine.engine import RolloutEngine

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
    sender = SharedMemorySender(trainer, rank, layout.ranks, target)
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


@pytest.fixture(scope="module")
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
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        pytest.param(Dtype.float32, FSDP_2, id="float32-fsdp_2"),
        pytest.param(Dtype.bfloat16, ZERO_3_2, id="bfloat16-zero3_2", marks=needs_deepspeed),
        pytest.param(Dtype.float32, ZERO_3_2, id="float32-zero3_2", marks=[needs_deepspeed, pytest.mark.proof]),
        pytest.param(Dtype.bfloat16, FSDP_2, id="bfloat16-fsdp_2", marks=pytest.mark.proof),
    ],
    indirect=["dtype"],
)
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


@pytest.mark.slow
def test_versions_on_disk_reach_an_engine(tmp_path: Path) -> None:
    """An anchor, changes, several at once, the same one twice, a damaged file, and an anchor that heals it."""
    model = engine_llama(seed=1)
    model.save_pretrained(tmp_path / "model")
    trainer = OneRank(model, torch.bfloat16)
    backend: Any = trainer
    sender = DiskSender(backend, 0, 1, tmp_path / "weights")
    arena = SharedMemorySender(backend, 0, 1, tmp_path)
    config = engine_config(Dtype.bfloat16, tensor_parallel=1)
    config.weights.transport, config.weights.verify = Transport.disk, Verify.full
    engine = RolloutEngine(config, str(tmp_path / "model"), index=0, threads=1)

    def stage(version: int) -> StagedWeights:
        trainer.change_a_little()
        staged = sender.stage(version)
        assert staged is not None
        return staged

    with asyncio.Runner() as runner:

        def load(staged: StagedWeights) -> None:
            assert runner.run(engine.load_weights(staged)) > 0
            expected = arena.stage(staged.version)
            assert expected is not None
            report = runner.run(engine.compare_weights(expected))
            assert report == {"num_equal": len(trainer.parameter_specs()), "different": [], "unverified": []}

        runner.run(engine.start())
        anchor = stage(1)
        load(anchor)
        second = stage(2)
        assert second.num_bytes < anchor.num_bytes / 5
        load(second)
        stage(3)
        load(stage(4))
        load(replace(second, version=4))
        damaged = stage(5)
        (path,) = (tmp_path / "weights" / "version_000005").glob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(RunError, match="version 5"):
            runner.run(engine.load_weights(damaged))
        with pytest.raises(EngineLost, match="no complete weights"):
            runner.run(engine.generate(request(0)))
        sender = DiskSender(backend, 0, 1, tmp_path / "weights")  # the trainer was started again
        load(stage(6))
        with pytest.raises(WeightsOvertaken, match="version 2"):
            runner.run(engine.load_weights(second))
        runner.run(engine.shutdown())
    arena.close()
