"""A pretrained model that has no memory yet, and the values that its parameters begin with.

config.json -> model on the meta device -> cut and sharded -> memory for what a rank keeps -> FirstValues, part by part

So a rank never holds more than it keeps and one parameter. Buffers, such as the frequencies of rotary embeddings, are
computed in float32 at once and are never cast.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.utils.logging import disable_progress_bar

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.opening import build_model, open_config, open_model
from rlflow.workers.trainer.layers import VALUE_HEAD, put_value_head
from rlflow.workers.trainer.lora import name_in_files
from rlflow.workers.trainer.way import choose_way, pin_rotary

CPU = torch.device("cpu")
_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
Fresh = dict[str, Callable[[], Tensor]]
"""Name of a parameter that no file has -> its first values, the same at every call and on every rank."""


class FirstValues:
    """The values that the parameters of a model begin with.

    Each rank reads what it keeps from the files of the model, if these hold every parameter under its own name. For
    other families, such as mixtures of experts whose files have each expert apart, and for quantised files, rank 0
    loads the model as transformers does, and the other ranks get from it what they keep.
    """

    def __init__(self, model: PreTrainedModel, folder: str, fresh: Fresh, load: Callable[[torch.dtype], Any]) -> None:
        """`model` is on the meta device; `load` gives the same model with memory, in a dtype."""
        self.fresh = fresh
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._files = _open_files(Path(folder))
        self._loaded: dict[str, Tensor] | None = None
        self.in_files = self._are_in_files(model)
        """True if every rank reads for itself. If not, `rows` is collective, and only rank 0 may call `whole`."""
        if not self.in_files:
            dtypes = {file.get_slice(name).get_dtype() for name, file in self._files.items()}
            narrow = _NARROW.get(dtypes.pop()) if len(dtypes) == 1 else None
            if _rank() == 0:
                self._loaded = load(narrow or torch.float32).state_dict()

    def whole(self, name: str) -> Tensor:
        """A parameter or buffer, in the dtype of its file, or in one that holds its values without rounding."""
        if name in self.fresh:
            return self.fresh[name]()
        key = name_in_files(name)
        if self._loaded is not None:
            return self._loaded[key]
        return self._files[key].get_tensor(key)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a parameter, with all their columns."""
        key = name_in_files(name)
        if name in self.fresh or _num_ranks() == 1:
            return self.whole(name)[start:stop]
        if self.in_files:
            return self._files[key].get_slice(key)[start:stop]
        return self._from_rank_0(name)[start:stop]

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """The buffers that files hold, such as the corrections by which experts are chosen; nothing trains them."""
        return {name: buffer for name, buffer in model.named_buffers() if name in self._shapes}

    def fill_buffers(self, model: PreTrainedModel) -> None:
        """Fill the buffers that files hold; collective unless `in_files`."""
        for name, buffer in self.buffers(model).items():
            is_apart = not self.in_files and _num_ranks() > 1
            buffer.copy_(self._from_rank_0(name) if is_apart else self.whole(name))

    def _from_rank_0(self, name: str) -> Tensor:
        """In float32, which holds every dtype of files, and on the device that the ranks talk with."""
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else CPU
        if _rank() == 0:
            values = self.whole(name).to(device, torch.float32).contiguous()
        else:
            values = torch.empty(self._shapes[name_in_files(name)], device=device)
        dist.broadcast(values, 0)
        return values

    def _are_in_files(self, model: PreTrainedModel) -> bool:
        if getattr(model.config, "quantization_config", None) is not None:
            return False
        patterns = converted_patterns(model)
        own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} & self._shapes.keys()
        # If files hold both names of a tied parameter, transformers decides which one counts.
        tied = self._shapes.keys() - own
        return not tied & self._files.keys() and all(
            name in self._files
            and tuple(self._files[name].get_slice(name).get_shape()) == self._shapes[name]
            and not any(re.search(pattern, name) for pattern in patterns)
            for name in own - self.fresh.keys()
        )


def empty_model(
    auto_class: Any,
    config: Config,
    folder: str,
    setting: str = "model.path",
    is_critic: bool = False,
) -> tuple[PreTrainedModel, FirstValues]:
    """A model by one of transformers' Auto classes, float32, its way chosen; parameters are on the meta device.

    Its buffers are on the CPU. A critic has a value head, which begins with zeros. Collective for families that rank 0
    loads. Raises ConfigError, naming the `setting`, for a model that cannot be built.
    """
    disable_progress_bar()
    trust = config.model.trust_remote_code
    model_config = open_config(folder, trust=trust, setting=setting)
    pin_rotary(model_config, config.model.max_length)
    with torch.device("meta"):
        model = build_model(auto_class, model_config, trust=trust, setting=setting, dtype=torch.float32).eval()
        if is_critic:
            put_value_head(model)
    choose_way(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the policy that is trained must be the one that sampled
    move_buffers(model, lambda buffer: torch.full_like(buffer, _unset(buffer), device="cpu"))
    model.initialize_weights()  # computes buffers; without effect on the meta device
    new: Fresh = {
        name: partial(torch.zeros, parameter.shape)
        for name, parameter in model.named_parameters()
        if is_critic and name.rpartition(".")[0] == VALUE_HEAD
    }
    load = partial(open_model, auto_class, folder, trust=trust, setting=setting)
    values = FirstValues(model, folder, new, lambda dtype: load(dtype=dtype))
    values.fill_buffers(model)
    for name, buffer in model.named_buffers():
        if buffer.isnan().any():
            raise ConfigError(
                f"{setting} names a {model_config.model_type} model whose {name} transformers computes only together "
                "with the parameters; choose a model such as Llama, Qwen2 or Qwen3"
            )
    return model, values


def converted_patterns(model: PreTrainedModel) -> list[str]:
    """Regular expressions of the names in files whose tensors transformers converts for this family."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    return [pattern for each in mapping if isinstance(each, WeightConverter) for pattern in each.source_patterns]


def load_whole(
    auto_class: Any,
    config: Config,
    folder: str,
    setting: str = "model.path",
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """`empty_model`, whole in this process with its first values."""
    model, values = empty_model(auto_class, config, folder, setting)
    fill(model, values, device, dtype)
    return model


def fill(
    model: PreTrainedModel, values: FirstValues, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> None:
    """Give a model in one process its memory and first values."""
    for name, parameter in with_memory(model, device, dtype):
        parameter.detach().copy_(values.whole(name))
    move_buffers(model, lambda buffer: buffer.to(device))


def with_memory(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, nn.Parameter]]:
    """Replace each parameter by one with memory, not filled, and yield it with its name; tied ones stay tied."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            places[parameter].append((module, attribute))
    for name, parameter in list(model.named_parameters()):
        empty = torch.empty_like(parameter, device=device, dtype=dtype or parameter.dtype)
        replaced = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for module, attribute in places[parameter]:
            setattr(module, attribute, replaced)
        yield name, replaced


def move_buffers(model: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, move(buffer))


def _unset(buffer: Tensor) -> float:
    return math.nan if buffer.is_floating_point() else 0


def _open_files(folder: Path) -> dict[str, Any]:
    """Name of each tensor -> the open file that has it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {part: safe_open(folder / part, framework="pt") for part in sorted(set(names.values()))}
        return {name: files[part] for name, part in names.items()}
    parts = [safe_open(part, framework="pt") for part in (folder / "model.safetensors",) if part.is_file()]
    return {name: file for file in parts for name in file.keys()}  # noqa: SIM118, a file is no mapping


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
