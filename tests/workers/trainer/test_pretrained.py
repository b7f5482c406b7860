"""A model begins with the values of its files to the bit, on any ranks, and with rotary frequencies in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from back_ends import Layout, build, needs_deepspeed, run_ranks
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from training import (
    VOCABULARY,
    save_model,
    save_reward_model,
    tiny_config,
    tiny_groups,
    tiny_llama,
    tiny_qwen3,
    with_adapters,
)
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from rlflow.config import Backend, Config, Dtype
from rlflow.workers.trainer.frozen import FrozenPolicy
from rlflow.workers.trainer.fsdp import FsdpTrainer
from rlflow.workers.trainer.policy import Policy, empty_policy, load_policy
from rlflow.workers.trainer.reward_model import RewardModel

TENSOR_2 = Layout(name="fsdp_2x2", backend=Backend.fsdp, ranks=4, tensor_parallel=2)
LAYOUTS = (
    Layout(name="fsdp_2", backend=Backend.fsdp),
    Layout(name="fsdp_4", backend=Backend.fsdp, ranks=4),
    *(Layout(name=f"zero{stage}_2", backend=Backend.deepspeed, zero_stage=stage) for stage in (1, 3)),
)


def experts() -> PreTrainedConfig:
    """A mixture whose files hold each expert apart, while the model holds all of a layer as one parameter."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )


def saved(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, **options: str) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, **options)
    return str(folder)


def without_prefix(folder: Path) -> str:
    """Files of a model without a head, whose names lack the first part."""
    torch.manual_seed(0)
    AutoModel.from_config(tiny_llama(), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def with_both_names(folder: Path) -> str:
    """Files that hold a tied parameter twice."""
    path = save_model(tiny_llama(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return path


def plain(path: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).named_parameters())


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("write", "in_files"),
    [
        pytest.param(lambda folder: save_model(tiny_llama(), folder), True, id="tied"),
        pytest.param(lambda folder: saved(tiny_qwen3(), folder, torch.bfloat16), True, id="bfloat16"),
        pytest.param(lambda folder: saved(tiny_llama(), folder, torch.float16), True, id="float16"),
        pytest.param(lambda folder: saved(tiny_llama(), folder, max_shard_size="20KB"), True, id="several_files"),
        pytest.param(lambda folder: saved(experts(), folder, torch.bfloat16), False, id="experts"),
        pytest.param(without_prefix, False, id="without_prefix"),
        pytest.param(with_both_names, False, id="both_names_of_a_tied_parameter"),
    ],
)
def test_first_values_are_those_of_transformers(
    write: Callable[[Path], str], in_files: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = write(tmp_path)
    policy = load_policy(tiny_config(), path, dtype=dtype)
    assert_equal(dict(policy.model.named_parameters()), plain(path, dtype))
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert_equal(dict(policy.model.named_buffers()), dict(expected.named_buffers()))
    assert not any(module.training for module in policy.modules() if module is not policy)
    assert empty_policy(tiny_config(), path)[1].in_files is in_files


def test_a_critic_begins_with_zeros_and_adapters_with_the_values_of_their_seed(tmp_path: Path) -> None:
    path = save_model(tiny_llama(), tmp_path)
    critic = FsdpTrainer(tiny_config(), path, 0, 1, "", is_critic=True)
    decoder = AutoModelForCausalLM.from_pretrained(path).model
    expected = {f"model.{name}": each.detach() for name, each in decoder.named_parameters()}
    expected |= {"score.weight": torch.zeros(1, 32), "score.bias": torch.zeros(1)}
    assert_equal(dict(critic.full_parameters()), expected)

    def adapters(seed: int) -> dict[str, torch.Tensor]:
        config = with_adapters(tiny_config())
        config.run.seed = seed
        return dict(FsdpTrainer(config, path, 0, 1, "").adapter_parameters())

    first, again, other = adapters(0), adapters(0), adapters(1)
    assert_equal(again, first)
    inner = [name for name in first if "lora_A" in name]
    assert inner and not any(torch.equal(first[name], other[name]) for name in inner)
    assert all(first[name].abs().max() <= first[name].shape[1] ** -0.5 for name in inner)
    assert len({first[name].flatten()[0].item() for name in inner}) == len(inner)
    assert all(first[name].count_nonzero() == 0 for name in first if "lora_B" in name)


def in_bfloat16() -> Config:
    config = tiny_config()
    config.model.dtype, config.model.max_length = Dtype.bfloat16, 4096
    return config


def assert_angles_are_exact(model: torch.nn.Module, head_dim: int) -> None:
    """Cosines and sines at positions up to 4,095 against float64, as bfloat16 rounds them."""
    positions = np.arange(4096)
    frequencies = 10000.0 ** -(np.arange(0, head_dim, 2) / head_dim)
    angles = np.tile(positions[:, None] * frequencies, 2)
    rotary = model.get_submodule("model.rotary_emb")
    cosines, sines = rotary(torch.zeros(1, dtype=torch.bfloat16), torch.from_numpy(positions)[None])
    for found, expected in ((cosines, np.cos(angles)), (sines, np.sin(angles))):
        assert found.dtype == torch.bfloat16
        # Half a unit of bfloat16 below 1, and float32 angles of up to 4,095 rad.
        np.testing.assert_allclose(found[0].double().numpy(), expected, atol=2**-9 + 4096 * 2**-23)


def test_a_frozen_model_in_bfloat16_turns_by_exact_angles(tmp_path: Path) -> None:
    reference = FrozenPolicy(in_bfloat16(), save_model(tiny_llama(max_position_embeddings=4096), tmp_path / "policy"))
    assert {each.dtype for each in reference._policy.parameters()} == {torch.bfloat16}
    assert_angles_are_exact(reference._policy.model, head_dim=8)
    scores = RewardModel(in_bfloat16(), save_reward_model(tmp_path / "reward", max_position_embeddings=4096))
    assert {each.dtype for each in scores._model.parameters()} == {torch.bfloat16}
    assert_angles_are_exact(scores._model.model, head_dim=8)


def write_parameters(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    found = {name: tensor.float().clone() for name, tensor in trainer.full_parameters()}
    assert isinstance(trainer._policy, Policy)
    for name, buffer in trainer._policy.model.named_buffers():
        found[name] = buffer.clone()
    save_file(found, folder / f"{layout.name}_{rank}.safetensors")
    trainer.close()


def write_reference(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    """Rank 1 has one row, rank 0 more; then one rank has nothing."""
    reference = FrozenPolicy(config, str(folder / "model"), rank, layout.ranks, rendezvous)
    groups = tiny_groups()
    found = reference.logprobs(groups[rank :: layout.ranks]), reference.logprobs(groups[:1] if rank else [])
    for call, rows in enumerate(found):
        np.savez(folder / f"reference_{rank}_{call}.npz", *rows)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("model", [tiny_llama(), experts()], ids=["llama", "experts"])
def test_two_ranks_of_a_reference_say_what_one_says(model: PreTrainedConfig, tmp_path: Path) -> None:
    path = saved(model, tmp_path / "model")
    layout = LAYOUTS[0]
    config = layout.config()
    run_ranks(write_reference, layout, config, tmp_path)
    groups = tiny_groups()
    alone = FrozenPolicy(config, path)
    for rank in range(layout.ranks):
        for call, brought in enumerate((groups[rank :: layout.ranks], groups[:1] if rank else [])):
            found = np.load(tmp_path / f"reference_{rank}_{call}.npz")
            rows = [found[f"arr_{index}"] for index in range(len(found.files))]
            for row, expected in zip(rows, alone.logprobs(brought), strict=True):
                assert expected.any()
                np.testing.assert_allclose(row, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model", "dtype"),
    [
        *(
            pytest.param(
                layout,
                tiny_llama(num_hidden_layers=1),
                torch.float32,
                id=layout.name,
                marks=[needs_deepspeed] if layout.zero_stage else [],
            )
            for layout in LAYOUTS
        ),
        pytest.param(TENSOR_2, tiny_qwen3(), torch.bfloat16, id=TENSOR_2.name),
        pytest.param(LAYOUTS[0], experts(), torch.bfloat16, id="experts_2"),
    ],
)
def test_ranks_together_have_the_values_of_the_files(
    layout: Layout, model: PreTrainedConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = saved(model, tmp_path / "model", dtype)
    run_ranks(write_parameters, layout, layout.config(), tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = {name: each.detach() for name, each in (*whole.named_parameters(), *whole.named_buffers())}
    for rank in range(layout.ranks):
        assert_equal(load_file(tmp_path / f"{layout.name}_{rank}.safetensors"), expected)
