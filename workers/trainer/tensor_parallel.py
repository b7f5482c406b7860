"""Tensor parallelism: a group of ranks goes through the same micro-batches, each with a slice of every decoder layer.

The model's own plan names the linear layers that are cut. A `colwise` layer computes some of the outputs on each rank.
A `rowwise` layer computes a part of every output from some of the inputs, and the parts are summed over the group.
Every rank computes everything else from whole parameters, except the output layer, whose tokens are divided
(policy.py).

Each rank takes 1 / size of the loss, and differentiates what it computed itself. So the gradients of activations and of
whole parameters are parts too, which add up over the group: FSDP shards whole parameters over all ranks and sums over
all ranks. The backward of a sum over the group is that sum again, so behind it the gradient is complete, and the
gradient of a slice needs to be summed over the data ranks only.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlflow.errors import ConfigError
from rlflow.workers.trainer.rank_group import RankGroup

_COLWISE, _ROWWISE = "colwise", "rowwise"
_WHOLE = "replicated_with_grad_allreduce"
"""The style of the norms of queries and keys: whole on every rank, which applies them to its own heads."""


class RowwiseLinear(nn.Module):
    """A linear layer of which each rank holds some of the columns. The bias is whole, and is added once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: RankGroup) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._group = group

    def forward(self, inputs: Tensor) -> Tensor:
        output = self._group.add_up(F.linear(inputs, self.weight))
        return output if self.bias is None else output + self.bias


def cut_layers(model: PreTrainedModel, group: RankGroup) -> dict[str, int]:
    """Keep only this rank's slices of the decoder layers of `model`, a model with a head.

    Returns the name of each parameter that was cut, and the dimension along which it is divided among the group. Raises
    ConfigError for a model that cannot be cut, or not into that many slices.
    """
    cut: dict[str, int] = {}
    for name, style in _layers_to_cut(model, group.size).items():
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise ConfigError(
                f"trainer.tensor_parallel={group.size} cannot cut {name}, which is no plain linear layer but {linear}; "
                "set it to 1"
            )
        dim = 0 if style == _COLWISE else 1
        if linear.weight.shape[dim] % group.size:
            raise ConfigError(
                f"trainer.tensor_parallel must divide the size of every layer that it cuts; got {group.size}, and "
                f"{linear.weight.shape[dim]} {'outputs' if dim == 0 else 'inputs'} of {name}; lower it"
            )
        cut[f"{name}.weight"] = dim
        weight = _slice(linear.weight, dim, group)
        if dim == 1:
            model.set_submodule(name, RowwiseLinear(weight, linear.bias, group))
            continue
        linear.weight, linear.out_features = weight, len(weight)
        if linear.bias is not None:
            linear.bias = _slice(linear.bias, 0, group)
            cut[f"{name}.bias"] = 0
    return cut


def _slice(parameter: Tensor, dim: int, group: RankGroup) -> nn.Parameter:
    own = group.slice(parameter.detach(), dim).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)


def _layers_to_cut(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Name of each module that transformers' plan for the decoder layers cuts, and how.

    The plan's entry for the embedding is ignored, because the embedding stays whole. Raises ConfigError if there is no
    plan, or it has unknown styles.
    """
    text = model.config.get_text_config()
    problem = f"trainer.tensor_parallel={size}: model.path names a {text.model_type} model"
    cure = "set it to 1, or choose a model such as Llama, Qwen2 or Qwen3"
    entries: dict[str, str] = text.base_model_tp_plan or {}
    plan = {pattern: style for pattern, style in entries.items() if pattern.startswith("layers.")}
    if not plan:
        raise ConfigError(f"{problem}, for which transformers has no plan to cut it; {cure}")
    unknown = sorted(set(plan.values()) - {_COLWISE, _ROWWISE, _WHOLE})
    if unknown:
        raise ConfigError(f"{problem}, whose plan has {', '.join(unknown)}, which training does not do; {cure}")
    for field in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(text, field, None) or text.num_attention_heads
        if number % size:
            raise ConfigError(f"{problem} with {field}={number}, which it must divide; lower trainer.tensor_parallel")
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        path = re.escape(f"{model.base_model_prefix}.{pattern}").replace(r"\*", r"\d+")
        found |= {name: style for name, _ in model.named_modules() if re.fullmatch(path, name)}
    return {name: style for name, style in found.items() if style != _WHOLE}
