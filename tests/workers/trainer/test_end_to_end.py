"""Samples end to end through layers with a state: exact with kernels that heed boundaries, chosen with no others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import linear_kernels
import numpy as np
import pytest
import torch
from linear_kernels import causal_conv1d_fn, chunk_gated_delta_rule
from test_ways import IN_ROWS, each_alone, gradients, settled, sized
from torch import Tensor
from training import largest_relative_difference, random_tree, save_model, tiny_config, tiny_groups, tiny_llama
from transformers import Lfm2Config, OlmoHybridConfig, Qwen3NextConfig

from rlflow.batching.pack import Conversation, PackedBatch, pack, pack_conversations
from rlflow.batching.plan import runs_of
from rlflow.config import Checkpointing, Config
from rlflow.errors import ConfigError
from rlflow.workers.trainer import policy
from rlflow.workers.trainer.attention import AttentionLayout, attention_layout
from rlflow.workers.trainer.flops import RowSizes, laid_out_sizes, padded_sizes
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.layers import decoder_layers, has_experts, wrap_as_asked
from rlflow.workers.trainer.policy import load_policy
from rlflow.workers.trainer.rows import boundaries, end_to_end
from rlflow.workers.trainer.way import Way, check_packed, way_of

LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRIDS = {
    "Qwen3.5": IN_ROWS["linear attention"],
    "Qwen3-Next": sized(Qwen3NextConfig, head_dim=8, shared_expert_intermediate_size=16, **LINEAR, **EXPERTS),
    "OLMo hybrid": sized(OlmoHybridConfig, **LINEAR),
    "LFM2": sized(Lfm2Config, layer_types=["conv", "full_attention"]),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    linear_kernels.install(monkeypatch, causal_conv1d_fn, chunk_gated_delta_rule)


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_kernels_of_these_tests_compute_what_transformers_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, groups = save_model(HYBRIDS[family], tmp_path), tiny_groups()
    expected = each_alone(folder, groups, 0.7, torch.float32)
    linear_kernels.install(monkeypatch, causal_conv1d_fn, chunk_gated_delta_rule)
    assert largest_relative_difference(each_alone(folder, groups, 0.7, torch.float32), expected) < 1e-4


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.usefixtures("kernels")
def test_each_family_gives_the_gradients_of_every_sample_alone(family: str, tmp_path: Path) -> None:
    config = tiny_config()
    folder, groups = save_model(HYBRIDS[family], tmp_path), tiny_groups()
    found = load_policy(config, folder)
    agreement = settled(found)
    assert agreement.way is Way.end_to_end
    expected = each_alone(folder, groups, config.rollout.temperature, torch.float64)
    if not has_experts(found.model.config):  # which torch multiplies in single precision only
        found = load_policy(config, folder, dtype=torch.float64)
    difference = largest_relative_difference(gradients(found, groups), expected)
    print(f"{family}: {agreement}, gradients {difference:.2g}")
    assert difference <= 1e-5


@pytest.mark.usefixtures("kernels")
def test_padding_behind_the_row_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of CUDA takes rows of whole tiles."""
    found, packed = load_policy(tiny_config(), save_model(HYBRIDS["Qwen3.5"], tmp_path)), pack(tiny_groups())
    with torch.no_grad():
        expected, _ = found(packed)

        def for_cuda(row: PackedBatch, device: torch.device, use_flex: bool, windows: Any) -> AttentionLayout:
            layout = attention_layout(row, device, True, windows)
            assert layout.num_padding > 0
            return layout

        monkeypatch.setattr(policy, "attention_layout", for_cuda)
        padded, _ = found(packed)
    torch.testing.assert_close(padded, expected)


@pytest.mark.parametrize("missing", ["causal_conv1d", "fla", "the argument of one"])
def test_a_family_that_would_fall_back_goes_in_padded_rows(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
        raise AssertionError("not called")

    rule = {"fla": None, "the argument of one": older}.get(missing, chunk_gated_delta_rule)
    linear_kernels.install(monkeypatch, None if missing == "causal_conv1d" else causal_conv1d_fn, rule)
    assert way_of(load_policy(tiny_config(), save_model(HYBRIDS["Qwen3.5"], tmp_path)).model) is Way.padded


@pytest.mark.parametrize("forgetful", ["convolution", "rule"])
def test_kernels_that_forget_a_boundary_send_the_model_into_padded_rows(
    forgetful: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convolution(*args: Any, seq_idx: Tensor | None = None, activation: str | None = None) -> Tensor:
        return causal_conv1d_fn(*args, seq_idx=None, activation=activation)

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)

    chosen = (convolution, chunk_gated_delta_rule) if forgetful == "convolution" else (causal_conv1d_fn, rule)
    linear_kernels.install(monkeypatch, *chosen)
    found = load_policy(tiny_config(), save_model(HYBRIDS["Qwen3.5"], tmp_path))
    assert way_of(found.model) is Way.end_to_end
    with torch.no_grad():
        own, plain = found(pack(tiny_groups()), has_plain=True)
    print(f"{(own - plain).abs().mean():.2g} nats")
    agreement = settled(found)
    assert agreement.way is way_of(found.model) is Way.padded
    assert agreement.difference < 1e-5


@pytest.mark.usefixtures("kernels")
def test_prefixes_below_the_prompt_have_the_gradients_of_every_sample_alone(tmp_path: Path) -> None:
    config, folder = tiny_config(), save_model(HYBRIDS["Qwen3.5"], tmp_path)
    found = load_policy(config, folder, dtype=torch.float64)
    assert way_of(found.model) is Way.end_to_end
    for seed in range(6):
        tree = [[one for one in random_tree(seed) if one.sample.loss_mask.any()]]
        expected = each_alone(folder, tree, config.rollout.temperature, torch.float64)
        assert largest_relative_difference(gradients(found, tree), expected) <= 1e-5


@pytest.mark.usefixtures("kernels")
def test_ranks_cannot_share_tokens_of_samples_end_to_end(tmp_path: Path) -> None:
    model = load_policy(tiny_config(), save_model(HYBRIDS["Qwen3.5"], tmp_path)).model
    check_packed(model, 1)
    message = "a qwen3_5_text model, which goes end to end because of its layers of linear_attention; set it to 1"
    with pytest.raises(ConfigError, match=message):
        check_packed(model, 2)


def test_a_row_is_told_where_each_sample_begins() -> None:
    """Samples part within samples, and one ends within another."""
    ids = ([5, 6, 7, 8], [5, 6, 7, 9, 4], [5, 6, 3], [5, 6], [2])
    packed = pack_conversations(
        [Conversation(prompt_ids=np.array(each[:1]), reply_ids=np.array(each[1:])) for each in ids]
    )
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 4, 3, 2]
    row, place_of = end_to_end(packed)
    assert row.input_ids.tolist() == [5, 6, 7, 8, 5, 6, 7, 9, 4, 5, 6, 3, 2]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert row.segment_starts.tolist() == [0, 4, 9, 12]
    assert row.segment_lengths.tolist() == [4, 5, 3, 1]
    assert row.segment_parents.tolist() == [-1, -1, -1, -1]
    # The states of tokens that several have are taken from the first of them.
    assert place_of.tolist() == [0, 1, 2, 3, 7, 8, 11, 12]
    assert row.loss_positions.tolist() == [3, 8, 11, 1, 12]


def test_padding_is_a_segment_of_its_own() -> None:
    told = boundaries(np.array([3, 2]), 4, torch.device("cpu"))
    assert told["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
    assert told["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2]]
    assert told["seq_idx"].dtype == torch.int32
    told = boundaries(np.array([3, 2]), 0, torch.device("cpu"))
    assert told["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert told["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]


def test_work_is_counted_without_padding_and_with_each_copy_of_a_prompt() -> None:
    samples = tiny_groups(num_groups=1)[0][:3]
    packed, padded = pack([samples]), padded_sizes(samples)
    # Up to what predicts the last loss token. What only the prompt predicts needs no copy.
    last = [int(np.flatnonzero(one.sample.loss_mask)[-1]) for one in samples]
    lengths = np.array([len(one.sample.prompt_ids) + end for one, end in zip(samples, last, strict=True) if end > 0])
    expected = RowSizes(
        tokens=int(lengths.sum()),
        pairs=int((lengths * (lengths + 1) // 2).sum()),
        predictions=len(np.unique(packed.loss_positions)),
    )
    assert laid_out_sizes(packed, padded, Way.end_to_end) == expected
    assert laid_out_sizes(packed, padded, Way.padded) == padded
    assert laid_out_sizes(packed, padded, Way.packed).tokens == len(packed.input_ids) < expected.tokens


def test_runs_without_padding_hold_as_many_tokens_as_fit() -> None:
    samples = [one for group in tiny_groups() for one in group]
    runs = runs_of(samples, 40, padded=False)
    assert [one for run in runs for one in run] == samples
    totals = [sum(one.sample.num_tokens for one in run) for run in runs]
    assert max(totals) <= 40
    for total, (_, following) in zip(totals, pairwise(runs), strict=False):
        assert total + following[0].sample.num_tokens > 40


def trained(config: Config, folder: str) -> tuple[Way, np.ndarray, dict[str, Tensor], int]:
    """The way, log-probabilities before a step, gradient norm and parameters after it, tokens that went through."""
    trainer, groups = FsdpTrainer(config, folder, 0, 1, ""), tiny_groups()
    way = trainer.settle_way().way
    (rows,) = trainer.per_token([groups])
    trainer.accumulate([groups])
    outcome = trainer.step()
    assert outcome.work is not None
    parameters = {name: tensor.clone() for name, tensor in trainer.full_parameters()}
    return way, np.concatenate(rows), parameters | {"norm": torch.tensor(outcome.grad_norm)}, outcome.work.tokens


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_the_trainer_makes_the_update_that_padded_rows_make(
    checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = tiny_config(), save_model(HYBRIDS["Qwen3.5"], tmp_path)
    config.trainer.micro_batch_tokens = 40
    config.trainer.gradient_checkpointing = Checkpointing(checkpointing)
    way, logprobs, expected, padded_tokens = trained(config, folder)
    assert way is Way.padded
    linear_kernels.install(monkeypatch, causal_conv1d_fn, chunk_gated_delta_rule)
    way, found, parameters, tokens = trained(config, folder)
    assert way is Way.end_to_end and tokens < padded_tokens
    np.testing.assert_allclose(found, logprobs, atol=1e-5)
    difference = largest_relative_difference(parameters, expected)
    print(f"{difference:.2g}")
    assert difference < 1e-3


@pytest.mark.parametrize(("family", "is_compiled"), [("Qwen3.5", False), ("LFM2", False), (None, True)])
def test_layers_with_a_state_are_not_compiled_unless_asked(
    family: str | None, is_compiled: bool, tmp_path: Path
) -> None:
    """Their code goes through a row in pieces, so that each number of pieces would be a graph of its own."""
    architecture = tiny_llama() if family is None else HYBRIDS[family]
    model = load_policy(tiny_config(), save_model(architecture, tmp_path)).model
    config = tiny_config()
    config.trainer.gradient_checkpointing = Checkpointing.none
    wrap_as_asked(model, config, on_gpu=True)
    assert all(("forward" in vars(layer)) is is_compiled for layer in decoder_layers(model))
