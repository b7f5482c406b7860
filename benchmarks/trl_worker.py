"""Train a few steps with TRL's GRPOTrainer and print the seconds of each step as one JSON line.

Runs under the Python of TRL's own virtual environment, started by `vs_trl.py`; it imports nothing of rlflow.
TRL is given its best settings for this work: no gradient checkpointing, no reference model, no saving, and no second
forward pass for old log-probabilities, since every batch is used for one update.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float | None]:
    """1.0 where the last number of the reply equals the answer."""
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = NUMBER.findall(completion[0]["content"])
        scores.append(1.0 if numbers and float(numbers[-1]) == float(expected) else 0.0)
    return scores


def use_float32_vllm() -> None:
    """Let TRL's colocated vLLM decode in float32 and take new weights correctly.

    Left alone, vLLM turns a float32 model into bfloat16, several times slower on most CPUs and far from the trainer's
    log-probabilities; and TRL's way of loading weights needs linear layers that oneDNN has not packed.
    """
    import vllm
    import vllm._custom_ops
    from trl.generation import vllm_generation

    vllm._custom_ops._supports_onednn = False
    changed: Any = vllm_generation
    changed.LLM = functools.partial(vllm.LLM, dtype="float32", enforce_eager=True)


def settings(arguments: argparse.Namespace, output_dir: str) -> dict[str, Any]:
    """GRPOConfig's arguments; one optimiser step trains on `groups * group_size` samples."""
    samples = arguments.groups * arguments.group_size
    micro_batch = min(arguments.micro_batch, samples)
    return {
        "output_dir": output_dir,
        "max_steps": arguments.steps,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": samples // micro_batch,
        "num_generations": arguments.group_size,
        "max_completion_length": arguments.max_new_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
        "use_vllm": arguments.mode == "vllm",
        "vllm_mode": "colocate",
        "vllm_max_model_length": arguments.max_length,
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_importance_sampling_correction": arguments.check,
    }


def train(arguments: argparse.Namespace, output_dir: str) -> dict[str, Any]:
    """Seconds from the end of one step to the end of the next, and the reward of each."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    if arguments.mode == "vllm":
        use_float32_vllm()
    torch.set_num_threads(arguments.threads)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    trainer = GRPOTrainer(
        model=str(arguments.model),
        reward_funcs=reward,
        args=GRPOConfig(**settings(arguments, output_dir)),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    keys = ("reward", "completions/mean_length", "sampling/sampling_logp_difference/mean")
    return {
        "step_s": [end - start for start, end in pairwise(ends)],
        **{key: [entry[key] for entry in logs if key in entry] for key in keys},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["transformers", "vllm"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL: prompt (messages), answer")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--check", action="store_true", help="also measure how far vLLM and trainer are apart (slower)")
    arguments = parser.parse_args()
    os.environ.update(
        OMP_NUM_THREADS=str(arguments.threads),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        TORCHDYNAMO_DISABLE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    with tempfile.TemporaryDirectory() as output_dir:
        result = train(arguments, output_dir)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
