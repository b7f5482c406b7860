"""How fast the trainer computes, and how much of what its GPUs could do that is. Pure."""

from rlflow.roles import StepOutcome
from rlflow.telemetry.metrics import StepRecord

_PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
)
"""Part of a GPU's name -> what it computes in a second in bfloat16, dense, as NVIDIA's data sheets give it. The first
that fits counts."""


def peak_flops(device: str) -> float | None:
    """Floating-point operations a second of a GPU by torch's name of it; None for a CPU, or one that is not known."""
    return next((peak for part, peak in _PEAKS if part in device), None)


def throughput_of(outcome: StepOutcome, train_s: float, *, is_bfloat16: bool) -> StepRecord:
    """Metrics of the policy's trainer, whose ranks were at work for `train_s` seconds; without work, none.

    `mfu` is the share of the GPUs' peak that the model's own operations take while the trainer works. The padded figure
    is what a trainer would need that pads its samples and shares no prompt, to do the same in that time: compare
    with others' figures by that one. They are None on a CPU, on an unknown GPU, and in float32.
    """
    work = outcome.work
    memory = {f"memory/trainer_peak_gb/rank_{rank}": peak / 2**30 for rank, peak in enumerate(outcome.memory_peaks)}
    if work is None or train_s <= 0:
        return {**memory}
    seconds = train_s * work.num_ranks
    peak = peak_flops(work.device) if is_bfloat16 else None
    return {
        "throughput/train_tokens_per_s_rank": work.tokens / seconds,
        "throughput/train_tflops_rank": work.flops / seconds / 1e12,
        "throughput/train_tflops_rank_padded": work.padded_flops / seconds / 1e12,
        "throughput/mfu": None if peak is None else work.flops / seconds / peak,
        "throughput/mfu_padded": None if peak is None else work.padded_flops / seconds / peak,
        **memory,
    }
