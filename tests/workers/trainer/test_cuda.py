"""The trainer on a GPU: the same figures as on the CPU, in float32 and near them in bfloat16, and its memory lent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from training import largest_relative_difference, save_model, tiny_config, tiny_groups, tiny_llama

from rlflow.config import Config, Dtype, Offload
from rlflow.workers.trainer.frozen import FrozenPolicy
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.policy import load_policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = {"hidden_size": 64, "head_dim": 16}
"""Flex attention takes heads of 16 and more."""


def take_step(config: Config, model: str, rendezvous: Path) -> tuple[float, np.ndarray, dict[str, torch.Tensor]]:
    """Gradient norm, log-probabilities before the step, parameters after it."""
    trainer = FsdpTrainer(config, model, 0, 1, f"file://{rendezvous}")
    try:
        groups = tiny_groups(num_groups=2)
        (rows,) = trainer.per_token([groups])
        trainer.accumulate([groups])
        outcome = trainer.step()
        return outcome.grad_norm, np.concatenate(rows), {n: p.cpu().clone() for n, p in trainer.full_parameters()}
    finally:
        trainer.close()


def on_cpu(config: Config, model: str) -> np.ndarray:
    from rlflow.batching import pack
    from rlflow.workers.trainer.policy import split_logprobs

    groups = tiny_groups(num_groups=2)
    with torch.no_grad():
        logprobs, _ = load_policy(config, model)(pack(groups))
    return np.concatenate(split_logprobs(logprobs, [sample for group in groups for sample in group]))


def test_float32_on_a_gpu_agrees_with_the_cpu(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    _, logprobs, _ = take_step(tiny_config(), model, tmp_path / "rendezvous")
    np.testing.assert_allclose(logprobs, on_cpu(tiny_config(), model), atol=1e-3)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    norm, logprobs, _ = take_step(tiny_config(), model, tmp_path / "first")
    config = tiny_config()
    config.model.dtype = Dtype.bfloat16
    rounded_norm, rounded, parameters = take_step(config, model, tmp_path / "second")
    np.testing.assert_allclose(rounded, logprobs, atol=0.2)
    assert rounded_norm == pytest.approx(norm, rel=0.1)
    assert all(parameter.dtype == torch.float32 for parameter in parameters.values())


def test_offloaded_shards_train_alike(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    norm, _, parameters = take_step(tiny_config(), model, tmp_path / "first")
    config = tiny_config()
    config.trainer.offload = Offload.cpu
    other_norm, _, others = take_step(config, model, tmp_path / "second")
    assert other_norm == pytest.approx(norm, rel=1e-3)
    assert largest_relative_difference(others, parameters) < 1e-3


def test_a_sleeping_trainer_gives_its_memory_back(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    trainer = FsdpTrainer(tiny_config(), model, 0, 1, f"file://{tmp_path / 'rendezvous'}")
    trainer.accumulate([tiny_groups(num_groups=2)])
    trainer.step()
    before = {name: tensor.cpu().clone() for name, tensor in trainer.full_parameters()}
    held = torch.cuda.memory_allocated()
    trainer.offload()
    assert torch.cuda.memory_allocated() < held / 4
    trainer.reload()
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in trainer.full_parameters())
    trainer.close()


def test_a_frozen_model_in_bfloat16_keeps_its_frequencies(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    config = tiny_config()
    config.model.dtype = Dtype.bfloat16
    reference = FrozenPolicy(config, model)
    assert {parameter.device.type for parameter in reference._policy.parameters()} == {"cuda"}
    expected = dict(load_policy(config, model).model.named_buffers())
    for name, buffer in reference._policy.model.named_buffers():
        assert torch.equal(buffer.cpu(), expected[name]), name
    found = np.concatenate(reference.logprobs(tiny_groups(num_groups=2)))
    np.testing.assert_allclose(found, on_cpu(tiny_config(), model), atol=0.2)
