"""Back ends of the trainer on several ranks, and what is done with them alike."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import spawn_ranks
from rounding import allowed_difference
from safetensors.torch import load_file, save_file
from torch import Tensor
from training import largest_relative_difference, share, shuffled, tiny_config, tiny_groups

from rlflow.config import Backend, Config, Dtype, Offload
from rlflow.roles import StepOutcome
from rlflow.types import TrainSample
from rlflow.workers.trainer.actor import build_backend
from rlflow.workers.trainer.packed import TrainerBackend
from rlflow.workers.trainer.parking import ParkingSpace
from rlflow.workers.trainer.shards import MOMENTS, PARAMETER, ShardReader

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed"
)


@dataclass(kw_only=True, frozen=True)
class Layout:
    """A back end and its ranks."""

    name: str
    backend: Backend
    zero_stage: int | None = None
    ranks: int = 2
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    replicas: int = 1
    micro_batch_tokens: int = 64
    seed: int | None = None
    """Of a shuffle of the samples; None for the order in which they were made."""

    @property
    def num_shares(self) -> int:
        """Into which the batch is divided."""
        return self.ranks // (self.tensor_parallel * self.sequence_parallel)

    def share_of(self, rank: int) -> int:
        return rank // (self.tensor_parallel * self.sequence_parallel)

    def config(self, dtype: Dtype = Dtype.float32) -> Config:
        config = tiny_config()
        config.model.dtype = dtype
        config.trainer.backend, config.trainer.zero_stage = self.backend, self.zero_stage
        config.trainer.ranks, config.trainer.tensor_parallel = self.ranks, self.tensor_parallel
        config.trainer.sequence_parallel, config.trainer.replicas = self.sequence_parallel, self.replicas
        config.trainer.learning_rate, config.trainer.warmup_steps = 1e-3, 2
        config.trainer.max_grad_norm = 0.25
        config.trainer.weight_decay = 0.1
        return config


def other_orders(layout: Layout) -> list[Layout]:
    """The same sums in other orders and parts: what they cost is what rounding costs, see `rounding`."""
    sizes = (16, 64, 1024)  # about a sample each, as the layouts have it, everything at once
    return [
        replace(layout, name=f"order_{seed}", seed=seed, micro_batch_tokens=tokens) for seed, tokens in enumerate(sizes)
    ]


def run_ranks(work: Any, layout: Layout, config: Config, folder: Path) -> None:
    """Call `work` on every rank of `layout`, in processes of their own unless there is only one."""
    if layout.ranks == 1:
        work(0, layout, config, folder, "")
        return
    rendezvous = folder / f"rendezvous_{layout.name}_{work.__name__}"
    spawn_ranks(layout.ranks, _run_rank, work, layout, config, folder, f"file://{rendezvous}")


def _run_rank(rank: int, work: Any, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    # Nothing of a back end may need a compiler on the CPU.
    os.environ["CC"] = os.environ["CXX"] = "/bin/false"
    work(rank, layout, config, folder, rendezvous)


def build(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> TrainerBackend:
    if config.trainer.offload is Offload.none:
        trainer = build_backend(config, str(folder / "model"), rank, layout.ranks, rendezvous)
        assert isinstance(trainer, TrainerBackend)
        return trainer
    # Without a GPU this saves nothing and is refused, but does all that it does with one.
    if config.trainer.backend is Backend.deepspeed:
        from rlflow.workers.trainer.deepspeed import DeepSpeedTrainer

        return DeepSpeedTrainer(config, str(folder / "model"), rank, layout.ranks, rendezvous)
    from rlflow.workers.trainer.fsdp import FsdpTrainer

    return FsdpTrainer(config, str(folder / "model"), rank, layout.ranks, rendezvous)


def silent_groups() -> list[list[TrainSample]]:
    """Groups whose gradient is zero."""
    groups = tiny_groups(num_groups=1)
    for group in groups:
        for sample in group:
            sample.advantage = 0.0
    return groups


def take_step(trainer: TrainerBackend, rank: int, layout: Layout) -> StepOutcome:
    """In two parts; the second one's micro-batch is empty in all shares but the last."""
    groups = tiny_groups(num_groups=5)
    first, second, silent = (_in_order(part, layout) for part in (groups[:3], groups[3:], silent_groups()))
    own, num_shares = layout.share_of(rank), layout.num_shares
    trainer.accumulate(share(first, own, num_shares, layout.micro_batch_tokens))
    trainer.observe(share(silent, own, num_shares, layout.micro_batch_tokens))
    trainer.accumulate([second if own == num_shares - 1 else []])
    return trainer.step()


def _in_order(groups: list[list[TrainSample]], layout: Layout) -> list[list[TrainSample]]:
    return groups if layout.seed is None else shuffled(groups, layout.seed)


def take_momentum_step(trainer: TrainerBackend, rank: int, layout: Layout) -> StepOutcome:
    """A step without any gradient."""
    trainer.observe(share(silent_groups(), layout.share_of(rank), layout.num_shares))
    return trainer.step()


def disturb(trainer: TrainerBackend, rank: int, layout: Layout) -> None:
    """Nothing of this may change anything."""
    before = {name: tensor.clone() for name, tensor in trainer.full_parameters()}
    broken = tiny_groups(num_groups=4)
    broken[3][0].advantage = math.inf
    trainer.accumulate(share(broken, layout.share_of(rank), layout.num_shares))
    outcome = trainer.step()
    assert not outcome.applied
    assert not math.isfinite(outcome.grad_norm)
    trainer.reload()
    trainer.offload()
    trainer.offload()
    trainer.reload()
    # On the CPU that does nothing, so here is what it does elsewhere.
    parking = ParkingSpace(torch.device("cpu"), chunk_bytes=2**16)
    parking.park(trainer._resident())
    num_elements = sum(tensor.numel() for tensor in before.values())
    num_trained = sum(math.prod(shape) for shape in trainer._shapes.values())
    # Parameters, and two moments of what is trained, in float32; the ranks' shares differ a little.
    num_elements += 2 * num_trained
    assert parking.num_bytes > 0.9 * 4 * num_elements * layout.replicas / layout.ranks
    assert all(storage.nbytes() == 0 for storage, _, _ in parking._parked)
    parking.unpark()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.full_parameters())


def write_outcomes(path: Path, outcomes: list[StepOutcome]) -> None:
    figures = [
        {
            "applied": outcome.applied,
            "grad_norm": outcome.grad_norm,
            "learning_rate": outcome.learning_rate,
            **{name: mean.value for name, mean in outcome.metrics.items()},
        }
        for outcome in outcomes
    ]
    path.write_text(json.dumps(figures))


def write_state(folder: Path, trainer: TrainerBackend) -> None:
    """Parameters and log-probabilities, which are the same on every rank, and the checkpoint."""
    tensors = {name: tensor.float().contiguous().clone() for name, tensor in trainer.full_parameters()}
    rows = trainer.per_token([tiny_groups(), [], tiny_groups(num_groups=1)])
    tensors["logprobs"] = torch.from_numpy(np.concatenate([row for part in rows for row in part]))
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / f"state_{os.getpid()}.safetensors")
    trainer.snapshot().write(folder / "checkpoint")


def read_state(folder: Path) -> dict[str, Tensor]:
    """What `write_state` wrote, once it is found to be equal on all ranks."""
    first, *others = [load_file(path) for path in sorted(folder.glob("state_*.safetensors"))]
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())
    return first


def go_on(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    """Load every checkpoint in turn into a trainer that has a state of its own; write it again, and take a step."""
    trainer = build(rank, layout, config, folder, rendezvous)
    take_step(trainer, rank, layout)
    outcomes = []
    for source in sorted(folder.glob("*/checkpoint")):
        trainer.load(source)
        write_state(folder / layout.name / f"from_{source.parent.name}", trainer)
        outcomes.append(take_step(trainer, rank, layout))
    if rank == 0:
        write_outcomes(folder / layout.name / "went_on.json", outcomes)
    trainer.close()


def read_kind(reader: ShardReader, kind: str) -> dict[str, Tensor]:
    return {name: reader.read_whole(kind, name) for name in reader.shapes}


def read_figures(path: Path) -> dict[str, Tensor]:
    """What `write_outcomes` wrote: figure -> [steps]."""
    outcomes = json.loads(path.read_text())
    assert all(outcome.keys() == outcomes[0].keys() for outcome in outcomes)
    return {name: torch.tensor([float(outcome[name]) for outcome in outcomes]) for name in outcomes[0]}


def read_trained(folder: Path) -> dict[str, dict[str, Tensor]]:
    """All that a layout has written, by what it is, to be compared with the same of another one."""
    reader = ShardReader(folder / "checkpoint")
    return {
        "state": read_state(folder),
        "figures": read_figures(folder / "outcomes.json"),
        **{kind: read_kind(reader, kind) for kind in (PARAMETER, *MOMENTS)},
    }


def differences(folder: Path, reference: Path) -> dict[str, float]:
    """The largest relative difference of each of the things that `read_trained` reads."""
    found, expected = read_trained(folder), read_trained(reference)
    return {what: largest_relative_difference(found[what], expected[what]) for what in expected}


def allowed_differences(orders: Sequence[Path], reference: Path) -> dict[str, float]:
    """What `differences` may be, from those of layouts that have summed in other orders."""
    costs = [differences(folder, reference) for folder in orders]
    allowed = {what: allowed_difference(cost[what] for cost in costs) for what in costs[0]}
    print("allowed relative differences:", {what: f"{value:.1e}" for what, value in allowed.items()})
    return allowed
