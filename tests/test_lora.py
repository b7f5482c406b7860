"""Adapters: what is trained and what is frozen, merged, saved and switched off, on every back end alike."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

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
from training import largest_relative_difference, save_model, share, tiny_config, tiny_groups, tiny_llama, tiny_qwen3
from transformers import AutoModelForCausalLM

from rlflow.config import Backend, Config, Dtype
from rlflow.errors import ConfigError, RunError
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
    outcomes = [take_step(trainer, rank, layout.ranks)]
    if layout.zero_stage == 2:
        for frozen in filter(lambda each: not each.requires_grad, trainer._parameters.values()):
            frozen.data = frozen.data.clone()  # what is mapped from a file cannot be emptied, as `disturb` does
    if layout != REFERENCE:
        disturb(trainer, rank, layout.ranks)
    outcomes.append(take_step(trainer, rank, layout.ranks))
    outcomes.append(take_momentum_step(trainer, rank, layout.ranks))
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
