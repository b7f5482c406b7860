"""Packing never changes the gradient: every way to cut the same samples gives the sum that a padded batch gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import allowed_difference
from torch import Tensor
from training import (
    exact_and_allowed,
    largest_relative_difference,
    plain_gradients,
    plain_logprobs,
    save_model,
    tiny_config,
    tiny_groups,
    tiny_llama,
    tiny_qwen3,
)
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlflow.batching.pack import PackedBatch, pack
from rlflow.config import Config
from rlflow.types import TrainSample
from rlflow.workers.trainer.attention import attention_layout, packed_attention
from rlflow.workers.trainer.frozen import FrozenPolicy
from rlflow.workers.trainer.objective import PolicyObjective
from rlflow.workers.trainer.policy import Policy, load_policy

CPU = torch.device("cpu")

Cut = list[list[list[TrainSample]]]


def packed_gradients(
    policy: Policy, micro_batches: Cut, config: Config, share_prefixes: bool = True
) -> dict[str, Tensor]:
    policy.zero_grad()
    for groups in micro_batches:
        packed = pack(groups, share_prefixes)
        logprobs, entropies = policy(packed)
        PolicyObjective(config)((logprobs, entropies), packed, version=0).loss.backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", [tiny_llama(), tiny_qwen3()], ids=["llama-tied", "qwen3-untied"])
def test_every_cut_gives_the_gradient_of_the_padded_batch(architecture: PreTrainedConfig, tmp_path: Path) -> None:
    config = tiny_config()
    config.algorithm.kl_coefficient = 0.1
    path = save_model(architecture, tmp_path)
    groups = tiny_groups(with_reference=True)
    expected, allowed = exact_and_allowed(lambda *how: plain_gradients(path, how[0], config, how[1]), groups)
    policy = load_policy(config, path)
    in_chunks = Policy(policy.model, config.rollout.temperature, max_logits=300)
    backwards = [group[::-1] for group in groups[::-1]]
    cuts: dict[str, dict[str, Tensor]] = {
        "shared prefixes": packed_gradients(policy, [groups], config),
        "repeated prefixes": packed_gradients(policy, [groups], config, share_prefixes=False),
        "a group each": packed_gradients(policy, [[group] for group in groups], config),
        "a sample each": packed_gradients(policy, [[[sample]] for group in groups for sample in group], config),
        "other order": packed_gradients(policy, [backwards], config),
        "an empty micro-batch": packed_gradients(policy, [groups, []], config),
        "head in chunks": packed_gradients(in_chunks, [groups], config),
    }
    differences = {name: largest_relative_difference(found, expected) for name, found in cuts.items()}
    print(differences, "allowed:", allowed)
    assert max(differences.values()) <= allowed, differences


def entropy_gradients(
    path: str, groups: list[list[TrainSample]], config: Config, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Of the bonus alone, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for sample in (one.sample for group in groups for one in group):
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1] / config.rollout.temperature
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        (-config.algorithm.entropy_bonus * entropies[torch.from_numpy(sample.loss_mask)].sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_bonus_for_entropy_has_the_gradient_of_its_definition(tmp_path: Path) -> None:
    config = tiny_config()
    config.algorithm.entropy_bonus = 0.1
    path, groups = save_model(tiny_llama(), tmp_path), tiny_groups()
    for one in (one for group in groups for one in group):
        one.advantage = 0.0
    expected, allowed = exact_and_allowed(lambda *how: entropy_gradients(path, how[0], config, how[1]), groups)
    policy = load_policy(config, path)
    for found in (policy, Policy(policy.model, config.rollout.temperature, max_logits=300)):
        assert largest_relative_difference(packed_gradients(found, [groups], config), expected) <= allowed


def test_an_empty_micro_batch_has_zero_gradient(tmp_path: Path) -> None:
    config = tiny_config()
    found = packed_gradients(load_policy(config, save_model(tiny_llama(), tmp_path)), [[]], config)
    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert all(not gradient.any() for gradient in found.values())


def test_the_same_rows_give_the_same_bits(tmp_path: Path) -> None:
    config = tiny_config()
    policy = load_policy(config, save_model(tiny_llama(), tmp_path))
    first = {name: g.clone() for name, g in packed_gradients(policy, [tiny_groups()], config).items()}
    second = packed_gradients(policy, [tiny_groups()], config)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    config = tiny_config()
    policy = load_policy(config, save_model(tiny_llama(attention_dropout=0.5), tmp_path))
    expected = {name: g.clone() for name, g in packed_gradients(policy, [tiny_groups()], config).items()}
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    found = packed_gradients(policy, [tiny_groups()], config)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_logprobs_and_entropies_are_those_of_the_model(tmp_path: Path) -> None:
    config = tiny_config()
    path = save_model(tiny_llama(), tmp_path)
    groups = tiny_groups()
    samples = [sample for group in groups for sample in group]

    def plain(dtype: torch.dtype) -> dict[str, Tensor]:
        _, rows = plain_logprobs(path, groups, config.rollout.temperature, dtype)
        masks = [torch.from_numpy(sample.sample.loss_mask) for sample in samples]
        return {str(index): row.detach() * mask for index, (row, mask) in enumerate(zip(rows, masks, strict=True))}

    exact = plain(torch.float64)
    found = {str(i): torch.from_numpy(row) for i, row in enumerate(FrozenPolicy(config, path).logprobs(groups))}
    allowed = allowed_difference([largest_relative_difference(plain(torch.float32), exact)])
    assert largest_relative_difference(found, exact) <= allowed

    uniform = load_policy(config, path)
    torch.nn.init.zeros_(uniform.model.get_parameter("model.embed_tokens.weight"))  # tied: all logits are 0
    _, entropies = uniform(pack(groups))
    # A sum of 67 terms is off by at most 67 roundings.
    rounding = 67 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(entropies, torch.full_like(entropies, float(np.log(67))), atol=0, rtol=rounding)


def test_tis_weighs_the_policy_gradient(tmp_path: Path) -> None:
    config = tiny_config()
    config.algorithm.loss, config.algorithm.loss_args = "reinforce", {}
    config.algorithm.corrections = {"tis": {"cap": 1.5}}
    path = save_model(tiny_llama(), tmp_path)
    groups = tiny_groups()

    def plain(groups: Sequence[Sequence[TrainSample]], dtype: torch.dtype) -> dict[str, Tensor]:
        model, rows = plain_logprobs(path, groups, config.rollout.temperature, dtype)
        total = torch.zeros((), dtype=dtype)
        for sample, logprobs in zip([sample for group in groups for sample in group], rows, strict=True):
            mask = torch.from_numpy(sample.sample.loss_mask)
            ratio = (logprobs.detach() - torch.from_numpy(sample.sample.logprobs)).exp()
            total = total - (sample.advantage * ratio.clamp(max=1.5) * logprobs)[mask].sum()
        total.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, allowed = exact_and_allowed(plain, groups)
    found = packed_gradients(load_policy(config, path), [groups], config)
    assert largest_relative_difference(found, expected) <= allowed


def attended(packed: PackedBatch, states: Sequence[Tensor], use_flex: bool) -> Tensor:
    """[1, T, H, D], from a query, keys and values [1, H, T, D] that are padded as the layout asks."""
    layout = attention_layout(packed, states[0].device, use_flex)
    query, key, value = (torch.nn.functional.pad(state, (0, 0, 0, layout.num_padding)) for state in states)
    output, _ = packed_attention(torch.nn.Identity(), query, key, value, None, scaling=0.25, layout=layout)
    return output[:, : len(packed.input_ids)]


def attend(groups: Sequence[Sequence[TrainSample]], device: torch.device, use_flex: bool) -> list[Tensor]:
    """Outputs, and gradients by query, key and value, of one layer with 4 query heads on 2 key heads."""
    packed = pack(groups)
    torch.manual_seed(0)
    states = [torch.randn(1, heads, len(packed.input_ids), 16, device=device) for heads in (4, 2, 2)]
    query, key, value = (state.requires_grad_() for state in states)
    output = attended(packed, [query, key, value], use_flex)
    weights = torch.arange(output.numel(), device=device).reshape(output.shape).sin()
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), [query, key, value])]


def test_the_flex_mask_equals_the_blocks() -> None:
    # Eager flex attention on CPU has no backward; outputs decide about the mask.
    packed = pack(tiny_groups())
    states = [torch.randn(1, heads, len(packed.input_ids), 16, dtype=torch.float64) for heads in (4, 2, 2)]
    outputs = [attended(packed, states, use_flex) for use_flex in (False, True)]
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_flex_attention_equals_the_blocks() -> None:
    found = attend(tiny_groups(), torch.device("cuda"), use_flex=True)
    expected = attend(tiny_groups(), CPU, use_flex=False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-3)


def test_blocks_attend_as_written_out_per_sample() -> None:
    groups = tiny_groups()
    packed = pack(groups)
    query, key, value = (torch.randn(1, 2, len(packed.input_ids), 8, dtype=torch.float64) for _ in range(3))
    layout = attention_layout(packed, CPU, use_flex=False)
    output, _ = packed_attention(torch.nn.Identity(), query, key, value, None, scaling=0.5, layout=layout)
    for segment, start in enumerate(packed.segment_starts):
        rows = [*range(start, start + packed.segment_lengths[segment])]
        while (segment := packed.segment_parents[segment]) >= 0:
            start = packed.segment_starts[segment]
            rows = [*range(start, start + packed.segment_lengths[segment]), *rows]
        q, k, v = query[0, :, rows], key[0, :, rows], value[0, :, rows]
        scores = (q @ k.transpose(1, 2) * 0.5).masked_fill(~torch.ones(len(rows), len(rows)).tril().bool(), -torch.inf)
        expected = (scores.softmax(-1) @ v).transpose(0, 1)
        torch.testing.assert_close(output[0, rows], expected)
