"""Router replay: each token goes to the experts that the engine chose when it sampled (R3, arXiv:2510.11370).

    PackedBatch.experts -> lay_routes (once a row) -> the choice in each router -> gates, as the family computes them

Engine and trainer round differently, so that of two experts that are nearly as good one takes the first and one the
second, and the probability of a token jumps. Only the choice is replayed: the family's own code computes gates of the
given experts from the current logits, so that routers have their gradient. Tokens without a route choose as ever.
Shape letters: R rows that the model computes, E experts, k of which a token goes to.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlflow.batching import IndexArray
from rlflow.errors import ConfigError, RunError
from rlflow.types import ExpertArray, no_route
from rlflow.workers.trainer.layers import decoder_layers, num_experts

_OFF = "set rollout.replay_experts=false, and the trainer chooses experts for itself"
_REPLAY = "rlflow_replay"
_CHOICES = (torch.topk, Tensor.topk)


def replay_routes(model: PreTrainedModel) -> None:
    """Let the routers of `model` take the routes that `lay_routes` gives; a model without experts stays as it is.

    Before it is sharded or wrapped.
    """
    if num_experts(model.config):
        setattr(model, _REPLAY, _Replay(model))


def lay_routes(model: PreTrainedModel, experts: ExpertArray | None, token_of: IndexArray) -> None:
    """Give the routes of a packed row [T, layers, k] to the forward pass of `model` that comes next, and its backward.

    `token_of` [R] is the token of the packed row that each row of the model's input holds, -1 for padding. They stay
    until the next call, because the backward pass may compute a layer again. Without effect on a model that
    `replay_routes` was not called for. Raises RunError for routes that no router can have chosen, ConfigError if the
    routers of the model are not known.
    """
    if replay := getattr(model, _REPLAY, None):
        replay.lay(experts, token_of, next(model.parameters()).device)


class _Replay:
    """The routers of a model, each with the routes of one row."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._family = model.config.model_type
        self._num_experts = num_experts(model.config)
        self._routers: list[tuple[int, Any]] = []
        """Each with its layer."""
        classes = _router_classes(model)
        for index, layer in enumerate(decoder_layers(model)):
            self._routers += [(index, module) for module in layer.modules() if isinstance(module, classes)]
        for _, router in self._routers:
            router.__class__ = _replaying(type(router))
            router.rlflow_routes, router.rlflow_experts = None, self._num_experts

    def lay(self, experts: ExpertArray | None, token_of: IndexArray, device: torch.device) -> None:
        if experts is None:
            for _, router in self._routers:
                router.rlflow_routes = None
            return
        if not self._routers:
            raise _unknown(f"a {self._family} model")
        routes = np.where(experts == no_route(experts), -1, experts.astype(np.int32)).swapaxes(0, 1)
        chosen = np.sort(routes[[layer for layer, _ in self._routers]], axis=-1)
        is_twice = (chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)
        if is_twice.any() or chosen.max(initial=-1) >= self._num_experts:
            raise RunError(
                f"the engine says that a token went to an expert twice, or to one that the {self._family} model lacks, "
                f"so vLLM has not recorded all choices; set rollout.engine_args.moe_backend=triton, or {_OFF}"
            )
        rows = torch.from_numpy(np.where(token_of[:, None] < 0, -1, routes[:, token_of])).to(device)
        for layer, router in self._routers:
            router.rlflow_routes = rows[layer]


@cache
def _replaying(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of routers that take routes. A class, because all layers of one class are compiled as one graph."""

    class Replaying(kind):
        rlflow_routes: Tensor | None  # [R, k], -1 without a route
        rlflow_experts: int

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.rlflow_routes is None:
                return kind.forward(self, *args, **kwargs)
            choice = _Choice(self.rlflow_routes.long(), self.rlflow_experts)
            with choice:
                routed = kind.forward(self, *args, **kwargs)
            if choice.num_taken != 1:
                raise _unknown(kind.__name__)
            return routed

    return Replaying


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"the routers of {what} do not choose the best of all experts in one step that is known, so that model.path "
        f"names a model whose routes cannot be replayed; {_OFF}"
    )


class _Choice(TorchFunctionMode):
    """While a router computes, its choice among all experts gives the `routes` [R, k] where there are any."""

    def __init__(self, routes: Tensor, num_experts: int) -> None:
        super().__init__()
        self._routes = routes
        self._num_experts = num_experts
        self.num_taken = 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _CHOICES:
            return found
        scores: Tensor = args[0]
        # Other choices, such as that of groups of experts, are among fewer and only prepare this one.
        if scores.shape != (len(self._routes), self._num_experts) or found.indices.shape != self._routes.shape:
            return found
        self.num_taken += 1
        indices = torch.where(self._routes < 0, found.indices, self._routes)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def _router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """The classes that transformers says the family's router logits come from; () if it says nothing."""
    recorded = [(getattr(module, "_can_record_outputs", None) or {}).get("router_logits") for module in model.modules()]
    first = next(filter(None, recorded), ())
    found = first if isinstance(first, list | tuple) else [first]
    return tuple(getattr(each, "target_class", each) for each in found)
