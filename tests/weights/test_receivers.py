"""Every transport into a model that is filled in place and one that is reloaded: one process, no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import tiny_llama, tiny_mixture
from one_rank import OneRank

from rlflow.config import Transport
from rlflow.roles import StagedWeights
from rlflow.weights.disk.sender import DiskSender
from rlflow.weights.engine.messages import Columns, Comparison, Opening, comparison_message, opening_message
from rlflow.weights.p2p.sender import PeerSender
from rlflow.weights.shm.sender import SharedMemorySender

pytestmark = pytest.mark.slow
pytest.importorskip("vllm")

UNREADABLE = {tiny_llama: 0, tiny_mixture: 2 * 2}
"""The packed experts of two layers cannot be read back."""


@contextmanager
def worker_of(model_path: str) -> Iterator[Any]:
    """What a vLLM worker is to the extension: a model of zeros, packed as vLLM packs it on a CPU."""
    from engine_layout import as_rank, build_model
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from rlflow.weights.extension import WorkerExtension

    with as_rank(0, 1):
        config, model = build_model(model_path, "float32", 1)
        with set_current_vllm_config(config), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        worker: Any = WorkerExtension()
        worker.vllm_config, worker.device = config, torch.device("cpu")
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        worker.weight_transfer_engine = None
        yield worker


@pytest.mark.parametrize("transport", [Transport.shm, Transport.p2p, Transport.disk])
@pytest.mark.parametrize("make", [tiny_llama, tiny_mixture])
def test_a_worker_computes_with_what_was_staged(
    make: Any, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
    old, new = make(seed=1), make(seed=2)
    old.save_pretrained(tmp_path / "model")
    backend: Any = OneRank(old, torch.float32)
    sender = {
        Transport.shm: lambda: SharedMemorySender(backend, 0, 1, tmp_path),
        Transport.p2p: lambda: PeerSender(backend, 0, 1, "", timeout_s=60, bucket_bytes=60_000),
        Transport.disk: lambda: DiskSender(backend, 0, 1, tmp_path / "weights"),
    }[transport]()

    def stage(version: int, model: Any) -> StagedWeights:
        backend.model = model
        staged = sender.stage(version)
        assert staged is not None
        return staged

    def begin(worker: Any, staged: StagedWeights) -> int:
        opening = Opening(staged=staged, transport=transport, engine=0, transfer=staged.version, timeout_s=60.0)
        is_beside, num_buckets = worker.rlflow_open(**opening_message(opening))
        assert is_beside
        return num_buckets

    def check(worker: Any, staged: StagedWeights) -> None:
        assert {worker.rlflow_receive(bucket) for bucket in range(begin(worker, staged))} == {None}
        worker.rlflow_commit()
        columns = Columns(count=32, seed=staged.version)
        comparison = Comparison(staged=staged, columns=columns)
        assert worker.rlflow_compare(**comparison_message(comparison))["different"] == []
        report = worker.rlflow_compare(**comparison_message(Comparison(staged=staged, columns=None)))
        assert report["different"] == []
        assert len(report["unverified"]) == UNREADABLE[make]
        assert report["num_equal"] > 10

    try:
        with worker_of(str(tmp_path / "model")) as worker:
            check(worker, stage(1, old))
            # One that is given up halfway is not used.
            second = stage(2, new)
            begin(worker, second)
            worker.rlflow_receive(0)
            worker.rlflow_abort()
            with pytest.raises(ValueError, match="parameters were not sent"):
                worker.rlflow_commit()
            check(worker, second)
    finally:
        sender.close()
