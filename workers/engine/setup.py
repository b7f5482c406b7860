"""What a rollout engine needs before vLLM is started: environment, checks, arguments. Does not import vLLM.

vLLM reports most start-up errors only in the log of a child process, so everything that can be known ahead is checked
here.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.config import ADAPTER_RANKS, Config, Dtype, Placement, Transport
from rlflow.errors import ConfigError
from rlflow.runtime.derived import sends_adapters, transport_of
from rlflow.runtime.environment import share_cpu

CPU_BLOCK_TOKENS = 32
"""Tokens of one cache block on a CPU: the smallest that its attention kernel takes."""
CPU_STEP_TOKENS = 4096
"""Prompt tokens that a CPU takes in one step; vLLM's own default."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention has kernels for; others fail at the first request only."""
COLOCATED_FREE_SHARE = 0.1
PROFILED_ITERATIONS = 200
"""Steps of an engine that a profile holds at most; some hundred KB each, compressed."""
BYTES_PER_ELEMENT = {Dtype.float32: 4, Dtype.bfloat16: 2}


@dataclass(kw_only=True, slots=True, frozen=True)
class CacheShape:
    """What the key-value cache depends on."""

    num_layers: int
    num_key_value_heads: int
    head_dim: int

    def num_bytes(self, num_tokens: int, bytes_per_element: int) -> int:
        """Keys and values of `num_tokens` tokens, in whole cache blocks."""
        num_blocks = -(-num_tokens // CPU_BLOCK_TOKENS)
        per_token = 2 * self.num_layers * self.num_key_value_heads * self.head_dim * bytes_per_element
        return num_blocks * CPU_BLOCK_TOKENS * per_token


def set_environment(config: Config, threads: int, on_gpu: bool) -> None:
    """Set this process up for a quiet vLLM that listens on loopback only. Must run before vLLM is imported."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_ENGINE_READY_TIMEOUT_S=str(max(1, round(config.deadlines.start_s))),
        TOKENIZERS_PARALLELISM="false",
        TORCH_CPP_LOG_LEVEL="ERROR",
        PYTHONWARNINGS="ignore",
    )
    if on_gpu:
        if transport_of(config) is Transport.ipc and config.trainer.ranks > 1:
            import torch

            # vLLM reads the memory of the machine's other GPUs too; the first one that it sees is the one it runs on.
            own = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
            others = [str(index) for index in range(torch.cuda._raw_device_count_nvml()) if str(index) not in own]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*own, *others])
        return
    share_cpu(threads)
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        # Compiling costs more than it gains here, and the first logprob request would wait for it.
        TORCHDYNAMO_DISABLE="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    # Only so does vLLM use its single-process executor on a CPU: one process less to start.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if config.rollout.tensor_parallel > 1 else "0"


def engine_arguments(config: Config, model_path: str, index: int, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype.value,
        "seed": config.run.seed + index,
        "max_model_len": config.model.max_length,
        "max_num_seqs": config.rollout.max_running,
        "kv_cache_memory_bytes": cache_bytes(config),
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": config.rollout.tensor_parallel,
        "distributed_executor_backend": "mp" if config.rollout.tensor_parallel > 1 else "uni",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "rlflow.weights.extension.WorkerExtension",
    }
    if config.run.profile_steps is not None and config.run.dir is not None:
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(Path(config.run.dir).absolute() / "profile" / f"engine_{index}"),
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
            "max_iterations": PROFILED_ITERATIONS,
        }
    if sends_adapters(config):
        assert config.lora.rank is not None
        arguments.update(
            load_format="safetensors",
            enable_lora=True,
            max_loras=1,
            max_lora_rank=largest_rank(config.lora.rank),
            # Otherwise vLLM would multiply for the embedding and the head too, with nothing.
            lora_target_modules=adapted_layers(model_path),
        )
    else:
        # The first weight update fills every parameter and fails if one is left out; nothing of a checkpoint is needed.
        arguments["load_format"] = "dummy"
    if not on_gpu:
        arguments.update(
            enforce_eager=True,
            block_size=CPU_BLOCK_TOKENS,
            # When a prompt is cut in two, vLLM takes back what a seeded request drew for the first part; on a CPU that
            # ends its process.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(CPU_STEP_TOKENS, config.model.max_length),
        )
    elif config.cluster.placement is Placement.colocated:
        # The cache's size is given, so that the share of memory is only what must be free at the start: the trainer
        # may be there already.
        arguments.update(enable_sleep_mode=True, gpu_memory_utilization=COLOCATED_FREE_SHARE)
    return arguments


def largest_rank(rank: int) -> int:
    """The rank that vLLM makes room for, to hold adapters of `rank`."""
    return next(each for each in ADAPTER_RANKS if each >= rank)


def adapted_layers(model_path: str) -> list[str]:
    """The last parts of the names of all layers that have adapters; see `lora.linear_layers`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlflow.workers.trainer.lora import linear_layers

    with torch.device("meta"):
        return linear_layers(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path)))


def cache_bytes(config: Config) -> int:
    return int(config.rollout.kv_cache_gb * 2**30)


def stop_token_ids(model_path: str) -> list[int]:
    """The ids that end a reply: from generation_config.json, else config.json. Empty if the model names none."""
    for name in ("generation_config.json", "config.json"):
        path = Path(model_path) / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def cache_shape(model_path: str) -> CacheShape:
    """Read from the model's config.json; raises ConfigError when there is none."""
    from transformers import AutoConfig  # slow to import, and needed by engines only

    if not (Path(model_path) / "config.json").is_file():
        raise ConfigError(f"model.path must be a folder with a config.json; found none in {model_path}")
    text = AutoConfig.from_pretrained(model_path).get_text_config()
    heads = text.num_attention_heads
    return CacheShape(
        num_layers=text.num_hidden_layers,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def check_engine(config: Config, shape: CacheShape, model_path: str, on_gpu: bool) -> None:
    """Raise ConfigError for what vLLM would refuse, or would only fail on later."""
    if not on_gpu and shape.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"the model in {model_path} has head_dim {shape.head_dim}, which vLLM cannot run on a CPU; take a "
            f"model whose head_dim is one of {', '.join(map(str, CPU_HEAD_DIMS))}"
        )
    if not on_gpu and sends_adapters(config):
        from transformers import AutoConfig

        text = AutoConfig.from_pretrained(model_path).get_text_config()
        if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ConfigError(
                f"the model in {model_path} is a mixture of experts, which vLLM cannot run with adapters on a CPU; set "
                "lora.send=merged"
            )
    per_rank = max(1, shape.num_key_value_heads // config.rollout.tensor_parallel)
    local = CacheShape(num_layers=shape.num_layers, num_key_value_heads=per_rank, head_dim=shape.head_dim)
    # vLLM keeps one block for itself.
    num_tokens = config.model.max_length + CPU_BLOCK_TOKENS
    needed = local.num_bytes(num_tokens, BYTES_PER_ELEMENT[config.model.dtype])
    if needed > cache_bytes(config):
        raise ConfigError(
            f"rollout.kv_cache_gb ({config.rollout.kv_cache_gb:g}) does not hold one sequence of model.max_length "
            f"({config.model.max_length}) tokens, which takes {needed / 2**30:.3g} GB; raise the first or "
            "lower the second"
        )
    if on_gpu:
        return
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) * 1024  # without swapping
    if cache_bytes(config) > free:
        raise ConfigError(
            f"rollout.kv_cache_gb ({config.rollout.kv_cache_gb:g}) is more than the memory that is free "
            f"({free / 2**30:.3g} GB); lower it"
        )
