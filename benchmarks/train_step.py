"""`rlflow bench train`: one optimiser step on the CPU, packed, beside other ways to train on the same samples.

    ragged       packed (ours), rows (ours, of a model that goes in padded rows), padded (a transformers loop written by
                 hand), TRL's GRPOTrainer
    window       packed (ours), padded and TRL's, each layer with a window of attention shorter than the samples
    long_prompt  packed (ours), unshared (ours, every sample with a copy of its prompt)
    forks        packed (ours), prompts (ours, sharing prompts alone), padded; episodes that fork at every turn

Every side runs in a process of its own, in turn, so that each has its own peak of memory and all meet the same machine.
That they do the same work shows in the norm of their first gradient.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import forks
from other_systems import figures_of, other_python, worker_script

from rlflow.config import Config
from rlflow.models.resolve import resolve_model
from rlflow.runtime.environment import keep_memory, share_cpu
from rlflow.tools.bench.training_sides import Workload, read_groups, run_side

ROUNDS = 3
TIMEOUT_S = 1800.0
VOCABULARY = 49152
"""Tokens that the model of `Config()` knows."""


WINDOW = 128
"""Tokens that a token of the workload `window` sees."""
SIDES = {
    "ragged": ("packed", "rows", "padded", "trl"),
    "window": ("packed", "padded", "trl"),
    "long_prompt": ("packed", "unshared"),
    "forks": ("packed", "prompts", "padded"),
}
"""Ours first."""
WORKLOADS = {
    "ragged": Workload(groups=1, group_size=8, prompt=256, shortest=32, longest=256),
    "window": Workload(groups=1, group_size=8, prompt=256, shortest=32, longest=256),
    "long_prompt": Workload(groups=1, group_size=16, prompt=512, shortest=64, longest=64),
}


def training() -> dict[str, float]:
    """Medians of the rounds: seconds a step, tokens/s, peak memory; ratios to ours, and our share of matmul speed.

    Raises RunError when a side fails.
    """
    script = worker_script("trl_training_worker.py")
    trl = [str(other_python("trl-venv", "trl.lock")), str(script)]
    ours = [sys.executable, str(worker_script("train_step.py"))]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="rlflow-bench-") as folder:
        model = Path(resolve_model(Config().model.path))
        models = dict.fromkeys(SIDES, model) | {"window": with_window(model, Path(folder) / "windowed")}
        for name, workload in WORKLOADS.items():
            workload.write(Path(folder) / f"{name}.npz", VOCABULARY)
        asyncio.run(forks.write(Path(folder) / "forks.npz"))
        for number in range(ROUNDS):
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            for name, sides in SIDES.items():
                for side in sides:
                    command = trl if side == "trl" else [*ours, side]
                    words = [*command, str(Path(folder) / f"{name}.npz"), str(models[name])]
                    figures = figures_of(f"the side {side} of {name}", words, TIMEOUT_S)
                    found.setdefault((name, side), []).append(figures)
    return summarize(found)


def with_window(model: Path, folder: Path, window: int = WINDOW) -> Path:
    """The Llama model of a folder as a Mistral model, whose weights have the same names, with a window; in `folder`."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def summarize(found: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """`found` has the figures of each round of (workload, side)."""
    figures = {
        f"{workload}/{side}/{name}": statistics.median(run[name] for run in runs)
        for (workload, side), runs in found.items()
        for name in runs[0]
    }
    for name, sides in SIDES.items():
        ours, *others = (f"{name}/{side}" for side in sides)
        for other in others:
            figures[f"{other}/speed_up"] = figures[f"{other}/step_s"] / figures[f"{ours}/step_s"]
            figures[f"{other}/memory_ratio"] = figures[f"{other}/peak_mb"] / figures[f"{ours}/peak_mb"]
            difference = figures[f"{other}/grad_norm"] / figures[f"{ours}/grad_norm"] - 1
            figures[f"{other}/gradient_difference"] = abs(difference)
    return figures


if __name__ == "__main__":  # one of our sides, in a process of its own: SIDE SAMPLES.npz MODEL
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # every side computes on the CPU
    chosen_side, samples_file, model_folder = sys.argv[1:]
    if chosen_side != "padded":
        # As the trainer's actor sets its process up.
        share_cpu(len(os.sched_getaffinity(0)))
        keep_memory()
    print(json.dumps(run_side(chosen_side, read_groups(Path(samples_file)), model_folder)))
