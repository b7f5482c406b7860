"""What a rollout engine needs before vLLM is started: environment, checks, arguments. Does not import vLLM.

vLLM reports most start-up errors only in the log of a child process, so everything that can be known ahead is checked
here.
"""

import json
import logging
import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from rlflow.config import ADAPTER_RANKS, Config, Dtype, ModelPlacement, Placement, Quantization, Speculative, Transport
from rlflow.errors import ConfigError
from rlflow.models.chatml import chatml_end
from rlflow.models.images import takes_images
from rlflow.models.opening import build_model, open_config
from rlflow.rollout.requests import PART_TOKENS
from rlflow.runtime.derived import (
    CPU_CACHE_GB,
    dtype_of,
    held_teachers,
    max_running,
    needs_reference,
    sends_adapters,
    transport_of,
)
from rlflow.runtime.environment import share_cpu
from rlflow.settings.engine_args import known_arguments, vllm_source

CPU_BLOCK_TOKENS = 32
"""Tokens of one cache block on a CPU: the smallest that its attention kernel takes."""
CPU_STEP_TOKENS = 4096
"""Prompt tokens that a CPU takes in one step; vLLM's own default."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention has kernels for; others fail at the first request only."""
GPU_STEP_TOKENS = 8192
"""Tokens of one step on a GPU, as vLLM chooses for its server on an H100. Inside a program it would choose
2,048 (0.32, `EngineArgs.get_batch_defaults`)."""
COLOCATED_FREE_SHARE = 0.1
"""Share of a GPU that must be free when an engine starts beside the trainer with a cache of a given size."""
SEPARATE_SHARE, COLOCATED_SHARE, SHARED_SHARE = 0.9, 0.7, 0.5
"""Share of a GPU that an engine fills with weights, activations and as much cache as there is room for: alone; beside a
trainer that has moved out, but keeps its context, its communicators and the copy that it sends (a whole one on a single
GPU); and beside a frozen model too, which stays. Of these vLLM knows nothing: it measures only itself
(0.32, `Worker.determine_available_memory`). The rest of a GPU alone is for CUDA graphs and for weights that arrive."""
NGRAM_DRAFT, NGRAM_TOKENS = 5, (2, 4)
"""Tokens that `rollout.speculative=ngram` guesses, and how many last tokens (from, to) it looks for."""
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


def engine_arguments(
    config: Config, model_path: str, index: int, on_gpu: bool, says_routes: bool = False
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs; `says_routes` if it is to say which experts it chose."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "trust_remote_code": config.model.trust_remote_code,
        # Only texts that end a reply are looked for in text.
        "skip_tokenizer_init": not config.rollout.stop,
        "dtype": dtype_of(config).value,
        "seed": config.run.seed + index,
        "max_model_len": config.model.max_length,
        "max_num_seqs": max_running(config),
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": config.rollout.tensor_parallel,
        "enable_expert_parallel": config.rollout.expert_parallel,
        "distributed_executor_backend": "mp" if config.rollout.tensor_parallel > 1 else "uni",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "rlflow.weights.extension.WorkerExtension",
        # Tokens are delivered part by part: at each step, a task for each request would take more than vLLM's own loop.
        "stream_interval": PART_TOKENS,
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
            lora_target_modules=adapted_layers(config, model_path),
        )
    elif config.trainer.ranks:
        # The first weight update fills every parameter and fails if one is left out; nothing of a checkpoint is needed.
        arguments["load_format"] = "dummy"
    if config.rollout.top_k is not None:
        arguments["return_sampling_mask"] = True
    arguments |= image_arguments(open_config(model_path, trust=config.model.trust_remote_code))
    if says_routes:
        arguments["enable_return_routed_experts"] = True
    if config.rollout.speculative is not Speculative.off:
        arguments["speculative_config"] = _speculation(config.rollout.speculative, on_gpu=on_gpu)
    if config.rollout.quantization is Quantization.fp8:
        # One scale for each output channel, and one for each token, found on the way: neither needs a calibration, and
        # each version that arrives is rounded anew.
        arguments["quantization"] = "fp8_per_channel"
    arguments |= _memory(config, on_gpu=on_gpu)
    if not on_gpu:
        arguments.update(
            enforce_eager=True,
            block_size=CPU_BLOCK_TOKENS,
            # When a prompt is cut in two, vLLM takes back what a seeded request drew for the first part; on a CPU that
            # ends its process.
            enable_chunked_prefill=False,
            # vLLM keeps the state of a linear layer for the next request only where prompts are cut (0.32).
            enable_prefix_caching=not _has_linear_layers(open_config(model_path, trust=arguments["trust_remote_code"])),
            max_num_batched_tokens=max(CPU_STEP_TOKENS, config.model.max_length),
        )
    given = config.rollout.engine_args
    for name in given.keys() & arguments.keys():  # the others were refused when the settings were checked
        raise ConfigError(
            f"rollout.engine_args.{name}={given[name]} has no effect without GPUs, where rlflow sets {arguments[name]}"
            "; leave it out"
        )
    if config.model.float32_head:
        _check_float32_head()
        given = given | {"hf_overrides": given.get("hf_overrides", {}) | {"head_dtype": "float32"}}
    return {"max_num_batched_tokens": GPU_STEP_TOKENS, **arguments, **given}


def image_arguments(model_config: Any) -> dict[str, Any]:
    """What vLLM is told about a model that takes images; nothing for others."""
    if not takes_images(model_config):
        return {}
    found: dict[str, Any] = {}
    if hasattr(model_config, "video_token_id"):
        found["limit_mm_per_prompt"] = {"video": 0}
    if "mm_device_do_normalize" in (known_arguments() or ()):
        # It would make a parameter of the processor's mean and deviation, which no weight update fills (0.32).
        found["mm_device_do_normalize"] = False
    return found


def _check_float32_head() -> None:
    """Raise ConfigError if vLLM computes the output layer in the dtype of the model alone."""
    source = vllm_source("model_executor/layers/logits_processor.py")
    if source is not None and "head_dtype" not in source:
        raise ConfigError("model.float32_head needs a newer vLLM, such as 0.32; install that, or leave it false")


def _memory(config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """How large the cache becomes, and whether it can be given back."""
    is_colocated = on_gpu and config.cluster.placement is Placement.colocated
    arguments: dict[str, Any] = {"enable_sleep_mode": True} if is_colocated else {}
    if (num_bytes := cache_bytes(config, on_gpu=on_gpu)) is None:
        return arguments | {"gpu_memory_utilization": memory_share(config)}
    arguments["kv_cache_memory_bytes"] = num_bytes
    if is_colocated:
        arguments["gpu_memory_utilization"] = COLOCATED_FREE_SHARE
    return arguments


def memory_share(config: Config) -> float:
    """The share of a GPU that an engine may take when rollout.kv_cache_gb does not say how large its cache is."""
    if config.cluster.placement is not Placement.colocated:
        return SEPARATE_SHARE
    stays = needs_reference(config) or bool(held_teachers(config)) or config.reward.model is not None
    return SHARED_SHARE if stays and config.cluster.roles is ModelPlacement.shared else COLOCATED_SHARE


def _speculation(method: Speculative, *, on_gpu: bool) -> dict[str, Any]:
    """vLLM's speculative_config. Both draft without a model, so that no other weights must be kept up to date."""
    if method is Speculative.suffix:
        if find_spec("arctic_inference") is None:
            raise ConfigError(
                "rollout.speculative=suffix needs the package arctic-inference where engines run; install it "
                "(pip install arctic-inference), or set rollout.speculative=ngram"
            )
        return {"method": "suffix"}
    return {
        # The one on the GPU lets the next step be scheduled while this one runs.
        "method": "ngram_gpu" if on_gpu else "ngram",
        "num_speculative_tokens": NGRAM_DRAFT,
        "prompt_lookup_min": NGRAM_TOKENS[0],
        "prompt_lookup_max": NGRAM_TOKENS[1],
    }


def sampling_arguments(config: Config, *, is_greedy: bool) -> dict[str, Any]:
    """What vLLM's SamplingParams say of the distribution that tokens are drawn from."""
    rollout = config.rollout
    if rollout.top_k is None:
        return {"temperature": 0.0 if is_greedy else rollout.temperature}
    # An engine that reports what it chose among takes neither temperature 0 nor an unbounded top_k.
    top_k = 1 if is_greedy else rollout.top_k
    return {"temperature": rollout.temperature, "top_k": top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}


def largest_rank(rank: int) -> int:
    """The rank that vLLM makes room for, to hold adapters of `rank`."""
    return next(each for each in ADAPTER_RANKS if each >= rank)


def adapted_layers(config: Config, model_path: str) -> list[str]:
    """The last parts of the names of the layers that have adapters; see `lora.targets_of`."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlflow.workers.trainer.lora import targets_of

    trust = config.model.trust_remote_code
    with torch.device("meta"):
        model = build_model(AutoModelForCausalLM, open_config(model_path, trust=trust), trust=trust)
    return targets_of(model, config.lora).layers


def cache_bytes(config: Config, *, on_gpu: bool) -> int | None:
    """The size of the cache on each GPU of an engine, or in the machine's memory; None: as much as a GPU has left."""
    gigabytes = config.rollout.kv_cache_gb or (None if on_gpu else CPU_CACHE_GB)
    return None if gigabytes is None else int(gigabytes * 2**30)


def stop_token_ids(model_path: str) -> list[int]:
    """The ids that end a reply: from generation_config.json, else config.json, and that of a ChatML that is given."""
    ends = [] if (end := chatml_end(Path(model_path))) is None else [end]
    for name in ("generation_config.json", "config.json"):
        found = ids_in(Path(model_path) / name, "eos_token_id")
        if found is not None:
            return list(dict.fromkeys([*found, *ends]))
    return ends


def ids_in(path: Path, name: str) -> list[int] | None:
    """The token ids that a JSON file of the model gives under `name`, as one or as a list; None if it gives none."""
    found = json.loads(path.read_text()).get(name) if path.is_file() else None
    return [found] if isinstance(found, int) else found


def cache_shape(config: Config, model_path: str) -> CacheShape:
    """Read from the model's config.json; raises ConfigError when there is none, and for a model without attention."""
    if not (Path(model_path) / "config.json").is_file():
        raise ConfigError(f"model.path must be a folder with a config.json; found none in {model_path}")
    text = open_config(model_path, trust=config.model.trust_remote_code).get_text_config()
    # Where layers differ (Gemma 4), the one that keeps most is taken for all of them.
    layers = list(getattr(text, "per_layer_config", ())) or [text]
    if not all(hasattr(each, "num_attention_heads") for each in layers):
        raise ConfigError(
            f"model.path names a {text.model_type} model, which has no attention heads; engines size their cache by "
            "them, so choose another model"
        )
    heads = [getattr(each, "num_key_value_heads", None) or each.num_attention_heads for each in layers]
    dims = [getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads for each in layers]
    num_key_value_heads, head_dim = max(zip(heads, dims, strict=True), key=prod)
    return CacheShape(num_layers=text.num_hidden_layers, num_key_value_heads=num_key_value_heads, head_dim=head_dim)


def check_engine(config: Config, shape: CacheShape, model_path: str, on_gpu: bool) -> None:
    """Raise ConfigError for what vLLM would refuse, or would only fail on later."""
    text = open_config(model_path, trust=config.model.trust_remote_code).get_text_config()
    if not on_gpu and (problem := _cpu_problem(config, shape, text)):
        raise ConfigError(f"the model in {model_path} {problem}")
    for name, is_set, cure in (
        ("rollout.expert_parallel", config.rollout.expert_parallel, "leave it false"),
        ("algorithm.balance_coefficient", config.algorithm.balance_coefficient, "set it to 0"),
    ):
        if is_set and not _is_mixture(text):
            raise ConfigError(
                f"{name} has no effect on the model in {model_path}, which is no mixture of experts; {cure}"
            )
    _check_cache(config, shape, on_gpu=on_gpu)


def _has_linear_layers(model_config: Any) -> bool:
    return "linear_attention" in (getattr(model_config.get_text_config(), "layer_types", None) or ())


def _cpu_problem(config: Config, shape: CacheShape, text: Any) -> str:
    """What about the model vLLM 0.32 cannot do on a CPU, and the cure; "" if there is nothing."""
    if getattr(text, "kv_lora_rank", None):
        return "has latent attention (MLA), whose queries vLLM rotates wrongly on a CPU; take GPUs, or another model"
    if shape.head_dim not in CPU_HEAD_DIMS:
        return (
            f"has head_dim {shape.head_dim}, which vLLM cannot run on a CPU; take a model whose head_dim is one of "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}"
        )
    if _has_linear_layers(text) and dtype_of(config) is Dtype.float32:
        return "has linear layers, which vLLM computes on a CPU in bfloat16 only; set model.dtype=bfloat16"
    if text.model_type == "gpt_oss" and config.trainer.ranks:
        return "has experts to which vLLM cannot give new weights on a CPU; take GPUs, or another model"
    if sends_adapters(config) and _is_mixture(text):
        return "is a mixture of experts, which vLLM cannot run with adapters on a CPU; set lora.send=merged"
    return ""


def _is_mixture(text: Any) -> bool:
    from rlflow.workers.trainer.layers import has_experts

    return has_experts(text)


def smallest_cache(config: Config, shape: CacheShape) -> int:
    """Bytes of one GPU that hold one sequence of model.max_length, beside the block that vLLM keeps for itself."""
    local = replace(shape, num_key_value_heads=max(1, shape.num_key_value_heads // config.rollout.tensor_parallel))
    return local.num_bytes(config.model.max_length + CPU_BLOCK_TOKENS, BYTES_PER_ELEMENT[dtype_of(config)])


def _check_cache(config: Config, shape: CacheShape, *, on_gpu: bool) -> None:
    num_bytes = cache_bytes(config, on_gpu=on_gpu)
    if num_bytes is None:
        return  # vLLM compares with what it finds
    needed, given = (
        smallest_cache(config, shape),
        f"rollout.kv_cache_gb ({config.rollout.kv_cache_gb or CPU_CACHE_GB:g})",
    )
    if needed > num_bytes:
        raise ConfigError(
            f"{given} does not hold one sequence of model.max_length ({config.model.max_length}) tokens, which takes "
            f"{needed / 2**30:.3g} GB; raise the first or lower the second"
        )
    if on_gpu:
        return
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) * 1024  # without swapping
    if num_bytes > free:
        raise ConfigError(f"{given} is more than the memory that is free ({free / 2**30:.3g} GB); lower it")


def log_hint() -> str:
    """Where vLLM says what went wrong: the file that this process's standard error goes to, if it is one."""
    target = Path("/proc/self/fd/2").resolve()
    return f"the cause is in {target}" if target.is_file() else "the cause is on its standard error"
