"""Adapters on experts: what PEFT computes of them, merged, exported, switched off, and what is refused."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import adapted, checkpointed, one_rank
from back_ends import Layout, build, needs_deepspeed, other_orders, read_state, run_ranks, take_step, write_state
from checkpoints import write_run
from rounding import FLOOR, allowed_difference
from safetensors.torch import save_file
from torch import Tensor, nn
from training import (
    exact_and_allowed,
    largest_relative_difference,
    mixture_of,
    plain_gradients,
    save_model,
    tiny_config,
    tiny_groups,
    tiny_qwen3_moe,
    with_adapters,
)
from transformers import AutoModelForCausalLM, GptOssConfig, JambaConfig, PreTrainedConfig, Qwen2MoeConfig

from rlflow.config import Backend, Checkpointing, Config, Dtype, LoraConfig, Optimizer, Send
from rlflow.errors import ConfigError
from rlflow.tools.export import export
from rlflow.types import TrainSample
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.lora import peft_config, targets_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft")

SHARED = mixture_of(Qwen2MoeConfig, num_experts=4, shared_expert_intermediate_size=24)
"""Linear layers beside the experts that are called like them."""


def merging(config: Config | None = None) -> Config:
    config = with_adapters(config or tiny_config())
    config.lora.send = Send.merged
    return config


@pytest.mark.parametrize(
    ("model", "targets"),
    [(tiny_qwen3_moe(), None), (tiny_qwen3_moe(), ["down_proj"]), (tiny_qwen3_moe(), ["q_proj"]), (SHARED, None)],
)
def test_merged_experts_are_those_of_peft(model: PreTrainedConfig, targets: list[str] | None, tmp_path: Path) -> None:
    from peft import PeftModel

    path = save_model(model, tmp_path / "model")
    config = merging()
    config.lora.targets = targets
    trainer = adapted(config, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    save_file(
        {name: each.clone() for name, each in trainer.adapter_parameters()}, tmp_path / "adapter_model.safetensors"
    )
    peft_config(config.lora, targets_of(whole, config.lora)).save_pretrained(tmp_path)
    expected = dict(PeftModel.from_pretrained(whole, tmp_path).merge_and_unload().named_parameters())
    found = dict(trainer.full_parameters())
    assert list(found) == list(before) == [name for name, *_ in trainer.parameter_specs()]
    assert largest_relative_difference(found, expected) <= FLOOR
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    assert not any(".mlp.gate." in name for name in changed), "a router stays frozen"
    experts = {name for name in found if ".experts." in name and (targets is None or name.endswith(targets[0]))}
    assert {name for name in changed if ".experts." in name} == experts


def write_merged(trainer: FsdpTrainer, base: str, folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.load_state_dict(dict(trainer.full_parameters()))
    model.save_pretrained(folder)
    return str(folder)


def gradients_of_adapters(whole: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the gradients of the merged experts [E, O, I], expert by expert: d B = scale dW A^T, d A = scale B^T dW.

    Of B the columns of an expert lie E apart, of A its rows lie together.
    """
    found = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in adapters.items()}
    for name, gradient in whole.items():
        path, _, kind = name.rpartition(".")
        if not path.endswith(".experts"):
            continue
        wrapper = f"{path}.base_layer" if kind == "gate_up_proj" else path
        inner, outer = (f"{wrapper}.lora_{each}.default.weight" for each in "AB")
        for expert, own in enumerate(gradient.double()):
            rows, columns = slice(4 * expert, 4 * expert + 4), slice(expert, None, 4)
            found[outer][:, columns] = 1.5 * own @ adapters[inner][rows].double().T
            found[inner][rows] = 1.5 * adapters[outer][:, columns].double().T @ own
    return {name: tensor for name, tensor in found.items() if ".experts." in name}


def test_each_expert_learns_for_itself(tmp_path: Path) -> None:
    path = save_model(tiny_qwen3_moe(), tmp_path / "model")
    trainer = adapted(merging(), tmp_path)
    adapters = {name: tensor.clone() for name, tensor in trainer._rows_of_trained().items()}
    merged_path = write_merged(trainer, path, tmp_path / "merged")

    def expected(groups: list[list[TrainSample]], dtype: torch.dtype) -> dict[str, Tensor]:
        return gradients_of_adapters(plain_gradients(merged_path, groups, tiny_config(), dtype), adapters)

    exact, allowed = exact_and_allowed(expected, tiny_groups())
    trainer.accumulate([tiny_groups()])
    found = {name: tensor.double() for name, tensor in trainer._gradients().items() if name in exact}
    assert len(found) == 2 * 2 * 2
    assert largest_relative_difference(found, exact) <= allowed


@pytest.mark.parametrize("checkpointing", [Checkpointing.selective, Checkpointing.full])
def test_sums_of_experts_are_computed_again(checkpointing: Checkpointing, tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    found, allowed = checkpointed(merging(), tmp_path, checkpointing)
    assert found <= allowed


def test_without_adapters_the_policy_is_the_model_that_it_began_with(tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    fresh, trainer = one_rank(merging(), tmp_path), adapted(merging(), tmp_path)
    names = [name for name, _ in trainer._policy.named_parameters()]
    expected, found = fresh.per_token([tiny_groups()])[0], trainer.reference_logprobs([tiny_groups()])[0]
    assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not np.array_equal(trainer.per_token([tiny_groups()])[0][0], found[0])
    assert [name for name, _ in trainer._policy.named_parameters()] == names


def test_a_checkpoint_holds_the_adapters_of_experts(tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    trainer = adapted(merging(), tmp_path)
    trainer.snapshot().write(tmp_path / "saved")
    again = one_rank(merging(), tmp_path)
    again.load(tmp_path / "saved")
    expected = dict(trainer.full_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.full_parameters())


def test_muon_leaves_the_adapters_of_experts_to_adamw(tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    config = merging()
    config.trainer.optimizer = Optimizer.muon
    matrices = adapted(config, tmp_path)._optimizer._matrices
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in matrices} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


@pytest.mark.parametrize("chosen", [None, ["gate_up_proj", "q_proj"]])
def test_the_export_of_experts(chosen: list[str] | None, tmp_path: Path) -> None:
    from peft import PeftModel

    model = save_model(tiny_qwen3_moe(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "chat_template.jinja").write_text("")
    config = merging()
    config.lora.targets = chosen
    trainer = adapted(config, tmp_path)
    write_run(tmp_path / "run", model, trainer)
    expected = dict(trainer.full_parameters())
    export(tmp_path / "run", tmp_path / "whole", step=None, dtype="float32")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert largest_relative_difference(dict(found.named_parameters()), expected) <= FLOOR
    export(tmp_path / "run", tmp_path / "alone", step=None, dtype="float32", adapter_only=True)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "alone")
    assert largest_relative_difference(dict(loaded.merge_and_unload().named_parameters()), expected) <= FLOOR


LINEAR = "lora.targets=[k_proj,o_proj,q_proj,v_proj]"
GPT_OSS = mixture_of(GptOssConfig, num_local_experts=4)


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        (
            tiny_qwen3_moe(),
            LoraConfig(rank=4),
            f"lora.send=adapters does not go with adapters on experts; set lora.send=merged, or leave experts out with "
            f"{LINEAR}",
        ),
        (
            tiny_qwen3_moe(),
            LoraConfig(rank=4, send=Send.merged, dropout=0.1),
            f"lora.dropout does not go with adapters on experts; set lora.dropout=0, or leave experts out with "
            f"{LINEAR}",
        ),
        (
            tiny_qwen3_moe(),
            LoraConfig(rank=4, targets=["gate"]),
            "lora.targets: the qwen3_moe model at model.path has no linear layers called gate in its decoder layers; "
            "it has down_proj, gate_up_proj, k_proj, o_proj, q_proj, v_proj",
        ),
        (
            GPT_OSS,
            LoraConfig(rank=4, send=Send.merged),
            f"lora.rank: the experts of the gpt_oss model at model.path cannot have adapters; leave experts out with "
            f"{LINEAR}",
        ),
    ],
)
def test_what_experts_cannot_have_is_refused_with_the_cure(
    model: PreTrainedConfig, lora: LoraConfig, message: str
) -> None:
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        targets_of(skeleton, lora)
    lora.targets, lora.dropout = ["q_proj", "v_proj"], 0.1
    assert targets_of(skeleton, lora) == (["q_proj", "v_proj"], [])


def test_linear_layers_of_routers_have_no_adapters() -> None:
    config = JambaConfig(num_hidden_layers=8, attn_layer_period=4, attn_layer_offset=3, num_experts=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert any(name.endswith(".router") for name, each in model.named_modules() if isinstance(each, nn.Linear))
    found = targets_of(model, LoraConfig(rank=4, send=Send.merged))
    assert found.experts == ["experts.down_proj", "experts.gate_up_proj"]
    assert "router" not in found.layers


def train(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    for _ in range(2):
        assert take_step(trainer, rank, layout).applied
    write_state(folder / layout.name, trainer)
    trainer.close()


REFERENCE = Layout(name="fsdp_1", backend=Backend.fsdp, ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(name="fsdp_2", backend=Backend.fsdp),
        pytest.param(Layout(name="zero2_2", backend=Backend.deepspeed, zero_stage=2), marks=needs_deepspeed),
    ],
)
def test_every_layout_trains_experts_alike(layout: Layout, tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    for each in (REFERENCE, *other_orders(REFERENCE), layout):
        run_ranks(train, each, merging(each.config()), tmp_path)
    reference = read_state(tmp_path / REFERENCE.name)
    apart = [
        largest_relative_difference(read_state(tmp_path / name), reference)
        for name in (layout.name, *(each.name for each in other_orders(REFERENCE)))
    ]
    assert apart[0] <= allowed_difference(apart[1:])


@pytest.mark.slow
def test_experts_are_summed_up_in_bfloat16(tmp_path: Path) -> None:
    """Their parameters are whole and in bfloat16 only while a layer computes."""
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    layout = Layout(name="fsdp_2", backend=Backend.fsdp)
    config = merging(layout.config(Dtype.bfloat16))
    config.trainer.gradient_checkpointing = Checkpointing.full
    run_ranks(train, layout, config, tmp_path)
    run_ranks(train, REFERENCE, merging(REFERENCE.config()), tmp_path)
    found, expected = (read_state(tmp_path / each.name)["logprobs"] for each in (layout, REFERENCE))
    assert (found - expected).abs().mean() < 0.05


@pytest.mark.slow
@needs_deepspeed
def test_zero_3_is_refused(tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    layout = Layout(name="zero3", backend=Backend.deepspeed, zero_stage=3)
    run_ranks(is_refused, layout, merging(layout.config()), tmp_path)


def is_refused(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer.zero_stage=3 does not go with adapters on experts.*set it to 2"):
        build(rank, layout, config, folder, rendezvous)
