"""The optimisers: Muon against NumPy, 8-bit moments against float32 ones, both in a trainer and in checkpoints."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from back_ends import Layout, build, other_orders, read_state, run_ranks, take_step, write_state
from numpy.typing import NDArray
from rounding import allowed_difference
from torch import Tensor
from training import largest_relative_difference, save_model, tiny_config, tiny_groups, tiny_llama

from rlflow.config import Backend, Config, Optimizer, TrainerConfig
from rlflow.errors import ConfigError, RunError
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.optimizers import ShardGroup, ShardOptimizer, fresh_moments, orthogonal, state_tensors
from rlflow.workers.trainer.shards import ShardReader

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package torchao")
MATRIX = "model.layers.0.mlp.up_proj.weight"
OTHERS = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")


def by_singular_values(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """What five steps of the polynomial 3.4445 s - 4.7750 s^3 + 2.0315 s^5 make of each singular value."""
    left, values, right = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (1, 5)])
def test_a_matrix_is_made_orthogonal_by_its_singular_values(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(3).normal(size=shape)
    found = orthogonal(torch.from_numpy(matrix)).numpy()
    np.testing.assert_allclose(found, by_singular_values(matrix), atol=1e-9)
    assert np.linalg.svd(found, compute_uv=False) == pytest.approx(np.ones(min(shape)), abs=0.35)


def test_a_matrix_without_any_gradient_stays_zero() -> None:
    assert torch.equal(orthogonal(torch.zeros(3, 2)), torch.zeros(3, 2))


def test_muon_takes_the_steps_of_the_paper() -> None:
    """Two steps of a 4 x 3 matrix, in float64: momentum 0.9 with Nesterov's look-ahead, decay, 0.2 sqrt(4)."""
    rng = np.random.default_rng(5)
    start, *gradients = rng.normal(size=(3, 4, 3))
    trainer = TrainerConfig(optimizer=Optimizer.muon, beta1=0.9, weight_decay=0.1)
    optimizer = ShardOptimizer(trainer, {"hidden": (4, 3)}, frozenset({"hidden"}), ShardGroup())
    weight = torch.from_numpy(start.astype(np.float32))
    expected, momentum = start, np.zeros((4, 3))
    for gradient in gradients:
        optimizer.step({"hidden": weight}, {"hidden": torch.from_numpy(gradient.astype(np.float32))}, 0.01)
        momentum = 0.9 * momentum + 0.1 * gradient
        direction = by_singular_values(0.1 * gradient + 0.9 * momentum)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(4) * direction
    np.testing.assert_allclose(weight.numpy(), expected, atol=1e-5)


def test_what_is_no_hidden_matrix_takes_steps_of_adamw() -> None:
    trainer = TrainerConfig(optimizer=Optimizer.muon, beta1=0.9, beta2=0.99, weight_decay=0.1)
    shapes = {"embedding": (5, 3), "norm": (3,)}
    optimizer = ShardOptimizer(trainer, shapes, frozenset({"norm"}), ShardGroup())
    ours = {name: torch.ones(shape) for name, shape in shapes.items()}
    theirs = {name: torch.ones(shape, requires_grad=True) for name, shape in shapes.items()}
    plain = torch.optim.AdamW(theirs.values(), lr=0.5, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    for seed in range(2):
        torch.manual_seed(seed)
        gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
        optimizer.step(ours, gradients, 0.5)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name]
        plain.step()
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.items())


@pytest.mark.parametrize("kind", [Optimizer.adamw, Optimizer.muon])
def test_only_matrices_of_decoder_layers_decay(kind: Optimizer) -> None:
    shapes = {"embedding": (5, 3), "layer": (4, 3), "experts": (2, 4, 3), "norm": (3,)}
    trainer = TrainerConfig(optimizer=kind, weight_decay=0.1)
    optimizer = ShardOptimizer(trainer, shapes, frozenset({"layer", "experts", "norm"}), ShardGroup())
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    optimizer.step(weights, {name: torch.zeros(shape) for name, shape in shapes.items()}, 0.5)
    assert {name: weight.unique().item() for name, weight in weights.items()} == pytest.approx(
        {"embedding": 1.0, "layer": 0.95, "experts": 0.95, "norm": 1.0}
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny_llama(), folder)
    return str(folder)


def trainer_with(optimizer: Optimizer, model_path: str) -> FsdpTrainer:
    config = tiny_config()
    config.trainer.optimizer = optimizer
    return FsdpTrainer(config, model_path, 0, 1, "")


def trained(optimizer: Optimizer, model_path: str, steps: int = 2) -> FsdpTrainer:
    trainer = trainer_with(optimizer, model_path)
    for _ in range(steps):
        trainer.accumulate([tiny_groups()])
        assert trainer.step().applied
    return trainer


def state_of(trainer: FsdpTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_parameters()}


def test_a_checkpoint_of_muon_goes_on_exactly(model_path: str, tmp_path: Path) -> None:
    trainer = trained(Optimizer.muon, model_path)
    trainer.snapshot().write(tmp_path)
    reader = ShardReader(tmp_path)
    assert reader.read_whole("exp_avg", MATRIX).abs().max() > 0
    assert all(reader.read_whole("exp_avg_sq", name).abs().max() > 0 for name in OTHERS)
    with pytest.raises(Exception, match="exp_avg_sq/model.layers.0.mlp.up_proj.weight"):
        reader.read_whole("exp_avg_sq", MATRIX)
    resumed = trainer_with(Optimizer.muon, model_path)
    resumed.load(tmp_path)
    for one in (trainer, resumed):
        one.accumulate([tiny_groups()])
        one.step()
    expected = state_of(trainer)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.full_parameters())


def test_moments_of_another_optimiser_are_refused(model_path: str, tmp_path: Path) -> None:
    trained(Optimizer.muon, model_path, steps=1).snapshot().write(tmp_path)
    with pytest.raises(RunError, match="was saved with trainer.optimizer=muon, whose moments mean nothing to adamw"):
        trainer_with(Optimizer.adamw, model_path).load(tmp_path)


def train(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    for _ in range(2):
        take_step(trainer, rank, layout)
    write_state(folder / layout.name, trainer)
    trainer.close()


def go_on(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    trainer.load(folder / "fsdp_1" / "checkpoint")
    take_step(trainer, rank, layout)
    write_state(folder / f"{layout.name}_went_on", trainer)
    trainer.close()


@pytest.mark.slow
def test_muon_on_two_ranks_is_muon_on_one(tmp_path: Path) -> None:
    """Also when two ranks go on from the checkpoint of one."""
    save_model(tiny_llama(), tmp_path / "model")
    one, two = (Layout(name=f"fsdp_{ranks}", backend=Backend.fsdp, ranks=ranks) for ranks in (1, 2))
    orders = other_orders(one)
    for layout in (one, two, *orders):
        config = layout.config()
        config.trainer.optimizer = Optimizer.muon
        run_ranks(train, layout, config, tmp_path)
        if layout in (one, two):
            run_ranks(go_on, layout, config, tmp_path)
    expected = read_state(tmp_path / "fsdp_1")
    costs = [largest_relative_difference(read_state(tmp_path / order.name), expected) for order in orders]
    allowed = allowed_difference(iter(costs))
    assert largest_relative_difference(read_state(tmp_path / "fsdp_2"), expected) <= allowed
    went_on = [read_state(tmp_path / f"fsdp_{ranks}_went_on") for ranks in (2, 1)]
    assert largest_relative_difference(*went_on) <= allowed


def test_moments_of_a_byte_without_their_package_name_the_extra(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match="install rlflow with the extra `optim8bit`, or set trainer.optimizer=adamw"):
        trainer_with(Optimizer.adamw8bit, model_path)


@needs_torchao
def test_moments_of_a_byte_take_a_byte_and_step_nearly_like_adamw() -> None:
    """A matrix of 64 x 128; each of its moments is 8192 bytes, a scale a block of 256, and a table of 256 values."""
    shape = {"weight": (64, 128)}
    found = {}
    for kind in (Optimizer.adamw, Optimizer.adamw8bit):
        torch.manual_seed(0)
        optimizer = ShardOptimizer(TrainerConfig(optimizer=kind), shape, frozenset(), ShardGroup())
        weight = torch.zeros(64, 128)
        for _ in range(3):
            optimizer.step({"weight": weight}, {"weight": torch.randn(64, 128)}, 1e-3)
        found[kind] = weight, optimizer
    (plain, _), (rounded, optimizer) = found.values()
    num_bytes = sum(tensor.nbytes for tensor in state_tensors(optimizer._adamw))
    assert num_bytes == 2 * (8192 + 32 * 4 + 256 * 4) + 4
    assert 0 < float((plain - rounded).abs().mean()) < 0.02 * float(plain.abs().mean())


@needs_torchao
def test_checkpoints_of_adamw_and_of_its_8_bits_are_each_others(model_path: str, tmp_path: Path) -> None:
    trained(Optimizer.adamw, model_path).snapshot().write(tmp_path / "adamw")
    resumed = trainer_with(Optimizer.adamw8bit, model_path)
    resumed.load(tmp_path / "adamw")
    resumed.snapshot().write(tmp_path / "rounded")
    plain, rounded = ShardReader(tmp_path / "adamw"), ShardReader(tmp_path / "rounded")
    for kind in ("exp_avg", "exp_avg_sq"):
        expected, found = plain.read_whole(kind, OTHERS[0]), rounded.read_whole(kind, OTHERS[0])
        assert found.dtype == torch.float32
        # Half a step of the table, relative to the largest of 256 values.
        assert (found - expected).abs().max() <= 0.01 * expected.abs().max()
    trainer_with(Optimizer.adamw, model_path).load(tmp_path / "rounded")
    resumed.accumulate([tiny_groups()])
    assert resumed.step().applied


def test_fresh_moments_are_zeros_with_a_step() -> None:
    state = fresh_moments(torch.ones(3), updates=7)
    assert float(state["step"]) == 7
    assert state["exp_avg"].tolist() == state["exp_avg_sq"].tolist() == [0.0, 0.0, 0.0]
