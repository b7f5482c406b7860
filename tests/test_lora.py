"""Adapters: what is trained and what is frozen, merged, saved and switched off, on every back end alike."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_trainer_contract import (
    TOLERANCE,
    Layout,
    assert_same_outcomes,
    build,
    disturb,
    go_on,
    needs_deepspeed,
    read_kind,
    read_state,
    run_ranks,
    take_momentum_step,
    take_step,
    write_outcomes,
    write_state,
)
from training import largest_relative_difference, save_model, tiny_config, tiny_groups, tiny_llama, tiny_qwen3
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlflow.checkpoint import CheckpointStore, RunState
from rlflow.cli import main
from rlflow.config import Backend, Config, Dtype, LoraConfig
from rlflow.errors import ConfigError, RunError
from rlflow.export import export
from rlflow.sampler import SamplerState
from rlflow.types import CriticTargets
from rlflow.workers.trainer.base import MicroBatch, Role
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.lora import merged, parts_of, peft_name
from rlflow.workers.trainer.packed import PackedTrainer
from rlflow.workers.trainer.shards import MOMENTS, PARAMETER, ShardReader

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft")
RANK = 4
REFERENCE = Layout(name="fsdp_1", backend=Backend.fsdp, ranks=1)
OTHERS = (
    Layout(name="fsdp_2", backend=Backend.fsdp),
    Layout(name="zero2_2", backend=Backend.deepspeed, zero_stage=2),
    Layout(name="zero3_2", backend=Backend.deepspeed, zero_stage=3),
)
LAYOUTS = [
    pytest.param(layout, id=layout.name, marks=needs_deepspeed if layout.zero_stage else ()) for layout in OTHERS
]
pytestmark = needs_peft


def with_adapters(config: Config, rank: int | None = RANK) -> Config:
    config.lora.rank = rank
    config.lora.alpha = 6.0
    return config


def one_rank(config: Config, folder: Path, role: Role = Role.policy) -> FsdpTrainer:
    return FsdpTrainer(config, str(folder / "model"), 0, 1, "", role)


def logprobs_of(rows: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([row for part in rows for row in part])


def micro_batches() -> list[MicroBatch]:
    return [tiny_groups(), [], tiny_groups(num_groups=1)]


def assert_base_is_untouched(trainer: PackedTrainer, folder: Path) -> None:
    """To the bit; and with the adapters off the trainer says what the model in `folder` says."""
    saved = load_file(folder / "model" / "model.safetensors")
    for name, parts in trainer._parts.items():
        with trainer._whole(parts[:1]) as (base,):
            assert torch.equal(base, saved[name]), name
    expected = np.load(folder / "base_logprobs.npy")
    before = logprobs_of(trainer.per_token(micro_batches()))
    found = logprobs_of(trainer.reference_logprobs(micro_batches()))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(before - expected).max() > 1e-3
    assert np.array_equal(logprobs_of(trainer.per_token(micro_batches())), before)


def prepare(folder: Path) -> None:
    """A model, what it says, the adapters that everyone begins with, and a checkpoint of others, which change it."""
    save_model(tiny_llama(), folder / "model")
    np.save(folder / "base_logprobs.npy", logprobs_of(one_rank(tiny_config(), folder).per_token(micro_batches())))
    trainer = one_rank(with_adapters(REFERENCE.config()), folder)
    save_file({name: tensor.clone() for name, tensor in trainer.adapter_parameters()}, folder / "fresh.safetensors")
    torch.manual_seed(1)
    for name, parameter in trainer._trained.items():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    trainer.save(folder / "begin")


def train(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    """Three steps, the last by momentum alone."""
    trainer = build(rank, layout, config, folder, rendezvous)
    fresh = load_file(folder / "fresh.safetensors")
    assert all(torch.equal(tensor, fresh.pop(name)) for name, tensor in trainer.adapter_parameters())
    assert not fresh
    trainer.load(folder / "begin")
    outcomes = [take_step(trainer, rank, layout)]
    if layout.zero_stage == 2:
        for frozen in filter(lambda each: not each.requires_grad, trainer._policy.parameters()):
            frozen.data = frozen.data.clone()  # what is mapped from a file cannot be emptied, as `disturb` does
    if layout != REFERENCE:
        disturb(trainer, rank, layout)
    outcomes.append(take_step(trainer, rank, layout))
    outcomes.append(take_momentum_step(trainer, rank, layout))
    assert_base_is_untouched(trainer, folder)
    write_state(folder / layout.name, trainer)
    if rank == 0:
        write_outcomes(folder / layout.name / "outcomes.json", outcomes)
    trainer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each layout wrote when it was trained."""
    folder = tmp_path_factory.mktemp("lora")
    prepare(folder)
    for layout in (REFERENCE, *OTHERS):
        if layout.zero_stage is None or importlib.util.find_spec("deepspeed") is not None:
            run_ranks(train, layout, with_adapters(layout.config()), folder)
    run_ranks(go_on, REFERENCE, with_adapters(REFERENCE.config()), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_adapters_alike(layout: Layout, folder: Path) -> None:
    assert largest_relative_difference(read_state(folder / layout.name), read_state(folder / "fsdp_1")) <= TOLERANCE
    outcomes = [json.loads((folder / name / "outcomes.json").read_text()) for name in (layout.name, "fsdp_1")]
    assert_same_outcomes(*outcomes)
    assert outcomes[0][0]["grad_norm"] > 0.01
    ours, theirs = (ShardReader(folder / name / "checkpoint") for name in (layout.name, "fsdp_1"))
    assert list(ours.shapes.items()) == list(theirs.shapes.items())
    for kind in (PARAMETER, *MOMENTS):
        assert largest_relative_difference(read_kind(ours, kind), read_kind(theirs, kind)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]])
def test_adapters_go_on_from_the_checkpoint_of_any_layout(layout: Layout, folder: Path) -> None:
    run_ranks(go_on, layout, with_adapters(layout.config()), folder)
    for source in sorted(path.parent.name for path in folder.glob("*/checkpoint")):
        written = folder / layout.name / f"from_{source}"
        saved, again = ShardReader(folder / source / "checkpoint"), ShardReader(written / "checkpoint")
        for kind in (PARAMETER, *MOMENTS):
            expected, found = read_kind(saved, kind), read_kind(again, kind)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert largest_relative_difference(read_state(written), read_state(folder / source)) <= TOLERANCE
    went_on = [json.loads((folder / name / "went_on.json").read_text()) for name in (layout.name, "fsdp_1")]
    assert_same_outcomes(*went_on)


def adapted(folder: Path, config: Config | None = None, role: Role = Role.policy) -> FsdpTrainer:
    """After two steps."""
    trainer = one_rank(config or with_adapters(tiny_config()), folder, role)
    for _ in range(2):
        take_step(trainer, 0, REFERENCE)
    return trainer


@pytest.mark.parametrize("model", [tiny_llama(), tiny_qwen3(), tiny_llama(attention_bias=True)])
def test_merged_parameters_are_those_of_peft(model: PreTrainedConfig, tmp_path: Path) -> None:
    from peft import PeftModel

    from rlflow.workers.trainer.lora import linear_layers, peft_config

    path = save_model(model, tmp_path / "model")
    trainer = adapted(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    adapters = {name: tensor.clone() for name, tensor in trainer.adapter_parameters()}
    save_file(adapters, tmp_path / "adapter_model.safetensors")
    peft_config(trainer._config.lora, linear_layers(whole)).save_pretrained(tmp_path)
    expected = PeftModel.from_pretrained(whole, tmp_path).merge_and_unload()
    found = dict(trainer.full_parameters())
    specs = [(name, torch.float32, tuple(tensor.shape)) for name, tensor in expected.named_parameters()]
    assert trainer.parameter_specs() == specs
    assert largest_relative_difference(found, dict(expected.named_parameters())) < 1e-6
    adapted_names = [name for name in found if not torch.equal(found[name], before[name])]
    assert len(adapted_names) == 2 * 7
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in adapted_names)


def test_the_same_seed_gives_the_same_adapters(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    config = with_adapters(tiny_config())
    state = torch.random.get_rng_state()
    one, other = (dict(one_rank(config, tmp_path).adapter_parameters()) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    assert all(bool(tensor.any()) == (".lora_A." in name) for name, tensor in one.items())
    config.run.seed = 1
    third = dict(one_rank(config, tmp_path).adapter_parameters())
    assert not torch.equal(one[next(iter(one))], third[next(iter(one))])


def test_gradients_of_adapters_pass_through_checkpointed_layers(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    config = with_adapters(tiny_config())
    plain = dict(adapted(tmp_path, config).full_parameters())
    config.trainer.gradient_checkpointing = True
    found = dict(adapted(tmp_path, config).full_parameters())
    assert largest_relative_difference(found, plain) <= TOLERANCE


def test_adapters_of_a_critic_and_its_whole_head_are_trained(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    trainer = one_rank(with_adapters(tiny_config()), tmp_path, Role.critic)
    groups = tiny_groups()
    for sample in (sample for group in groups for sample in group):
        ones = np.ones(len(sample.sample.loss_mask), np.float32)
        sample.critic = CriticTargets(values=0 * ones, returns=ones)
    before = {name: tensor.clone() for name, tensor in trainer._trained.items()}
    for _ in range(3):
        trainer.accumulate([groups])
        assert trainer.step().applied
    assert {name for name in before if ".lora_" not in name} == {"score.weight", "score.bias"}
    changed = {name for name, tensor in trainer._trained.items() if not torch.equal(tensor, before[name])}
    assert changed == before.keys()
    trainer.save(tmp_path / "saved")
    again = one_rank(with_adapters(tiny_config()), tmp_path, Role.critic)
    again.load(tmp_path / "saved")
    assert all(torch.equal(again._trained[name], tensor) for name, tensor in trainer._trained.items())


@pytest.mark.parametrize(
    ("rank", "alpha", "found"),
    [
        (None, 32.0, "the run has no adapters"),
        (8, 6.0, "the run has adapters of lora.rank=8, lora.alpha=6"),
        (RANK, 7.0, "the run has adapters of lora.rank=4, lora.alpha=7"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(rank: int | None, alpha: float, found: str, tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    one_rank(with_adapters(tiny_config()), tmp_path).save(tmp_path / "saved")
    config = tiny_config()
    config.lora.rank, config.lora.alpha = rank, alpha
    with pytest.raises(RunError, match=f"was saved with adapters of lora.rank=4, lora.alpha=6, but {found}"):
        one_rank(config, tmp_path).load(tmp_path / "saved")


def test_a_checkpoint_of_the_whole_model_is_refused(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    one_rank(tiny_config(), tmp_path).save(tmp_path / "saved")
    with pytest.raises(RunError, match="was saved with no adapters, but the run has adapters of lora.rank=4"):
        one_rank(with_adapters(tiny_config()), tmp_path).load(tmp_path / "saved")


def test_without_peft_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="lora.rank needs a package .* install rlflow with the extra `lora`, or set"):
        one_rank(with_adapters(tiny_config()), tmp_path)


def test_names_of_parts() -> None:
    names = ["embed.weight", "layers.0.q.base_layer.weight", "layers.0.q.base_layer.bias"]
    names += ["layers.0.q.lora_A.default.weight", "layers.0.q.lora_B.default.weight", "norm.weight"]
    assert parts_of(names) == {
        "embed.weight": ("embed.weight",),
        "layers.0.q.weight": (names[1], names[3], names[4]),
        "layers.0.q.bias": (names[2],),
        "norm.weight": ("norm.weight",),
    }
    assert peft_name(names[3]) == "base_model.model.layers.0.q.lora_A.weight"


def test_merging_is_in_float32() -> None:
    weight, inner, outer = torch.tensor([[256.0, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5]])
    parts = [tensor.bfloat16() for tensor in (weight, inner, outer)]
    assert merged(parts, LoraConfig(rank=2, alpha=2.0)).tolist() == [[256.5, 2.0]]
    assert merged(parts[:1], LoraConfig(rank=2)) is parts[0]


def train_in_bfloat16(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    fresh = load_file(folder / "fresh.safetensors")
    for name, tensor in trainer.adapter_parameters():
        assert torch.equal(tensor.float(), fresh[name].bfloat16().float()), name
    for _ in range(2):
        assert take_step(trainer, rank, layout).applied
    frozen = [each for each in trainer._policy.parameters() if not each.requires_grad]
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}
    difference = logprobs_of(trainer.reference_logprobs(micro_batches())) - np.load(folder / "base_logprobs.npy")
    assert np.abs(difference).mean() < 0.05
    trainer.save(folder / layout.name)
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]])
def test_the_frozen_model_is_held_in_bfloat16_and_adapters_in_float32(layout: Layout, tmp_path: Path) -> None:
    prepare(tmp_path)
    run_ranks(train_in_bfloat16, layout, with_adapters(layout.config(Dtype.bfloat16)), tmp_path)
    saved = read_kind(ShardReader(tmp_path / layout.name), PARAMETER)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())


def write_run(folder: Path, model: str) -> FsdpTrainer:
    """A run of one step whose weights are those of the trainer that is returned."""
    trainer = adapted(folder)
    store = CheckpointStore(folder / "run" / "checkpoints", keep=1)
    partial = store.begin(1)
    trainer.save(partial / "trainer")
    sampler = SamplerState(task_pass=0, position=0, put_back=[])
    store.commit(partial, RunState(step=1, version=1, sampler=sampler, ready=[]))
    (folder / "run" / "config.yaml").write_text(f"model:\n  path: {model}\n")
    return trainer


def test_the_export_is_the_merged_model_or_the_adapters_alone(tmp_path: Path) -> None:
    from peft import PeftModel

    model = tmp_path / "model"
    save_model(tiny_llama(), model)
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("")
    expected = dict(write_run(tmp_path, str(model)).full_parameters())
    export(tmp_path / "run", tmp_path / "whole", step=None, dtype="float32")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert largest_relative_difference(dict(found.named_parameters()), expected) < 1e-6
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "alone"), "--adapter", "--dtype", "float32"]) == 0
    assert {path.name for path in (tmp_path / "alone").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "alone")
    assert largest_relative_difference(dict(loaded.merge_and_unload().named_parameters()), expected) < 1e-6


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    model = save_model(tiny_llama(), tmp_path / "model")
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1)
    partial = store.begin(1)
    one_rank(tiny_config(), tmp_path).save(partial / "trainer")
    sampler = SamplerState(task_pass=0, position=0, put_back=[])
    store.commit(partial, RunState(step=1, version=1, sampler=sampler, ready=[]))
    (tmp_path / "run" / "config.yaml").write_text(f"model:\n  path: {model}\n")
    with pytest.raises(ConfigError, match="--adapter has no effect: the run trained the whole model"):
        export(tmp_path / "run", tmp_path / "out", step=None, dtype="float32", adapter_only=True)
    assert not (tmp_path / "out").exists()
