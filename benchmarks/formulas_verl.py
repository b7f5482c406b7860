"""verl's side of formulas.py: its own functions on the same tokens.

    python formulas_verl.py BATCH.npz FORMULAS_JSON RESULTS.npz

Runs under the Python of verl's own virtual environment and imports nothing of rlflow.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig


class Verl:
    def __init__(self, batch: dict[str, Tensor]) -> None:
        self._batch = batch
        self._mask = batch["mask"].double()

    def _with_gradient(self, leaf: Tensor, value: Tensor) -> dict[str, Tensor]:
        (gradient,) = torch.autograd.grad(value, leaf)
        return {"value": value.detach(), "gradient": gradient}

    def loss(self, mode: str, aggregation: str, **clips: float) -> dict[str, Tensor]:
        logprobs = self._batch["logprobs"].clone().requires_grad_()
        config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **clips)
        value, _ = core_algos.get_policy_loss_fn(mode)(
            old_log_prob=self._batch["behaviour"],
            log_prob=logprobs,
            advantages=self._batch["advantages"],
            response_mask=self._mask,
            loss_agg_mode=aggregation,
            config=config,
        )
        return self._with_gradient(logprobs, value)

    def kl(self, name: str) -> dict[str, Tensor]:
        logprobs = self._batch["logprobs"].clone().requires_grad_()
        penalty = core_algos.kl_penalty(logprobs, self._batch["reference"], name)
        return self._with_gradient(logprobs, core_algos.agg_loss(penalty, self._mask, "token-mean"))

    def correction(self, threshold: str | float, level: str = "", rejection: str = "") -> dict[str, Tensor]:
        ratio = self._batch["logprobs"] - self._batch["behaviour"]
        if rejection:
            return {"value": compute_rollout_rejection_mask(ratio, self._mask, rejection, threshold)[0]}
        weights, _ = compute_rollout_correction_weights(ratio, self._mask, level, threshold)
        return {"value": weights * self._mask}

    def advantage(self, name: str, options: dict[str, Any]) -> dict[str, Tensor]:
        rewards = torch.zeros_like(self._mask)
        rewards[torch.arange(len(rewards)), self._batch["last_tokens"]] = self._batch["rewards"]
        given: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": self._mask, **options}
        config = OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True})
        if name == "gae":
            given["values"] = self._batch["old_values"]
        elif name == "remax":
            given |= {"reward_baselines": self._batch["baselines"], "config": config}
        elif name == "reinforce_plus_plus":
            given["config"] = config
        else:
            given |= {"index": self._batch["groups"].numpy(), "config": config}
        advantages, _ = core_algos.get_adv_estimator_fn(name)(**given)
        return {"value": advantages * self._mask}

    def value(self, clip: float) -> dict[str, Tensor]:
        values = self._batch["values"].clone().requires_grad_()
        loss, _ = core_algos.compute_value_loss(
            values, self._batch["returns"], self._batch["old_values"], self._mask, clip
        )
        return self._with_gradient(values, loss)


def main() -> None:
    source, formulas, target = sys.argv[1:]
    with np.load(source, allow_pickle=False) as arrays:
        verl = Verl({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    found: dict[str, np.ndarray] = {}
    for key, asked in json.loads(formulas).items():
        parts = getattr(verl, asked.pop("kind"))(**asked)
        found |= {f"{key}/{part}": number.numpy() for part, number in parts.items()}
    np.savez(target, allow_pickle=False, **found)
    print(json.dumps({"formulas": len(found)}))


if __name__ == "__main__":
    main()
