"""TRL's side of `rlflow bench train`: its GRPOTrainer steps on recorded samples; the last line is one JSON object.

    python trl_training_worker.py SAMPLES.npz MODEL

Runs under the Python of TRL's own virtual environment and imports nothing of rlflow. Generation is replaced by the
recorded samples, a group a micro-batch; everything after it is TRL's. Of two steps the second is timed.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 2


def settings(num_groups: int, group_size: int, longest: int, output_dir: str, on_gpu: bool) -> dict[str, Any]:
    """GRPOConfig's arguments: no second forward pass, no reference, no saving; on a GPU in
    bfloat16 with gradient checkpointing, like the trainer that it is measured beside.
    """
    return {
        "output_dir": output_dir,
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": group_size,
        "gradient_accumulation_steps": num_groups,
        "num_generations": group_size,
        "max_completion_length": longest,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "gradient_checkpointing": on_gpu,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "fp16": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }


def micro_batches(path: Path) -> list[dict[str, Any]]:
    """One a group, as TRL prepares it: completions padded to the longest of the group."""
    import torch

    with np.load(path, allow_pickle=False) as arrays:
        recorded = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    found = []
    for group, lengths in enumerate(recorded["lengths"]):
        longest = int(lengths.max())
        prompts = recorded["prompts"][group]
        found.append(
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": recorded["completions"][group, :, :longest],
                "completion_mask": (torch.arange(longest) < lengths[:, None]).long(),
                "advantages": recorded["advantages"][group],
                "old_per_token_logps": recorded["logprobs"][group, :, :longest],
                "num_items_in_batch": recorded["lengths"].sum(),
            }
        )
    return found


def train(path: Path, model: str, output_dir: str) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    batches = micro_batches(path)
    num_groups, group_size = len(batches), len(batches[0]["prompt_ids"])
    longest = max(batch["completion_ids"].shape[1] for batch in batches)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Recorded(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            return batches[self._step % num_groups]

    trainer = Recorded(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**settings(num_groups, group_size, longest, output_dir, torch.cuda.is_available())),
        train_dataset=Dataset.from_list([{"prompt": "0"}] * (STEPS * num_groups)),
        callbacks=[Clock()],
    )
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    seconds = [end - start for start, end in pairwise(ends)]
    tokens = sum(int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()) for batch in batches)
    return {
        "step_s": seconds[-1],
        "tokens_per_s": tokens / seconds[-1],
        "row_tokens": sum(b["prompt_ids"].numel() + b["completion_ids"].numel() for b in batches),
        "peak_mb": torch.cuda.max_memory_allocated() / 2**20
        if torch.cuda.is_available()
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "grad_norm": float(norms[0]),
    }


def main() -> None:
    path, model = sys.argv[1:]
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TORCHDYNAMO_DISABLE="1")
    with tempfile.TemporaryDirectory() as output_dir:
        figures = train(Path(path), model, output_dir)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
