"""A run's checkpoint -> a folder that transformers and vLLM load, or the adapters alone for PEFT."""

from __future__ import annotations

import argparse
import json
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlflow.config import Config
from rlflow.errors import ConfigError, RunError, first_line
from rlflow.models.chatml import CHATML, chatml_end
from rlflow.models.images import takes_images
from rlflow.models.opening import build_model, open_config, open_model
from rlflow.models.resolve import BUILTIN, resolve_model
from rlflow.rundir.store import CheckpointStore, read_state
from rlflow.runtime.disk import disk_errors
from rlflow.tools.model_card import model_card
from rlflow.workers.engine.setup import stop_token_ids

if TYPE_CHECKING:
    import torch

_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
_MAX_FILE_BYTES = 4 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; it must not exist")
    parser.add_argument("--step", metavar="N|best", help="the checkpoint; the last one by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--adapter", action="store_true", help="the adapters of a run with lora.rank alone, for PEFT")
    parser.add_argument(
        "--push", metavar="ORG/NAME", help="then upload OUT to the hub, as a private model if it is new"
    )


def run(options: argparse.Namespace) -> int:
    if options.push is not None:
        _check_hub(options.push)
    print(export(options.run, options.out, step=options.step, dtype=options.dtype, adapter_only=options.adapter))
    if options.push is not None:
        print(_push(options.out, options.push))
    return 0


def _check_hub(repository: str) -> None:
    """Raise ConfigError, before any work, when the hub would not take a model."""
    from huggingface_hub import whoami
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    cure = "log in with `hf auth login`, or leave --push out and upload the folder later"
    try:
        validate_repo_id(repository)
        if is_offline_mode():
            raise ConfigError("--push needs the hub, and HF_HUB_OFFLINE is set; unset it, or leave --push out")
        whoami()
    except HFValidationError as error:
        raise ConfigError(f"--push must be ORG/NAME; {first_line(error)}") from error
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise ConfigError(f"--push: the hub takes nothing from here ({first_line(error)}); {cure}") from error


def _push(folder: Path, repository: str) -> str:
    """Upload a model's folder; the address. Raises RunError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder)
    except (HfHubHTTPError, OSError) as error:
        raise RunError(
            f"{folder} is whole, but the hub did not take it ({first_line(error)}); upload it with "
            f"`hf upload {repository} {folder}`"
        ) from error
    return f"https://huggingface.co/{repository}"


def export(run: Path, out: Path, *, step: str | None, dtype: str, adapter_only: bool = False) -> Path:
    """Write checkpoint `step` of a run (a number or `best`; None: the last) to the new folder `out`, whole or not at
    all; returns `out`.

    dtype: "bfloat16" or "float32", for every floating-point weight. Adapters are merged into the model that the run
    began with, or written alone, as PEFT does, with `adapter_only`. Raises ConfigError when `out` exists or the run has
    no such checkpoint or no adapters, RunError when the checkpoint is damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; give a new folder, or remove it first")
    checkpoint = CheckpointStore(run / "checkpoints", keep=1).chosen(run, step)
    read_state(checkpoint)  # checks every byte
    try:
        trained = yaml.safe_load((run / "config.yaml").read_text())["model"]
        model_path, trust = trained["path"], trained.get("trust_remote_code", False)
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / 'config.yaml'} does not say which model the run trained ({error!r})") from error
    with disk_errors("the exported model", out.absolute().parent, "export again"):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            if adapter_only:
                _write_adapters(checkpoint / "trainer", partial, dtype, model_path, trust=trust)
            else:
                source = Path(resolve_model(model_path))
                _copy_files(source, partial, dtype)
                _write_weights(checkpoint / "trainer", source, partial, dtype, trust=trust)
            card = partial / "README.md"
            card.write_text(
                model_card(run, int(checkpoint.name.removeprefix("step_")), out.name, adapter_only=adapter_only)
            )
            mode = stat.S_IMODE(card.stat().st_mode)  # what the umask leaves; safetensors and mkdtemp keep others out
            for path in partial.iterdir():
                path.chmod(mode)
            partial.chmod(mode | (mode & 0o444) >> 2)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return out


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
    if chatml_end(source) is not None:  # what the model was trained with
        (target / "chat_template.jinja").write_text(CHATML)
        file = target / "generation_config.json"
        generation = json.loads(file.read_text()) if file.is_file() else {}
        generation["eos_token_id"] = stop_token_ids(str(source))
        file.write_text(json.dumps(generation, indent=2) + "\n")


def _write_adapters(trainer: Path, target: Path, dtype: str, model_path: str, *, trust: bool) -> None:
    import torch
    from safetensors.torch import save_file

    from rlflow.workers.trainer.lora import peft_config, peft_name, targets_of
    from rlflow.workers.trainer.shards import PARAMETER, ShardReader

    reader = ShardReader(trainer)
    if reader.lora.rank is None:
        raise ConfigError("--adapter has no effect: the run trained the whole model, without adapters; leave it out")
    tensors = {peft_name(name): reader.read_whole(PARAMETER, name).to(getattr(torch, dtype)) for name in reader.shapes}
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    is_here = model_path in BUILTIN or Path(model_path).expanduser().is_dir()
    # PEFT finds a base model by its hub id or its whole path only.
    base = str(resolve_model(model_path)) if is_here else model_path
    peft_config(reader.lora, targets_of(_skeleton(base, trust=trust), reader.lora), base).save_pretrained(target)


def _skeleton(source: str, *, trust: bool) -> Any:
    """The model without memory; `source` is its folder or its hub id."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return build_model(AutoModelForCausalLM, open_config(source, trust=trust), trust=trust)


def _weights(trainer: Path, source: Path, *, trust: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the trained model, whole. `source` is the model that the adapters belong to."""
    import torch

    from rlflow.workers.trainer.lora import add_adapters, is_adapter, merged, parts_of
    from rlflow.workers.trainer.shards import PARAMETER, ShardReader, read_full

    reader = ShardReader(trainer)
    if reader.lora.rank is None:
        yield from read_full(trainer)
        yield from _frozen(source, trust=trust)
        return
    from transformers import AutoModelForCausalLM

    adapted = _skeleton(str(source), trust=trust)
    add_adapters(adapted, reader.lora, torch.float32)
    if others := {name for name, _ in adapted.named_parameters() if is_adapter(name)} ^ reader.shapes.keys():
        raise RunError(
            f"{trainer} does not hold the adapters of the model in {source}: they differ in {min(others)}; put the "
            "model there that the run began with"
        )
    model, parts = open_model(AutoModelForCausalLM, str(source), trust=trust, dtype="auto"), parts_of(adapted)
    for name, weight in model.named_parameters():
        adapters = (reader.read_whole(PARAMETER, each) for each in parts[name][1:])
        yield name, merged((weight.detach(), *adapters), reader.lora)


def _frozen(source: Path, *, trust: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """What sees images, which no checkpoint holds because it is not trained."""
    from rlflow.workers.trainer.policy import empty_policy

    if takes_images(open_config(str(source), trust=trust)):
        config = Config()
        config.model.trust_remote_code = trust
        policy, values = empty_policy(config, str(source))
        for name, parameter in policy.model.named_parameters():
            if not parameter.requires_grad:
                yield name, values.whole(name)


def _write_weights(trainer: Path, source: Path, target: Path, dtype: str, *, trust: bool) -> None:
    import torch
    from safetensors.torch import save_file

    files: list[list[str]] = []
    num_bytes = 0
    for bucket in _buckets(_weights(trainer, source, trust=trust), getattr(torch, dtype), _MAX_FILE_BYTES):
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
