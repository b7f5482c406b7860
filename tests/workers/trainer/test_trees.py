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
"""Of the largest value of a parameter's gradient, and of the sum of the samples' losses without their signs."""


def distinct_prefixes(samples: Sequence[TrainSample]) -> int:
    """The tokens that a tree computes, counted one by one: each prefix of what loss tokens depend on."""
    found: set[tuple[int, ...]] = set()
    for sample in (one.sample for one in samples):
        ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
        last = len(sample.prompt_ids) + int(np.flatnonzero(sample.loss_mask)[-1])
        found |= {tuple(ids[: length + 1]) for length in range(last)}
    return len(found)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Policy, nn.Module, nn.Module]:
    """Ours, and transformers' in double and in single precision."""
    config, folder = tiny_config(), save_model(tiny_llama(), tmp_path_factory.mktemp("model"))
    return config, load_policy(config, folder), plain_model(folder, torch.float64), plain_model(folder)


def padded_losses(model: nn.Module, samples: list[TrainSample], config: Config) -> Tensor:
    """[samples], of one padded batch."""
    rows = padded_logprobs(model, [samples], config.rollout.temperature)
    return torch.stack([plain_loss([row], [[one]], config) for row, one in zip(rows, samples, strict=True)])


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_a_tree_has_the_loss_and_the_gradient_of_the_padded_batch(
    first: int, models: tuple[Config, Policy, nn.Module, nn.Module]
) -> None:
    config, policy, exact, single = models
    differences: list[float] = []
    num_left_out = 0
    for seed in range(first, first + 100):
        samples = [one for one in random_tree(seed) if one.sample.loss_mask.any()]
        if not samples:
            continue
        packed = pack([samples])
        assert len(packed.input_ids) == distinct_prefixes(samples)
        num_left_out += sum(one.sample.num_tokens for one in samples) - len(packed.input_ids)
        loss = PolicyObjective(config)(policy(packed), packed, version=0).loss
        loss.backward()
        losses = padded_losses(exact, samples, config)
        losses.sum().backward()
        found, wanted = gradients(policy.model), gradients(exact)
        assert (loss - losses.sum()).abs() <= ALLOWED * losses.abs().sum()
        differences.append(largest_relative_difference(found, wanted))
        if differences[-1] > ALLOWED:  # advantages cancel each other until rounding is left, of the padded batch too
            padded_losses(single, samples, config).sum().backward()
            assert differences[-1] <= 2 * largest_relative_difference(gradients(single), wanted), seed
    above = sum(each > ALLOWED for each in differences)
    print(
        f"{len(differences)} trees, {num_left_out} tokens less; differ by {max(differences):.1e} at most, {above} above"
    )
    assert above <= 1
