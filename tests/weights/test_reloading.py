"""A mixture of experts, which vLLM repacks on a CPU, through the transports that send parts of parameters."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import differences, request, sample, tiny_config, tiny_mixture
from one_rank import OneRank

from rlflow.config import Transport, Verify
from rlflow.errors import EngineLost, WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.weights.disk.sender import DiskSender
from rlflow.weights.p2p.sender import PeerSender
from rlflow.workers.engine.engine import RolloutEngine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transport", [Transport.p2p, Transport.disk])
def test_a_mixture_of_experts_takes_versions_through_every_transport(transport: Transport, tmp_path: Path) -> None:
    """Two versions, one that is gone, and a third that changed a little: on disk it is a delta."""
    old, new = tiny_mixture(seed=1), tiny_mixture(seed=2)
    old.save_pretrained(tmp_path / "model")
    config = tiny_config()
    config.weights.transport, config.weights.verify, config.deadlines.weights_s = transport, Verify.full, 60.0
    trainer = OneRank(old, torch.float32)
    backend: Any = trainer
    sender = (
        PeerSender(backend, 0, 1, "", timeout_s=60, bucket_bytes=60_000)
        if transport is Transport.p2p
        else DiskSender(backend, 0, 1, tmp_path / "weights")
    )

    def stage(version: int) -> StagedWeights:
        staged = sender.stage(version)
        assert staged is not None
        return staged

    async def scenario() -> None:
        engine = RolloutEngine(config, str(tmp_path / "model"), index=0, threads=1)
        await engine.start()

        async def check(version: int, staged: StagedWeights) -> None:
            assert await engine.load_weights(staged) > 0
            (completion,) = await sample(engine, [request(version)])
            assert completion.versions == [version] * len(completion.ids)
            assert differences(trainer.model, completion).mean() <= 1e-4
            report = await engine.compare_weights(staged)
            assert report["different"] == []
            assert len(report["unverified"]) == 2 * 2, "the experts of two layers cannot be read back"
            assert report["num_equal"] == len(trainer.parameter_specs()) - 2 * 2

        try:
            await check(1, stage(1))
            trainer.model = new
            second = stage(2)
            await check(2, second)
            trainer.change_a_little()
            third = stage(3)
            gone = second if transport is Transport.p2p else replace(second, version=9)
            with pytest.raises(WeightsOvertaken):
                await engine.load_weights(gone)
            with pytest.raises(EngineLost, match="no complete weights"):
                await engine.generate(request(0))
            await check(3, third)
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
    sender.close()
