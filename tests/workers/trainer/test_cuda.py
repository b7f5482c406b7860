"""The trainer on a GPU: the same figures as on the CPU, in float32 and near them in bfloat16, and its memory lent."""

from __future__ import annotations

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import spawn_ranks
from safetensors.torch import load_file, save_file
from training import largest_relative_difference, save_model, tiny_config, tiny_groups, tiny_llama
from transformers import Qwen3_5TextConfig

from rlflow.batching.pack import pack
from rlflow.config import Checkpointing, Config, Dtype, Offload, Optimizer, TrainerConfig
from rlflow.types import Sample, TrainSample
from rlflow.workers.trainer.attention import attention_layout, packed_attention
from rlflow.workers.trainer.frozen import FrozenPolicy
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.optimizers import ShardGroup, ShardOptimizer
from rlflow.workers.trainer.parking import ParkingSpace
from rlflow.workers.trainer.policy import load_policy
from rlflow.workers.trainer.profile import RankProfile
from rlflow.workers.trainer.token_logprobs import LogitRule, TokenLogprobs
from rlflow.workers.trainer.way import Way, go_in_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = {"hidden_size": 64, "head_dim": 16}
"""Flex attention takes heads of 16 and more."""
LINEAR = {
    **{"vocab_size": 67, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
HAS_LINEAR_KERNELS = all(find_spec(package) for package in ("fla", "causal_conv1d"))


def take_step(config: Config, model: str, rendezvous: Path) -> tuple[float, np.ndarray, dict[str, torch.Tensor]]:
    """Gradient norm, log-probabilities before the step, parameters after it."""
    trainer = FsdpTrainer(config, model, 0, 1, f"file://{rendezvous}")
    try:
        groups = tiny_groups(num_groups=2)
        (rows,) = trainer.per_token([groups])
        trainer.accumulate([groups])
        outcome = trainer.step()
        return outcome.grad_norm, np.concatenate(rows), {n: p.cpu().clone() for n, p in trainer.full_parameters()}
    finally:
        trainer.close()


def on_cpu(config: Config, model: str) -> np.ndarray:
    from rlflow.workers.trainer.policy import split_logprobs

    groups = tiny_groups(num_groups=2)
    with torch.no_grad():
        logprobs, _ = load_policy(config, model)(pack(groups))
    return np.concatenate(split_logprobs(logprobs, [sample for group in groups for sample in group]))


def test_float32_on_a_gpu_agrees_with_the_cpu(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    _, logprobs, _ = take_step(tiny_config(), model, tmp_path / "rendezvous")
    np.testing.assert_allclose(logprobs, on_cpu(tiny_config(), model), atol=1e-3)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    norm, logprobs, _ = take_step(tiny_config(), model, tmp_path / "first")
    config = tiny_config()
    config.model.dtype = Dtype.bfloat16
    rounded_norm, rounded, parameters = take_step(config, model, tmp_path / "second")
    np.testing.assert_allclose(rounded, logprobs, atol=0.2)
    assert rounded_norm == pytest.approx(norm, rel=0.1)
    assert all(parameter.dtype == torch.float32 for parameter in parameters.values())


@pytest.mark.skipif(not HAS_LINEAR_KERNELS, reason="needs flash-linear-attention and causal-conv1d")
def test_samples_end_to_end_through_the_kernels_of_linear_layers(tmp_path: Path) -> None:
    architecture = Qwen3_5TextConfig(**SIZES, **LINEAR)
    config = tiny_config()
    config.model.dtype = Dtype.bfloat16
    path, found = save_model(architecture, tmp_path / "model"), []
    for way in (Way.end_to_end, Way.padded):
        trainer = FsdpTrainer(config, path, 0, 1, f"file://{tmp_path / way}")
        try:
            if way is Way.padded:
                go_in_rows(trainer._policy.model)
            assert trainer.settle_way().way is way
            (rows,) = trainer.per_token([tiny_groups()])
            trainer.accumulate([tiny_groups()])
            found.append((np.concatenate(rows), trainer.step().grad_norm))
        finally:
            trainer.close()
    (logprobs, norm), (padded, padded_norm) = found
    assert np.abs(logprobs - padded).mean() < 0.05
    assert norm == pytest.approx(padded_norm, rel=0.05)


def test_offloaded_shards_train_alike(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    norm, _, parameters = take_step(tiny_config(), model, tmp_path / "first")
    config = tiny_config()
    config.trainer.offload = Offload.cpu
    other_norm, _, others = take_step(config, model, tmp_path / "second")
    assert other_norm == pytest.approx(norm, rel=1e-3)
    assert largest_relative_difference(others, parameters) < 1e-3


def test_a_sleeping_trainer_gives_its_memory_back(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    trainer = FsdpTrainer(tiny_config(), model, 0, 1, f"file://{tmp_path / 'rendezvous'}")
    trainer.accumulate([tiny_groups(num_groups=2)])
    trainer.step()
    before = {name: tensor.cpu().clone() for name, tensor in trainer.full_parameters()}
    held = torch.cuda.memory_allocated()
    trainer.offload()
    assert torch.cuda.memory_allocated() < held / 4
    trainer.reload()
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in trainer.full_parameters())
    trainer.close()


def test_a_frozen_model_in_bfloat16_keeps_its_frequencies(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    config = tiny_config()
    config.model.dtype = Dtype.bfloat16
    reference = FrozenPolicy(config, model)
    assert {parameter.device.type for parameter in reference._policy.parameters()} == {"cuda"}
    expected = dict(load_policy(config, model).model.named_buffers())
    for name, buffer in reference._policy.model.named_buffers():
        assert torch.equal(buffer.cpu(), expected[name]), name
    found = np.concatenate(reference.logprobs(tiny_groups(num_groups=2)))
    np.testing.assert_allclose(found, on_cpu(tiny_config(), model), atol=0.2)


@pytest.mark.parametrize("kind", Optimizer)
def test_every_optimiser_steps_as_on_the_cpu(kind: Optimizer) -> None:
    """Muon orthogonalises in bfloat16 there."""
    if kind is Optimizer.adamw8bit:
        pytest.importorskip("torchao")
    shapes, rate = {"hidden": (64, 128), "embedding": (32, 128)}, 1e-3
    torch.manual_seed(0)
    gradients = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(2)]
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        optimizer = ShardOptimizer(
            TrainerConfig(optimizer=kind), shapes, frozenset({"hidden"}), ShardGroup(device=device)
        )
        shards = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        for step in gradients:
            optimizer.step(shards, {name: gradient.to(device) for name, gradient in step.items()}, rate)
        found.append({name: shard.cpu() for name, shard in shards.items()})
    for name in shapes:
        assert (found[0][name] - found[1][name]).abs().mean() < 0.05 * found[0][name].abs().mean()


def test_a_step_tells_its_gpu_and_the_peak_of_its_memory(tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    trainer = FsdpTrainer(tiny_config(), model, 0, 1, f"file://{tmp_path / 'rendezvous'}")
    trainer.accumulate([tiny_groups(num_groups=2)])
    outcome = trainer.step()
    assert outcome.work is not None
    assert outcome.work.device == torch.cuda.get_device_name()
    (peak,) = outcome.memory_peaks
    assert peak >= torch.cuda.memory_allocated() > 0
    trainer.close()


def test_a_profile_holds_kernels_and_allocations(tmp_path: Path) -> None:
    profile = RankProfile()
    matrix = torch.ones(256, 256, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    profile.write(tmp_path, "rank")
    with gzip.open(tmp_path / "rank.trace.json.gz", "rt") as file:
        categories = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert {"cpu_op", "kernel"} <= categories
    assert (tmp_path / "rank.memory.pickle").stat().st_size > 0


def test_what_leaves_the_gpu_waits_in_the_same_pinned_memory() -> None:
    device = torch.device("cuda", 0)
    tensors = [torch.arange(5000.0, device=device), torch.arange(300, device=device)]
    expected = [each.cpu() for each in tensors]
    space, places = ParkingSpace(device, chunk_bytes=2**12), []
    for _ in range(2):
        space.park(tensors)
        assert all(chunk.is_pinned() for chunk in space._chunks)
        places.append([chunk.data_ptr() for chunk in space._chunks])
        space.unpark()
        assert all(torch.equal(each.cpu(), there) for each, there in zip(tensors, expected, strict=True))
    assert places[0] == places[1]


def test_compiled_attention_over_16k_tokens_equals_float64_on_the_last_rows() -> None:
    torch.manual_seed(0)
    device, num_tokens = torch.device("cuda"), 2**14
    packed = pack([group_of(prompt_length=4096, completion_lengths=[4096, 4096, 4097])])
    layout = attention_layout(packed, device, use_flex=True)
    assert (len(packed.input_ids), layout.num_padding) == (num_tokens, 0)
    query, key, value = (torch.randn(1, heads, num_tokens, 64, device=device) for heads in (4, 2, 2))
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, None, scaling=0.125, layout=layout)
    rows = torch.arange(num_tokens - 300, num_tokens, device=device)
    keys = torch.arange(num_tokens, device=device)
    assert layout.block_masks is not None
    sees = layout.block_masks[None].mask_mod(keys[:0], keys[:0], rows[:, None], keys[None])
    q, k, v = (states[0].double() for states in (query[:, :, rows], key, value))
    scores = (q @ k.repeat_interleave(2, 0).transpose(1, 2) * 0.125).masked_fill(~sees, -torch.inf)
    expected = (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1)
    torch.testing.assert_close(found[0, rows].double(), expected, atol=5e-3, rtol=5e-3)


def group_of(prompt_length: int, completion_lengths: list[int]) -> list[TrainSample]:
    return [
        TrainSample(
            sample=Sample(
                prompt_ids=np.zeros(prompt_length, np.int32),
                completion_ids=np.full(length, index + 1, np.int32),
                loss_mask=np.ones(length, np.bool_),
                logprobs=np.zeros(length, np.float32),
                versions=np.zeros(length, np.int32),
                cache_versions=np.zeros(length, np.int32),
            ),
            advantage=1.0,
        )
        for index, length in enumerate(completion_lengths)
    ]


@pytest.mark.parametrize("checkpointing", list(Checkpointing))
def test_compiled_layers_train_like_eager_ones(checkpointing: Checkpointing, tmp_path: Path) -> None:
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    config = tiny_config()
    config.trainer.compile = False
    norm, logprobs, parameters = take_step(config, model, tmp_path / "first")
    config.trainer.compile, config.trainer.gradient_checkpointing = True, checkpointing
    other_norm, others, updated = take_step(config, model, tmp_path / "second")
    np.testing.assert_allclose(others, logprobs, atol=1e-3)
    assert other_norm == pytest.approx(norm, rel=1e-3)
    assert largest_relative_difference(updated, parameters) < 1e-3


def test_the_output_layer_needs_its_gradient_and_some_logits() -> None:
    rows, vocabulary, hidden_size, max_logits = 4096, 2**17, 1024, 2**24
    hidden = torch.randn(rows, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    row_of = torch.arange(rows, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = TokenLogprobs.apply(hidden, weight, None, row_of, row_of, LogitRule(), max_logits)  # pyright: ignore[reportGeneralTypeIssues]
    logprobs.sum().backward()
    # The gradient in bfloat16, the hidden states' in float32 and bfloat16, and four float32 copies of some logits.
    allowed = 2 * vocabulary * hidden_size + 6 * rows * hidden_size + 4 * 4 * max_logits + 2**26
    assert torch.cuda.max_memory_allocated() - before < allowed


def share_rows(rank: int, world_size: int, model: str, rendezvous: str, folder: Path) -> None:
    config = tiny_config()
    config.model.dtype = Dtype.float32
    config.trainer.compile = False
    config.trainer.ranks = config.trainer.sequence_parallel = world_size
    trainer = FsdpTrainer(config, model, rank, world_size, rendezvous)
    groups = tiny_groups(num_groups=2)
    (rows,) = trainer.per_token([groups])
    trainer.accumulate([groups])
    norm = torch.tensor([trainer.step().grad_norm])
    found = {name: tensor.cpu().clone() for name, tensor in trainer.full_parameters()}
    if rank == 0:
        save_file({"logprobs": torch.from_numpy(np.concatenate(rows)), "norm": norm, **found}, folder / f"{world_size}")
    trainer.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_share_a_row(tmp_path: Path) -> None:
    """Flex attention, with half of the heads on each, and NCCL."""
    model = save_model(tiny_llama(**SIZES), tmp_path / "model")
    for size in (1, 2):
        spawn_ranks(size, share_rows, size, model, f"file://{tmp_path / f'rendezvous_{size}'}", tmp_path)
    alone, shared = (load_file(tmp_path / name) for name in ("1", "2"))
    assert largest_relative_difference(shared, alone) < 1e-3
