"""Which arguments of vLLM `rollout.engine_args` may name: those that exist, and follow from no other setting."""

import ast
from importlib.util import find_spec
from pathlib import Path

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.plugins.names import did_you_mean

DECIDED = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "model.max_length",
    "seed": "run.seed",
    "max_num_seqs": "rollout.max_running",
    "kv_cache_memory_bytes": "rollout.kv_cache_gb",
    "gpu_memory_utilization": "rollout.kv_cache_gb",
    "num_gpu_blocks_override": "rollout.kv_cache_gb",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "data_parallel_size": "rollout.engines",
    "enable_expert_parallel": "rollout.expert_parallel",
    "quantization": "rollout.quantization",
    "speculative_config": "rollout.speculative",
    "spec_method": "rollout.speculative",
    "spec_model": "rollout.speculative",
    "spec_tokens": "rollout.speculative",
    "enable_lora": "lora.rank",
    "max_loras": "lora.rank",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.rank",
    "enable_sleep_mode": "cluster.placement",
    "profiler_config": "run.profile_steps",
    "return_sampling_mask": "rollout.top_k",
    "enable_return_routed_experts": "rollout.replay_experts",
}
"""Argument -> the setting that decides it."""
RELIED_ON = frozenset(
    {
        *("config_format", "convert", "distributed_executor_backend", "disable_log_stats", "enable_prefix_caching"),
        *("generation_config", "load_format", "logprobs_mode", "max_logprobs", "mm_device_do_normalize"),
        "model_weights",
        *("override_generation_config", "runner", "scheduler_cls", "skip_tokenizer_init", "stream_interval"),
        *("tokens_only", "use_tqdm_on_load", "weight_transfer_config", "worker_cls", "worker_extension_cls"),
    }
)
"""Arguments whose values rlflow relies on: how weights arrive, and which log-probabilities come back."""
_OTHER_PROCESSES = ("data_parallel_", "pipeline_", "prefill_context_", "nnodes", "node_rank", "master_", "device_ids")
"""How names begin that would spread an engine over processes of which rlflow knows nothing."""


def check_engine_args(config: Config) -> None:
    """Raise ConfigError for an argument that rlflow sets itself, and, where vLLM is there, for one that it lacks."""
    known = known_arguments()
    for name in config.rollout.engine_args:
        key = f"rollout.engine_args.{name}"
        if setting := DECIDED.get(name):
            raise ConfigError(f"{key} follows from {setting}; set that instead")
        if name in RELIED_ON or name.startswith(_OTHER_PROCESSES):
            raise ConfigError(f"{key} cannot be chosen, because rlflow relies on the value that it sets; leave it out")
        if known is not None and name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"{key} is not an argument of vLLM's AsyncEngineArgs{near or '; leave it out'}")


def known_arguments() -> tuple[str, ...] | None:
    """The names of all fields of AsyncEngineArgs; None where vLLM is not installed.

    They are read from its source, because importing vLLM takes seconds (0.26 to 0.32: `engine/arg_utils.py`, two
    dataclasses).
    """
    source = vllm_source("engine/arg_utils.py")
    if source is None:
        return None
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return tuple(
        line.target.id
        for each in classes
        if each.name in ("EngineArgs", "AsyncEngineArgs")
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def vllm_source(file: str) -> str | None:
    """The text of a file of vLLM's package; None where it is not installed."""
    found = find_spec("vllm")
    return None if found is None or found.origin is None else (Path(found.origin).parent / file).read_text()
