"""Metrics of the trainer's speed."""

from __future__ import annotations

import pytest

from rlflow.roles import StepOutcome, TrainWork
from rlflow.telemetry.throughput import peak_flops, throughput_of


def outcome(device: str, memory_peaks: list[int]) -> StepOutcome:
    work = TrainWork(tokens=8_000, flops=989e12, padded_flops=1978e12, num_ranks=4, device=device)
    return StepOutcome(applied=True, grad_norm=1.0, learning_rate=0.1, metrics={}, work=work, memory_peaks=memory_peaks)


def test_the_share_of_the_peak_while_the_ranks_work() -> None:
    """Four H100 that do in one second what one can do in a second use a quarter; padded, half."""
    assert throughput_of(outcome("NVIDIA H100 80GB HBM3", [2**30, 3 * 2**29]), 1.0, is_bfloat16=True) == {
        "throughput/train_tokens_per_s_rank": 2_000.0,
        "throughput/train_tflops_rank": 247.25,
        "throughput/train_tflops_rank_padded": 494.5,
        "throughput/mfu": 0.25,
        "throughput/mfu_padded": 0.5,
        "memory/trainer_peak_gb/rank_0": 1.0,
        "memory/trainer_peak_gb/rank_1": 1.5,
    }


@pytest.mark.parametrize(("device", "is_bfloat16"), [("cpu", True), ("NVIDIA H100 80GB HBM3", False)])
def test_without_a_peak_there_is_a_rate_but_no_share(device: str, is_bfloat16: bool) -> None:
    found = throughput_of(outcome(device, []), 2.0, is_bfloat16=is_bfloat16)
    assert found["throughput/train_tflops_rank"] == 123.625
    assert found["throughput/mfu"] is None
    assert found["throughput/mfu_padded"] is None


def test_a_step_without_work_or_time_has_no_rate() -> None:
    assert throughput_of(outcome("cpu", []), 0.0, is_bfloat16=True) == {}
    plain = StepOutcome(applied=True, grad_norm=1.0, learning_rate=0.1, metrics={})
    assert throughput_of(plain, 1.0, is_bfloat16=True) == {}


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GeForce RTX 5090", None),
    ],
)
def test_peaks_by_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak
