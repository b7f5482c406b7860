"""How a model is cut for a tensor group; that the ranks train alike is in test_trainer_contract.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from training import tiny_llama, tiny_qwen3
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPT2Config,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlflow.errors import ConfigError
from rlflow.workers.trainer.rank_group import RankGroup
from rlflow.workers.trainer.tensor_parallel import cut_layers


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def parameters_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_the_slices_of_all_ranks_are_the_model() -> None:
    config = tiny_qwen3(attention_bias=True)
    whole = parameters_of(model_of(config))
    models = [model_of(config), model_of(config)]
    cut, _ = (cut_layers(model, RankGroup(rank=rank, size=2)) for rank, model in enumerate(models))
    slices = [parameters_of(model) for model in models]
    in_layer = {name.removeprefix("model.layers.1."): dim for name, dim in cut.items() if ".layers.1." in name}
    assert in_layer == {
        **{f"self_attn.{part}_proj.{field}": 0 for part in "qkv" for field in ("weight", "bias")},
        "self_attn.o_proj.weight": 1,
        "mlp.gate_proj.weight": 0,
        "mlp.up_proj.weight": 0,
        "mlp.down_proj.weight": 1,
    }
    assert list(slices[0]) == list(whole)
    for name, tensor in whole.items():
        first, second = (part[name] for part in slices)
        joined = torch.cat([first, second], cut[name]) if name in cut else first
        assert torch.equal(joined, tensor), name
        assert name in cut or torch.equal(first, second), name


def test_the_decoder_of_a_critic_is_cut_likewise() -> None:
    critic = AutoModelForTokenClassification.from_config(tiny_llama(), dtype=torch.float32)
    cut = cut_layers(critic, RankGroup(rank=1, size=2))
    assert cut == cut_layers(model_of(tiny_llama()), RankGroup(rank=1, size=2))
    assert critic.get_parameter("model.layers.0.mlp.down_proj.weight").shape == (32, 24)
    assert critic.get_parameter("score.weight").shape == (2, 32)


SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (tiny_llama(), 3, "a llama model with num_attention_heads=4, which it must divide"),
        (tiny_llama(), 4, "a llama model with num_key_value_heads=2, which it must divide"),
        (tiny_llama(intermediate_size=49), 2, "got 2, and 49 outputs of model.layers.0.mlp.gate_proj; lower it"),
        (GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=67), 2, "a gpt2 model, for which .* no plan"),
        (MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2, vocab_size=67), 2, "whose plan has .*moe"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(config: PreTrainedConfig, size: int, message: str) -> None:
    with torch.device("meta"):
        model = model_of(config)
    with pytest.raises(ConfigError, match=message):
        cut_layers(model, RankGroup(size=size))


def test_only_plain_linear_layers_are_cut() -> None:
    model = model_of(tiny_llama())
    model.set_submodule("model.layers.0.self_attn.q_proj", torch.nn.Sequential(torch.nn.Linear(32, 32)))
    with pytest.raises(ConfigError, match="cannot cut model.layers.0.self_attn.q_proj, which is no plain linear layer"):
        cut_layers(model, RankGroup(size=2))
