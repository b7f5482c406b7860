"""Rows whose tokens several ranks share: the same figures as on one rank, and a share of the memory.

That the ranks train and save alike, step after step, is in test_trainer_contract.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from back_ends import Layout, needs_deepspeed, run_ranks
from families import FAMILIES, tiny_model
from processes import spawn_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import (
    VOCABULARY,
    largest_relative_difference,
    save_model,
    share,
    tiny_config,
    tiny_groups,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
    with_adapters,
)
from transformers import PreTrainedConfig

from rlflow.batching.pack import PackedBatch, pack
from rlflow.batching.routes import no_route
from rlflow.config import Aggregation, Backend, Checkpointing, Config
from rlflow.errors import ConfigError
from rlflow.tools.dry_run.model import read_model
from rlflow.types import CriticTargets, Sample, TrainSample
from rlflow.workers.trainer import policy as policy_module
from rlflow.workers.trainer.actor import build_backend
from rlflow.workers.trainer.attention import attention_layout
from rlflow.workers.trainer.gate import settle_way
from rlflow.workers.trainer.heads import check_heads
from rlflow.workers.trainer.policy import empty_policy, load_policy
from rlflow.workers.trainer.rank_group import ALONE as ALONE_GROUP
from rlflow.workers.trainer.rank_group import RankGroup
from rlflow.workers.trainer.sequence_parallel import RowPart, shared_attention
from rlflow.workers.trainer.way import check_packed, is_packed

ALONE = Layout(name="alone", backend=Backend.fsdp, ranks=1)
TWO = Layout(name="two", backend=Backend.fsdp, ranks=2, sequence_parallel=2)
THREE = Layout(name="three", backend=Backend.fsdp, ranks=3, sequence_parallel=3)
FOUR = Layout(name="four", backend=Backend.fsdp, ranks=4, sequence_parallel=4)
ZERO = Layout(name="zero", backend=Backend.deepspeed, zero_stage=3, ranks=2, sequence_parallel=2)
EIGHT_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}


# -- the exchange


def exchange(rank: int, rendezvous: str) -> None:
    """Three ranks, 7 tokens, so that the row is padded to 9: queries of 6 heads, keys of 2, which become 6."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=3)
    part = RowPart(group=RankGroup(rank=rank, size=3, process_group=dist.group.WORLD), num_tokens=7)
    np.testing.assert_array_equal(
        part.of(np.arange(10, 17), padding=-1), [[10, 11, 12], [13, 14, 15], [16, -1, -1]][rank]
    )
    generator = torch.Generator().manual_seed(0)
    for heads in (6, 2):
        row = torch.randn(9, heads, 4, generator=generator)  # the same on every rank
        own = row[3 * rank : 3 * rank + 3].transpose(0, 1)[None].requires_grad_()
        mine = part.to_heads(own)
        repeated = row.repeat_interleave(6 // heads, dim=1)
        assert torch.equal(mine, repeated[:7, 2 * rank : 2 * rank + 2].transpose(0, 1)[None])
        weights = torch.randn(9, 6, 4, generator=generator)
        (mine * weights[:7, 2 * rank : 2 * rank + 2].transpose(0, 1)).sum().backward()
        weights[7:] = 0  # padding goes nowhere
        expected = weights[3 * rank : 3 * rank + 3].unflatten(1, (heads, -1)).sum(2).transpose(0, 1)
        assert own.grad is not None
        torch.testing.assert_close(own.grad[0], expected)
        back = part.to_tokens(mine.transpose(1, 2))
        repeated[7:] = 0
        assert torch.equal(back[0], repeated[3 * rank : 3 * rank + 3])
    dist.destroy_process_group()


def test_ranks_exchange_tokens_for_heads_and_back(tmp_path: Path) -> None:
    spawn_ranks(3, exchange, f"file://{tmp_path / 'rendezvous'}")


# -- the same as alone


def many_groups() -> list[list[TrainSample]]:
    """Each with targets for a critic, which a policy ignores."""
    groups = tiny_groups(num_groups=3, with_reference=True)
    for index, one in enumerate(one for group in groups for one in group):
        length = len(one.sample.completion_ids)
        one.critic = CriticTargets(values=np.zeros(length, np.float32), returns=np.full(length, index % 3, np.float32))
    return groups


def routed(groups: list[list[TrainSample]]) -> list[list[TrainSample]]:
    """Every token goes to the experts 1 and 3 in the first layer, and chooses for itself in the second."""

    def given(sample: Sample) -> Sample:
        routes = np.full((sample.num_tokens, 2, 2), no_route(np.zeros(0, np.uint8)), np.uint8)
        routes[:, 0] = (1, 3)
        return replace(sample, experts=routes)

    return [[replace(one, sample=given(one.sample)) for one in group] for group in groups]


def train(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str, *, is_critic: bool = False) -> None:
    """Two steps: before each, log-probabilities or values; after each, figures and parameters."""
    trainer = build_backend(config, str(folder / "model"), rank, layout.ranks, rendezvous, is_critic)
    assert trainer.settle_way().difference < 1e-5
    groups, found = many_groups(), dict[str, Tensor]()
    if config.rollout.replay_experts:
        groups = routed(groups)
    for step in range(2):
        (rows,) = trainer.per_token([groups])
        found[f"{step}/per token"] = torch.from_numpy(np.concatenate(rows))
        trainer.accumulate(share(groups, layout.share_of(rank), layout.num_shares, 128))
        outcome = trainer.step()
        assert outcome.work is not None
        numbers = [mean.value for _, mean in sorted(outcome.metrics.items()) if mean.value is not None]
        found[f"{step}/figures"] = torch.tensor([outcome.grad_norm, outcome.work.tokens, *numbers])
        found |= {f"{step}/{name}": tensor.float().clone() for name, tensor in trainer.full_parameters()}
    if rank == 0:
        save_file(found, folder / f"{layout.name}.safetensors")
    trainer.close()


train_critic = partial(train, is_critic=True)
train_critic.__name__ = "train_critic"  # pyright: ignore[reportAttributeAccessIssue]


def by_sequence(config: Config) -> None:
    """A loss that needs all tokens of a sequence, and all terms beside it."""
    config.algorithm.loss, config.algorithm.loss_args = "gspo", {}
    config.algorithm.aggregation = Aggregation.seq_mean_token_mean
    config.algorithm.entropy_bonus, config.algorithm.kl_coefficient = 0.1, 0.1


def computed_again(config: Config) -> None:
    by_sequence(config)
    config.trainer.gradient_checkpointing = Checkpointing.full


def computed_again_in_part(config: Config) -> None:
    config.trainer.gradient_checkpointing = Checkpointing.selective


def balanced(config: Config) -> None:
    config.algorithm.balance_coefficient, config.rollout.replay_experts = 0.5, True


DENSE, MIXTURE = tiny_qwen3(**EIGHT_HEADS), tiny_qwen3_moe(**EIGHT_HEADS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model", "alter", "work"),
    [
        pytest.param(TWO, DENSE, by_sequence, train, id="two"),
        pytest.param(FOUR, DENSE, computed_again_in_part, train, id="four, more than heads of keys"),
        pytest.param(THREE, tiny_qwen3(**EIGHT_HEADS | {"num_attention_heads": 6}), computed_again, train, id="three"),
        pytest.param(ZERO, DENSE, computed_again, train, id="ZeRO", marks=needs_deepspeed),
        pytest.param(TWO, MIXTURE, balanced, train, id="a mixture"),
        pytest.param(TWO, DENSE, with_adapters, train, id="adapters"),
        pytest.param(TWO, DENSE, by_sequence, train_critic, id="a critic"),
    ],
)
def test_ranks_that_share_rows_compute_what_one_computes(
    layout: Layout, model: PreTrainedConfig, alter: Callable[[Config], object], work: Any, tmp_path: Path
) -> None:
    save_model(model, tmp_path / "model")
    for each in (ALONE, layout):
        config = each.config()
        config.trainer.micro_batch_tokens = 128
        alter(config)
        if each is ALONE:
            config.trainer.backend, config.trainer.zero_stage = Backend.fsdp, None
        run_ranks(work, each, config, tmp_path)
    found, expected = (load_file(tmp_path / f"{each.name}.safetensors") for each in (layout, ALONE))
    assert found.keys() == expected.keys()
    differences = {name: float((found[name] - tensor).abs().max()) for name, tensor in expected.items()}
    print("largest differences:", {name: f"{value:.0e}" for name, value in sorted(differences.items()) if "/p" in name})
    assert max(differences.values()) < 1e-5, differences
    assert not torch.equal(expected["1/per token"], expected["0/per token"])


def gradients_of_families(rank: int, folders: list[Path], rendezvous: str, use_flex: bool) -> None:
    """With flex attention, as on a GPU, log-probabilities alone, because on a CPU it has no backward."""
    if use_flex:
        policy_module.attention_layout = lambda *args, **given: attention_layout(*args, **given | {"use_flex": True})
        torch.set_grad_enabled(False)
    policies = [load_policy(tiny_config(), str(folder)) for folder in folders]  # each rank by itself
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    group = RankGroup(rank=rank, size=2, process_group=dist.group.WORLD)
    packed = pack(tiny_groups(num_groups=2))
    for folder, policy in zip(folders, policies, strict=True):
        assert is_packed(policy.model), folder.name
        found: list[dict[str, Tensor]] = []
        for shared in (ALONE_GROUP, group):
            policy.share_rows(shared)
            policy.zero_grad()
            logprobs, entropies = policy(packed)
            weights = torch.linspace(-1, 1, len(logprobs))
            total = ((logprobs * weights).sum() + entropies.sum()).div(shared.size)
            if not use_flex:
                total.backward()
            parts = {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}
            for part in parts.values():
                if shared is group:
                    dist.all_reduce(part)
            found.append({"logprobs": logprobs.detach(), **{name: part.clone() for name, part in parts.items()}})
        difference = largest_relative_difference(found[1], found[0])
        assert difference < 1e-4, f"{folder.name}: {difference}"
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("use_flex", [False, True], ids=["blocks", "flex"])
def test_every_family_that_goes_packed_can_share_rows(use_flex: bool, tmp_path: Path) -> None:
    """Windows, sinks, caps of scores, heads of two sizes, shared keys, experts."""
    folders = [tmp_path / name for name in FAMILIES if name not in ("Qwen3.5", "Qwen3-Next")]
    for folder in folders:
        tiny_model(folder.name, seed=0).save_pretrained(folder)
    spawn_ranks(2, gradients_of_families, folders, f"file://{tmp_path / 'rendezvous'}", use_flex)


# -- memory


LONG = 4096
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}


def long_row() -> list[list[TrainSample]]:
    """A prompt of 3584 tokens with a reply of 512."""
    ids, ones = np.random.default_rng(0).integers(0, VOCABULARY, LONG).astype(np.int32), np.ones(512, np.bool_)
    zeros = np.zeros(512, np.int32)
    sample = Sample(
        prompt_ids=ids[:-512],
        completion_ids=ids[-512:],
        loss_mask=ones,
        logprobs=zeros - np.float32(4),
        versions=zeros,
        cache_versions=zeros,
    )
    return [[TrainSample(sample=sample, advantage=1.0)]]


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that still live, each storage once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._known:
            self._known.add(id(storage))
            weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _forget(self, storage: int, num_bytes: int) -> None:
        self._known.remove(storage)
        self.now -= num_bytes


def measure(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    """The largest memory of tensors, forward and backward, beside what was there before."""
    trainer = build_backend(config, str(folder / "model"), rank, layout.ranks, rendezvous)
    trainer.accumulate([tiny_groups()])  # gradients
    with Alive() as alive:
        trainer.accumulate([long_row()])
    (folder / f"{layout.name}_{rank}").write_text(str(alive.peak))
    trainer.close()


@pytest.mark.slow
def test_two_ranks_that_share_a_row_of_4096_tokens_need_half_of_the_memory_each(tmp_path: Path) -> None:
    """A little more, because the mask of each layer stays whole on a CPU, and gathered parameters count."""
    save_model(tiny_llama(**EIGHT_HEADS | WIDE, max_position_embeddings=LONG), tmp_path / "model")
    for layout in (ALONE, TWO):
        config = layout.config()
        config.model.max_length = config.trainer.micro_batch_tokens = LONG
        run_ranks(measure, layout, config, tmp_path)
    alone, *two = [int((tmp_path / name).read_text()) for name in ("alone_0", "two_0", "two_1")]
    shares = ", ".join(f"{part / 2**20:.0f} MiB ({part / alone:.2f})" for part in two)
    print(f"largest memory of tensors: {alone / 2**20:.0f} MiB alone; on two ranks {shares}")
    assert max(two) < 0.6 * alone


# -- what is refused


@pytest.mark.parametrize(("size", "fitting"), [(3, "1, 2, 4, 8"), (16, "1, 2, 4, 8")])
def test_heads_that_do_not_divide_are_refused_with_the_numbers(size: int, fitting: str, tmp_path: Path) -> None:
    folder, config = save_model(tiny_qwen3(**EIGHT_HEADS), tmp_path), Config()
    check_heads(config, folder)
    config.trainer.sequence_parallel = size
    message = (
        f"trainer.sequence_parallel must divide the attention heads, which ranks share out; got {size}, and model.path "
        f"names a qwen3 model with num_attention_heads=8; set it to one of {fitting}"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        check_heads(config, folder)
    config.trainer.sequence_parallel = 4
    check_heads(config, folder)


def test_a_model_in_padded_rows_is_refused(tmp_path: Path) -> None:
    """By a dry run, and by a rank before it reads any weight."""
    tiny_model("Qwen3.5", seed=0).save_pretrained(tmp_path)
    config = TWO.config()
    message = "a qwen3_5_text model, which goes in padded rows because of its layers of linear_attention; set it to 1"
    with pytest.raises(ConfigError, match=message):
        read_model(config, str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        check_packed(empty_policy(config, str(tmp_path))[0].model, 2)


def test_a_model_that_differs_when_packed_is_not_tried_in_padded_rows(
    tmp_path: Path,
) -> None:
    policy = load_policy(tiny_config(), save_model(tiny_llama(), tmp_path))

    def forward(batch: PackedBatch) -> tuple[Tensor, ...]:
        logprobs, plain = policy(batch, has_plain=True)
        return logprobs + 1, plain

    ask = partial(settle_way, policy.model, forward, lambda found: found, torch.float32, 64)
    with pytest.raises(ConfigError, match=r"by 1 nats packed on average, .*; set trainer\.sequence_parallel=1, which"):
        ask(sequence_parallel=2)
    assert is_packed(policy.model)
    with pytest.raises(ConfigError, match="by 1 nats packed, 1 nats in padded rows on average, .*; choose another"):
        ask()


def test_heads_of_a_layer_that_do_not_divide_are_refused() -> None:
    part = RowPart(group=RankGroup(size=3), num_tokens=4)
    states = torch.zeros(1, 4, 4, 8)
    with pytest.raises(ConfigError, match="sequence_parallel=3 does not divide the 4 attention heads of Identity"):
        shared_attention(torch.nn.Identity(), states, states, states, None, part=part, scaling=1.0)
