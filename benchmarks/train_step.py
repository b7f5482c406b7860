"""`rlflow bench train`: one optimiser step on the CPU, packed, beside other ways to train on the same samples.

    ragged       packed (ours), padded (a transformers loop written by hand), TRL's GRPOTrainer
    long_prompt  packed (ours), unshared (ours, every sample with a copy of its prompt)

Every side runs in a process of its own, in turn, so that each has its own peak of memory and all meet the same machine.
That they do the same work shows in the norm of their first gradient.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from other_systems import figures_of, other_python, worker_script

from rlflow.config import Config
from rlflow.models.resolve import resolve_model

ROUNDS = 3
TIMEOUT_S = 1800.0
VOCABULARY = 49152
"""Tokens that the model of `Config()` knows."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Workload:
    """The samples of a step. Tokens are random: what they are does not matter to the time."""

    groups: int
    group_size: int
    prompt: int
    """Tokens."""
    shortest: int
    """Tokens of a completion."""
    longest: int
    sides: tuple[str, ...]
    """Ours first."""

    def write(self, path: Path, vocabulary: int = VOCABULARY) -> None:
        """Arrays [groups, group size, ...], completions padded at their end."""
        random = np.random.default_rng(0)
        shape = (self.groups, self.group_size, self.longest)
        np.savez(
            path,
            prompts=random.integers(0, vocabulary, (self.groups, self.prompt)),
            completions=random.integers(0, vocabulary, shape),
            lengths=random.integers(self.shortest, self.longest + 1, shape[:2]),
            logprobs=random.normal(-10, 0.5, shape).astype(np.float32),
            advantages=random.normal(0, 1, shape[:2]).astype(np.float32),
        )


WORKLOADS = {
    "ragged": Workload(groups=1, group_size=8, prompt=256, shortest=32, longest=256, sides=("packed", "padded", "trl")),
    "long_prompt": Workload(groups=1, group_size=16, prompt=512, shortest=64, longest=64, sides=("packed", "unshared")),
}


def training() -> dict[str, float]:
    """Medians of the rounds: seconds a step, tokens/s, peak memory; ratios to ours, and our share of matmul speed.

    Raises RunError when a side fails.
    """
    script = worker_script("trl_training_worker.py")
    trl = [str(other_python("trl-venv", "trl.lock")), str(script)]
    ours = [sys.executable, str(worker_script("train_step_side.py"))]
    model = resolve_model(Config().model.path)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="rlflow-bench-") as folder:
        for name, workload in WORKLOADS.items():
            workload.write(Path(folder) / f"{name}.npz")
        for number in range(ROUNDS):
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            for name, workload in WORKLOADS.items():
                for side in workload.sides:
                    command = trl if side == "trl" else [*ours, side]
                    words = [*command, str(Path(folder) / f"{name}.npz"), str(model)]
                    figures = figures_of(f"the side {side} of {name}", words, TIMEOUT_S)
                    found.setdefault((name, side), []).append(figures)
    return summarize(found)


def summarize(found: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """`found` has the figures of each round of (workload, side)."""
    figures = {
        f"{workload}/{side}/{name}": statistics.median(run[name] for run in runs)
        for (workload, side), runs in found.items()
        for name in runs[0]
    }
    for name, workload in WORKLOADS.items():
        ours, *others = (f"{name}/{side}" for side in workload.sides)
        for other in others:
            figures[f"{other}/speed_up"] = figures[f"{other}/step_s"] / figures[f"{ours}/step_s"]
            figures[f"{other}/memory_ratio"] = figures[f"{other}/peak_mb"] / figures[f"{ours}/peak_mb"]
            difference = figures[f"{other}/grad_norm"] / figures[f"{ours}/grad_norm"] - 1
            figures[f"{other}/gradient_difference"] = abs(difference)
    return figures
