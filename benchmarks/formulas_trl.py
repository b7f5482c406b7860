"""TRL's side of formulas.py: the loss of its GRPOTrainer on the same tokens.

    python formulas_trl.py BATCH.npz FORMULAS_JSON RESULTS.npz

Runs under the Python of TRL's own virtual environment and imports nothing of rlflow. The trainer is made without a
model: only what its loss reads is set, and its log-probabilities are the given ones.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer


class Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        del reduction
        return tensor


class Loss(GRPOTrainer):
    def __init__(self, logprobs: Tensor, options: dict[str, Any]) -> None:
        args = GRPOConfig(output_dir="unused", report_to="none", use_cpu=True, bf16=False)
        args.delta = options.pop("delta", None)
        args.use_bias_correction_kl = False
        self.beta = 1.0 if options.pop("kl", False) else 0.0
        self.args = args
        self.loss_type = "dapo"
        self.importance_sampling_level = "token"
        self.epsilon_low = self.epsilon_high = 0.2
        self.off_policy_mask_threshold = None
        vars(self).update(options)
        self.top_entropy_quantile = 1.0
        self.aux_loss_enabled = self.use_vllm = self._entropy_bonus_enabled = False
        self.vllm_importance_sampling_correction = False
        self.max_completion_length = logprobs.shape[1]
        self.current_gradient_accumulation_steps = args.steps_per_generation = 1
        self.model = SimpleNamespace(training=True)
        self.accelerator = Accelerator()
        self._metrics = {"train": defaultdict(list)}
        self._logprobs = logprobs

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        return self._logprobs, torch.zeros_like(self._logprobs), None


def value_and_gradient(batch: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    kind = options.pop("kind")
    if kind == "correction":
        mask = GRPOTrainer.get_off_policy_mask(
            advantages=batch["advantages"][:, :1],
            per_token_logps=batch["logprobs"],
            sampling_per_token_logps=batch["behaviour"],
            mask=batch["mask"].double(),
            off_policy_threshold=options["off_policy_mask_threshold"],
        )
        return {"value": mask * batch["mask"].double()}
    logprobs = batch["logprobs"].clone().requires_grad_()
    nothing = torch.zeros(len(logprobs), 0, dtype=torch.int64)
    advantages = batch["advantages"][:, 0]
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(batch["mask"], dtype=torch.int64),
        "completion_mask": batch["mask"].double(),
        "advantages": torch.zeros_like(advantages) if kind == "kl" else advantages,
        "old_per_token_logps": batch["behaviour"],
        "ref_per_token_logps": batch["reference"],
        "num_items_in_batch": batch["mask"].sum(),
    }
    value = Loss(logprobs, options)._compute_loss(None, inputs)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {"value": value.detach(), "gradient": gradient}


def main() -> None:
    source, formulas, target = sys.argv[1:]
    with np.load(source, allow_pickle=False) as arrays:
        batch = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    found: dict[str, np.ndarray] = {}
    for key, options in json.loads(formulas).items():
        parts = value_and_gradient(batch, options)
        found |= {f"{key}/{part}": number.numpy() for part, number in parts.items()}
    np.savez(target, allow_pickle=False, **found)
    print(json.dumps({"formulas": len(found)}))


if __name__ == "__main__":
    main()
