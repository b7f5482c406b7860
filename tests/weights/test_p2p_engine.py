"""The rank-to-rank transport from a real trainer to a real engine, next to what whole parameters in an arena say."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import is_loopback, listeners
from processes import start_ranks
from training import save_model, share, tiny_groups, tiny_llama

from rlflow.config import Backend, Config, Dtype, Transport
from rlflow.errors import WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.rollout.requests import GenerateRequest
from rlflow.weights.p2p.sender import PeerSender
from rlflow.weights.shm.sender import SharedMemorySender
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.trainer.actor import build_backend

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 128, "hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 512}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed"
)


@dataclass(kw_only=True, frozen=True)
class Case:
    backend: Backend
    zero_stage: int | None
    tensor_parallel: int
    """Of the engine."""
    dtype: Dtype

    def config(self) -> Config:
        config = Config()
        config.model.dtype, config.model.max_length = self.dtype, 192
        config.rollout.kv_cache_gb, config.rollout.tensor_parallel = 0.05, self.tensor_parallel
        config.trainer.backend, config.trainer.zero_stage, config.trainer.ranks = self.backend, self.zero_stage, 2
        config.trainer.learning_rate = 1e-2
        config.weights.transport, config.deadlines.weights_s = Transport.p2p, 60.0
        return config


CASES = [
    pytest.param(Case(backend=Backend.fsdp, zero_stage=None, tensor_parallel=2, dtype=Dtype.float32), id="fsdp-2"),
    pytest.param(
        Case(backend=Backend.deepspeed, zero_stage=3, tensor_parallel=1, dtype=Dtype.bfloat16),
        id="zero3-1",
        marks=needs_deepspeed,
    ),
]


def train(rank: int, case: Case, folder: Path, orders: Any, staged: Any) -> None:
    """Stage a version over both transports when told to, and take a step before all but the first."""
    rendezvous = f"file://{folder / 'rendezvous'}"
    backend = build_backend(case.config(), str(folder / "model"), rank, 2, rendezvous)
    senders = [
        PeerSender(backend, rank, 2, rendezvous, timeout_s=60, bucket_bytes=20_000),
        SharedMemorySender(backend, rank, 2),
    ]
    while (version := orders[rank].get(timeout=200)) is not None:
        if version > 1:
            backend.accumulate(share(tiny_groups(num_groups=4), rank, 2))
            assert backend.step().applied
        found = [sender.stage(version) for sender in senders]
        if rank == 0:
            staged.put(found)
    for sender in senders:
        sender.close()
    backend.close()


@contextmanager
def training(case: Case, folder: Path) -> Iterator[Any]:
    """Gives a function that makes the trainer stage a version: where it is to be had rank to rank, and the arena."""
    context = torch.multiprocessing.get_context("spawn")
    orders, staged = [context.Queue(), context.Queue()], context.Queue()
    ranks = start_ranks(2, train, case, folder, orders, staged)

    def stage(version: int) -> list[StagedWeights]:
        for queue in orders:
            queue.put(version)
        return staged.get(timeout=200)

    try:
        yield stage
    finally:
        for queue in orders:
            queue.put(None)
        while not ranks.join(timeout=60):
            pass


@pytest.mark.parametrize("case", CASES)
def test_an_engine_computes_with_what_the_ranks_hold(case: Case, tmp_path: Path) -> None:
    save_model(tiny_llama(**SIZES), tmp_path / "model")
    engine = RolloutEngine(case.config(), str(tmp_path / "model"), index=0, threads=1)
    request = GenerateRequest(prompt_ids=[1, 5, 7], seed=0, max_new_tokens=8, prefix_key=None)

    async def scenario(stage: Any) -> None:
        await engine.start()
        try:
            for version in (1, 2):
                peers, arena = await asyncio.to_thread(stage, version)
                await engine.load_weights(peers)
                report = await engine.compare_weights(arena)
                assert report == {"num_equal": len(arena.slots), "different": [], "unverified": []}
                assert set((await engine.generate(request)).versions) == {version}
            # One that is no longer to be had, and then the one that is.
            with pytest.raises(WeightsOvertaken, match="could not load weights of version 1"):
                await engine.load_weights(replace(peers, version=1))
            await engine.load_weights(peers)
            assert (await engine.compare_weights(arena))["different"] == []
            found = listeners(os.getpid())
            assert all(is_loopback(address) for addresses in found.values() for address in addresses), found
        finally:
            await engine.shutdown()

    with training(case, tmp_path) as stage:
        asyncio.run(scenario(stage))
