"""Adapters: what is trained and what is frozen, merged, saved, exported and switched off."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import adapted, checkpointed, one_rank
from checkpoints import write_run
from fakes import make_ready
from rounding import FLOOR
from safetensors.torch import save_file
from training import (
    largest_relative_difference,
    save_model,
    tiny_config,
    tiny_groups,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
    with_adapters,
)
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlflow.batching.plan import in_order_of_training, plan_micro_batches
from rlflow.batching.shares import RankWork, Share
from rlflow.cli import main
from rlflow.cluster.gpus import gpu_plan
from rlflow.cluster.trainers import RayTrainer
from rlflow.config import Checkpointing, Config, LoraConfig, ProcessKind, Send, TrainerConfig
from rlflow.errors import ConfigError, RunError
from rlflow.roles import REFERENCE
from rlflow.runtime.derived import needs_reference, policy_is_reference
from rlflow.tools.export import export
from rlflow.types import CriticTargets, Span
from rlflow.weights.shm.arena import tensor_at
from rlflow.workers.trainer.actor import TrainerWorker
from rlflow.workers.trainer.lora import add_adapters, is_adapter, merged, parts_of, peft_config, peft_name, targets_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft")


CHOSEN = LoraConfig(rank=4, alpha=6.0, rank_stabilised=True, targets=["v_proj", "q_proj"], dropout=0.25)


@pytest.mark.parametrize(
    ("model", "lora", "num_adapted"),
    [
        (tiny_llama(), None, 2 * 7),
        (tiny_qwen3(), None, 2 * 7),
        (tiny_llama(attention_bias=True), None, 2 * 7),
        (tiny_llama(), CHOSEN, 2 * 2),
    ],
)
def test_merged_parameters_are_those_of_peft(
    model: PreTrainedConfig, lora: LoraConfig | None, num_adapted: int, tmp_path: Path
) -> None:
    from peft import PeftModel

    path = save_model(model, tmp_path / "model")
    config = with_adapters(tiny_config())
    config.lora = lora or config.lora
    trainer = adapted(config, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    adapters = {name: tensor.clone() for name, tensor in trainer.adapter_parameters()}
    save_file(adapters, tmp_path / "adapter_model.safetensors")
    peft_config(config.lora, targets_of(whole, config.lora)).save_pretrained(tmp_path)
    expected = PeftModel.from_pretrained(whole, tmp_path).merge_and_unload()
    found = dict(trainer.full_parameters())
    specs = [(name, torch.float32, tuple(tensor.shape)) for name, tensor in expected.named_parameters()]
    assert trainer.parameter_specs() == specs
    assert largest_relative_difference(found, dict(expected.named_parameters())) <= FLOOR
    adapted_names = [name for name in found if not torch.equal(found[name], before[name])]
    assert len(adapted_names) == num_adapted
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in adapted_names)


def test_a_layer_that_the_model_lacks_is_named_with_those_that_it_has(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    config = with_adapters(tiny_config())
    config.lora.targets = ["q_proj", "query", "lm_head"]
    expected = (
        "lora.targets: the llama model at model.path has no linear layers called lm_head, query in its decoder layers; "
        "it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        one_rank(config, tmp_path)


def with_dropout() -> Config:
    config = with_adapters(tiny_config())
    config.lora.dropout = 0.5
    return config


@pytest.mark.parametrize("checkpointing", [Checkpointing.selective, Checkpointing.full])
def test_a_layer_that_is_computed_again_drops_the_same(checkpointing: Checkpointing, tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    config = with_dropout()
    plain = dict(adapted(config, tmp_path).full_parameters())
    without = dict(adapted(with_adapters(tiny_config()), tmp_path).full_parameters())
    config.trainer.gradient_checkpointing = checkpointing
    found = dict(adapted(config, tmp_path).full_parameters())
    assert largest_relative_difference(found, plain) < 1e-4 < 0.01 < largest_relative_difference(found, without)


def test_a_resumed_run_drops_what_the_other_one_did(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    trainer = adapted(with_dropout(), tmp_path)
    trainer.snapshot().write(tmp_path / "saved")
    torch.manual_seed(7)  # whatever else a process has drawn
    again = one_rank(with_dropout(), tmp_path)
    again.load(tmp_path / "saved")
    for each in (trainer, again):
        each.accumulate([tiny_groups(), tiny_groups(num_groups=1)])
        assert each.step().applied
    found = dict(again.adapter_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in trainer.adapter_parameters())


def test_passes_of_a_step_drop_different_inputs(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    trainer = adapted(with_dropout(), tmp_path)
    first, second, again = (trainer._loss(tiny_groups()).item() for _ in range(3))
    assert len({first, second, again}) == 3


@pytest.mark.parametrize("checkpointing", [Checkpointing.none, Checkpointing.full])
def test_nothing_is_dropped_where_no_gradient_is_asked_for(checkpointing: Checkpointing, tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    config = with_dropout()
    config.trainer.gradient_checkpointing = checkpointing
    trainer = adapted(config, tmp_path)
    config.lora.dropout = 0.0
    plain = one_rank(config, tmp_path)
    trainer.snapshot().write(tmp_path / "saved")
    plain.load(tmp_path / "saved")  # a checkpoint does not depend on it
    for ask in ("per_token", "reference_logprobs"):
        found, expected = (getattr(each, ask)([tiny_groups()])[0] for each in (trainer, plain))
        assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert trainer.settle_way().difference < 1e-5


@pytest.mark.parametrize("send", Send)
def test_adapters_are_staged_alone_unless_they_are_to_be_merged(
    send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):  # which a worker sets for its process
        monkeypatch.setenv(name, "1")
    path = save_model(tiny_llama(), tmp_path / "model")
    config = with_adapters(tiny_config())
    config.lora.send = send
    worker = TrainerWorker(config, path, 0, 1, threads=1)
    worker.start("")
    try:
        staged = worker.stage_weights(3)
        assert staged is not None
        sent = {
            Send.adapters: worker._backend.adapter_parameters,
            Send.merged: worker._backend.full_parameters,
        }[send]
        arena_bytes = torch.frombuffer(bytearray(Path(staged.path).read_bytes()), dtype=torch.uint8)
        found = {slot.name: tensor_at(arena_bytes, slot) for slot in staged.slots}
        assert found.keys() == dict(sent()).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in sent())
    finally:
        worker.close()


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


@pytest.mark.parametrize("checkpointing", [Checkpointing.selective, Checkpointing.full])
def test_gradients_of_adapters_pass_through_checkpointed_layers(checkpointing: Checkpointing, tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    found, allowed = checkpointed(with_adapters(tiny_config()), tmp_path, checkpointing)
    assert found <= allowed


def test_adapters_of_a_critic_and_its_whole_head_are_trained(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    trainer = one_rank(with_adapters(tiny_config()), tmp_path, is_critic=True)
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
    trainer.snapshot().write(tmp_path / "saved")
    again = one_rank(with_adapters(tiny_config()), tmp_path, is_critic=True)
    again.load(tmp_path / "saved")
    assert all(torch.equal(again._trained[name], tensor) for name, tensor in trainer._trained.items())


@pytest.mark.parametrize(
    ("lora", "found"),
    [
        (LoraConfig(), "no adapters"),
        (LoraConfig(rank=8, alpha=6.0), "adapters of lora.rank=8, lora.alpha=6; set these"),
        (LoraConfig(rank=4, alpha=7.0), "adapters of lora.rank=4, lora.alpha=7; set these"),
        (LoraConfig(rank=4, alpha=6.0, rank_stabilised=True), "lora.alpha=6, lora.rank_stabilised=true; set these"),
        (
            LoraConfig(rank=4, alpha=6.0, targets=["v_proj", "k_proj"]),
            r"lora.targets=\['k_proj', 'v_proj'\]; set these",
        ),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(lora: LoraConfig, found: str, tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    one_rank(with_adapters(tiny_config()), tmp_path).snapshot().write(tmp_path / "saved")
    config = tiny_config()
    config.lora = lora
    with pytest.raises(
        RunError, match=f"was saved with adapters of lora.rank=4, lora.alpha=6, but the run has.*{found}"
    ):
        one_rank(config, tmp_path).load(tmp_path / "saved")


def test_a_checkpoint_of_the_whole_model_is_refused(tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    one_rank(tiny_config(), tmp_path).snapshot().write(tmp_path / "saved")
    with pytest.raises(RunError, match="was saved with no adapters, but the run has adapters of lora.rank=4"):
        one_rank(with_adapters(tiny_config()), tmp_path).load(tmp_path / "saved")


def test_without_peft_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="need a package .* install rlflow with the extra `lora`, or go without"):
        one_rank(with_adapters(tiny_config()), tmp_path)


def test_names_of_parts() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_qwen3_moe(num_hidden_layers=1, attention_bias=True))
    plain = [name for name, _ in model.named_parameters()]
    add_adapters(model, LoraConfig(rank=2, send=Send.merged), torch.float32)
    found, layer = parts_of(model), "model.layers.0"
    assert list(found) == plain
    query, experts = f"{layer}.self_attn.q_proj", f"{layer}.mlp.experts"
    adapters = ("lora_A.default.weight", "lora_B.default.weight")
    assert found[f"{query}.weight"] == tuple(f"{query}.{part}" for part in ("base_layer.weight", *adapters))
    assert found[f"{query}.bias"] == (f"{query}.base_layer.bias",)
    inner = tuple(f"{experts}.base_layer.{part}" for part in ("base_layer.gate_up_proj", *adapters))
    assert found[f"{experts}.gate_up_proj"] == inner
    outer = tuple(f"{experts}.{part}" for part in ("base_layer.base_layer.down_proj", *adapters))
    assert found[f"{experts}.down_proj"] == outer
    assert found["model.norm.weight"] == ("model.norm.weight",)
    assert peft_name(inner[1]) == f"base_model.model.{experts}.base_layer.lora_A.weight"
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == set(filter(is_adapter, trained))
    assert not any(".gate." in name for name in trained)


def test_merging_is_in_float32() -> None:
    weight, inner, outer = torch.tensor([[256.0, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5]])
    parts = [tensor.bfloat16() for tensor in (weight, inner, outer)]
    assert merged(parts, LoraConfig(rank=2, alpha=2.0)).tolist() == [[256.5, 2.0]]
    assert merged(parts[:1], LoraConfig(rank=2)) is parts[0]


@pytest.mark.parametrize("lora", [LoraConfig(rank=4, alpha=6.0), CHOSEN], ids=["all layers", "chosen layers"])
def test_the_export_is_the_merged_model_or_the_adapters_alone(lora: LoraConfig, tmp_path: Path) -> None:
    from peft import PeftModel

    model = tmp_path / "model"
    save_model(tiny_llama(), model)
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("")
    config = tiny_config()
    config.lora = lora
    trainer = adapted(config, tmp_path)
    write_run(tmp_path / "run", str(model), trainer)
    expected = dict(trainer.full_parameters())
    export(tmp_path / "run", tmp_path / "whole", step=None, dtype="float32")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert largest_relative_difference(dict(found.named_parameters()), expected) <= FLOOR
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "alone"), "--adapter", "--dtype", "float32"]) == 0
    assert {path.name for path in (tmp_path / "alone").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "alone")
    assert largest_relative_difference(dict(loaded.merge_and_unload().named_parameters()), expected) <= FLOOR


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    model = save_model(tiny_llama(), tmp_path / "model")
    write_run(tmp_path / "run", model, one_rank(tiny_config(), tmp_path))
    with pytest.raises(ConfigError, match="--adapter has no effect: the run trained the whole model"):
        export(tmp_path / "run", tmp_path / "out", step=None, dtype="float32", adapter_only=True)
    assert not (tmp_path / "out").exists()


class FakeMethod:
    """Of an actor: a handle is the place that it stands for."""

    def __init__(self, name: str, rank: int, log: list[Any]) -> None:
        self._name, self._rank, self._log = name, rank, log
        self._num_returns = 1

    def options(self, num_returns: int) -> FakeMethod:
        self._num_returns = num_returns
        return self

    def remote(self, work: Share | RankWork, *_: object) -> Any:
        share = work.trained if isinstance(work, RankWork) else work
        own = [
            (share.groups[group].payloads[index], share.groups[group].frozen.get(REFERENCE, {index: None})[index])
            for group, index in in_order_of_training(share.plans)
        ]
        self._log.append((self._name, self._rank, own))
        done = answered(Span(actor=f"trainer {self._rank}", name=self._name, start_s=0.0, end_s=1.0))
        return done if self._num_returns == 1 else [done, *(place for place, _ in own)]


async def answered(span: Span) -> Span:
    return span


class FakeRank:
    def __init__(self, rank: int, log: list[Any]) -> None:
        self.references = FakeMethod("references", rank, log)
        self.accumulate = FakeMethod("accumulate", rank, log)


@pytest.mark.parametrize("num_episodes", [(3, 2), (1,)])
async def test_a_policy_that_is_its_own_reference_is_asked_before_it_learns(num_episodes: tuple[int, ...]) -> None:
    log: list[Any] = []
    trainer = RayTrainer(
        [FakeRank(rank, log) for rank in range(2)],
        TrainerConfig(ranks=2, micro_batch_tokens=16),
        policy_is_reference=True,
    )
    groups = [make_ready(number, *[0] * count) for number, count in enumerate(num_episodes)]
    for number, group in enumerate(groups):
        group.payloads = [(number, index) for index in range(len(group.episodes))]
    await trainer.prepare(groups, None)
    await trainer.accumulate(groups, None)
    plans = plan_micro_batches([group.episodes for group in groups], 2, 16)
    own = [in_order_of_training(each) for each in plans]
    assert log[:2] == [("references", rank, [(place, None) for place in own[rank]]) for rank in range(2)]
    assert log[2:] == [("accumulate", rank, [(place, place) for place in own[rank]]) for rank in range(2)]


def test_no_process_holds_the_reference_of_a_policy_with_adapters() -> None:
    config = Config()
    config.algorithm.kl_coefficient = 0.1
    assert (needs_reference(config), policy_is_reference(config), ProcessKind.reference in gpu_plan(config).counts) == (
        True,
        False,
        True,
    )
    config.lora.rank = 8
    assert (needs_reference(config), policy_is_reference(config), ProcessKind.reference in gpu_plan(config).counts) == (
        False,
        True,
        False,
    )
    config.algorithm.kl_coefficient = 0.0
    assert not (needs_reference(config) or policy_is_reference(config))
