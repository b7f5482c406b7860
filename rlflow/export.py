"""A run's checkpoint -> a folder that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rlflow.checkpoint import CheckpointStore, read_state
from rlflow.disk import disk_errors
from rlflow.errors import ConfigError
from rlflow.models import resolve_model

if TYPE_CHECKING:
    import torch

_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_MAX_FILE_BYTES = 4 << 30


def export(run: Path, out: Path, *, step: int | None, dtype: str) -> Path:
    """Write checkpoint `step` of a run (None: the last) to the new folder `out`, whole or not at all; returns `out`.

    dtype: "bfloat16" or "float32", of every floating-point weight.
    Raises ConfigError when `out` exists or the run has no such checkpoint, RunError when the checkpoint is damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; give a new folder, or remove it first")
    checkpoint = _checkpoint(run, step)
    read_state(checkpoint)  # checks that every file has the size it was written with
    source = Path(resolve_model(_model_path(run)))
    with disk_errors("the exported model", out.absolute().parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            _copy_files(source, partial, dtype)
            _write_weights(checkpoint / "trainer", partial, dtype)
            partial.chmod(0o755)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return out


def _checkpoint(run: Path, step: int | None) -> Path:
    store = CheckpointStore(run / "checkpoints", keep=1)
    steps = store.steps()
    if not steps:
        raise ConfigError(f"{run} has no complete checkpoint; give the directory of a run that has saved one")
    if step is not None and step not in steps:
        raise ConfigError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return store.path(steps[-1] if step is None else step)


def _model_path(run: Path) -> str:
    try:
        return yaml.safe_load((run / "config.yaml").read_text())["model"]["path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / 'config.yaml'} does not say which model the run trained ({error!r})") from error


def _copy_files(source: Path, target: Path, dtype: str) -> None:
    """Everything but the weights: configuration, tokenizer, chat template."""
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if not path.name.endswith(".safetensors.index.json"):
                shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name of `dtype` in older files; the two must not differ
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(trainer: Path, target: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    from rlflow.workers.trainer.shards import read_full

    files: list[list[str]] = []
    num_bytes = 0
    for bucket in _buckets(read_full(trainer), getattr(torch, dtype), _MAX_FILE_BYTES):
        save_file(bucket, target / f"{len(files)}.partial", metadata={"format": "pt"})
        files.append(list(bucket))
        num_bytes += sum(tensor.nbytes for tensor in bucket.values())
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{index + 1:05}-of-{len(files):05}.safetensors" for index in range(len(files))]
        weight_map = {weight: name for name, weights in zip(names, files, strict=True) for weight in weights}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for number, name in enumerate(names):
        (target / f"{number}.partial").rename(target / name)


def _buckets(
    weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype, max_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The weights, converted, in groups of at most `max_bytes` (or one larger tensor)."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, weight in weights:
        tensor = (weight.to(dtype) if weight.is_floating_point() else weight).contiguous()
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    assert bucket, "a checkpoint without weights"
    yield bucket
