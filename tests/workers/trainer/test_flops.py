"""The operations of a step, by hand and against what torch counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training import tiny_llama, tiny_qwen3
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig

from rlflow.batching.pack import pack
from rlflow.config import LoraConfig, Send
from rlflow.types import Sample, TrainSample
from rlflow.workers.trainer.flops import ModelSizes, RowSizes, flops, packed_sizes, padded_sizes, sizes_of
from rlflow.workers.trainer.lora import add_adapters

SIZES = ModelSizes(trained=100, frozen=10, head=20, is_head_trained=True, attention=5)


def one_sample(prompt: list[int], completion: list[int]) -> TrainSample:
    """A sample whose completion was sampled whole."""
    count = len(completion)
    sample = Sample(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        loss_mask=np.ones(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        cache_versions=np.zeros(count, np.int32),
    )
    return TrainSample(sample=sample, advantage=1.0)


def test_operations_of_a_row_by_hand() -> None:
    row = RowSizes(tokens=7, pairs=28, predictions=3)
    # 2 each: matrices 7 x 110, head 3 x 20; attention 4 x 28 x 5.
    forward = 2 * 770 + 2 * 60 + 560
    assert flops(SIZES, row, with_backward=False) == forward
    # Backward: the same twice, but frozen matrices once.
    assert flops(SIZES, row) == 3 * forward - 2 * 70


def test_a_shared_prompt_counts_once_and_padding_counts() -> None:
    """Prompt [5 6] with the completions [7 8 9] and [3]; the last token of each predicts nothing."""
    long, short = one_sample([5, 6], [7, 8, 9]), one_sample([5, 6], [3])
    # Rows 5 6 | 7 8; keys: 1 + 2 for the prompt, 3 + 4 for the completion; states: of 6, 7 and 8.
    assert packed_sizes(pack([[long, short]])) == RowSizes(tokens=4, pairs=10, predictions=3)
    # Two rows of 2 + 3 tokens.
    assert padded_sizes([long, short]) == RowSizes(tokens=10, pairs=30, predictions=6)
    assert padded_sizes([]) == RowSizes(tokens=0, pairs=0, predictions=0)


@pytest.mark.parametrize("config", [tiny_llama(), tiny_qwen3()], ids=["grouped queries", "wide heads"])
def test_linear_layers_agree_with_what_torch_counts(config: PretrainedConfig) -> None:
    """torch counts all T x T pairs of attention, so they are taken off both."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    sizes, tokens = sizes_of(model), 6
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None]).logits.sum().backward()
    counted = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    linear = sum(count for name, count in counted.items() if "bmm" not in name)
    ours = flops(sizes, RowSizes(tokens=tokens, pairs=0, predictions=tokens))
    # The gradient of the embeddings' rows does go through the first layer, so nothing is left out.
    assert linear == ours
    every_pair = RowSizes(tokens=0, pairs=tokens**2, predictions=0)
    assert sum(counted.values()) - linear == pytest.approx(flops(sizes, every_pair), rel=0.05)


def test_frozen_matrices_have_no_gradient_of_their_own() -> None:
    pytest.importorskip("peft")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_llama())
    whole = sizes_of(model)
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    adapted = sizes_of(model)
    assert (adapted.frozen, adapted.is_head_trained) == (whole.trained, False)
    num_adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert adapted.trained == num_adapters


def test_only_the_experts_that_a_token_goes_through_count() -> None:
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=8,
        moe_intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    # Queries 8 x 8, keys and values 4 x 8 each, output 8 x 8, router 4 x 8, and 2 experts of 3 x 6 x 8.
    assert sizes_of(model).trained == 64 + 2 * 32 + 64 + 32 + 2 * 144
    pytest.importorskip("peft")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, LoraConfig(rank=3, send=Send.merged, targets=["gate_up_proj", "q_proj"]), torch.float32)
    sizes = sizes_of(model)
    assert (sizes.trained, sizes.frozen) == (3 * (8 + 8) + 2 * 3 * (8 + 12), 64 + 2 * 32 + 64 + 32 + 2 * 144)
