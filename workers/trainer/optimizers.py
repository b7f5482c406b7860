"""The optimisers, on one rank's rows of each trained parameter: AdamW, AdamW with 8-bit moments, and Muon.

AdamW is element by element, so it needs nothing from other ranks. Muon needs whole matrices: the ranks take them in
turn, each rank orthogonalises its own, and everyone gets its rows of the result back.

Moments are given and taken as float32, whatever they are kept in, so that a checkpoint fits any layout of the ranks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.config import Optimizer, TrainerConfig
from rlflow.errors import ConfigError
from rlflow.weights.shape.layout import chunk_of
from rlflow.workers.trainer.lora import is_of_experts
from rlflow.workers.trainer.shards import MOMENTS

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def adamw(trainer: TrainerConfig, parameters: Sequence[Tensor]) -> torch.optim.AdamW:
    """AdamW with float32 moments, for every back end; the back end itself decays the weights that `decayed` names."""
    betas = (trainer.beta1, trainer.beta2)
    return torch.optim.AdamW(parameters, lr=trainer.learning_rate, betas=betas, weight_decay=0.0, fused=True)


def decayed(shapes: Mapping[str, tuple[int, ...]], hidden: frozenset[str]) -> frozenset[str]:
    """The matrices of the decoder layers, `hidden`: norms, biases, embeddings and output layer keep their size."""
    return frozenset(name for name in hidden if len(shapes[name]) > 1)


def fresh_moments(like: Tensor, updates: int) -> dict[str, Tensor]:
    """AdamW's state of one tensor after `updates` steps, moments still to be filled in."""
    step = torch.tensor(float(updates), device=like.device)
    return {"step": step} | {kind: torch.zeros_like(like) for kind in MOMENTS}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Everything that the optimiser keeps; an 8-bit moment as the tensors that it consists of."""
    for state in optimizer.state.values():
        for value in state.values():
            if hasattr(value, "__tensor_flatten__"):
                yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
            elif isinstance(value, Tensor):
                yield value


@dataclass(kw_only=True, slots=True, frozen=True)
class ShardGroup:
    """The ranks that share out the rows of every matrix."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    """None with one rank."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a device never changes
    """Where matrices are made whole and orthogonalised."""


class ShardOptimizer:
    """Steps a rank's rows. They are handed in at each step, because FSDP2 may move them between two steps."""

    def __init__(
        self, trainer: TrainerConfig, shapes: Mapping[str, tuple[int, ...]], hidden: frozenset[str], group: ShardGroup
    ) -> None:
        """`shapes` are the whole parameters'. Muon takes the matrices among `hidden`, AdamW the rest.

        `hidden` are the parameters of the decoder layers.

        Raises ConfigError if a package is missing.
        """
        self._trainer = trainer
        self._group = group
        is_muon = trainer.optimizer is Optimizer.muon
        self._matrices = {
            name: (shape[0], shape[1])
            for name, shape in shapes.items()
            if is_muon and name in hidden and len(shape) == 2 and not is_of_experts(name)
        }
        self._decayed = decayed(shapes, hidden) if trainer.weight_decay else frozenset[str]()
        self._momentum: dict[str, Tensor] = {}
        self._stand_ins = {name: nn.Parameter(torch.empty(0)) for name in shapes if name not in self._matrices}
        self._adamw = _adamw_of(trainer, list(self._stand_ins.values())) if self._stand_ins else None

    @torch.no_grad()
    def step(self, shards: Mapping[str, Tensor], gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update the rows in place. With Muon it is collective."""
        for name in self._decayed:
            shards[name].mul_(1 - learning_rate * self._trainer.weight_decay)
        for name, stand_in in self._stand_ins.items():
            stand_in.data, stand_in.grad = shards[name], gradients[name]
        if self._adamw is not None:
            for options in self._adamw.param_groups:
                _set_rate(options, learning_rate)
            with _eager_on_cpu(self._trainer.optimizer, next(iter(shards.values())).device):
                self._adamw.step()
            for stand_in in self._stand_ins.values():
                stand_in.data, stand_in.grad = torch.empty(0), None
        self._step_matrices(shards, gradients, learning_rate)

    def _step_matrices(
        self, shards: Mapping[str, Tensor], gradients: Mapping[str, Tensor], learning_rate: float
    ) -> None:
        """Muon (arXiv:2502.16982, section 2.2), whose factor 0.2 makes AdamW's learning rates fit."""
        decay = self._trainer.beta1
        # Matrices that are orthogonalised at the same time are alike, so that no rank waits for another.
        names = iter(sorted(self._matrices, key=lambda name: self._matrices[name]))
        while batch := list(islice(names, self._group.size)):
            updates = []
            for name in batch:
                momentum = self._momentum.setdefault(name, torch.zeros_like(shards[name]))
                momentum.lerp_(gradients[name], 1 - decay)
                updates.append(gradients[name].lerp(momentum, decay))
            shapes = [self._matrices[name] for name in batch]
            for name, update in zip(batch, on_whole_matrices(orthogonal, updates, shapes, self._group), strict=True):
                shard, scale = shards[name], 0.2 * math.sqrt(max(self._matrices[name]))
                shard.add_(update, alpha=-learning_rate * scale)

    def moments(self, name: str, like: Tensor) -> dict[str, Tensor]:
        """Kind -> this rank's rows in float32; zeros before the first step. `like` are the rows of the parameter."""
        if name in self._matrices:
            return {MOMENTS[0]: self._momentum.get(name, torch.zeros_like(like))}
        state = self._adamw.state.get(self._stand_ins[name]) if self._adamw is not None else None
        return {kind: _as_float32(state[kind]) if state else torch.zeros_like(like) for kind in MOMENTS}

    def load(self, name: str, like: Tensor, read: Callable[[str, Tensor], None] | None, updates: int) -> None:
        """Take what `read(kind, target)` fills in for the moments after `updates` steps; None starts anew."""
        if name in self._matrices:
            self._momentum.pop(name, None)
            if read is not None:
                self._momentum[name] = torch.zeros_like(like)
                read(MOMENTS[0], self._momentum[name])
            return
        assert self._adamw is not None, "what is no matrix is AdamW's"
        stand_in = self._stand_ins[name]
        self._adamw.state.pop(stand_in, None)
        if read is not None:
            state = fresh_moments(like, updates)
            for kind in MOMENTS:
                read(kind, state[kind])
            if self._trainer.optimizer is Optimizer.adamw8bit:
                state = _in_8_bits(self._adamw, state)
            self._adamw.state[stand_in] = state

    def resident(self) -> Iterator[Tensor]:
        """Everything that it keeps between two steps."""
        yield from self._momentum.values()
        if self._adamw is not None:
            yield from state_tensors(self._adamw)


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly the nearest matrix with equal singular values: five steps of Newton-Schulz (arXiv:2502.16982, eq. 2)."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=1e-7)
    first, third, fifth = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return found.T if is_tall else found


def on_whole_matrices(
    function: Callable[[Tensor], Tensor],
    shards: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    group: ShardGroup,
) -> list[Tensor]:
    """This rank's rows of function(matrix) for at most `group.size` matrices, of which each rank computes one.

    On a GPU matrices travel and are computed with in bfloat16, as in the paper's own code; elsewhere in float32.
    """
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    if group.process_group is None:
        return [function(shard.to(group.device, dtype)).to(shard.device) for shard in shards]
    own = shapes[group.rank] if group.rank < len(shapes) else (0, 0)
    rows = [chunk_of(own[0], rank, group.size) for rank in range(group.size)]
    counts_here = [(stop - start) * own[1] for start, stop in rows]
    counts_there = [shard.numel() for shard in shards] + [0] * (group.size - len(shards))
    parts = torch.cat([shard.to(group.device, dtype).flatten() for shard in shards])
    whole = parts.new_empty(sum(counts_here))
    dist.all_to_all_single(whole, parts, counts_here, counts_there, group=group.process_group)
    if len(whole):
        whole = function(whole.view(own)).contiguous().flatten()
    dist.all_to_all_single(parts, whole, counts_there, counts_here, group=group.process_group)
    found = parts.split(counts_there)[: len(shards)]
    return [part.view(shard.shape).to(shard.device) for part, shard in zip(found, shards, strict=True)]


def _adamw_of(trainer: TrainerConfig, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    if trainer.optimizer is not Optimizer.adamw8bit:
        return adamw(trainer, parameters)
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"trainer.optimizer=adamw8bit needs a package that is missing: {error}; install rlflow with the extra "
            "`optim8bit`, or set trainer.optimizer=adamw"
        ) from error
    betas = (trainer.beta1, trainer.beta2)
    return AdamW8bit(parameters, lr=trainer.learning_rate, betas=betas, weight_decay=0.0)


def _set_rate(options: dict[str, Any], learning_rate: float) -> None:
    """torchao keeps the rate in a tensor, because its step is compiled."""
    if isinstance(options["lr"], Tensor):
        options["lr"].fill_(learning_rate)
    else:
        options["lr"] = learning_rate


def _eager_on_cpu(optimizer: Optimizer, device: torch.device) -> AbstractContextManager[object]:
    """torchao compiles its step; a machine without a GPU need not have a compiler."""
    is_compiled = optimizer is Optimizer.adamw8bit and device.type == "cpu"
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def _as_float32(moment: Tensor) -> Tensor:
    """The values that a moment stands for."""
    return moment.dequantize() if hasattr(moment, "__tensor_flatten__") else moment


def _in_8_bits(optimizer: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments as torchao keeps them; small ones, and those that its blocks do not fit, stay in float32."""
    found = {"step": state["step"].cpu()}
    for kind in MOMENTS:
        found[kind] = optimizer._new_buffer(state[kind], kind == MOMENTS[0])
        found[kind].copy_(state[kind])
    return found
