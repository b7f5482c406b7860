"""A training back end on one rank: micro-batches through the model, the frame of a step, parameters out, checkpoints.

    micro-batches -> pack -> model -> Objective -> backward (sums) ... -> step: norm, divide, clip, AdamW

Rules: every public method but `held` is collective, so all ranks call it in the same order, with equally many
micro-batches. What is accumulated are sums; `step` divides once, by the number of loss tokens or sequences of all
ranks, so neither micro-batches nor ranks change an update. A gradient that is not finite updates nothing. Everything
outside sees whole parameters by their Hugging Face names; how they lie on the ranks is the subclass's business.

Example: two ranks accumulate losses with 30 and 50 loss tokens. `step` adds up both gradients, divides them by 80, and
scales them down if their norm exceeds `trainer.max_grad_norm`.

A step of the run makes one such update, or several (algorithm.epochs, algorithm.minibatches). The learning rate, the
critic's head start and what adapts follow steps, not updates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.algorithms.schedules import learning_rate
from rlflow.batching.pack import PackedBatch, pack
from rlflow.batching.plan import runs_of
from rlflow.config import Checkpointing, Config
from rlflow.errors import RunError
from rlflow.roles import Mean, StepOutcome, TrainWork
from rlflow.rollout.requests import ProbePrompt
from rlflow.runtime.derived import dtype_of, num_updates, ranks_per_share
from rlflow.types import FloatArray, TrainSample
from rlflow.weights.shape.layout import Layout, mesh_layout
from rlflow.weights.source import Specs
from rlflow.workers.trainer.figures import Figures, memory_peaks
from rlflow.workers.trainer.flops import laid_out_sizes, padded_sizes, sizes_of
from rlflow.workers.trainer.gate import Agreement, probe_prompts, settle_way
from rlflow.workers.trainer.layers import VALUE_HEAD, decoder_layers, wrap_as_asked
from rlflow.workers.trainer.lora import (
    add_adapters,
    first_adapter,
    is_adapter,
    merged,
    parts_of,
    peft_name,
    seed_dropout,
    without_adapters,
)
from rlflow.workers.trainer.objective import Objective, PolicyObjective
from rlflow.workers.trainer.parking import ParkingSpace
from rlflow.workers.trainer.policy import Policy, empty_policy, split_logprobs, torch_dtype
from rlflow.workers.trainer.process_group import choose_device, join
from rlflow.workers.trainer.sequence_parallel import join_sequence_group
from rlflow.workers.trainer.shards import Shard, ShardReader, Snapshot
from rlflow.workers.trainer.value import ValueObjective, empty_value_model
from rlflow.workers.trainer.way import Way, check_packed, way_of

MicroBatch = Sequence[Sequence[TrainSample]]
"""What goes through the model at once: pieces of groups, each with its samples."""


class TrainerBackend(ABC):
    """One rank, on one device. The subclass shards the model before its parameters have memory, and then fills them."""

    version: int = 0
    """The version of the current parameters; set by the actor that counts the updates."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: int,
        world_size: int,
        rendezvous: str,
        is_critic: bool,
        is_distributed: bool,
    ) -> None:
        """Join the other ranks at `rendezvous` (see `process_group.join`) if `is_distributed`, and build the model.

        Its parameters are on the meta device, and `_first` has the values that they begin with.

        Raises ConfigError for a model that cannot be trained.
        """
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._device = choose_device(rank)
        if config.cluster.cpu_threads is not None and self._device.type == "cpu":
            torch.set_num_threads(config.cluster.cpu_threads)
        self._is_distributed = is_distributed
        if is_distributed:
            join(rendezvous, rank, world_size, self._device, config.deadlines.train_s)
        self._is_critic = is_critic
        build = empty_value_model if is_critic else empty_policy
        self._policy, self._first = build(config, model_path)
        self._ranks_per_share = ranks_per_share(config.trainer)
        check_packed(self._policy.model, config.trainer.sequence_parallel)
        self._policy.share_rows(join_sequence_group(config.trainer, rank, config.deadlines.train_s))
        self._objective: Objective = ValueObjective(config) if is_critic else PolicyObjective(config)
        if config.lora.rank is not None:
            heads = (VALUE_HEAD,) if is_critic else ()
            add_adapters(self._policy.model, config.lora, torch_dtype(config), heads)
        self._balance = self._policy.follow_routers(config) if isinstance(self._policy, Policy) else None
        wrap_as_asked(self._policy.model, config, on_gpu=self._device.type == "cuda")
        self._policy.train(config.trainer.gradient_checkpointing is Checkpointing.full)
        named = dict(self._policy.model.named_parameters())
        self._all_shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        # Trained parameters only, because those are what checkpoints hold.
        self._shapes = {name: self._all_shapes[name] for name, each in named.items() if each.requires_grad}
        for name in filter(is_adapter, named):
            shape, seed = self._all_shapes[name], config.run.seed
            self._first.fresh[name] = partial(first_adapter, name, shape, seed, torch_dtype(config))
        layers = {id(parameter) for parameter in decoder_layers(self._policy.model).parameters()}
        self._hidden = frozenset(name for name in self._shapes if id(named[name]) in layers)
        self._parts = parts_of(self._policy.model)
        self._buffers = list(self._first.buffers(self._policy.model))
        dtype = torch_dtype(config)
        self._specs: Specs = [(name, dtype, tuple(named[parts[0]].shape)) for name, parts in self._parts.items()]
        self._specs += [(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in self._constants().items()]
        self._model_sizes = sizes_of(self._policy.model)
        self._parking = ParkingSpace(self._device)
        self._updates = self._steps = 0
        """Updates that were applied, and steps that had any."""
        self._figures = Figures(self._objective.num_sums, self._model_sizes, self._device)
        self._applied: list[Tensor] = []
        """The sums of each update of the step that was applied."""

    # -- what a subclass does

    @abstractmethod
    def accumulate(self, groups: Sequence[MicroBatch]) -> None:
        """Add the gradients of this rank's micro-batches (weighted sums over loss tokens) to what a step divides."""

    @abstractmethod
    def _parameter_parts(self) -> Iterator[tuple[str, Tensor]]:
        """`held` of the parameters."""

    @property
    @abstractmethod
    def _forward(self) -> nn.Module:
        """The policy, called through whatever wraps it."""

    @abstractmethod
    def _finish_gradients(self) -> None:
        """Called first in a step: bring what was accumulated into the form that `_gradient_norm` reads."""

    @abstractmethod
    def _gradient_norm(self) -> float:
        """Euclidean norm of the accumulated sums, over all shards of all ranks; not finite if any of them is not."""

    @abstractmethod
    def _update(self, scale: float, learning_rate: float) -> None:
        """Multiply the accumulated sums by `scale`, let the optimiser step, and clear them."""

    @abstractmethod
    def _discard_gradients(self) -> None:
        """Clear what was accumulated; parameters and moments stay as they are."""

    @abstractmethod
    def _shards(self) -> Iterator[Shard]:
        """Copies, on the CPU, of what this rank saves of every parameter. Before the first update moments are zeros."""

    @abstractmethod
    def _load_shards(self, reader: ShardReader) -> None:
        """Fill parameters, and moments if the checkpoint has them; otherwise the optimiser starts anew."""

    @abstractmethod
    def _whole(self, names: Sequence[str]) -> AbstractContextManager[list[Tensor]]:
        """These parameters, whole on every rank, until the block ends; not to be written to."""

    @abstractmethod
    def _layout_of_ranks(self, dtype: str) -> Layout:
        """`layout` of the parameters of a model without adapters."""

    @abstractmethod
    def _resident(self) -> Iterator[Tensor]:
        """Everything that takes memory of the device between two calls."""

    # -- a step

    def settle_way(self) -> Agreement:
        """Measure the model and settle how it goes; see `gate`. Called once, before anything goes through it."""
        return settle_way(
            self._policy.model,
            partial(self._forward, has_plain=True),
            lambda found: float(self._all_reduce(torch.tensor(found, dtype=torch.float64), dist.ReduceOp.MAX)),
            torch_dtype(self._config),
            self._config.model.max_length,
            images=self._policy.images,
            sequence_parallel=self._config.trainer.sequence_parallel,
        )

    def probe_prompts(self) -> list[ProbePrompt]:
        """See `gate`."""
        return probe_prompts(self._policy.model, self._config.model.max_length, self._policy.images)

    def _in_pieces(self, groups: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Micro-batches as they go through the model: if prefixes are copied, cut into equally many on every rank."""
        if (way := way_of(self._policy.model)) is Way.packed:
            return groups
        rows = [[sample for group in micro_batch for sample in group] for micro_batch in groups]
        for row in rows:
            row.sort(key=lambda sample: sample.sample.num_tokens)  # less padding
        most_tokens, padded = self._config.trainer.micro_batch_tokens, way is Way.padded
        pieces = [[run] for row in rows for run in runs_of(row, most_tokens, padded=padded)]
        most = int(self._all_reduce(torch.tensor(len(pieces), dtype=torch.float64), dist.ReduceOp.MAX))
        return pieces + [[]] * (most - len(pieces))

    def observe(self, groups: Sequence[MicroBatch]) -> None:
        """Count micro-batches whose gradient is known to be zero: like `accumulate`, without the backward pass."""
        with torch.no_grad():
            for micro_batch in self._in_pieces(groups):
                self._loss(micro_batch, is_silent=True)
        self.pass_over(groups)

    def pass_over(self, groups: Sequence[MicroBatch]) -> None:
        """Like `observe`, without the forward pass: their figures are taken to be those of the observed ones."""
        for micro_batch in groups:
            self._figures.pass_over([sample for group in micro_batch for sample in group])

    def _loss(self, micro_batch: MicroBatch, *, is_silent: bool = False) -> Tensor:
        """This rank's share of a micro-batch's weighted sum over its loss tokens; adds up its figures."""
        if self._config.lora.dropout and torch.is_grad_enabled():
            seed_dropout(self._config.run.seed, self._updates, self._rank, int(self._figures.work[0]))
        packed = self._lay_out(micro_batch)
        padded = padded_sizes([sample for group in micro_batch for sample in group])
        self._figures.add_work(laid_out_sizes(packed, padded, way_of(self._policy.model)), padded)
        row = self._objective(self._forward(packed), packed, self.version)
        self._figures.add(row, is_silent=is_silent)
        return row.loss / self._ranks_per_share

    def _lay_out(self, micro_batch: MicroBatch) -> PackedBatch:
        """One row; the benchmark of the layout puts another in its place."""
        return pack(micro_batch)

    def step(self, *, is_last: bool = True) -> StepOutcome:
        """Divide by the number of loss tokens or of sequences of all ranks, clip, update, clear.

        A gradient that is not finite updates nothing and is cleared. `is_last`: the last update of the step of the run.
        Raises ValueError if nothing was accumulated, unless there are other updates in the step.
        """
        self._finish_gradients()
        sums = self._figures.totals(self._add_up_data)
        count = self._objective.divisor(sums)
        if count == 0 and num_updates(self._config.algorithm) == 1:
            raise ValueError("a step needs at least one accumulated loss token; got none")
        grad_norm = self._gradient_norm() / (count or 1.0)
        trainer = self._config.trainer
        rate = learning_rate(trainer, self._steps, self._config.run.steps) * self._objective.rate_scale(sums)
        clip, is_finite = min(1.0, trainer.max_grad_norm / (grad_norm + 1e-6)), math.isfinite(grad_norm)
        if not self._is_critic and self._steps < self._config.critic.warmup_steps:
            clip = rate = 0.0
        is_applied = is_finite and count > 0  # one of several parts may hold nothing but tokens that are too old
        if is_applied:
            self._update(clip / count, rate)
            self._updates += 1
            self._applied.append(sums)
        else:
            self._discard_gradients()
        metrics = self._objective.metrics(sums, self._all_reduce(self._figures.largest, dist.ReduceOp.MAX))
        if is_last:
            metrics |= self._end_step()
        tokens, *costs = self._add_up_data(self._figures.work).tolist()
        self._figures.clear()
        return StepOutcome(
            applied=is_applied,
            num_skipped=int(not is_finite),
            grad_norm=grad_norm,
            learning_rate=rate,
            metrics=metrics,
            work=TrainWork(
                tokens=round(tokens),
                flops=costs[0],
                padded_flops=costs[1],
                num_ranks=self._world_size,
                device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            ),
            memory_peaks=memory_peaks(self._device),
        )

    def _end_step(self) -> dict[str, Mean]:
        """After the last update of a step: adapt what adapts; returns what that is now."""
        if self._applied:
            # Each group was counted once an epoch.
            self._objective.end_step(torch.stack(self._applied).sum(0) / self._config.algorithm.epochs)
            self._steps += 1
        self._applied.clear()
        metrics = self._objective.adapted()
        if self._balance is not None:
            load = self._balance.end_step(self._all_reduce(self._balance.counts))
            metrics["experts/max_load"] = Mean(total=load, count=1)
        return metrics

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Each number summed over the ranks."""
        return self._add_up_data(torch.tensor(values, dtype=torch.float64)).tolist()

    def per_token(self, groups: Sequence[MicroBatch]) -> list[list[FloatArray]]:
        """For each micro-batch one [L] for each of its samples, in their order; 0 where there is no loss.

        Log-probabilities under the current policy, or values of the current critic.
        """
        found: dict[int, FloatArray] = {}
        for micro_batch in self._in_pieces(groups):  # which may order the samples anew
            samples = [sample for group in micro_batch for sample in group]
            with torch.no_grad():
                first, *_ = self._forward(self._lay_out(micro_batch))
            found |= {id(one): row for one, row in zip(samples, split_logprobs(first, samples), strict=True)}
        return [[found[id(one)] for group in micro_batch for one in group] for micro_batch in groups]

    def reference_logprobs(self, groups: Sequence[MicroBatch]) -> list[list[FloatArray]]:
        """`per_token` of a policy with its adapters switched off, which is the model that the run began with."""
        with without_adapters(self._policy):
            return self.per_token(groups)

    # -- parameters for the engines; with `held`, what `weights.source.WeightSource` asks for

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, by its Hugging Face name; tied ones once. All ranks iterate in the same order.

        Adapters are merged into what they belong to, which itself stays as it is. Behind the parameters come the
        buffers that files hold, because engines start without files.
        """
        for name, parts in self._parts.items():
            with self._whole(parts) as tensors:
                yield name, merged(tensors, self._config.lora)
        yield from self._constants().items()

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, like `full_parameters` but by PEFT's names; none if the whole model is trained."""
        for name in filter(is_adapter, self._shapes):
            with self._whole([name]) as tensors:
                yield peft_name(name), tensors[0]

    def layout(self) -> Layout | None:
        """Where the ranks keep what `full_parameters` gives, and the dtype to send; None if adapters are merged."""
        if self._config.lora.rank is not None:
            return None
        own = self._layout_of_ranks(dtype_of(self._config).value)
        placements = dict(own.placements)
        for name, buffer in self._constants().items():
            shapes, dtype = {name: tuple(buffer.shape)}, str(buffer.dtype).removeprefix("torch.")
            copies = mesh_layout(shapes, dtype, self._world_size, lambda _: ((self._world_size, None),))
            placements |= copies.placements
        return replace(own, placements=placements)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds of each tensor of `layout`, flat, by name; not to be written to.

        Each is in memory until the next one is asked for. Not collective.
        """
        yield from self._parameter_parts()
        for name, buffer in self._constants().items():
            yield name, buffer.reshape(-1)

    def _constants(self) -> dict[str, Tensor]:
        """The buffers that files hold."""
        return {name: self._policy.model.get_buffer(name) for name in self._buffers}

    def adapter_specs(self) -> Specs:
        """Like `parameter_specs`, for what `adapter_parameters` gives."""
        dtype = torch_dtype(self._config)
        return [(peft_name(name), dtype, shape) for name, shape in self._shapes.items() if is_adapter(name)]

    def parameter_specs(self) -> Specs:
        """Name, the dtype that the engines hold, and shape of what `full_parameters` gives."""
        return list(self._specs)

    # -- checkpoints and memory

    def snapshot(self) -> Snapshot:
        """Copy this rank's part of a checkpoint to the memory of the CPU; training may go on while it is written.

        Called between two steps, so nothing is accumulated. The checkpoint is complete when every rank's is written.
        """
        return Snapshot(
            rank=self._rank,
            num_ranks=self._world_size,
            shards=list(self._shards()),
            updates=self._updates,
            steps=self._steps,
            objective=self._objective.state(),
            expert_loads=[] if self._balance is None else self._balance.before.tolist(),
            lora=self._config.lora,
            optimizer=self._config.trainer.optimizer,
        )

    def load(self, folder: Path) -> None:
        """Read a checkpoint written on any number of ranks.

        Raises RunError if it is incomplete, or belongs to another model, other adapters or another optimiser.
        """
        reader = ShardReader(folder)
        reader.check_adapters(self._config.lora)
        reader.check_optimizer(self._config.trainer.optimizer)
        if reader.shapes != self._shapes:
            wrong = sorted(set(reader.shapes.items()) ^ set(self._shapes.items()))[0]
            raise RunError(
                f"checkpoint {folder} belongs to another model than model.path: they differ in {wrong[0]} {wrong[1]}; "
                "set model.path to the model that the run began with"
            )
        self._updates, self._steps = reader.updates, reader.steps
        self._objective.load_state(reader.objective)
        if self._balance is not None and reader.expert_loads:
            self._balance.before = torch.tensor(reader.expert_loads, dtype=torch.float64, device=self._device)
        self._load_shards(reader)

    def offload(self) -> None:
        """Move parameters, gradients and optimiser state to the memory of the CPU, and free the device's for others.

        Between `offload` and `reload` nothing but `close` is called; a second `offload` does nothing.
        """
        if self._device.type != "cpu" and not self._parking.num_bytes:
            self._parking.park(self._resident())

    def reload(self) -> None:
        """Undo `offload`, if there was one; training goes on as if it had not happened."""
        self._parking.unpark()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """Euclidean norm over these tensors of all ranks; each element is held by one rank of every replica."""
        dtypes = [torch.promote_types(gradient.dtype, torch.float32) for gradient in gradients]
        norms = [
            torch.linalg.vector_norm(gradient, dtype=dtype).double()
            for gradient, dtype in zip(gradients, dtypes, strict=True)
        ]
        squares = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
        return float((self._all_reduce(squares) / self._config.trainer.replicas).sqrt())

    def _add_up_data(self, values: Tensor) -> Tensor:
        """The sum over the ranks; what all ranks of a group have counts once."""
        return self._all_reduce(values) / self._ranks_per_share

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        total = values.to(self._device, copy=True)
        if self._is_distributed:
            dist.all_reduce(total, operation)
        return total
