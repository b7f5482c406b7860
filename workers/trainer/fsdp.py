"""The FSDP2 back end: gloo on CPU, NCCL on CUDA.

micro-batches -> pack -> Policy -> token_objective -> backward (sums) ... -> step: divide, clip, AdamW

Parameters and moments are float32, sharded along their first dimension. A single float32 rank has nothing to shard or
to cast, so it trains the bare module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlflow.batching import pack
from rlflow.config import Config
from rlflow.errors import RunError
from rlflow.roles import StepOutcome
from rlflow.types import FloatArray
from rlflow.workers.trainer.base import MicroBatch, TrainerBackend
from rlflow.workers.trainer.objective import NUM_SUMS, read_metrics, token_objective
from rlflow.workers.trainer.policy import Policy, load_policy, split_logprobs, torch_dtype
from rlflow.workers.trainer.process_group import choose_device, join
from rlflow.workers.trainer.shards import PARAMETER, Shard, ShardReader, shard_range, write_shards

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpTrainer(TrainerBackend):
    """One rank; `rendezvous` is where the ranks meet, as `process_group.join` takes it."""

    def __init__(self, config: Config, model_path: str, rank: int, world_size: int, rendezvous: str) -> None:
        """Join the other ranks and load the model.

        Raises ConfigError for a model that cannot be trained packed.
        """
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._device = choose_device(rank)
        if config.cluster.cpu_threads is not None and self._device.type == "cpu":
            torch.set_num_threads(config.cluster.cpu_threads)
        self._is_sharded = world_size > 1 or torch_dtype(config) != torch.float32
        if self._is_sharded:
            join(rendezvous, rank, world_size, self._device, config.deadlines.train_s)
        self._policy = load_policy(config, model_path)
        if config.trainer.gradient_checkpointing:
            self._policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._policy.train(config.trainer.gradient_checkpointing)
        if self._is_sharded:
            _shard(self._policy, self._device, world_size, torch_dtype(config))
        self._policy.to(self._device)
        self._parameters = _named_parameters(self._policy)
        trainer = config.trainer
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=trainer.learning_rate,
            betas=(trainer.beta1, trainer.beta2),
            weight_decay=trainer.weight_decay,
            fused=True,
        )
        self._updates = 0
        self._sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=self._device)
        self._largest_difference = torch.zeros((), dtype=torch.float64, device=self._device)

    def accumulate(self, groups: Sequence[MicroBatch]) -> None:
        for micro_batch in groups:
            self._objective(micro_batch).backward()

    def observe(self, groups: Sequence[MicroBatch]) -> None:
        with torch.no_grad():
            for micro_batch in groups:
                self._objective(micro_batch)

    def _objective(self, micro_batch: MicroBatch) -> Tensor:
        packed = pack(micro_batch)
        logprobs, entropies = self._policy(packed)
        objective = token_objective(logprobs, entropies, packed, self._config.algorithm)
        self._sums += objective.sums
        self._largest_difference = torch.maximum(self._largest_difference, objective.largest_difference)
        return objective.loss

    def step(self) -> StepOutcome:
        sums = self._all_reduce(self._sums)
        num_tokens = float(sums[-1])
        if num_tokens == 0:
            raise ValueError("a step needs at least one accumulated loss token; got none")
        gradients = [_local(_gradient(parameter)) for parameter in self._parameters.values()]
        grad_norm = self._norm(gradients) / num_tokens
        learning_rate = self._learning_rate()
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            clip = min(1.0, self._config.trainer.max_grad_norm / (grad_norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(clip / num_tokens)
            for options in self._optimizer.param_groups:
                options["lr"] = learning_rate
            self._optimizer.step()
            self._updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        largest_difference = self._all_reduce(self._largest_difference, dist.ReduceOp.MAX)
        self._sums.zero_()
        self._largest_difference.zero_()
        return StepOutcome(
            applied=is_finite,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            metrics=read_metrics(sums, largest_difference, self._config.algorithm),
        )

    def logprobs(self, groups: Sequence[MicroBatch]) -> list[list[FloatArray]]:
        found: list[list[FloatArray]] = []
        for micro_batch in groups:
            with torch.no_grad():
                logprobs, _ = self._policy(pack(micro_batch))
            found.append(split_logprobs(logprobs, [sample for group in micro_batch for sample in group]))
        return found

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            tensor = parameter.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def parameter_specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        dtype = torch_dtype(self._config)
        return [(name, dtype, tuple(parameter.shape)) for name, parameter in self._parameters.items()]

    def save(self, folder: Path) -> None:
        write_shards(folder, self._rank, self._world_size, list(self._shards()), self._updates)

    def load(self, folder: Path) -> None:
        reader = ShardReader(folder)
        expected = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if reader.shapes != expected:
            wrong = sorted(set(reader.shapes.items()) ^ set(expected.items()))[0]
            raise RunError(
                f"checkpoint {folder} belongs to another model than model.path: they differ in {wrong[0]} {wrong[1]}; "
                "set model.path to the model that the run began with"
            )
        self._updates = reader.updates
        for name, parameter in self._parameters.items():
            rows = shard_range(len(parameter), self._rank, self._world_size)
            _local(parameter.detach()).copy_(reader.read(PARAMETER, name, *rows))
            self._optimizer.state.pop(parameter, None)
            if set(_MOMENTS) <= set(reader.kinds):
                state = self._fresh_state(parameter)
                for kind in _MOMENTS:
                    _local(state[kind]).copy_(reader.read(kind, name, *rows))
                self._optimizer.state[parameter] = state

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _shards(self) -> Iterator[Shard]:
        """What this rank holds. Before the first update the moments are absent, and zeros stand for them."""
        for name, parameter in self._parameters.items():
            tensors = {PARAMETER: _local(parameter.detach()).cpu()}
            if self._config.trainer.save_optimizer:
                state = self._optimizer.state.get(parameter) or self._fresh_state(parameter)
                tensors |= {kind: _local(state[kind]).cpu() for kind in _MOMENTS}
            start, stop = shard_range(len(parameter), self._rank, self._world_size)
            assert len(tensors[PARAMETER]) == stop - start, f"{name} is cut another way than FSDP2 does"
            yield Shard(name=name, shape=tuple(parameter.shape), start=start, tensors=tensors)

    def _fresh_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of one parameter after `updates` steps, moments still to be filled in."""
        step = torch.tensor(float(self._updates), device=self._device)
        return {"step": step} | {kind: torch.zeros_like(parameter) for kind in _MOMENTS}

    def _learning_rate(self) -> float:
        """Linear warm-up over the first `warmup_steps` updates, then constant."""
        trainer = self._config.trainer
        return trainer.learning_rate * min(1.0, (self._updates + 1) / max(1, trainer.warmup_steps))

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """Euclidean norm over all shards of all ranks."""
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        return float(self._all_reduce(norms.double().square().sum()).sqrt())

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        total = values.clone()
        if self._is_sharded:
            dist.all_reduce(total, operation)
        return total


def _shard(policy: Policy, device: torch.device, world_size: int, dtype: torch.dtype) -> None:
    """Shard each decoder layer, and the rest as the root; gradients are summed over the ranks, not averaged."""
    mesh = init_device_mesh(device.type, (world_size,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = policy.model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _named_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """By Hugging Face name; tied parameters once."""
    return dict(policy.model.named_parameters())


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, made zero where nothing had one, so that the optimiser's momentum acts all the same."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
