"""The arithmetic of a dry run against figures worked out by hand, and the command."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import linear_kernels
import pytest
from transformers import Qwen3MoeConfig
from transformers.models.lfm2 import modeling_lfm2

from rlflow.cli import main
from rlflow.config import (
    Checkpointing,
    Config,
    Dtype,
    ModelPlacement,
    Optimizer,
    Placement,
    Quantization,
    Send,
    TeacherConfig,
    Transport,
)
from rlflow.errors import ConfigError
from rlflow.tools.dry_run.command import as_text
from rlflow.tools.dry_run.estimate import Estimate, estimate, smallest_gpu
from rlflow.tools.dry_run.memory import (
    Activations,
    ModelFacts,
    ProcessMemory,
    RewardModelFacts,
    Weight,
    activation_bytes,
    cached_sequences,
    engine_memory,
    frozen_memory,
    logit_rows,
    reward_model_memory,
    shard_size,
    trainer_memory,
)
from rlflow.tools.dry_run.model import read_model, read_reward_model
from rlflow.workers.engine.setup import CacheShape

DATA = Path(__file__).parents[1] / "support" / "data"
QWEN2_7B = str(DATA / "qwen2_7b")
QWEN2_32B = str(DATA / "qwen2_32b")
PARAMETERS_7B = 7_615_616_512
"""2 x 152,064 x 3,584 + 28 x 233,057,792 + 3,584; a layer has 4 attention matrices with 3 biases, 3 x 3,584 x 18,944
and 2 norms."""
PARAMETERS_32B = 32_763_876_352
GIB = 2**30

SMALL = ModelFacts(
    model_type="small",
    weights=(
        Weight(name="embedding", shape=(10, 4), layer=None),
        Weight(name="layers.0", shape=(6, 4), layer=0),
        Weight(name="layers.1", shape=(6, 4), layer=1),
        Weight(name="layers.1.norm", shape=(4,), layer=1),
    ),
    activations=Activations(layers=1000, largest_layer=600, layer_inputs=16, kept=100, rest=40),
    trainer_activations=Activations(layers=1000, largest_layer=600, layer_inputs=16, kept=100, rest=40),
    cache=CacheShape(num_layers=2, num_key_value_heads=2, head_dim=8),
    hidden_size=4,
    vocabulary_size=10,
)
"""92 parameters: 40 outside the layers, 24 and 28 in them."""
CLASSIFIER = RewardModelFacts(num_parameters=50, largest_layer=300)


def config(**settings: object) -> Config:
    """`section__key=value`."""
    made = Config()
    for name, value in settings.items():
        section, key = name.split("__")
        setattr(getattr(made, section), key, value)
    return made


def sizes(memory: ProcessMemory) -> dict[str, int]:
    return {item.name: item.num_bytes for item in memory.items}


# -- from config.json


def test_parameters_of_a_7b_are_counted_without_weights() -> None:
    facts = read_model(config(model__dtype=Dtype.bfloat16), QWEN2_7B)
    assert facts.num_parameters == PARAMETERS_7B
    assert (facts.largest_layer(), facts.outside_layers) == (233_057_792, 1_089_998_336)
    assert (facts.num_layers, facts.hidden_size, facts.vocabulary_size) == (28, 3584, 152_064)
    assert facts.cache == CacheShape(num_layers=28, num_key_value_heads=4, head_dim=128)


def test_parameters_of_a_32b() -> None:
    assert read_model(config(model__dtype=Dtype.bfloat16), QWEN2_32B).num_parameters == PARAMETERS_32B


def test_activations_of_a_token_are_those_that_autograd_keeps() -> None:
    # A norm keeps its input in float32, one root, and what it casts; its output is kept once by whoever multiplies it.
    norm = 4 * 3584 + 4 + 2 * 3584 + 2 * 3584
    # Queries and outputs of 28 heads, keys and values of 4, all of 128; one float32 for each head.
    attention = 2 * (2 * 28 * 128 + 2 * 4 * 128) + 4 * 28
    mlp = 2 * 4 * 18_944  # gate, its activation, up, and their product
    layer = 2 * norm + attention + mlp
    rotary = 2 * 2 * 128  # sine and cosine, which the first layer keeps for all
    found = read_model(config(model__dtype=Dtype.bfloat16), QWEN2_7B).activations
    assert layer == 225_400
    assert found == Activations(
        layers=28 * layer + rotary,
        largest_layer=layer + rotary,
        layer_inputs=28 * 2 * 3584,
        # Queries, attention with a float32 for each head, and its projection; not keys and values, nor the MLP.
        kept=28 * (3 * 2 * 3584 + 4 * 28),
        rest=norm - 2 * 3584 + 8,  # the last norm's output is nobody's input; a token's id
    )


def test_a_tensor_group_shares_out_heads_and_mlp_but_not_norms() -> None:
    asked = config(model__dtype=Dtype.bfloat16, trainer__ranks=4, trainer__tensor_parallel=4)
    facts = read_model(asked, QWEN2_7B)
    norm = 4 * 3584 + 4 + 2 * 3584 + 2 * 3584
    attention = 2 * (2 * 7 * 128 + 2 * 1 * 128) + 4 * 7  # 7 query heads and 1 of keys and values
    mlp = 2 * 4 * 18_944 // 4
    assert facts.trainer_activations.layers == 28 * (2 * norm + attention + mlp) + 2 * 2 * 128
    assert facts.activations == read_model(config(model__dtype=Dtype.bfloat16), QWEN2_7B).activations
    cut = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512 + 3 * 3584 * 18_944
    assert facts.largest_layer(4) == 2 * 3584 + cut // 4
    assert (facts.num_parameters, facts.outside_layers) == (PARAMETERS_7B, 1_089_998_336)


def test_a_model_whose_heads_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel=8: .* a qwen2 model with num_attention_heads=28"):
        read_model(config(model__dtype=Dtype.bfloat16, trainer__tensor_parallel=8), QWEN2_7B)


def test_a_config_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(ConfigError, match="no model can be built from .*config.json: .*lama"):
        read_model(config(), str(tmp_path))


def write_config(folder: Path, **fields: object) -> str:
    """A config.json of a model so small that building it takes no time."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100, **fields}))
    return str(folder)


def test_experts_count_as_parameters_but_compute_in_bfloat16_only(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_type="mixtral", num_key_value_heads=2, num_local_experts=4)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 4 * 3 * 64 * 128 + 4 * 64 + 2 * 64
    found = read_model(config(model__dtype=Dtype.bfloat16), folder)
    assert found.num_parameters == 2 * layer + 2 * 100 * 64 + 64
    with pytest.raises(ConfigError, match="a mixtral model in float32 cannot be followed .* model.dtype=bfloat16"):
        read_model(config(), folder)


def test_the_way_of_a_model_with_convolutions_is_padded_rows(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_type="lfm2", layer_types=["conv", "full_attention"], num_key_value_heads=2)
    asked = config(model__dtype=Dtype.bfloat16)
    facts = read_model(asked, folder)
    assert not facts.is_packed
    assert read_model(asked, QWEN2_7B).is_packed
    found = estimate(asked, facts, max_logits=1000)
    assert "\nTraining: samples in padded rows, or end to end if" in as_text(found, asked, asked)


def test_kernels_that_need_memory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: object, seq_idx: object = None) -> None:
        raise RuntimeError("a pointer is needed")

    folder = write_config(tmp_path, model_type="lfm2", layer_types=["conv", "full_attention"], num_key_value_heads=2)
    expected = read_model(config(model__dtype=Dtype.bfloat16), folder)
    linear_kernels.install(monkeypatch, kernel, None)
    assert read_model(config(model__dtype=Dtype.bfloat16), folder) == expected
    with pytest.raises(RuntimeError, match="a pointer is needed"):
        modeling_lfm2.causal_conv1d_fn(0)


def test_keys_and_values_may_differ_in_size(tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16}
    folder = write_config(tmp_path, model_type="minicpm3", num_key_value_heads=4, **sizes)
    assert read_model(config(model__dtype=Dtype.bfloat16), folder).activations.layers > 0


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 16, "expand": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2", "vocab_size": 100, **sizes}))
    folder = str(tmp_path)
    with pytest.raises(ConfigError, match="a mamba2 model, which has no attention heads"):
        read_model(config(model__dtype=Dtype.bfloat16), folder)


def test_sums_of_experts_and_adapters_do_not_grow_with_the_tokens(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_type="mixtral", num_key_value_heads=2, num_local_experts=4)
    asked = config(model__dtype=Dtype.bfloat16, lora__rank=4, lora__send=Send.merged)
    facts = read_model(asked, folder)
    gate_up, down = 2 * 4 * 2 * 128 * 64, 2 * 4 * 64 * 128
    assert facts.trainer_activations.experts == (gate_up + down, gate_up + down)
    asked.lora.targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    without = read_model(asked, folder)
    # What goes into both matrices of two experts is kept for the gradients of their adapters.
    inputs = 2 * 2 * (64 + 128)
    assert facts.trainer_activations.layers == without.trainer_activations.layers + 2 * inputs
    assert without.trainer_activations.experts == ()
    found = [activation_bytes(facts, 8, each) - activation_bytes(without, 8, each) for each in Checkpointing]
    # The sums of both layers or of one, and the gradients of one.
    assert found == [8 * 2 * inputs + 3 * (gate_up + down), *[8 * inputs + 2 * (gate_up + down)] * 2]


# -- memory


def test_sixteen_bytes_a_parameter_over_the_ranks() -> None:
    facts = read_model(config(model__dtype=Dtype.bfloat16), QWEN2_7B)
    asked = config(model__dtype=Dtype.bfloat16, trainer__ranks=4)
    found = trainer_memory(asked, facts, num_tokens=16_384, max_logits=2**26)
    assert found.kept == 16 * PARAMETERS_7B // 4  # every first dimension is a multiple of 4


def test_memory_of_a_rank() -> None:
    asked = config(model__dtype=Dtype.bfloat16, trainer__ranks=4)
    found = trainer_memory(asked, SMALL, num_tokens=5, max_logits=20)
    shard = 4 * (3 * 4 + 2 * 4 + 2 * 4 + 1)  # of 10 rows 3, of 6 rows 2, of 4 elements 1
    assert sizes(found) == {
        "parameters": shard,
        "gradients": shard,
        "moments of AdamW": 2 * shard,
        "gathered parameters": 2 * (40 + 2 * 28),
        "gradients to be scattered": (2 + 4) * 40,
        "activations": 5 * (1000 + 40),
        "output layer": 12 * 2 * 10 + 2 * 10 * 4 + (2 + 4) * 5 * 4,
    }
    assert (found.kept, found.total) == (4 * shard, 4 * shard + found.passing)


def test_memory_of_a_rank_of_a_replica() -> None:
    of_two, of_eight = (
        trainer_memory(config(model__dtype=Dtype.bfloat16, **ranks), SMALL, num_tokens=5, max_logits=20)
        for ranks in ({"trainer__ranks": 2}, {"trainer__ranks": 8, "trainer__replicas": 4})
    )
    assert of_eight == of_two


@pytest.mark.parametrize(
    ("optimizer", "name", "num_bytes"),
    [
        # 92 elements, of which 2 x 24 are of matrices of decoder layers.
        (Optimizer.adamw, "moments of AdamW", 8 * 92),
        (Optimizer.adamw8bit, "moments of AdamW", 2 * (92 + 4 * 92 // 256)),
        (Optimizer.muon, "moments of Muon and AdamW", 4 * (2 * 92 - 48)),
    ],
)
def test_memory_of_each_optimiser(optimizer: Optimizer, name: str, num_bytes: int) -> None:
    found = sizes(trainer_memory(config(trainer__optimizer=optimizer), SMALL, num_tokens=5, max_logits=20))
    assert found[name] == num_bytes


def test_memory_of_a_rank_of_a_tensor_group() -> None:
    facts = replace(
        SMALL,
        weights=(
            Weight(name="embedding", shape=(10, 4), layer=None),
            Weight(name="layers.0.up", shape=(6, 4), layer=0, cut=0),
            Weight(name="layers.0.down", shape=(4, 6), layer=0, cut=1),
            Weight(name="layers.0.norm", shape=(4,), layer=0),
        ),
        trainer_activations=Activations(layers=600, largest_layer=400, layer_inputs=16, kept=100, rest=40),
    )
    asked = config(model__dtype=Dtype.bfloat16, trainer__ranks=4, trainer__tensor_parallel=2)
    found = sizes(trainer_memory(asked, facts, num_tokens=5, max_logits=50))
    # Of 10 rows over all ranks 3; of 3 rows 2, of 4 rows of 3 columns 2, over 2 ranks; of 4 elements over all ranks 1.
    assert found["parameters"] == 4 * (3 * 4 + 2 * 4 + 2 * 3 + 1)
    assert found["gathered parameters"] == 2 * (40 + 2 * (12 + 12 + 4))
    assert found["activations"] == 5 * (600 + 40)
    assert found["output layer"] == 12 * 3 * 10 + 2 * 10 * 4 + (2 + 4) * 5 * 4  # logits of 3 of the 5 tokens
    assert small_estimate(trainer__ranks=4, trainer__tensor_parallel=2, algorithm__group_size=4).batch == (
        small_estimate(trainer__ranks=2, algorithm__group_size=4).batch
    )


def test_memory_of_a_rank_that_shares_rows() -> None:
    asked = config(model__dtype=Dtype.bfloat16, trainer__ranks=4, trainer__sequence_parallel=2)
    alone = trainer_memory(config(model__dtype=Dtype.bfloat16, trainer__ranks=4), SMALL, num_tokens=5, max_logits=20)
    found = trainer_memory(asked, SMALL, num_tokens=10, max_logits=20)
    assert sizes(found) == sizes(alone)
    (note,) = [item.note for item in found.items if item.name == "activations"]
    assert note.startswith("a share of 2; trainer.gradient_checkpointing=none; ")
    assert small_estimate(trainer__ranks=4, trainer__sequence_parallel=2, algorithm__group_size=4).batch == (
        small_estimate(trainer__ranks=2, algorithm__group_size=4).batch
    )


def test_attention_repeats_heads_of_keys_for_more_ranks() -> None:
    """28 heads, and 4 of keys and values of 128 numbers: for 7 ranks these become 28, in each of 28 layers."""
    alone, shared, repeated = (
        read_model(config(model__dtype=Dtype.bfloat16, trainer__sequence_parallel=size), QWEN2_7B).trainer_activations
        for size in (1, 4, 7)
    )
    assert shared == alone
    assert repeated.largest_layer - alone.largest_layer == 2 * 24 * 128 * 2
    assert repeated.layers - alone.layers == 28 * 2 * 24 * 128 * 2


def test_a_single_float32_rank_gathers_nothing() -> None:
    found = sizes(trainer_memory(config(), SMALL, num_tokens=5, max_logits=20))
    assert found["parameters"] == found["gradients"] == 4 * 92
    assert found["moments of AdamW"] == 8 * 92
    assert "gathered parameters" not in found


def test_memory_of_a_rank_with_adapters() -> None:
    asked = config(model__dtype=Dtype.bfloat16, trainer__ranks=4)
    adapters = tuple(
        Weight(name=f"layers.{layer}.lora_{name}", shape=shape, layer=layer)
        for layer in (0, 1)
        for name, shape in (("A", (2, 4)), ("B", (6, 2)))
    )
    found = trainer_memory(asked, replace(SMALL, adapters=adapters), num_tokens=5, max_logits=20)
    shard = 4 * 2 * (1 * 4 + 2 * 2)  # of 2 rows 1, of 6 rows 2
    assert sizes(found) == {
        "frozen parameters": 2 * (3 * 4 + 2 * 4 + 2 * 4 + 1),
        "adapters": shard,
        "gradients": shard,
        "moments of AdamW": 2 * shard,
        "gathered parameters": 2 * (40 + 2 * (28 + 20)),
        "gradients to be scattered": (2 + 4) * 20,
        "activations": 5 * (1000 + 40),
        "output layer": 12 * 2 * 10 + (2 + 4) * 5 * 4,
    }


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the package peft")
def test_adapters_of_a_7b_are_counted_and_take_few_activations() -> None:
    plain, asked = config(model__dtype=Dtype.bfloat16), config(model__dtype=Dtype.bfloat16, lora__rank=16)
    facts = read_model(asked, QWEN2_7B)
    assert facts.num_parameters == PARAMETERS_7B
    inputs_and_outputs = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944)
    assert facts.largest_adapters == 16 * inputs_and_outputs
    assert sum(weight.size for weight in facts.adapters) == 28 * 16 * inputs_and_outputs == 40_370_176
    # 7 layers keep 16 more numbers; norms whose weights are frozen keep less.
    assert facts.activations.layers < read_model(plain, QWEN2_7B).activations.layers + 28 * 7 * 2 * 16


def test_adapters_are_staged_alone_and_the_engine_makes_room_for_the_next_larger_rank() -> None:
    asked = config(model__dtype=Dtype.bfloat16, trainer__ranks=2, lora__rank=2)
    adapters = (Weight(name="lora_A", shape=(2, 4), layer=0), Weight(name="lora_B", shape=(6, 2), layer=0))
    facts = replace(SMALL, adapters=adapters)
    weights = estimate(asked, facts, max_logits=20).weights
    assert (weights.staged, weights.gathered, weights.largest) == (2 * 20, 4 * 20, 4 * 12)
    assert sizes(engine_memory(asked, facts))["adapters"] == 2 * 20 * 4  # of rank 8
    assert "adapters" not in sizes(engine_memory(config(lora__rank=2, lora__send=Send.merged), facts))


def test_adapters_are_staged_merged_and_gathered_as_they_lie() -> None:
    asked = config(model__dtype=Dtype.bfloat16, algorithm__kl_coefficient=0.1, lora__rank=2, lora__send=Send.merged)
    facts = replace(SMALL, adapters=(Weight(name="lora_A", shape=(2, 4), layer=0),))
    found = estimate(asked, facts, max_logits=20)
    assert (found.weights.staged, found.weights.gathered) == (2 * 92, 2 * 92 + 4 * 8)
    assert "reference" not in found.processes


def test_a_single_bfloat16_rank_computes_on_copies() -> None:
    found = sizes(trainer_memory(config(model__dtype=Dtype.bfloat16), SMALL, num_tokens=5, max_logits=20))
    assert (found["parameters"], found["gathered parameters"]) == (4 * 92, 2 * (40 + 2 * 28))


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer() -> None:
    assert activation_bytes(SMALL, 5, Checkpointing.none) == 5 * (1000 + 40)
    assert activation_bytes(SMALL, 5, Checkpointing.selective) == 5 * (16 + 100 + 600 + 40)
    assert activation_bytes(SMALL, 5, Checkpointing.full) == 5 * (16 + 600 + 40)
    asked = config(trainer__gradient_checkpointing=Checkpointing.full)
    assert sizes(trainer_memory(asked, SMALL, num_tokens=5, max_logits=20))["activations"] == 5 * (16 + 600 + 40)


def test_shards_are_padded_as_fsdp2_does() -> None:
    assert [shard_size(SMALL.weights[0], ranks, 1) for ranks in (1, 2, 3, 4, 16)] == [40, 20, 16, 12, 4]


def test_logits_exist_for_some_tokens_at_a_time() -> None:
    assert [logit_rows(SMALL, tokens, 25) for tokens in (1, 2, 9)] == [1, 2, 2]
    assert logit_rows(SMALL, 9, 5) == 1  # never less than one


def test_memory_of_an_engine() -> None:
    asked = config(model__dtype=Dtype.bfloat16, rollout__tensor_parallel=4, rollout__kv_cache_gb=2.0)
    assert sizes(engine_memory(asked, SMALL)) == {"weights": 46, "key-value cache": 2 * GIB}


@pytest.mark.parametrize(
    ("parallel", "max_length", "sequences"),
    [
        # 32 tokens take 2 x 2 layers x 2 heads x 8 x 2 bytes x 32 = 4 KiB: 256 such blocks are 1 MiB, one is vLLM's.
        (1, 32, 255),
        (1, 64, 127),
        (1, 65, 85),
        (2, 32, 511),
        (4, 32, 511),  # one head a GPU is the least
    ],
)
def test_sequences_that_a_cache_holds(parallel: int, max_length: int, sequences: int) -> None:
    asked = config(
        model__dtype=Dtype.bfloat16,
        model__max_length=max_length,
        rollout__tensor_parallel=parallel,
    )
    assert cached_sequences(asked, SMALL, cache=2**20) == sequences


def test_memory_of_the_reference() -> None:
    found = frozen_memory(config(model__dtype=Dtype.bfloat16), SMALL, num_tokens=5, max_logits=20, ranks=1)
    assert sizes(found) == {"parameters": 2 * 92, "one layer and the logits": 5 * 600 + 12 * 2 * 10}


def test_memory_of_a_rank_of_the_reference() -> None:
    asked = config(model__dtype=Dtype.bfloat16)
    found = frozen_memory(asked, SMALL, num_tokens=5, max_logits=20, ranks=4)
    # Of 10, 6, 6 and 4 rows the largest of 4 parts have 3, 2, 2 and 1; two layers of up to 28 are whole at a time.
    assert sizes(found) == {
        "parameters": 2 * (3 * 4 + 2 * 4 + 2 * 4 + 1),
        "one layer and the logits": 5 * 600 + 12 * 2 * 10,
        "gathered parameters": 2 * (40 + 2 * 28),
    }


def test_memory_of_a_reward_model() -> None:
    asked = config(model__dtype=Dtype.bfloat16, trainer__micro_batch_tokens=7)
    assert sizes(reward_model_memory(asked, CLASSIFIER)) == {"parameters": 2 * 50, "one layer": 7 * 300}


def test_parameters_of_a_reward_model(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "num_key_value_heads": 2, "num_labels": 1}
    found = read_reward_model(config(), write_config(tmp_path, **fields))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert found.num_parameters == 2 * layer + 100 * 64 + 64 + 64


@pytest.mark.parametrize(
    ("gib", "expected"), [(0.1, 16), (14.4, 16), (14.5, 24), (72.0, 80), (72.1, 96), (259.2, 288), (260.0, None)]
)
def test_a_tenth_of_a_gpu_stays_free(gib: float, expected: int | None) -> None:
    assert smallest_gpu(int(gib * GIB)) == expected


# -- placement, batch, weights


def small_estimate(**settings: object) -> Estimate:
    return estimate(config(**settings), SMALL, max_logits=20)


def test_gpus_are_counted_in_the_order_of_the_processes() -> None:
    found = small_estimate(
        rollout__engines=3,
        rollout__tensor_parallel=2,
        trainer__ranks=4,
        algorithm__kl_coefficient=0.1,
        cluster__reference_ranks=2,
    )
    assert [(each.first, each.last, each.holds) for each in found.gpus] == [
        (0, 5, "engines 0 to 2 on 2 GPUs each"),
        (6, 9, "trainer ranks 0 to 3"),
        (10, 11, "reference ranks 0 to 1"),
    ]
    assert [each.num_bytes for each in found.gpus] == [found.processes[name].total for name in found.processes]


def test_colocated_processes_take_turns() -> None:
    settings = {"rollout__engines": 2, "trainer__ranks": 2, "cluster__placement": Placement.colocated}
    settings |= {"rollout__kv_cache_gb": 0.5}
    found = small_estimate(**settings)
    engine, trainer = found.processes["engine"], found.processes["trainer"]
    assert [(each.first, each.last, each.holds) for each in found.gpus] == [
        (0, 1, "engines 0 to 1 and trainer ranks 0 to 1, in turn")
    ]
    # What was staged stays beside the engine, which may be started again.
    staged = sizes(trainer)["weights for the engines"]
    assert found.gpus[0].num_bytes == max(engine.total + staged, trainer.total)
    assert "weights for the engines" not in sizes(
        small_estimate(**settings, algorithm__advantage="gae").processes["critic"]
    )
    assert found.batch.micro_batches_one_by_one is None
    with pytest.raises(ConfigError, match="rollout.engines equal to trainer.ranks; got 1, 2 and 3"):
        small_estimate(**{**settings, "trainer__ranks": 3})


def test_what_shares_a_gpu_adds_up_there() -> None:
    settings = {"rollout__engines": 3, "trainer__ranks": 3, "algorithm__advantage": "gae"}
    settings |= {"algorithm__kl_coefficient": 0.1, "reward__model": "mine", "reward__model_replicas": 2}
    settings |= {"rollout__kv_cache_gb": 0.5}
    asked = config(**settings, cluster__roles=ModelPlacement.shared)
    found = estimate(asked, SMALL, max_logits=20, reward_model=CLASSIFIER)
    memory = {name: each.total for name, each in found.processes.items()}
    last = memory["trainer"] + memory["critic"] + memory["reference"]
    first = last + memory["reward_model"]
    assert [(each.first, each.last, each.holds, each.num_bytes) for each in found.gpus] == [
        (0, 2, "engines 0 to 2", memory["engine"]),
        (3, 4, "trainer ranks 0 to 1; critic ranks 0 to 1; reference ranks 0 to 1; reward models 0 to 1", first),
        (5, 5, "trainer rank 2; critic rank 2; reference rank 2", last),
    ]
    asked.cluster.placement = Placement.colocated
    found = estimate(asked, SMALL, max_logits=20, reward_model=CLASSIFIER)
    staged = sizes(found.processes["trainer"])["weights for the engines"]
    in_turn = max(memory["engine"] + staged, memory["trainer"] + memory["critic"])
    beside = memory["reward_model"] + memory["reference"]
    assert (found.gpus[0].first, found.gpus[-1].last) == (0, 2)
    names = "engines 0 to 1 and trainer ranks 0 to 1, critic ranks 0 to 1, in turn"
    assert found.gpus[0].holds == f"{names}; reference ranks 0 to 1; reward models 0 to 1"
    assert found.gpus[0].num_bytes == in_turn + beside


def test_each_rank_of_each_teacher_counts_as_one_of_the_largest() -> None:
    asked = config(rollout__kv_cache_gb=0.5, trainer__ranks=2)
    asked.teacher = TeacherConfig(models={"sums": "a", "default": "b", "words": "a"}, ranks=3)
    smaller = replace(SMALL, weights=SMALL.weights[1:])
    found = estimate(asked, SMALL, max_logits=20, teachers=[smaller, SMALL])
    expected = frozen_memory(asked, SMALL, found.micro_batch_tokens, 20, 3)
    assert found.processes["teacher"] == expected
    assert [(each.first, each.last, each.holds) for each in found.gpus] == [
        (0, 0, "engine 0"),
        (1, 2, "trainer ranks 0 to 1"),
        (3, 8, "teacher ranks 0 to 5"),
    ]
    asked.teacher.ranks, asked.cluster.roles = 1, ModelPlacement.shared
    found = estimate(asked, SMALL, max_logits=20, teachers=[smaller, SMALL])
    memory = {name: each.total for name, each in found.processes.items()}
    [_, shared] = found.gpus
    assert (shared.first, shared.last, shared.holds) == (
        1,
        2,
        "trainer ranks 0 to 1; teacher ranks 0 to 1 of 2 of them",
    )
    assert shared.num_bytes == memory["trainer"] + 2 * memory["teacher"]


def test_replicas_of_a_reward_model_have_gpus_of_their_own() -> None:
    asked = config(reward__model="mine", reward__model_replicas=2)
    found = estimate(asked, SMALL, max_logits=20, reward_model=CLASSIFIER)
    assert [(each.first, each.last, each.holds) for each in found.gpus] == [
        (0, 0, "engine 0"),
        (1, 1, "trainer rank 0"),
        (2, 3, "reward models 0 to 1"),
    ]
    assert found.gpus[2].num_bytes == found.processes["reward_model"].total


def test_a_step_at_its_most() -> None:
    batch = small_estimate(
        algorithm__groups_per_step=6,
        algorithm__group_size=4,
        staleness__max_versions=2,
        model__max_length=100,
        trainer__micro_batch_tokens=250,
        trainer__ranks=4,
        rollout__engines=2,
    ).batch
    assert (batch.groups, batch.episodes, batch.tokens) == (6, 24, 2400)
    assert (batch.live_groups, batch.live_episodes, batch.decoding) == (18, 72, 128)
    # Two episodes of 100 tokens fit into a micro-batch: 12 pieces for 4 ranks. Alone, a group gives each rank one.
    assert (batch.micro_batches, batch.micro_batches_one_by_one) == (3, 6)


def test_no_more_live_groups_than_the_run_trains() -> None:
    assert small_estimate(run__steps=2, staleness__max_versions=4).batch.live_groups == 2 * 8


def test_groups_that_come_together_only() -> None:
    assert small_estimate(trainer__streaming=False).batch.micro_batches_one_by_one is None
    several = small_estimate(
        algorithm__groups_per_step=6,
        algorithm__group_size=4,
        algorithm__epochs=2,
        algorithm__minibatches=3,
        model__max_length=100,
        trainer__micro_batch_tokens=250,
        trainer__ranks=4,
    ).batch
    # Two groups in each of six updates: four pieces for four ranks.
    assert (several.updates, several.micro_batches, several.micro_batches_one_by_one) == (6, 6, None)


def test_bytes_of_new_weights() -> None:
    weights = small_estimate(model__dtype=Dtype.bfloat16, trainer__ranks=2).weights
    assert (weights.staged, weights.gathered) == (2 * 92, 0)  # each rank writes its own part


def test_a_rank_starts_with_its_part_of_one_parameter_at_a_time() -> None:
    # Of the embedding with 10 rows of 4 the largest of 4 parts has 3 rows.
    start = small_estimate(model__dtype=Dtype.bfloat16, trainer__ranks=4).start
    assert (start.rank, start.converted) == (4 * 3 * 4, 0)


def test_rank_0_converts_a_mixture_of_experts(tmp_path: Path) -> None:
    experts = Qwen3MoeConfig(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, dtype="bfloat16")
    experts.save_pretrained(tmp_path)
    facts = read_model(config(model__dtype=Dtype.bfloat16), str(tmp_path))
    assert facts.converted == 2 * facts.num_parameters
    assert read_model(config(), QWEN2_7B).converted == 0
    assert estimate(config(), replace(SMALL, converted=184), max_logits=20).start.converted == 184


def test_what_is_sent_from_rank_to_rank_lies_aside() -> None:
    asked = config(model__dtype=Dtype.bfloat16, weights__transport=Transport.p2p)
    found = sizes(trainer_memory(asked, SMALL, num_tokens=5, max_logits=20))
    assert found["weights for the engines"] == 2 * 92


# -- the command


def dry_run(
    *arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # registers it, so that what the command sets is undone
    code = main(["train", *arguments, "--dry-run"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


GOLDEN = """\
smoke: llama, 2 layers, 115,200 parameters, bfloat16
Worked out from the settings and config.json; nothing was started.
Training: samples packed into one row, shared prefixes once; the start of the run measures that this is exact.
Chosen for the machines: model.dtype=bfloat16, rollout.max_running=512, rollout.seeded=false.

GPUs: 2 (without any, the same processes share the machine's memory)
          0  102.62 MiB of each: a GPU of 16 GB or more; engine 0
          1    7.25 MiB of each: a GPU of 16 GB or more; trainer rank 0
  A GPU is taken to hold what fits into 90% of it; CUDA and vLLM's graphs need the rest.
  Ray chooses the machines; the GPUs of one engine are of one machine.

Engine, on each of its GPUs
    0.22 MiB  weights (bfloat16)
  102.40 MiB  key-value cache (rollout.kv_cache_gb)
  102.62 MiB  in all

Trainer rank, with micro-batches of up to 512 tokens
    0.44 MiB  parameters (float32)
    0.44 MiB  gradients (float32)
    0.88 MiB  moments of AdamW (float32)
    0.22 MiB  weights for the engines (bfloat16)
    0.22 MiB  gathered parameters (bfloat16: embedding, output layer and 2 layers)
    0.28 MiB  gradients to be scattered (bfloat16, and their sum in float32)
    3.03 MiB  activations (trainer.gradient_checkpointing=none; 3.28 MiB if selective, 1.77 MiB if full)
    1.74 MiB  output layer (logits of 512 tokens at once, gradient in bfloat16)
    7.25 MiB  in all

A step
  2 groups of 4: 8 episodes, at most 2,048 tokens
  at most 4 micro-batches a rank when its groups come together, 4 when one by one
  at most 2 groups (8 episodes) live under staleness.max_versions=0; the engines decode at most 512 at once
  an engine's cache holds 819 sequences of 256 tokens, and more of shorter ones; rollout.max_running=512

A new version of the weights
    0.22 MiB  sent to each engine: what its workers hold, by the ranks that have it
  weights.transport=p2p: GPUs send each other weights faster than through the CPU's memory

Main memory while a trainer starts, beside the cache of files
    0.06 MiB  for each rank, which reads the parts that it keeps one by one
"""


def test_the_text_for_the_tiny_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLFLOW_CACHE", str(tmp_path))
    code, out, _ = dry_run("recipe=smoke", capsys=capsys, monkeypatch=monkeypatch)
    assert code == 0
    assert out == GOLDEN


@pytest.mark.parametrize(
    ("recipe", "model", "parameters", "gpus"),
    [("grpo_7b", QWEN2_7B, PARAMETERS_7B, 8), ("grpo_32b", QWEN2_32B, PARAMETERS_32B, 64)],
)
def test_large_recipes_fit_their_gpus(
    recipe: str,
    model: str,
    parameters: int,
    gpus: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = (f"recipe={recipe}", f"model.path={model}", "--json")
    code, out, _ = dry_run(*asked, capsys=capsys, monkeypatch=monkeypatch)
    found = json.loads(out)
    assert code == 0
    assert (found["recipe"], found["num_parameters"], found["num_gpus"]) == (recipe, parameters, gpus)
    assert [each["gpu_size"] for each in found["gpus"]] == [80, 80]
    assert found["weights"]["staged"] == 2 * parameters
    assert found["processes"]["engine"]["total"] == found["gpus"][0]["num_bytes"]


def test_a_cache_of_what_is_left_grows_with_the_gpu_that_the_run_needs() -> None:
    found = small_estimate(model__dtype=Dtype.bfloat16)
    assert found.gpus[0].gpu_size == found.gpus[1].gpu_size == 16
    assert sizes(found.processes["engine"]) == {"weights": 2 * 92, "key-value cache": int(0.9 * 16 * GIB) - 2 * 92}
    # A token takes 2 x 2 layers x 2 heads x 8 x 2 bytes: 4 KiB a block of 32; one block is vLLM's.
    assert found.batch.cached_sequences == ((int(0.9 * 16 * GIB) - 2 * 92) // 4096 - 1) // (1024 // 32)
    found = small_estimate(model__dtype=Dtype.bfloat16, cluster__placement=Placement.colocated)
    assert found.processes["engine"].total == int(0.7 * 16 * GIB)


def test_an_engine_in_fp8_holds_its_layers_in_one_byte() -> None:
    asked = config(model__dtype=Dtype.bfloat16, rollout__quantization=Quantization.fp8)
    assert sizes(engine_memory(asked, SMALL))["weights"] == 24 + 28 + 2 * 40


def test_a_model_that_fits_no_gpu_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("recipe=grpo_32b", f"model.path={QWEN2_32B}", "trainer.ranks=1")
    code, out, _ = dry_run(*asked, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 0
    assert "of each: NO GPU IS LARGE ENOUGH; trainer rank 0" in out


def test_a_reward_model_is_read_from_its_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    asked = ["recipe=smoke", "reward.function=null", f"reward.model={write_config(tmp_path, **fields)}"]
    code, out, _ = dry_run(*asked, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 0
    assert "\nReward model, the largest, of which each replica is whole\n" in out
    assert "a GPU of 16 GB or more; reward model 0\n" in out
    write_config(tmp_path, **{**fields, "num_labels": 3})
    code, _, error = dry_run(*asked, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert "is a classifier with 3 labels" in error


def test_what_a_run_would_refuse_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("recipe=grpo_7b", f"model.path={QWEN2_7B}", "rollout.kv_cache_gb=0.1")
    code, out, error = dry_run(*asked, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, "")
    assert "rollout.kv_cache_gb (0.1) does not hold one sequence of model.max_length (8192) tokens" in error


def test_a_folder_without_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = dry_run("recipe=grpo_7b", f"model.path={tmp_path}", capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert f"model.path: {tmp_path} has no config.json" in error


def test_json_alone_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe=smoke", "--json"]) == 2
    assert "--json has no effect without --dry-run" in capsys.readouterr().err


def test_nothing_heavy_is_started() -> None:
    code = (
        "import sys\nfrom rlflow.cli import main\n"
        f"main(['train', 'recipe=grpo_7b', 'model.path={QWEN2_7B}', '--dry-run', '--json'])\n"
        "print([name for name in ('ray', 'vllm', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[0])["num_gpus"] == 8
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_without_engines_has_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown, _ = dry_run(
        "recipe=sft", "model.path=tiny", "env.args.path=x.jsonl", capsys=capsys, monkeypatch=monkeypatch
    )
    assert code == 0
    assert "Trainer rank" in shown
    assert "engine 0" not in shown and "the engines decode" not in shown and "A new version of the weights" not in shown
