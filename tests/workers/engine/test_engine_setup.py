"""The arguments that vLLM is started with, by device, and the settings that null becomes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from families import FAMILIES

from rlflow.config import Config, Dtype, ModelPlacement, Placement, Quantization, Speculative
from rlflow.errors import ConfigError
from rlflow.models.resolve import resolve_config
from rlflow.runtime.derived import by_device, without_training
from rlflow.settings import engine_args
from rlflow.settings.engine_args import DECIDED, RELIED_ON, known_arguments
from rlflow.workers.engine.setup import CacheShape, _memory, cache_shape, check_engine, engine_arguments

TINY = resolve_config("tiny")


def arguments(*, on_gpu: bool, **rollout: object) -> dict[str, Any]:
    config = by_device(with_rollout(Config(), **rollout), on_gpus=on_gpu)
    return engine_arguments(config, TINY, index=1, on_gpu=on_gpu)


def with_rollout(config: Config, **settings: object) -> Config:
    for name, value in settings.items():
        setattr(config.rollout, name, value)
    return config


def test_null_is_decided_by_the_machines() -> None:
    asked = Config()
    on_gpus, without = by_device(asked, on_gpus=True), by_device(asked, on_gpus=False)
    assert (on_gpus.model.dtype, without.model.dtype) == (Dtype.bfloat16, Dtype.float32)
    assert (on_gpus.rollout.max_running, without.rollout.max_running) == (512, 64)
    assert (on_gpus.rollout.seeded, without.rollout.seeded) == (False, True)
    assert (on_gpus.rollout.kv_cache_gb, without.rollout.kv_cache_gb) == (None, 0.5)
    assert (on_gpus.trainer.streaming, without.trainer.streaming) == (True, None)
    assert asked == Config(), "the settings as they were given stay"
    for found, other in ((on_gpus, False), (without, True)):
        found.rollout.kv_cache_gb, found.trainer.streaming = 1.0, False
        assert by_device(found, on_gpus=other) == found, "what is decided once stays, wherever it is asked again"


@pytest.mark.parametrize(
    "settings", [{"cluster": {"placement": Placement.colocated}}, {"algorithm": {"minibatches": 2}}]
)
def test_groups_that_wait_for_the_step_anyway_are_not_streamed_on_gpus(settings: dict[str, dict[str, Any]]) -> None:
    asked = Config()
    for section, values in settings.items():
        for name, value in values.items():
            setattr(getattr(asked, section), name, value)
    assert by_device(asked, on_gpus=True).trainer.streaming is None


def test_only_a_fleet_without_training_reads_the_weights_of_the_model() -> None:
    config = by_device(Config(), on_gpus=False)
    assert engine_arguments(config, TINY, index=0, on_gpu=False)["load_format"] == "dummy"
    assert "load_format" not in engine_arguments(without_training(config), TINY, index=0, on_gpu=False)


def test_what_is_given_is_not_changed_by_the_machines() -> None:
    asked = with_rollout(Config(), max_running=7, seeded=False, kv_cache_gb=2.0)
    asked.model.dtype, asked.trainer.streaming = Dtype.bfloat16, False
    assert by_device(asked, on_gpus=False) == asked
    asked.model.dtype, asked.rollout.seeded = Dtype.float32, True
    assert by_device(asked, on_gpus=True) == asked


def test_an_engine_on_a_gpu_fills_it() -> None:
    found = arguments(on_gpu=True)
    assert (found["dtype"], found["max_num_seqs"], found["max_num_batched_tokens"]) == ("bfloat16", 512, 8192)
    assert found["gpu_memory_utilization"] == 0.9
    assert not {"kv_cache_memory_bytes", "enforce_eager", "block_size", "enable_sleep_mode"} & found.keys()
    assert arguments(on_gpu=True, kv_cache_gb=2.0)["kv_cache_memory_bytes"] == 2 * 2**30
    assert "gpu_memory_utilization" not in arguments(on_gpu=True, kv_cache_gb=2.0)


def test_an_engine_without_a_gpu_is_small() -> None:
    found = arguments(on_gpu=False)
    assert (found["dtype"], found["max_num_seqs"], found["max_num_batched_tokens"]) == ("float32", 64, 4096)
    assert found["kv_cache_memory_bytes"] == 2**29
    assert found["enforce_eager"] and not found["enable_chunked_prefill"]


@pytest.mark.parametrize(
    ("roles", "reward_model", "share"),
    [
        (ModelPlacement.separate, None, 0.7),
        (ModelPlacement.separate, "mine", 0.7),
        (ModelPlacement.shared, "mine", 0.5),  # the reward model stays beside the engine
    ],
)
def test_a_colocated_engine_leaves_room(roles: ModelPlacement, reward_model: str | None, share: float) -> None:
    config = Config()
    config.cluster.placement, config.cluster.roles, config.reward.model = Placement.colocated, roles, reward_model
    found = engine_arguments(by_device(config, on_gpus=True), TINY, index=0, on_gpu=True)
    assert (found["enable_sleep_mode"], found["gpu_memory_utilization"]) == (True, share)
    config.rollout.kv_cache_gb = 4.0
    found = engine_arguments(by_device(config, on_gpus=True), TINY, index=0, on_gpu=True)
    assert (found["kv_cache_memory_bytes"], found["gpu_memory_utilization"]) == (4 * 2**30, 0.1)


def test_whatever_an_engine_is_given_cannot_be_given_again() -> None:
    """But for the size of a step, which on a GPU is a default, and what vLLM on a CPU cannot do otherwise."""
    everything = {"speculative": Speculative.ngram, "quantization": Quantization.fp8, "kv_cache_gb": 1.0}
    with_adapters = Config()
    with_adapters.lora.rank, with_adapters.cluster.placement = 4, Placement.colocated
    names = arguments(on_gpu=True, **everything).keys() | _memory(with_adapters, on_gpu=True).keys()
    assert names - DECIDED.keys() - RELIED_ON == {"max_num_batched_tokens"}
    assert (DECIDED.keys() | RELIED_ON) <= set(known_arguments() or ())


def test_arguments_of_ones_own_come_last() -> None:
    given = {"max_num_batched_tokens": 16384, "kv_cache_dtype": "fp8"}
    found = arguments(on_gpu=True, engine_args=given)
    assert (found["max_num_batched_tokens"], found["kv_cache_dtype"]) == (16384, "fp8")
    with pytest.raises(ConfigError, match="engine_args.max_num_batched_tokens=16384 has no effect without GPUs"):
        arguments(on_gpu=False, engine_args={"max_num_batched_tokens": 16384})


def test_a_float32_head_goes_with_overrides_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = by_device(Config(), on_gpus=True)
    config.model.float32_head = True
    config.rollout.engine_args = {"hf_overrides": {"rope_theta": 7.0}}
    found = engine_arguments(config, TINY, index=0, on_gpu=True)
    assert found["hf_overrides"] == {"rope_theta": 7.0, "head_dtype": "float32"}
    assert "hf_overrides" not in arguments(on_gpu=True)
    old = tmp_path / "model_executor" / "layers" / "logits_processor.py"
    old.parent.mkdir(parents=True)
    old.write_text("class LogitsProcessor: ...\n")
    monkeypatch.setattr(engine_args, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    with pytest.raises(ConfigError, match="^model.float32_head needs a newer vLLM, such as 0.32"):
        engine_arguments(config, TINY, index=0, on_gpu=True)


def test_guesses_are_made_without_a_model() -> None:
    assert "speculative_config" not in arguments(on_gpu=True)
    ngram = {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    found = {on_gpu: arguments(on_gpu=on_gpu, speculative=Speculative.ngram) for on_gpu in (False, True)}
    assert found[False]["speculative_config"] == {"method": "ngram", **ngram}
    assert found[True]["speculative_config"] == {"method": "ngram_gpu", **ngram}
    with pytest.raises(ConfigError, match="rollout.speculative=suffix needs the package arctic-inference"):
        arguments(on_gpu=False, speculative=Speculative.suffix)


def test_texts_that_end_a_reply_need_a_tokenizer() -> None:
    assert arguments(on_gpu=False)["skip_tokenizer_init"]
    assert not arguments(on_gpu=False, stop=["</answer>"])["skip_tokenizer_init"]


def test_quantised_engines_round_what_arrives() -> None:
    assert "quantization" not in arguments(on_gpu=True)
    assert arguments(on_gpu=True, quantization=Quantization.fp8)["quantization"] == "fp8_per_channel"


def write_config(family: str, folder: Path) -> str:
    config_class, options = FAMILIES[family]
    config_class(**options).save_pretrained(folder)
    return str(folder)


def test_layers_that_differ_are_counted_as_the_largest(tmp_path: Path) -> None:
    """Gemma 4's layers with a window have heads of 32, the others of 64."""
    shape = cache_shape(Config(), write_config("Gemma 4", tmp_path))
    assert shape == CacheShape(num_layers=2, num_key_value_heads=1, head_dim=64)


def test_linear_layers_keep_no_prefix_on_a_cpu(tmp_path: Path) -> None:
    folder = write_config("Qwen3-Next", tmp_path)
    for on_gpu, expected in ((False, False), (True, True)):
        config = by_device(Config(), on_gpus=on_gpu)
        assert engine_arguments(config, folder, index=0, on_gpu=on_gpu)["enable_prefix_caching"] is expected
    assert arguments(on_gpu=False)["enable_prefix_caching"]


@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3-Next"])
def test_linear_layers_are_refused_in_float32_on_a_cpu(family: str, tmp_path: Path) -> None:
    folder, config = write_config(family, tmp_path), Config()
    with pytest.raises(ConfigError, match=r"which vLLM computes on a CPU in bfloat16 only; set model.dtype=bfloat16"):
        check_engine(config, cache_shape(config, folder), folder, on_gpu=False)
    check_engine(config, cache_shape(config, folder), folder, on_gpu=True)
    config.model.dtype = Dtype.bfloat16
    check_engine(config, cache_shape(config, folder), folder, on_gpu=False)


def test_latent_attention_is_refused_on_a_cpu(tmp_path: Path) -> None:
    """Seen with vLLM 0.32: its kernel rotates only the first head of queries that are given by head."""
    folder, config = write_config("DeepSeek-V3", tmp_path), Config()
    with pytest.raises(ConfigError, match=r"has latent attention \(MLA\), whose queries vLLM rotates wrongly on a CPU"):
        check_engine(config, cache_shape(config, folder), folder, on_gpu=False)
    check_engine(config, cache_shape(config, folder), folder, on_gpu=True)


def test_experts_that_cannot_be_renewed_are_refused_where_there_is_training(tmp_path: Path) -> None:
    folder, config = write_config("gpt-oss", tmp_path), Config()
    shape = cache_shape(config, folder)
    with pytest.raises(ConfigError, match="has experts to which vLLM cannot give new weights on a CPU"):
        check_engine(config, shape, folder, on_gpu=False)
    check_engine(config, shape, folder, on_gpu=True)
    check_engine(without_training(config), shape, folder, on_gpu=False)
