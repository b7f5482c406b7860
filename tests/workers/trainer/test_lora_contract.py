"""The trainer's contract with adapters, on one rank and on two; see `test_trainer_contract`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from back_ends import (
    Layout,
    allowed_differences,
    build,
    differences,
    disturb,
    go_on,
    needs_deepspeed,
    other_orders,
    read_figures,
    read_kind,
    read_state,
    run_ranks,
    take_momentum_step,
    take_step,
    write_outcomes,
    write_state,
)
from rounding import allowed_difference
from safetensors.torch import load_file, save_file
from training import largest_relative_difference, save_model, tiny_config, tiny_groups, tiny_llama, with_adapters

from rlflow.config import Backend, Config, Dtype
from rlflow.workers.trainer.base import MicroBatch
from rlflow.workers.trainer.packed import PackedTrainer
from rlflow.workers.trainer.shards import MOMENTS, PARAMETER, ShardReader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft"),
]

REFERENCE = Layout(name="fsdp_1", backend=Backend.fsdp, ranks=1)
OTHERS = (
    Layout(name="fsdp_2", backend=Backend.fsdp),
    Layout(name="zero2_2", backend=Backend.deepspeed, zero_stage=2),
    Layout(name="zero3_2", backend=Backend.deepspeed, zero_stage=3),
)
LAYOUTS = [
    pytest.param(layout, id=layout.name, marks=needs_deepspeed if layout.zero_stage else ()) for layout in OTHERS
]


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
    expected, alone = np.load(folder / "base_logprobs.npy")
    before = logprobs_of(trainer.per_token(micro_batches()))
    found = logprobs_of(trainer.reference_logprobs(micro_batches()))
    largest = np.abs(expected).max()
    allowed = allowed_difference([float(np.abs(alone - expected).max() / largest)])
    assert np.abs(found - expected).max() <= allowed * largest
    assert np.abs(before - expected).max() > 1e-3
    assert np.array_equal(logprobs_of(trainer.per_token(micro_batches())), before)


def prepare(folder: Path) -> None:
    """A model, what it says, also of each sample alone, the adapters that everyone begins with, and a checkpoint of
    others, which change it."""
    save_model(tiny_llama(), folder / "model")
    base = build(0, REFERENCE, tiny_config(), folder, "")
    alone = [[[sample]] for groups in micro_batches() for group in groups for sample in group]
    np.save(folder / "base_logprobs.npy", [logprobs_of(base.per_token(cut)) for cut in (micro_batches(), alone)])
    trainer = build(0, REFERENCE, with_adapters(REFERENCE.config()), folder, "")
    save_file({name: tensor.clone() for name, tensor in trainer.adapter_parameters()}, folder / "fresh.safetensors")
    torch.manual_seed(1)
    for name, parameter in trainer._policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    trainer.snapshot().write(folder / "begin")


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
    if layout.ranks > 1:
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


@pytest.fixture(scope="module")
def allowed(folder: Path) -> dict[str, float]:
    """The relative differences from the reference that rounding explains."""
    orders = folder / "orders"
    orders.mkdir()
    for name in ("model", "base_logprobs.npy", "fresh.safetensors", "begin"):
        (orders / name).symlink_to(folder / name)
    for order in other_orders(REFERENCE):
        run_ranks(train, order, with_adapters(order.config()), orders)
    return allowed_differences([orders / order.name for order in other_orders(REFERENCE)], folder / REFERENCE.name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_adapters_alike(layout: Layout, folder: Path, allowed: dict[str, float]) -> None:
    found = differences(folder / layout.name, folder / REFERENCE.name)
    assert all(value <= allowed[what] for what, value in found.items()), f"{found} against {allowed}"
    assert read_figures(folder / layout.name / "outcomes.json")["grad_norm"][0] > 0.01
    ours, theirs = (ShardReader(folder / name / "checkpoint") for name in (layout.name, REFERENCE.name))
    assert list(ours.shapes.items()) == list(theirs.shapes.items())


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]])
def test_adapters_go_on_from_the_checkpoint_of_any_layout(
    layout: Layout, folder: Path, allowed: dict[str, float]
) -> None:
    run_ranks(go_on, layout, with_adapters(layout.config()), folder)
    for source in sorted(path.parent.name for path in folder.glob("*/checkpoint")):
        written = folder / layout.name / f"from_{source}"
        saved, again = ShardReader(folder / source / "checkpoint"), ShardReader(written / "checkpoint")
        for kind in (PARAMETER, *MOMENTS):
            expected, found = read_kind(saved, kind), read_kind(again, kind)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert largest_relative_difference(read_state(written), read_state(folder / source)) <= allowed["state"]
    went_on = [read_figures(folder / name / "went_on.json") for name in (layout.name, REFERENCE.name)]
    assert largest_relative_difference(*went_on) <= allowed["figures"]


def train_in_bfloat16(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    fresh = load_file(folder / "fresh.safetensors")
    for name, tensor in trainer.adapter_parameters():
        assert torch.equal(tensor.float(), fresh[name].bfloat16().float()), name
    for _ in range(2):
        assert take_step(trainer, rank, layout).applied
    frozen = [each for each in trainer._policy.parameters() if not each.requires_grad]
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}
    difference = logprobs_of(trainer.reference_logprobs(micro_batches())) - np.load(folder / "base_logprobs.npy")[0]
    assert np.abs(difference).mean() < 0.05
    trainer.snapshot().write(folder / layout.name)
    trainer.close()


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]])
def test_the_frozen_model_is_held_in_bfloat16_and_adapters_in_float32(layout: Layout, tmp_path: Path) -> None:
    prepare(tmp_path)
    run_ranks(train_in_bfloat16, layout, with_adapters(layout.config(Dtype.bfloat16)), tmp_path)
    saved = read_kind(ShardReader(tmp_path / layout.name), PARAMETER)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
