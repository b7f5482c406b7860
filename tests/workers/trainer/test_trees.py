"""Samples that share prefixes of any depth, as one row: loss and gradient are those of a padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import (
    largest_relative_difference,
    padded_logprobs,
    plain_loss,
    plain_model,
    random_tree,
    save_model,
    tiny_config,
    tiny_llama,
)

from rlflow.batching.pack import pack
from rlflow.config import Config
from rlflow.types import TrainSample
from rlflow.workers.trainer.objective import PolicyObjective
from rlflow.workers.trainer.policy import Policy, load_policy

ALLOWED = 1e-5
"""Of the largest value, in float32."""


def distinct_prefixes(samples: Sequence[TrainSample]) -> int:
    """The tokens that a tree computes, counted one by one: each prefix of what loss tokens depend on."""
    found: set[tuple[int, ...]] = set()
    for sample in (one.sample for one in samples if one.sample.loss_mask.any()):
        ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
        last = len(sample.prompt_ids) + int(np.flatnonzero(sample.loss_mask)[-1])
        found |= {tuple(ids[: length + 1]) for length in range(last)}
    return len(found)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Policy, nn.Module]:
    config, folder = tiny_config(), save_model(tiny_llama(), tmp_path_factory.mktemp("model"))
    return config, load_policy(config, folder), plain_model(folder, torch.float64)


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_a_tree_has_the_loss_and_the_gradient_of_the_padded_batch(
    first: int, models: tuple[Config, Policy, nn.Module]
) -> None:
    config, policy, plain = models
    worst = shared = 0.0
    for seed in range(first, first + 100):
        samples = random_tree(seed)
        packed = pack([samples])
        assert len(packed.input_ids) == max(1, distinct_prefixes(samples))
        shared += sum(one.sample.num_tokens for one in samples) - len(packed.input_ids)
        loss = PolicyObjective(config)(policy(packed), packed, version=0).loss
        loss.backward()
        rows = padded_logprobs(plain, [samples], config.rollout.temperature)
        losses = [plain_loss([row], [[one]], config) for row, one in zip(rows, samples, strict=True)]
        wanted = torch.stack(losses).sum()
        if not wanted.requires_grad:  # no sample has a loss token
            assert loss == 0
            assert not any(each.any() for each in gradients(policy.model).values())
            continue
        wanted.backward()
        scale = torch.stack(losses).abs().sum()  # samples cancel each other
        differences = (
            ((loss - wanted).abs() / scale).item(),
            largest_relative_difference(gradients(policy.model), gradients(plain)),
        )
        worst = max(worst, *differences)
        assert worst <= ALLOWED, (seed, differences)
    print(f"seeds {first} to {first + 99}: {shared:.0f} tokens shared or left out; largest difference {worst:.1e}")
