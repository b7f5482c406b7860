"""What every back end of the trainer does alike, on one rank and on more: FSDP2, also tensor-parallel, and ZeRO 1 to 3.

One FSDP2 rank, which shards nothing, is what the others are compared with. They are disturbed on the way: by a step
whose gradient is not finite, by sleep, and by micro-batches that are empty or known to have no gradient.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import spawn_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from training import (
    largest_relative_difference,
    save_model,
    share,
    tiny_config,
    tiny_groups,
    tiny_llama,
    tiny_qwen3,
)

from rlflow.config import Backend, Config, Dtype, Offload
from rlflow.errors import ConfigError
from rlflow.roles import StepOutcome
from rlflow.types import TrainSample
from rlflow.weights.arena_view import ArenaView
from rlflow.weights.shm_sender import SharedMemorySender
from rlflow.workers.trainer.backends import build_backend, check_offload
from rlflow.workers.trainer.base import TrainerBackend
from rlflow.workers.trainer.packed import PackedTrainer
from rlflow.workers.trainer.parking import Parked, park, unpark
from rlflow.workers.trainer.shards import MOMENTS, PARAMETER, ShardReader

TOLERANCE = 1e-5

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

    @property
    def num_shares(self) -> int:
        """Into which the batch is divided."""
        return self.ranks // self.tensor_parallel

    def share_of(self, rank: int) -> int:
        return rank // self.tensor_parallel

    def config(self, dtype: Dtype = Dtype.float32) -> Config:
        config = tiny_config()
        config.model.dtype = dtype
        config.trainer.backend, config.trainer.zero_stage = self.backend, self.zero_stage
        config.trainer.ranks, config.trainer.tensor_parallel = self.ranks, self.tensor_parallel
        config.trainer.learning_rate, config.trainer.warmup_steps = 1e-3, 2
        config.trainer.max_grad_norm = 0.25
        config.trainer.weight_decay = 0.1
        return config


REFERENCE = Layout(name="fsdp_1", backend=Backend.fsdp, ranks=1)
TENSOR_2 = Layout(name="fsdp_1x2", backend=Backend.fsdp, ranks=2, tensor_parallel=2)
DATA_2_TENSOR_2 = Layout(name="fsdp_2x2", backend=Backend.fsdp, ranks=4, tensor_parallel=2)
OTHERS = (
    Layout(name="fsdp_2", backend=Backend.fsdp),
    TENSOR_2,
    DATA_2_TENSOR_2,
    *(Layout(name=f"zero{stage}_2", backend=Backend.deepspeed, zero_stage=stage) for stage in (1, 2, 3)),
)
LAYOUTS = [
    pytest.param(layout, id=layout.name, marks=needs_deepspeed if layout.zero_stage else ()) for layout in OTHERS
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


def build(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> PackedTrainer:
    if config.trainer.offload is Offload.none:
        trainer = build_backend(config, str(folder / "model"), rank, layout.ranks, rendezvous)
        assert isinstance(trainer, PackedTrainer)
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
    own, num_shares = layout.share_of(rank), layout.num_shares
    trainer.accumulate(share(groups[:3], own, num_shares))
    trainer.observe(share(silent_groups(), own, num_shares))
    trainer.accumulate([groups[3:] if own == num_shares - 1 else []])
    return trainer.step()


def take_momentum_step(trainer: TrainerBackend, rank: int, layout: Layout) -> StepOutcome:
    """A step without any gradient."""
    trainer.observe(share(silent_groups(), layout.share_of(rank), layout.num_shares))
    return trainer.step()


def disturb(trainer: PackedTrainer, rank: int, layout: Layout) -> None:
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
    parked: list[Parked] = []
    park(trainer._resident(), torch.device("cpu"), parked)
    num_elements = sum(tensor.numel() for tensor in before.values())
    num_trained = sum(math.prod(shape) for shape in trainer._shapes.values())
    # Parameters, and two moments of what is trained, in float32; the ranks' shares differ a little.
    num_elements += 2 * num_trained
    assert sum(contents.nbytes() for _, contents in parked) > 0.9 * 4 * num_elements / layout.ranks
    assert all(storage.nbytes() == 0 for storage, _ in parked)
    unpark(parked)
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


def write_staged(folder: Path, trainer: TrainerBackend, rank: int, layout: Layout, rendezvous: str) -> None:
    """What the engines would read of this version."""
    sender = SharedMemorySender(trainer, rank, layout.ranks, folder.parent)
    assert not sender.gathers
    staged = sender.stage(3)
    if staged is not None:
        view = ArenaView(staged.path, staged.num_bytes)
        view.check(3)
        save_file({name: tensor.clone() for name, tensor in view.tensors(staged.slots)}, folder / "staged.safetensors")
    sender.close()


def train(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    """Three steps, the last by momentum alone."""
    trainer = build(rank, layout, config, folder, rendezvous)
    outcomes = [take_step(trainer, rank, layout)]
    if layout != REFERENCE:
        disturb(trainer, rank, layout)
    outcomes.append(take_step(trainer, rank, layout))
    trainer.snapshot().write(folder / layout.name / "at_once")
    snapshot = trainer.snapshot()
    outcomes.append(take_momentum_step(trainer, rank, layout))
    write_state(folder / layout.name, trainer)
    write_staged(folder / layout.name, trainer, rank, layout, rendezvous)
    take_step(trainer, rank, layout)
    snapshot.write(folder / layout.name / "later")
    if rank == 0:
        write_outcomes(folder / layout.name / "outcomes.json", outcomes)
    trainer.close()


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and what each layout wrote when it was trained."""
    folder = tmp_path_factory.mktemp("contract")
    save_model(tiny_llama(), folder / "model")
    for layout in (REFERENCE, *OTHERS):
        if layout.zero_stage is None or importlib.util.find_spec("deepspeed") is not None:
            run_ranks(train, layout, layout.config(), folder)
    run_ranks(go_on, REFERENCE, REFERENCE.config(), folder)
    return folder


def assert_same_outcomes(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_alike(layout: Layout, folder: Path) -> None:
    found, expected = read_state(folder / layout.name), read_state(folder / REFERENCE.name)
    difference = largest_relative_difference(found, expected)
    print(f"{layout.name}: largest relative difference of parameters and log-probabilities {difference:.1e}")
    assert difference <= TOLERANCE
    outcomes = [json.loads((folder / name / "outcomes.json").read_text()) for name in (layout.name, REFERENCE.name)]
    assert_same_outcomes(*outcomes)
    assert [outcome["applied"] for outcome in outcomes[0]] == [True, True, True]
    assert [outcome["learning_rate"] for outcome in outcomes[0]] == [5e-4, 1e-3, 1e-3]
    assert outcomes[0][0]["grad_norm"] > layout.config().trainer.max_grad_norm
    assert outcomes[0][2]["grad_norm"] == 0


@pytest.mark.slow
def test_queries_and_keys_with_norms_and_biases_are_cut_alike(tmp_path: Path) -> None:
    """Also: slices that do not divide evenly over the data ranks, and layers that are computed again."""
    save_model(tiny_qwen3(attention_bias=True, intermediate_size=50), tmp_path / "model")
    for layout in (REFERENCE, DATA_2_TENSOR_2):
        config = layout.config()
        config.trainer.gradient_checkpointing = layout is DATA_2_TENSOR_2
        run_ranks(train, layout, config, tmp_path)
    ours, theirs = (tmp_path / layout.name for layout in (DATA_2_TENSOR_2, REFERENCE))
    assert_same_outcomes(*(json.loads((path / "outcomes.json").read_text()) for path in (ours, theirs)))
    assert largest_relative_difference(read_state(ours), read_state(theirs)) <= TOLERANCE
    for kind in (PARAMETER, *MOMENTS):
        found, expected = (read_kind(ShardReader(path / "checkpoint"), kind) for path in (ours, theirs))
        assert largest_relative_difference(found, expected) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_saves_the_same_moments(layout: Layout, folder: Path) -> None:
    ours, theirs = (ShardReader(folder / name / "checkpoint") for name in (layout.name, REFERENCE.name))
    assert ours.shapes == theirs.shapes
    assert list(ours.shapes) == list(theirs.shapes)
    assert ours.updates == theirs.updates == 3
    for kind in (PARAMETER, *MOMENTS):
        difference = largest_relative_difference(read_kind(ours, kind), read_kind(theirs, kind))
        print(f"{layout.name}: largest relative difference of {kind} {difference:.1e}")
        assert difference <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_engines_its_parameters(layout: Layout, folder: Path) -> None:
    """Each rank has written its own part, and nothing was gathered."""
    staged, whole = load_file(folder / layout.name / "staged.safetensors"), read_state(folder / layout.name)
    assert set(staged) == set(whole) - {"logprobs"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in staged.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_snapshot_does_not_change_when_training_goes_on(layout: Layout, folder: Path) -> None:
    at_once, later, last = (folder / layout.name / name for name in ("at_once", "later", "checkpoint"))
    names = sorted(path.name for path in at_once.iterdir())
    assert len(names) == 2 * layout.ranks + 1
    assert all((at_once / name).read_bytes() == (later / name).read_bytes() for name in names)
    assert any((at_once / name).read_bytes() != (last / name).read_bytes() for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_from_the_checkpoint_of_any(layout: Layout, folder: Path) -> None:
    """What is loaded is what was saved, to the bit, and the next step is that of the layout that saved it."""
    run_ranks(go_on, layout, layout.config(), folder)
    sources = sorted(path.parent.name for path in folder.glob("*/checkpoint"))
    assert len(sources) >= 2
    for source in sources:
        written = folder / layout.name / f"from_{source}"
        saved, again = ShardReader(folder / source / "checkpoint"), ShardReader(written / "checkpoint")
        assert again.updates == saved.updates
        for kind in (PARAMETER, *MOMENTS):
            expected, found = read_kind(saved, kind), read_kind(again, kind)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        state = read_state(written)
        assert largest_relative_difference(state, read_state(folder / source)) <= TOLERANCE
        assert all(torch.equal(state[name], tensor) for name, tensor in read_kind(saved, PARAMETER).items())
    went_on = [json.loads((folder / name / "went_on.json").read_text()) for name in (layout.name, REFERENCE.name)]
    assert_same_outcomes(*went_on)


def read_kind(reader: ShardReader, kind: str) -> dict[str, Tensor]:
    return {name: reader.read_whole(kind, name) for name in reader.shapes}


def train_in_bfloat16(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    outcomes = [take_step(trainer, rank, layout) for _ in range(2)]
    write_state(folder / layout.name, trainer)
    if rank == 0:
        write_outcomes(folder / layout.name / "outcomes.json", outcomes)
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TENSOR_2, *LAYOUTS[-2:]], ids=lambda layout: layout.name)
def test_masters_stay_in_float32_when_the_model_computes_in_bfloat16(layout: Layout, tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    run_ranks(train_in_bfloat16, REFERENCE, REFERENCE.config(), tmp_path)
    run_ranks(train_in_bfloat16, layout, layout.config(Dtype.bfloat16), tmp_path)
    saved = read_kind(ShardReader(tmp_path / layout.name / "checkpoint"), PARAMETER)
    expected = read_kind(ShardReader(tmp_path / REFERENCE.name / "checkpoint"), PARAMETER)
    for name, tensor in expected.items():
        assert saved[name].dtype == torch.float32
        # Two steps of Adam move an element by at most 1.5e-3; bfloat16 may turn the sign of small gradients.
        assert (saved[name] - tensor).abs().mean() < 3e-4, name
        assert not torch.equal(saved[name], saved[name].bfloat16().float()), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [OTHERS[0], TENSOR_2, *LAYOUTS[-2:]], ids=lambda layout: layout.name)
def test_offloaded_shards_train_alike(layout: Layout, folder: Path, tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    config = layout.config()
    config.trainer.offload = Offload.cpu
    run_ranks(train, layout, config, tmp_path)
    assert (
        largest_relative_difference(read_state(tmp_path / layout.name), read_state(folder / REFERENCE.name))
        <= TOLERANCE
    )
    ours, theirs = (ShardReader(root / "checkpoint") for root in (tmp_path / layout.name, folder / REFERENCE.name))
    for kind in (PARAMETER, *MOMENTS):
        assert largest_relative_difference(read_kind(ours, kind), read_kind(theirs, kind)) <= TOLERANCE


def test_offloading_to_the_cpu_without_a_gpu_is_refused() -> None:
    config = tiny_config()
    check_offload(config, has_gpu=False)
    config.trainer.offload = Offload.cpu
    check_offload(config, has_gpu=True)
    with pytest.raises(ConfigError, match="trainer.offload=cpu has no effect on a machine without a GPU"):
        check_offload(config, has_gpu=False)
