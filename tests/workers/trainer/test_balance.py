"""The balance loss: its gradient against one written out token by token, in every cut; its loads, kept and resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import Layout, build, run_ranks
from rounding import allowed_difference
from torch import Tensor
from training import (
    largest_relative_difference,
    mixture_of,
    save_model,
    share,
    shuffled,
    tiny_config,
    tiny_groups,
    tiny_llama,
    tiny_qwen3_moe,
)
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedConfig

from rlflow.config import Aggregation, Backend, Checkpointing, Config
from rlflow.errors import ConfigError
from rlflow.types import TrainSample
from rlflow.workers.trainer.balance import Balance
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.routing import lay_routes, replay_routes

COEFFICIENT = 0.5
LOADS = [[6.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 5.0]]


def balanced(aggregation: Aggregation = Aggregation.token_mean) -> Config:
    config = tiny_config()
    config.algorithm.balance_coefficient = COEFFICIENT
    config.algorithm.aggregation = aggregation
    return config


def silent(groups: list[list[TrainSample]]) -> list[list[TrainSample]]:
    """The same without advantages, so that the balance loss is all there is."""
    return [[replace(one, advantage=0.0) for one in group] for group in groups]


def one_rank(folder: Path, config: Config) -> FsdpTrainer:
    trainer = FsdpTrainer(config, str(folder / "model"), 0, 1, "")
    assert trainer._balance is not None
    trainer._balance.before = torch.tensor(LOADS, dtype=torch.float64)
    return trainer


def gradients(trainer: FsdpTrainer, cut: Sequence[list[list[TrainSample]]]) -> dict[str, Tensor]:
    trainer.accumulate(cut)
    found = {name: tensor.clone() for name, tensor in trainer._gradients().items()}
    trainer._discard_gradients()
    return found


def oracle(
    path: str, groups: list[list[TrainSample]], dtype: torch.dtype, *, by_sequence: bool = False
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Gradients of the loss written out, sample by sample, and how often each expert was chosen by a loss token."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    total, counts = torch.zeros((), dtype=dtype), np.zeros((2, 4))
    for one in (one for group in groups for one in group):
        sample, logits = one.sample, []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda module, inputs, found, into=logits: into.append(found[0]))
            for layer in model.model.layers
        ]
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
        model(input_ids=ids[None])
        for hook in hooks:
            hook.remove()
        rows = len(sample.prompt_ids) - 1 + np.flatnonzero(sample.loss_mask)
        weight = 1 / len(rows) if by_sequence else 1.0
        for router, (found, loads) in enumerate(zip(logits, LOADS, strict=True)):
            shares = torch.tensor(loads, dtype=dtype) / 8
            for row in rows:
                probabilities = found[row].softmax(-1)
                total = total + COEFFICIENT * weight * 4 * (shares * probabilities).sum() / len(LOADS)
                for expert in probabilities.topk(2).indices.tolist():
                    counts[router, expert] += 1
    total.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}, counts


@pytest.mark.parametrize("aggregation", [Aggregation.token_mean, Aggregation.seq_mean_token_mean])
def test_the_gradient_and_the_loads_do_not_depend_on_the_cut(aggregation: Aggregation, tmp_path: Path) -> None:
    path = save_model(tiny_qwen3_moe(), tmp_path / "model")
    groups = silent(tiny_groups())
    by_sequence = aggregation is Aggregation.seq_mean_token_mean
    exact, counts = oracle(path, groups, torch.float64, by_sequence=by_sequence)
    others = [oracle(path, shuffled(groups, seed), torch.float32, by_sequence=by_sequence)[0] for seed in range(3)]
    allowed = allowed_difference(largest_relative_difference(other, exact) for other in others)
    trainer = one_rank(tmp_path, balanced(aggregation))
    assert trainer._balance is not None
    each_alone = [[[one]] for group in groups for one in group]
    for cut in ([groups], [groups[:1], groups[1:]], each_alone, [[], groups]):
        found = gradients(trainer, cut)
        unused = found.keys() - exact.keys()
        assert all("lm_head" in name or "norm" in name or "layers.1" in name for name in unused)
        assert not any(found.pop(name).any() for name in unused), "what comes after the last router"
        assert largest_relative_difference(found, exact) <= allowed
        assert np.array_equal(trainer._balance.counts.numpy(), counts)
        trainer._balance.counts.zero_()


@pytest.mark.parametrize("checkpointing", [Checkpointing.selective, Checkpointing.full])
def test_a_router_that_is_computed_again_counts_once(checkpointing: Checkpointing, tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    plain, again = balanced(), balanced()
    again.trainer.gradient_checkpointing = checkpointing
    trainers = one_rank(tmp_path, plain), one_rank(tmp_path, again)
    expected, found = (gradients(each, [tiny_groups()]) for each in trainers)
    assert largest_relative_difference(found, expected) < 1e-5
    counts = [each._balance.counts for each in trainers if each._balance is not None]
    assert torch.equal(*counts)
    assert counts[0].sum(1).tolist() == [2 * sum(one.sample.loss_mask.sum() for g in tiny_groups() for one in g)] * 2


def test_the_loads_of_a_step_are_those_of_the_next_and_of_a_resumed_run(tmp_path: Path) -> None:
    path = save_model(tiny_qwen3_moe(), tmp_path / "model")
    config = balanced()
    config.trainer.learning_rate = 1e-9
    trainer = FsdpTrainer(config, path, 0, 1, "")
    _, counts = oracle(path, tiny_groups(), torch.float64)
    # Even shares: the probabilities of a token add up to 1, whatever the router does.
    first = gradients(trainer, [silent(tiny_groups())])
    assert max(float(each.abs().max()) for each in first.values()) < 1e-6
    assert trainer._balance is not None
    trainer._balance.counts.zero_()
    trainer.per_token([tiny_groups()])
    trainer.observe([silent(tiny_groups())])
    trainer.accumulate([tiny_groups()])
    outcome = trainer.step()
    assert outcome.metrics["experts/max_load"].total == pytest.approx((counts / counts.sum(1)[:, None]).max() * 4)
    trainer.snapshot().write(tmp_path / "saved")
    again = FsdpTrainer(config, path, 0, 1, "")
    again.load(tmp_path / "saved")
    assert again._balance is not None
    assert again._balance.before.tolist() == trainer._balance.before.tolist() == counts.tolist()
    found, expected = (gradients(each, [silent(tiny_groups())]) for each in (again, trainer))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-3


def test_the_coefficient_evens_out_the_loads(tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    trainer = FsdpTrainer(balanced(), str(tmp_path / "model"), 0, 1, "")
    for layer in trainer._policy.model.model.layers:
        with torch.no_grad():
            layer.mlp.gate.weight[1:] = 0  # equally good, of which the first is chosen each time
    loads = []
    for _ in range(12):
        trainer.accumulate([silent(tiny_groups(num_groups=12))])
        loads.append(trainer.step().metrics["experts/max_load"].total)
    assert loads[0] > 1.9
    assert max(loads[5:]) < 1.8


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = save_model(tiny_llama(), tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"^algorithm.balance_coefficient has no effect on the llama model.*set it to 0$"
    ):
        FsdpTrainer(balanced(), path, 0, 1, "")


def test_without_a_step_before_the_loss_is_one() -> None:
    balance = Balance(1, 4)
    balance.begin(torch.tensor([2, 0, 2]))
    probabilities = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]])
    balance.add(0, probabilities, torch.tensor([[2, 3], [0, 1], [0, 1]]))
    losses = balance.take()
    assert losses is not None
    assert losses.tolist() == pytest.approx([1, 1, 1])
    assert balance.counts.tolist() == [[2, 2, 1, 1]]
    assert balance.end_step(balance.counts) == pytest.approx(4 / 3)
    balance.begin(torch.tensor([2]))
    balance.add(0, probabilities, torch.tensor([[2, 3], [0, 1], [0, 1]]))
    losses = balance.take()
    assert losses is not None
    assert losses.tolist() == pytest.approx([4 * (0.7 * 2 + 0.1 * 2 + 0.1 + 0.1) / 6])


LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 4, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 2},
}
FAMILIES: list[tuple[PreTrainedConfig, Any]] = [
    (tiny_qwen3_moe(), lambda logits: logits.softmax(-1)),
    (mixture_of(GptOssConfig, num_local_experts=4), lambda logits: logits.softmax(-1)),
    (
        mixture_of(DeepseekV3Config, **LATENT),
        lambda logits: logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True),
    ),
]


@pytest.mark.parametrize(("family", "expected"), FAMILIES, ids=[family.model_type for family, _ in FAMILIES])
def test_probabilities_are_those_of_the_family(family: PreTrainedConfig, expected: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family, dtype=torch.float32)
    balance = replay_routes(model, with_balance=True)
    assert balance is not None
    balance.before = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    mixture = model.model.layers[0].mlp
    router = mixture.router if family.model_type == "gpt_oss" else mixture.gate
    torch.nn.init.normal_(router.weight)
    lay_routes(model, None, np.arange(5), np.arange(5))
    logits, *_ = router(torch.randn(5, 32))
    losses = balance.take()
    assert losses is not None
    assert torch.allclose(losses, 4 * expected(logits)[:, 0], atol=1e-6)


def train(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    grad_norms = []
    for _ in range(2):
        trainer.accumulate(share(tiny_groups(num_groups=5), rank, layout.ranks))
        grad_norms.append(trainer.step().grad_norm)
    assert trainer._balance is not None
    if rank == 0:
        (folder / f"{layout.name}.json").write_text(json.dumps([trainer._balance.before.tolist(), grad_norms]))
    trainer.close()


@pytest.mark.slow
def test_the_loads_are_those_of_all_ranks(tmp_path: Path) -> None:
    save_model(tiny_qwen3_moe(), tmp_path / "model")
    found = []
    for ranks in (1, 2):
        layout = Layout(name=f"fsdp_{ranks}", backend=Backend.fsdp, ranks=ranks)
        config = layout.config()
        config.algorithm.balance_coefficient = COEFFICIENT
        if ranks == 2:
            config.trainer.gradient_checkpointing = Checkpointing.full
        run_ranks(train, layout, config, tmp_path)
        found.append(json.loads((tmp_path / f"{layout.name}.json").read_text()))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
