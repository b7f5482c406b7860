"""Router replay: each token goes to the experts that the engine chose when it sampled (R3, arXiv:2510.11370).

    PackedBatch.experts -> lay_routes (once a row) -> the choice in each router -> gates, as the family computes them

Engine and trainer round differently, so that of two experts that are nearly as good one takes the first and one the
second, and the probability of a token jumps. Only the choice is replayed: the family's own code computes gates of the
given experts from the current logits, so that routers have their gradient. Tokens without a route choose as ever.
What the routers compute is also what the balance loss is made of (`balance`).
Shape letters: R rows that the model computes, E experts, k of which a token goes to.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlflow.batching.pack import IndexArray
from rlflow.batching.routes import no_route
from rlflow.errors import ConfigError, RunError
from rlflow.types import ExpertArray
from rlflow.workers.trainer.balance import Balance
from rlflow.workers.trainer.layers import decoder_layers, num_experts

_OFF = "set rollout.replay_experts=false, and the trainer chooses experts for itself"
_REPLAY = "rlflow_replay"
_CHOICES = (torch.topk, Tensor.topk)
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_SIGMOID = (F.sigmoid, torch.sigmoid, Tensor.sigmoid)


def replay_routes(model: PreTrainedModel, *, with_balance: bool = False) -> Balance | None:
    """Let the routers of `model` take the routes that `lay_routes` gives; a model without experts stays as it is.

    Before it is sharded or wrapped. `with_balance` also lets them compute the balance loss, which is returned. Raises
    ConfigError if there are no routers to compute it.
    """
    replay = _Replay(model, with_balance=with_balance) if num_experts(model.config) else None
    if replay is not None:
        setattr(model, _REPLAY, replay)
    if with_balance and (replay is None or not replay.routers):
        raise ConfigError(
            f"algorithm.balance_coefficient has no effect on the {model.config.model_type} model at model.path, in "
            "which no routers of experts are known; set it to 0"
        )
    return None if replay is None else replay.balance


def lay_routes(
    model: PreTrainedModel, experts: ExpertArray | None, token_of: IndexArray, loss_rows: IndexArray
) -> None:
    """Give the routes of a packed row [T, layers, k] to the forward pass of `model` that comes next, and its backward.

    `token_of` [R] is the token of the packed row that each row of the model's input holds, -1 for padding, and
    `loss_rows` [N] the row that predicts each loss token. They stay until the next call, because the backward pass may
    compute a layer again. Without effect on a model that `replay_routes` was not called for. Raises RunError for routes
    that no router can have chosen, ConfigError if the routers of the model are not known.
    """
    if replay := getattr(model, _REPLAY, None):
        replay.lay(experts, token_of, loss_rows, next(model.parameters()).device)


class _Replay:
    """The routers of a model, each with the routes of one row."""

    def __init__(self, model: PreTrainedModel, *, with_balance: bool) -> None:
        self._family = model.config.model_type
        self._num_experts = num_experts(model.config)
        self.routers: list[tuple[int, Any]] = []
        """Each with its layer."""
        classes = _router_classes(model)
        for index, layer in enumerate(decoder_layers(model)):
            self.routers += [(index, module) for module in layer.modules() if isinstance(module, classes)]
        self.balance = Balance(len(self.routers), self._num_experts) if with_balance else None
        for number, (_, router) in enumerate(self.routers):
            router.__class__ = _replaying(type(router))
            router.rlflow_routes, router.rlflow_experts = None, self._num_experts
            router.rlflow_balance, router.rlflow_number = self.balance, number

    def lay(
        self, experts: ExpertArray | None, token_of: IndexArray, loss_rows: IndexArray, device: torch.device
    ) -> None:
        if self.balance is not None:
            has_gradient = torch.is_grad_enabled()
            self.balance.begin(torch.from_numpy(loss_rows).long().to(device) if has_gradient else None)
        if experts is None:
            for _, router in self.routers:
                router.rlflow_routes = None
            return
        if not self.routers:
            raise _unknown(f"a {self._family} model")
        routes = np.where(experts == no_route(experts), -1, experts.astype(np.int32)).swapaxes(0, 1)
        chosen = np.sort(routes[[layer for layer, _ in self.routers]], axis=-1)
        is_twice = (chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)
        if is_twice.any() or chosen.max(initial=-1) >= self._num_experts:
            raise RunError(
                f"the engine says that a token went to an expert twice, or to one that the {self._family} model lacks, "
                f"so vLLM has not recorded all choices; set rollout.engine_args.moe_backend=triton, or {_OFF}"
            )
        rows = torch.from_numpy(np.where(token_of[:, None] < 0, -1, routes[:, token_of])).to(device)
        for layer, router in self.routers:
            router.rlflow_routes = rows[layer]


@cache
def _replaying(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of routers that take routes, and tell what they compute to the balance loss.

    A class, because all layers of one class are compiled as one graph.
    """

    class Replaying(kind):
        rlflow_routes: Tensor | None  # [R, k], -1 without a route
        rlflow_experts: int
        rlflow_balance: Balance | None
        rlflow_number: int

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            routes = None if self.rlflow_routes is None else self.rlflow_routes.long()
            balance = self.rlflow_balance if self.rlflow_balance and self.rlflow_balance.rows is not None else None
            if routes is None and balance is None:
                return kind.forward(self, *args, **kwargs)
            choice = _Choice(routes, self.rlflow_experts)
            with choice:
                routed = kind.forward(self, *args, **kwargs)
            if choice.num_taken != 1:
                raise _unknown(kind.__name__)
            if balance is not None:
                balance.add(self.rlflow_number, choice.probabilities, choice.chosen)
            return routed

    return Replaying


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"the routers of {what} do not choose the best of all experts in one step that is known, so that model.path "
        f"names a model whose routes cannot be replayed; {_OFF} (and algorithm.balance_coefficient=0)"
    )


class _Choice(TorchFunctionMode):
    """While a router computes, its choice among all experts gives the `routes` [R, k] where there are any."""

    probabilities: Tensor
    """[R, E]: the family's softmax, its sigmoids over their sum, or else the softmax of what it chooses by."""
    chosen: Tensor
    """[R, k]"""

    def __init__(self, routes: Tensor | None, num_experts: int) -> None:
        super().__init__()
        self._routes = routes
        self._num_experts = num_experts
        self._activations: Tensor | None = None
        self.num_taken = 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _SOFTMAX + _SIGMOID and found.dim() == 2 and found.shape[1] == self._num_experts:
            self._activations = found / found.sum(-1, keepdim=True) if func in _SIGMOID else found
        if func not in _CHOICES:
            return found
        scores: Tensor = args[0]
        # Other choices, such as that of groups of experts, are among fewer and only prepare this one.
        if scores.dim() != 2 or scores.shape[1] != self._num_experts:
            return found
        if self._routes is not None and found.indices.shape != self._routes.shape:
            return found
        self.num_taken += 1
        self.probabilities = scores.softmax(-1) if self._activations is None else self._activations
        self.chosen = found.indices
        if self._routes is None:
            return found
        self.chosen = torch.where(self._routes < 0, found.indices, self._routes)
        return torch.return_types.topk((scores.gather(-1, self.chosen), self.chosen))


def _router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """The classes that transformers says the family's router logits come from; () if it says nothing."""
    recorded = [(getattr(module, "_can_record_outputs", None) or {}).get("router_logits") for module in model.modules()]
    first = next(filter(None, recorded), ())
    found = first if isinstance(first, list | tuple) else [first]
    return tuple(getattr(each, "target_class", each) for each in found)
