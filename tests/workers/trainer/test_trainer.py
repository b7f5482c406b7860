"""The FSDP back end: steps, what it refuses, checkpoints across layouts, one rank against two."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import digests_of
from fakes import make_ready
from families import tiny_model
from processes import spawn_ranks
from rounding import allowed_difference
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from training import (
    exact_and_allowed,
    largest_relative_difference,
    plain_gradients,
    plain_logprobs,
    save_model,
    share,
    shuffled,
    tiny_config,
    tiny_groups,
    tiny_llama,
)
from transformers import AutoModelForCausalLM

from rlflow.batching.pack import pack
from rlflow.config import Aggregation, Checkpointing, Config, Dtype, Schedule
from rlflow.errors import RunError
from rlflow.groups.silent import by_turns, has_no_gradient
from rlflow.roles import StepOutcome
from rlflow.types import TrainSample
from rlflow.weights.shape.layout import chunk_of
from rlflow.workers.trainer.flops import flops, packed_sizes
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.process_group import join
from rlflow.workers.trainer.shards import MOMENTS, PARAMETER, Shard, ShardReader, Snapshot, read_full
from rlflow.workers.trainer.way import go_in_rows


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    return save_model(tiny_llama(), tmp_path / "model")


def one_rank(config: Config, model_path: str) -> FsdpTrainer:
    return FsdpTrainer(config, model_path, rank=0, world_size=1, rendezvous="")


def parameters(trainer: FsdpTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_parameters()}


def gradients(trainer: FsdpTrainer) -> dict[str, Tensor]:
    """What was accumulated, whole, on every rank."""
    found = {name: parameter.grad for name, parameter in trainer._parameters.items() if parameter.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for name, grad in found.items()}


def num_loss_tokens(groups: list[list[TrainSample]]) -> int:
    return sum(int(sample.sample.loss_mask.sum()) for group in groups for sample in group)


def test_a_step_divides_clips_and_updates(model_path: str) -> None:
    config = tiny_config()
    config.trainer.max_grad_norm = 0.25
    trainer = one_rank(config, model_path)
    groups = tiny_groups()

    def stepped(groups: list[list[TrainSample]], dtype: torch.dtype) -> dict[str, Tensor]:
        sums = plain_gradients(model_path, groups, config, dtype)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in sums.values())) / num_loss_tokens(groups)
        reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
        for name, parameter in reference.named_parameters():
            parameter.grad = sums[name] / num_loss_tokens(groups) * min(1, 0.25 / norm)
        optimizer.step()
        updated = {name: parameter.detach() for name, parameter in reference.named_parameters()}
        return {"norm": torch.tensor(norm), **updated}

    expected, allowed = exact_and_allowed(stepped, groups)
    trainer.accumulate([groups[:1], groups[1:]])
    outcome = trainer.step()
    assert outcome.applied
    assert outcome.learning_rate == 1e-2
    found = {"norm": torch.tensor(outcome.grad_norm), **parameters(trainer)}
    assert largest_relative_difference(found, expected) <= allowed


def test_log_probabilities_of_padded_rows_come_in_the_order_that_was_asked(model_path: str) -> None:
    """Rows are padded together with others of their length."""
    trainer, groups = one_rank(tiny_config(), model_path), tiny_groups()
    go_in_rows(trainer._policy.model)
    rows = [row for found in trainer.per_token([groups[:2], groups[2:]]) for row in found]
    _, expected = plain_logprobs(model_path, groups, 0.7)
    samples = [sample for group in groups for sample in group]
    for sample, row, plain in zip(samples, rows, expected, strict=True):
        mask = sample.sample.loss_mask
        np.testing.assert_allclose(row, np.where(mask, plain.detach().numpy(), 0), atol=1e-5)


def test_steps_and_not_updates_move_the_schedule(model_path: str, tmp_path: Path) -> None:
    """Through a checkpoint too. A step of which no update was applied is none."""
    config = tiny_config()
    config.algorithm.epochs, config.trainer.warmup_steps, config.run.steps = 2, 4, 8
    trainer = one_rank(config, model_path)
    broken = tiny_groups(num_groups=1)
    broken[0][0].advantage = math.nan

    def rates(trainer: FsdpTrainer, *steps: list[list[list[TrainSample]]]) -> list[list[float]]:
        found = []
        for parts in steps:
            found.append([])
            for number, groups in enumerate(parts, 1):
                trainer.accumulate([groups])
                found[-1].append(trainer.step(is_last=number == len(parts)).learning_rate)
        return found

    good = [tiny_groups(), tiny_groups()]
    assert rates(trainer, good, [broken, broken], [broken, tiny_groups()]) == [[0.0025] * 2, [0.005] * 2, [0.005] * 2]
    trainer.snapshot().write(tmp_path)
    resumed = one_rank(config, model_path)
    resumed.load(tmp_path)
    assert rates(resumed, good, good) == [[0.0075] * 2, [0.01] * 2]


def test_what_adapts_does_so_once_a_step(model_path: str) -> None:
    """As with one update: each group counts once, in whatever epochs it was."""
    coefficients = []
    for epochs in (1, 2):
        config = tiny_config()
        config.algorithm.epochs, config.trainer.learning_rate = epochs, 1e-30
        config.algorithm.kl_coefficient, config.algorithm.kl_target = 0.1, 1e-4
        trainer = one_rank(config, model_path)
        outcomes = []
        for epoch in range(epochs):
            trainer.accumulate([tiny_groups(with_reference=True)])
            outcomes.append(trainer.step(is_last=epoch == epochs - 1))
        assert all("kl_coefficient" not in each.metrics for each in outcomes[:-1])
        coefficients.append(outcomes[-1].metrics["kl_coefficient"].value)
    assert coefficients[0] == coefficients[1] > 0.1


def test_a_part_without_tokens_to_learn_from_changes_nothing_and_is_not_a_skipped_update(model_path: str) -> None:
    config = tiny_config()
    config.algorithm.minibatches, config.algorithm.groups_per_step = 2, 2
    trainer = one_rank(config, model_path)
    before = parameters(trainer)
    trainer.accumulate([[]])
    outcome = trainer.step(is_last=False)
    assert (outcome.applied, outcome.num_skipped, outcome.grad_norm) == (False, 0, 0.0)
    assert outcome.metrics["loss"].value is None
    assert largest_relative_difference(parameters(trainer), before) == 0
    trainer.accumulate([tiny_groups()])
    assert trainer.step().grad_norm > 0


def test_metrics_are_means_over_loss_tokens(model_path: str) -> None:
    config = tiny_config()
    config.algorithm.kl_coefficient = 0.1
    trainer = one_rank(config, model_path)
    groups = tiny_groups(with_reference=True)
    current = np.concatenate([row for rows in trainer.per_token([groups[:2], groups[2:]]) for row in rows])
    samples = [sample for group in groups for sample in group]
    mask = np.concatenate([sample.sample.loss_mask for sample in samples])
    behaviour = np.concatenate([sample.sample.logprobs for sample in samples])
    difference = (current - behaviour)[mask]
    trainer.accumulate([groups[:2], groups[2:]])
    metrics = trainer.step().metrics
    assert set(metrics) == {
        "loss",
        "entropy",
        "kl",
        "clip_fraction",
        "sampling/logp_difference_mean",
        "sampling/logp_difference_max",
        "ratio/mean",
        "ratio/effective_share",
        "num_tokens",
    }
    ratios = np.exp(difference.astype(np.float64))
    share = metrics.pop("ratio/effective_share").value
    assert share == pytest.approx(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()), rel=1e-4)
    assert metrics.pop("sampling/logp_difference_max").value == pytest.approx(np.abs(difference).max(), rel=1e-4)
    assert all(metric.count == mask.sum() for metric in metrics.values())
    assert metrics["num_tokens"].total == mask.sum()
    assert metrics["sampling/logp_difference_mean"].value == pytest.approx(np.abs(difference).mean(), rel=1e-4)
    assert metrics["ratio/mean"].value == pytest.approx(np.exp(difference).mean(), rel=1e-4)
    assert 0 < (metrics["clip_fraction"].value or 0) < 1
    assert 0 < (metrics["entropy"].value or 0) < math.log(67)


def test_tokens_on_an_older_cache_have_a_difference_of_their_own(model_path: str) -> None:
    config = tiny_config()
    config.staleness.max_versions = 1
    trainer = one_rank(config, model_path)
    groups = tiny_groups()
    samples = [sample for group in groups for sample in group]
    for index, each in enumerate(samples):
        mask, is_older = each.sample.loss_mask, index % 3 == 0
        versions, cache_versions = np.where(mask, 1, -1), np.where(mask, 0 if is_older else 1, -1)
        each.sample = replace(each.sample, versions=versions, cache_versions=cache_versions)
    (current,) = trainer.per_token([groups])
    gaps = [
        np.abs(row - each.sample.logprobs)[each.sample.loss_mask] for row, each in zip(current, samples, strict=True)
    ]
    older = np.concatenate([gap for index, gap in enumerate(gaps) if index % 3 == 0])
    fresh = np.concatenate([gap for index, gap in enumerate(gaps) if index % 3])
    trainer.accumulate([groups])
    metrics = trainer.step().metrics
    share, difference = metrics["sampling/older_cache_share"], metrics["sampling/older_cache_logp_difference_mean"]
    assert (share.total, share.count) == (len(older), len(older) + len(fresh))
    assert difference.count == len(older)
    assert difference.value == pytest.approx(older.mean(), rel=1e-4)
    assert metrics["sampling/logp_difference_mean"].count == len(fresh)
    assert metrics["sampling/logp_difference_mean"].value == pytest.approx(fresh.mean(), rel=1e-4)
    assert metrics["sampling/logp_difference_max"].value == pytest.approx(fresh.max(), rel=1e-4)


def test_tokens_of_the_version_that_is_trained_have_a_difference_of_their_own(model_path: str) -> None:
    config = tiny_config()
    config.staleness.max_versions = 1
    trainer = one_rank(config, model_path)
    trainer.version = 1
    groups = tiny_groups()
    samples = [sample for group in groups for sample in group]
    for index, each in enumerate(samples):
        versions = np.where(each.sample.loss_mask, index % 2, -1)
        each.sample = replace(each.sample, versions=versions, cache_versions=versions)
    (current,) = trainer.per_token([groups])
    gaps = [
        np.abs(row - each.sample.logprobs)[each.sample.loss_mask] for row, each in zip(current, samples, strict=True)
    ]
    trainer.accumulate([groups])
    metrics = trainer.step().metrics
    of_now, everything = np.concatenate(gaps[1::2]), np.concatenate(gaps)
    share, difference = metrics["sampling/current_share"], metrics["sampling/current_logp_difference_mean"]
    assert (share.total, share.count, difference.count) == (len(of_now), len(everything), len(of_now))
    assert difference.value == pytest.approx(of_now.mean(), rel=1e-4)
    assert metrics["sampling/logp_difference_mean"].value == pytest.approx(everything.mean(), rel=1e-4)


def test_metrics_without_a_meaning_are_left_out(model_path: str) -> None:
    trainer = one_rank(tiny_config(), model_path)
    trainer.accumulate([tiny_groups()])
    assert not {"kl", "correction/mean", "correction/rejected"} & set(trainer.step().metrics)


def test_a_gradient_that_is_not_finite_is_skipped_and_cleared(model_path: str) -> None:
    config = tiny_config()
    config.trainer.warmup_steps = 4
    trainer, other = one_rank(config, model_path), one_rank(config, model_path)
    before = parameters(trainer)
    broken = tiny_groups()
    broken[0][0].advantage = math.inf
    trainer.accumulate([broken])
    outcome = trainer.step()
    assert not outcome.applied
    assert not math.isfinite(outcome.grad_norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.full_parameters())

    for one in (trainer, other):
        one.accumulate([tiny_groups()])
        assert one.step().applied
    expected = parameters(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trainer.full_parameters())


def test_the_learning_rate_warms_up_to_a_constant(model_path: str) -> None:
    config = tiny_config()
    config.trainer.warmup_steps = 4
    trainer = one_rank(config, model_path)
    rates = []
    for _ in range(5):
        trainer.accumulate([tiny_groups(num_groups=1)])
        rates.append(trainer.step().learning_rate)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_a_step_says_what_it_computed_and_starts_again(model_path: str) -> None:
    """Tokens of the packed row; a silent group costs a forward pass; padding costs more."""
    trainer = one_rank(tiny_config(), model_path)
    groups = tiny_groups()
    sizes = packed_sizes(pack(groups))
    outcomes = []
    for _ in range(2):
        trainer.accumulate([groups])
        outcomes.append(trainer.step().work)
    for plain in outcomes:
        assert plain is not None
        assert (plain.tokens, plain.num_ranks, plain.device) == (sizes.tokens, 1, "cpu")
        assert plain.flops == flops(trainer._model_sizes, sizes)
        assert plain.padded_flops > 1.5 * plain.flops
    trainer.accumulate([groups])
    trainer.observe([groups])
    silent = trainer.step().work
    assert silent is not None
    both = [flops(trainer._model_sizes, sizes, with_backward=has_backward) for has_backward in (True, False)]
    assert silent.flops == sum(both)


def test_a_step_without_tokens_is_refused(model_path: str) -> None:
    trainer = one_rank(tiny_config(), model_path)
    trainer.accumulate([[]])
    with pytest.raises(ValueError, match="at least one accumulated loss token; got none"):
        trainer.step()


def test_kl_without_a_reference_is_refused(model_path: str) -> None:
    config = tiny_config()
    config.algorithm.kl_coefficient = 0.1
    with pytest.raises(ValueError, match="carry no reference log-probabilities"):
        one_rank(config, model_path).accumulate([tiny_groups()])


def test_parameters_have_hugging_face_names_and_tied_ones_come_once(model_path: str) -> None:
    trainer = one_rank(tiny_config(), model_path)
    saved = load_file(Path(model_path) / "model.safetensors")
    assert {name for name, _ in trainer.full_parameters()} == set(saved)
    assert "lm_head.weight" not in saved
    assert [(name, torch.float32, tuple(t.shape)) for name, t in trainer.full_parameters()] == trainer.parameter_specs()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in trainer.full_parameters())


def test_buffers_that_files_hold_go_to_the_engines_with_all_their_digits(tmp_path: Path) -> None:
    model = tiny_model("GLM-4.5", seed=1)
    model.save_pretrained(tmp_path)
    config = tiny_config()
    config.model.dtype = Dtype.bfloat16
    trainer = FsdpTrainer(config, str(tmp_path), rank=0, world_size=1, rendezvous=f"file://{tmp_path}/meeting")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = model.get_buffer(name)
    assert trainer.parameter_specs()[-1] == (name, torch.float32, (4,))
    for found in (dict(trainer.full_parameters()), dict(trainer.held())):
        assert torch.equal(found[name], bias)
    layout = trainer.layout()
    assert layout is not None and layout.dtypes[name] == "float32" and layout.shapes[name] == (4,)
    assert layout.dtypes["model.norm.weight"] == "bfloat16"
    assert name not in trainer._shapes  # nothing trains it
    trainer.close()


def test_a_loaded_trainer_goes_on_where_the_saved_one_stopped(model_path: str, tmp_path: Path) -> None:
    config = tiny_config()
    config.trainer.schedule, config.run.steps = Schedule.cosine, 3
    trainer = one_rank(config, model_path)
    trainer.accumulate([tiny_groups()])
    trainer.step()
    trainer.snapshot().write(tmp_path / "saved")
    resumed = one_rank(config, model_path)
    resumed.load(tmp_path / "saved")
    outcomes = []
    for one in (trainer, resumed):
        one.accumulate([tiny_groups()])
        outcomes.append(one.step())
    assert outcomes[0] == outcomes[1]
    assert outcomes[1].learning_rate == pytest.approx(0.75 * config.trainer.learning_rate)
    expected = parameters(trainer)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.full_parameters())


def test_what_is_written_is_of_the_moment_of_the_snapshot(model_path: str, tmp_path: Path) -> None:
    config = tiny_config()
    config.algorithm.kl_coefficient, config.algorithm.kl_target = 0.5, 1e-6
    trainer = one_rank(config, model_path)

    def take_step() -> None:
        trainer.accumulate([tiny_groups(with_reference=True)])
        assert trainer.step().applied

    take_step()
    trainer.snapshot().write(tmp_path / "at_once")
    snapshot = trainer.snapshot()
    take_step()
    take_step()
    snapshot.write(tmp_path / "later")
    assert trainer.snapshot().write(tmp_path / "now") == digests_of(tmp_path / "now")
    for name in ("manifest.json", "rank_0.json", "rank_0.safetensors"):
        at_once, later, now = ((tmp_path / folder / name).read_bytes() for folder in ("at_once", "later", "now"))
        assert later == at_once
        assert (now == at_once) is (name == "rank_0.json")


def test_without_the_optimizer_only_parameters_are_saved(model_path: str, tmp_path: Path) -> None:
    config = tiny_config()
    config.trainer.save_optimizer = False
    trainer = one_rank(config, model_path)
    trainer.snapshot().write(tmp_path / "saved")
    assert ShardReader(tmp_path / "saved").kinds == ["parameter"]
    trainer.load(tmp_path / "saved")
    trainer.accumulate([tiny_groups()])
    assert trainer.step().applied


def test_a_checkpoint_of_another_model_is_refused(model_path: str, tmp_path: Path) -> None:
    one_rank(tiny_config(), model_path).snapshot().write(tmp_path / "saved")
    wider = one_rank(tiny_config(), save_model(tiny_llama(intermediate_size=56), tmp_path / "wider"))
    with pytest.raises(RunError, match=r"belongs to another model than model\.path"):
        wider.load(tmp_path / "saved")


@pytest.mark.parametrize("missing", ["manifest.json", "rank_0.json", "rank_0.safetensors"])
def test_an_incomplete_checkpoint_is_refused(model_path: str, tmp_path: Path, missing: str) -> None:
    trainer = one_rank(tiny_config(), model_path)
    trainer.snapshot().write(tmp_path / "saved")
    (tmp_path / "saved" / missing).unlink()
    with pytest.raises(RunError, match=f"cannot be read: {missing}"):
        trainer.load(tmp_path / "saved")


def test_a_torn_shard_is_refused(model_path: str, tmp_path: Path) -> None:
    trainer = one_rank(tiny_config(), model_path)
    trainer.snapshot().write(tmp_path / "saved")
    file = tmp_path / "saved" / "rank_0.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"cannot be read: rank_0.safetensors"):
        trainer.load(tmp_path / "saved")


def test_missing_elements_are_named(model_path: str, tmp_path: Path) -> None:
    one_rank(tiny_config(), model_path).snapshot().write(tmp_path / "saved")
    layout = tmp_path / "saved" / "rank_0.json"
    entries = json.loads(layout.read_text())
    entries["model.norm.weight"]["stop"] = 30
    layout.write_text(json.dumps(entries))
    with pytest.raises(RunError, match=r"lacks elements 30 to 32 of model\.norm\.weight"):
        list(read_full(tmp_path / "saved"))


def test_a_checkpoint_of_two_versions_is_refused(tmp_path: Path) -> None:
    shards = [Shard(name="w", shape=(2,), start=rank, tensors={PARAMETER: torch.zeros(1)}) for rank in range(2)]
    for rank, updates in ((0, 3), (1, 4)):
        Snapshot(rank=rank, num_ranks=2, shards=[shards[rank]], updates=updates, steps=updates).write(tmp_path)
    with pytest.raises(RunError, match="mixes versions: its ranks have 3, 4 updates, and should have 3; remove it"):
        ShardReader(tmp_path)


def test_shard_ranges_are_rounded_up_chunks() -> None:
    assert [chunk_of(10, rank, 4) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [chunk_of(2, rank, 3) for rank in range(3)] == [(0, 1), (1, 2), (2, 2)]


def test_an_unknown_rendezvous_is_refused() -> None:
    with pytest.raises(ValueError, match="must be tcp://host:port or file:///path; got nowhere"):
        join("nowhere", 0, 1, torch.device("cpu"), 10.0)


# One rank against two


def train(config: Config, model_path: str, rank: int, world_size: int, rendezvous: str, folder: Path) -> None:
    """Two steps; the first one's gradients, the second one's outcome and the checkpoint between them go to `folder`."""
    trainer = FsdpTrainer(config, model_path, rank, world_size, rendezvous)
    trainer.accumulate(share(tiny_groups(), rank, world_size))
    found = gradients(trainer)
    trainer.step()
    trainer.snapshot().write(folder / "checkpoint")
    trainer.accumulate(share(tiny_groups(), rank, world_size))
    trainer.accumulate([[tiny_groups()[rank]], []])
    outcome = trainer.step()
    if rank == 0:
        save_file(found, folder / "gradients.safetensors")
        whole = {name: value.tolist() for name, value in figures(outcome).items()}
        (folder / "figures.json").write_text(json.dumps(whole))
    trainer.close()


def figures(outcome: StepOutcome) -> dict[str, Tensor]:
    """The norm, and the total and the count of each metric."""
    found = {"grad_norm": torch.tensor(outcome.grad_norm)}
    for name, mean in outcome.metrics.items():
        found |= {f"{name}/total": torch.tensor(mean.total), f"{name}/count": torch.tensor(mean.count)}
    return found


def moments(checkpoint: Path) -> dict[str, Tensor]:
    reader = ShardReader(checkpoint)
    assert reader.updates == 1
    return {f"{kind} {name}": reader.read_whole(kind, name) for kind in MOMENTS for name in reader.shapes}


def allowed_by_order(expected: dict[str, Tensor], compute: Callable[[int], dict[str, Tensor]]) -> float:
    """The relative difference that rounding explains, from three other orders of the samples, each a seed's."""
    return allowed_difference(largest_relative_difference(compute(seed), expected) for seed in range(3))


def _train_rank(rank: int, config: Config, model_path: str, world_size: int, rendezvous: str, folder: Path) -> None:
    train(config, model_path, rank, world_size, rendezvous, folder)


@pytest.mark.slow
def test_two_ranks_train_as_one(model_path: str, tmp_path: Path) -> None:
    config = tiny_config()
    rendezvous = f"file://{tmp_path}/rendezvous"
    spawn_ranks(2, _train_rank, config, model_path, 2, rendezvous, tmp_path)
    groups = tiny_groups()
    expected, allowed = exact_and_allowed(lambda *how: plain_gradients(model_path, how[0], config, how[1]), groups)
    difference = largest_relative_difference(load_file(tmp_path / "gradients.safetensors"), expected)
    print("two ranks against a padded batch:", difference, "allowed:", allowed)
    assert difference <= allowed

    # What two ranks saved, one loads: same moments, same next step.
    def moments_of_one(name: str, groups: list[list[TrainSample]]) -> dict[str, Tensor]:
        single = one_rank(config, model_path)
        single.accumulate([groups])
        single.step()
        single.snapshot().write(tmp_path / name)
        return moments(tmp_path / name)

    ours = moments_of_one("single", groups)
    allowed = allowed_by_order(ours, lambda seed: moments_of_one(f"order_{seed}", shuffled(groups, seed)))
    assert largest_relative_difference(moments(tmp_path / "checkpoint"), ours) <= allowed
    saved = dict(read_full(tmp_path / "checkpoint"))

    def next_step_of_one(micro_batches: list[list[list[TrainSample]]]) -> dict[str, Tensor]:
        resumed = one_rank(config, model_path)
        resumed.load(tmp_path / "checkpoint")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.full_parameters())
        resumed.accumulate(micro_batches)
        return figures(resumed.step())

    expected = next_step_of_one([groups, [groups[0]], [groups[1]]])
    allowed = allowed_by_order(
        expected, lambda seed: next_step_of_one([shuffled([*groups, groups[0], groups[1]], seed)])
    )
    found = {name: torch.tensor(value) for name, value in json.loads((tmp_path / "figures.json").read_text()).items()}
    assert largest_relative_difference(found, expected) <= allowed


def _load_rank(rank: int, config: Config, model_path: str, rendezvous: str, folder: Path) -> None:
    trainer = FsdpTrainer(config, model_path, rank, 2, rendezvous)
    trainer.load(folder / "single")
    trainer.accumulate(share(tiny_groups(), rank, 2))
    outcome = trainer.step()
    whole = {name: tensor.contiguous() for name, tensor in trainer.full_parameters()}
    if rank == 0:
        assert outcome.applied
        save_file(whole, folder / "two.safetensors")
    trainer.close()


@pytest.mark.slow
def test_two_ranks_go_on_from_one_in_bfloat16(model_path: str, tmp_path: Path) -> None:
    """Also: over TCP on loopback, with gradient checkpointing, and with float32 parameters all the same."""
    single = one_rank(tiny_config(), model_path)
    single.accumulate([tiny_groups()])
    single.step()
    single.snapshot().write(tmp_path / "single")
    single.accumulate([tiny_groups()])
    single.step()
    config = tiny_config()
    config.model.dtype = Dtype.bfloat16
    config.trainer.gradient_checkpointing = Checkpointing.full
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    spawn_ranks(2, _load_rank, config, model_path, rendezvous, tmp_path)
    found = load_file(tmp_path / "two.safetensors")
    for name, tensor in single.full_parameters():
        assert found[name].dtype == torch.float32
        # Adam's step is at most 1e-2; bfloat16 gradients may turn the sign of the smallest ones.
        assert (found[name] - tensor).abs().mean() < 2e-3, name


def test_observing_groups_without_gradient_is_accumulating_them(model_path: str) -> None:
    """Same parameters and figures, also in a step that has nothing else and moves by momentum alone."""
    first, second = one_rank(tiny_config(), model_path), one_rank(tiny_config(), model_path)
    silent = tiny_groups(num_groups=1)
    for group in silent:
        for sample in group:
            sample.advantage = 0.0
    for with_gradient in (tiny_groups(), []):
        first.accumulate([with_gradient, silent])
        second.accumulate([with_gradient])
        second.observe([silent])
        expected, found = first.step(), second.step()
        assert found.metrics == expected.metrics
        assert found.grad_norm == expected.grad_norm
        assert found.applied
        wanted = parameters(first)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in second.full_parameters())
    assert found.grad_norm == 0.0


def test_groups_that_are_passed_over_count_like_those_that_are_observed(model_path: str) -> None:
    """Their tokens divide the gradient; their figures are those of the group that was observed, here the same."""
    first, second = one_rank(tiny_config(), model_path), one_rank(tiny_config(), model_path)
    silent = tiny_groups(num_groups=1)
    for group in silent:
        for sample in group:
            sample.advantage = 0.0
    for trainer in (first, second):
        trainer.accumulate([tiny_groups()])
    first.observe([silent, silent, silent])
    second.observe([silent])
    second.pass_over([silent, silent])
    expected, found = first.step(), second.step()
    assert found.grad_norm == expected.grad_norm
    assert found.metrics["num_tokens"] == expected.metrics["num_tokens"]
    assert {name: mean.count for name, mean in found.metrics.items()} == {
        name: mean.count for name, mean in expected.metrics.items()
    }
    # The same numbers, added up in another order.
    assert {name: mean.total for name, mean in found.metrics.items()} == pytest.approx(
        {name: mean.total for name, mean in expected.metrics.items()}, rel=1e-12
    )


@pytest.mark.parametrize("term", [None, "kl_coefficient", "entropy_bonus", "entropy_target", "balance_coefficient"])
def test_equal_rewards_leave_the_gradient_of_other_terms(term: str | None) -> None:
    config = tiny_config()
    if term is not None:
        setattr(config.algorithm, term, 0.1)
    equal = replace(make_ready(0, 0, 0), advantages=[[0.0], [0.0]])
    assert has_no_gradient(config, equal) is (term is None)
    assert not has_no_gradient(config, replace(equal, advantages=[[0.0], [0.5]]))


def test_of_eight_groups_without_gradient_the_first_is_observed() -> None:
    groups: list[Any] = list(range(10))
    assert by_turns(groups, 0) == ([0, 8], [1, 2, 3, 4, 5, 6, 7, 9])
    assert by_turns(groups[:2], 7) == ([1], [0])


def test_a_bonus_for_entropy_adapts_to_its_target_and_is_remembered(model_path: str, tmp_path: Path) -> None:
    """The tiny model is far less sure than its target in one run, and far surer in the other."""
    groups = tiny_groups()

    def config_with(target: float | None, bonus: float) -> Config:
        config = tiny_config()
        config.algorithm.entropy_target, config.algorithm.entropy_bonus = target, bonus
        return config

    def second_norm(target: float | None, bonus: float, second: float, tmp_path: Path) -> float:
        """Of the second step, which the metrics of the first say is given the bonus `second`."""
        trainer = one_rank(config_with(target, bonus), model_path)
        trainer.accumulate([groups])
        metrics = trainer.step().metrics
        assert target is None or metrics["entropy_bonus"].value == pytest.approx(second)
        trainer.snapshot().write(tmp_path)
        again = one_rank(config_with(target, bonus), model_path)
        again.load(tmp_path)
        for one in (trainer, again):
            one.accumulate([groups])
        norm = trainer.step().grad_norm
        assert again.step().grad_norm == norm
        return norm

    grown = second_norm(100.0, 0.1, 0.105, tmp_path / "grown")
    stopped = second_norm(1e-3, 0.1, 0.0, tmp_path / "stopped")
    plain = one_rank(config_with(None, 0.0), model_path)
    kept = one_rank(config_with(None, 0.105), model_path)
    norms = []
    for one, folder in ((plain, "stopped"), (kept, "grown")):
        one.load(tmp_path / folder)
        one.accumulate([groups])
        norms.append(one.step().grad_norm)
    assert [stopped, grown] == norms
    assert grown != pytest.approx(stopped)


def test_a_sum_over_tokens_is_the_mean_times_their_number(model_path: str) -> None:
    norms = []
    for aggregation in (Aggregation.token_mean, Aggregation.token_sum):
        config = tiny_config()
        config.algorithm.aggregation = aggregation
        trainer = one_rank(config, model_path)
        trainer.accumulate([tiny_groups()])
        norms.append(trainer.step().grad_norm)
    num_tokens = sum(int(one.sample.loss_mask.sum()) for group in tiny_groups() for one in group)
    assert norms[1] == pytest.approx(num_tokens * norms[0], rel=1e-5)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_rate_follows_the_effective_share_of_the_tokens(model_path: str, power: float) -> None:
    config = tiny_config()
    config.trainer.schedule_args = {"effective_share": power}
    trainer = one_rank(config, model_path)
    trainer.accumulate([tiny_groups()])
    outcome = trainer.step()
    share = outcome.metrics["ratio/effective_share"].value
    assert share is not None and 0 < share < 0.9
    assert outcome.learning_rate == pytest.approx(config.trainer.learning_rate * share**power)


def test_the_kl_coefficient_and_the_entropy_control_adapt_and_are_remembered(model_path: str, tmp_path: Path) -> None:
    config = tiny_config()
    config.algorithm.kl_coefficient, config.algorithm.kl_target = 0.5, 1e-6
    config.algorithm.entropy_low, config.algorithm.entropy_high = 0.1, 0.2
    trainer = one_rank(config, model_path)
    groups = tiny_groups(with_reference=True)
    packed = pack(groups)
    _, entropies = trainer._policy(packed)
    of_sequence = np.bincount(packed.sequence_of, entropies.detach().numpy()) / np.bincount(packed.sequence_of)
    trainer.accumulate([groups])
    first = trainer.step().metrics
    # 12 sequences of 10,000 push the coefficient up by 20 % of their share.
    assert first["kl_coefficient"].value == pytest.approx(0.5 * (1 + 0.2 * 12 / 10_000))
    assert first["entropy_control"].value == 1.0
    assert first["entropy/sequence_mean"].value == pytest.approx(of_sequence.mean(), rel=1e-5)
    trainer.snapshot().write(tmp_path / "saved")
    again = one_rank(config, model_path)
    again.load(tmp_path / "saved")
    for one in (trainer, again):
        one.accumulate([groups])
    assert again.step().grad_norm == trainer.step().grad_norm
    free = tiny_config()
    free.algorithm.kl_coefficient, free.algorithm.kl_target = 0.5, 1e-6
    positive = [[replace(one, advantage=max(float(np.max(one.advantage)), 0.0)) for one in group] for group in groups]
    norms = []
    for settings, batch in ((config, groups), (free, positive), (free, groups)):
        one = one_rank(settings, model_path)
        one.load(tmp_path / "saved")
        one._objective.load_state(one._objective.state() | {"leaves_out_negatives": float(settings is config)})
        one.accumulate([batch])
        norms.append(one.step().grad_norm)
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] != pytest.approx(norms[2])
