"""What every back end of the trainer does alike, on one rank and on more.

FSDP2, also tensor-parallel and in replicas, and ZeRO 1 to 3; both also with rows that ranks share ("ulysses").

One FSDP2 rank, which shards nothing, is what the others are compared with. They are disturbed on the way: by a step
whose gradient is not finite, by sleep, and by micro-batches that are empty or known to have no gradient.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from back_ends import (
    Layout,
    allowed_differences,
    build,
    differences,
    disturb,
    go_on,
    needs_deepspeed,
    other_orders,
    read_figures,
    read_kind,
    read_state,
    run_ranks,
    take_momentum_step,
    take_step,
    write_outcomes,
    write_state,
)
from rounding import CEILING
from safetensors.torch import load_file, save_file
from torch import Tensor
from training import (
    largest_relative_difference,
    save_model,
    tiny_config,
    tiny_llama,
    tiny_qwen3,
)

from rlflow.config import Backend, Checkpointing, Config, Dtype, Offload
from rlflow.errors import ConfigError
from rlflow.weights.shm.arena import ArenaView
from rlflow.weights.shm.sender import SharedMemorySender
from rlflow.workers.trainer.actor import check_offload
from rlflow.workers.trainer.packed import TrainerBackend
from rlflow.workers.trainer.shards import MOMENTS, PARAMETER, ShardReader

REFERENCE = Layout(name="fsdp_1", backend=Backend.fsdp, ranks=1)
TENSOR_2 = Layout(name="fsdp_1x2", backend=Backend.fsdp, ranks=2, tensor_parallel=2)
DATA_2_TENSOR_2 = Layout(name="fsdp_2x2", backend=Backend.fsdp, ranks=4, tensor_parallel=2)
REPLICAS_2 = Layout(name="hsdp_2x2", backend=Backend.fsdp, ranks=4, replicas=2)
REPLICAS_2_TENSOR_2 = Layout(name="hsdp_2x1x2", backend=Backend.fsdp, ranks=4, replicas=2, tensor_parallel=2)
OTHERS = (
    Layout(name="fsdp_2", backend=Backend.fsdp),
    REPLICAS_2,
    REPLICAS_2_TENSOR_2,
    TENSOR_2,
    DATA_2_TENSOR_2,
    Layout(name="ulysses_1x2", backend=Backend.fsdp, ranks=2, sequence_parallel=2),
    Layout(name="ulysses_1x4", backend=Backend.fsdp, ranks=4, sequence_parallel=4),
    Layout(name="ulysses_hsdp_2x1x2", backend=Backend.fsdp, ranks=4, replicas=2, sequence_parallel=2),
    Layout(name="ulysses_zero2_2x2", backend=Backend.deepspeed, zero_stage=2, ranks=4, sequence_parallel=2),
    Layout(name="ulysses_zero3_1x2", backend=Backend.deepspeed, zero_stage=3, ranks=2, sequence_parallel=2),
    *(Layout(name=f"zero{stage}_2", backend=Backend.deepspeed, zero_stage=stage) for stage in (1, 2, 3)),
)
IN_PROOF = ("fsdp_1x2", "zero1_2", "hsdp_2x1x2", "ulysses_1x2", "ulysses_hsdp_2x1x2", "ulysses_zero3_1x2")
"""In the suite, fsdp_2x2 is tensor-parallel for the first and the last, hsdp_2x2 has replicas for the last, and zero2_2
divides states and gradients for the other; ulysses_1x4 shares rows for FSDP2, ulysses_zero2_2x2 for ZeRO."""
LAYOUTS = [
    pytest.param(
        layout,
        id=layout.name,
        marks=[
            *([needs_deepspeed] if layout.zero_stage else []),
            *([pytest.mark.proof] if layout.name in IN_PROOF else []),
        ],
    )
    for layout in OTHERS
]


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


def train(
    rank: int,
    layout: Layout,
    config: Config,
    folder: Path,
    rendezvous: str,
    alter: Callable[[TrainerBackend], object] = lambda trainer: None,
) -> None:
    """Three steps, the last by momentum alone; `alter` may put a fault into the trainer first."""
    trainer = build(rank, layout, config, folder, rendezvous)
    alter(trainer)
    outcomes = [take_step(trainer, rank, layout)]
    if layout.ranks > 1:
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


def train_in_other_orders(folder: Path) -> None:
    """The reference with the samples in other orders, in `folder/orders`."""
    (folder / "orders").mkdir()
    (folder / "orders" / "model").symlink_to(folder / "model")
    for order in other_orders(REFERENCE):
        run_ranks(train, order, order.config(), folder / "orders")


def allowed_in(folder: Path) -> dict[str, float]:
    """The relative differences from the reference that rounding explains."""
    return allowed_differences([folder / "orders" / order.name for order in other_orders(REFERENCE)], folder / "fsdp_1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model, and what each layout that is asked for wrote when it was trained."""
    folder = tmp_path_factory.mktemp("contract")
    save_model(tiny_llama(), folder / "model")
    train_in_other_orders(folder)
    ours = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    wanted = [item.callspec.params["layout"] for item in ours if "folder" in item.fixturenames]
    for layout in (REFERENCE, *(each for each in OTHERS if each in wanted)):
        if layout.zero_stage is None or importlib.util.find_spec("deepspeed") is not None:
            run_ranks(train, layout, layout.config(), folder)
    run_ranks(go_on, REFERENCE, REFERENCE.config(), folder)
    return folder


@pytest.fixture(scope="module")
def allowed(folder: Path) -> dict[str, float]:
    return allowed_in(folder)


def assert_within(found: dict[str, float], allowed: dict[str, float]) -> None:
    print("largest relative differences:", {what: f"{value:.1e}" for what, value in found.items()})
    assert all(value <= allowed[what] for what, value in found.items()), f"{found} against {allowed}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_alike(layout: Layout, folder: Path, allowed: dict[str, float]) -> None:
    found = differences(folder / layout.name, folder / REFERENCE.name)
    assert_within({what: found[what] for what in ("state", "figures")}, allowed)
    outcomes = json.loads((folder / layout.name / "outcomes.json").read_text())
    assert [outcome["applied"] for outcome in outcomes] == [True, True, True]
    assert [outcome["learning_rate"] for outcome in outcomes] == [5e-4, 1e-3, 1e-3]
    assert outcomes[0]["grad_norm"] > layout.config().trainer.max_grad_norm
    assert outcomes[2]["grad_norm"] == 0


@pytest.mark.slow
def test_queries_and_keys_with_norms_and_biases_are_cut_alike(tmp_path: Path) -> None:
    """Also: slices that do not divide evenly over the data ranks, and layers that are computed again."""
    save_model(tiny_qwen3(attention_bias=True, intermediate_size=50), tmp_path / "model")
    checkpointing = {TENSOR_2: Checkpointing.selective, DATA_2_TENSOR_2: Checkpointing.full}
    for layout in (REFERENCE, *checkpointing):
        config = layout.config()
        config.trainer.gradient_checkpointing = checkpointing.get(layout, Checkpointing.none)
        run_ranks(train, layout, config, tmp_path)
    train_in_other_orders(tmp_path)
    for layout in checkpointing:
        assert_within(differences(tmp_path / layout.name, tmp_path / REFERENCE.name), allowed_in(tmp_path))


@pytest.mark.parametrize("lost", [slice(None), slice(0, 8)], ids=["on every rank", "on one tensor rank"])
def test_a_lost_gradient_is_seen(lost: slice, tmp_path: Path) -> None:
    """Whatever the machine's rounding allows: one bias whose gradient never comes is beyond it."""
    save_model(tiny_qwen3(attention_bias=True, intermediate_size=50), tmp_path / "model")
    train(0, REFERENCE, REFERENCE.config(), tmp_path, "")

    def lose(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[lost] = 0
        return gradient

    def alter(trainer: TrainerBackend) -> None:
        trainer._policy.model.get_parameter("model.layers.0.self_attn.k_proj.bias").register_hook(lose)

    faulty = replace(REFERENCE, name="faulty")
    train(0, faulty, faulty.config(), tmp_path, "", alter)
    found = differences(tmp_path / "faulty", tmp_path / REFERENCE.name)
    assert all(found[what] > 10 * CEILING for what in ("state", PARAMETER, *MOMENTS)), found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_saves_the_same_moments(layout: Layout, folder: Path, allowed: dict[str, float]) -> None:
    ours, theirs = (ShardReader(folder / name / "checkpoint") for name in (layout.name, REFERENCE.name))
    assert ours.shapes == theirs.shapes
    assert list(ours.shapes) == list(theirs.shapes)
    assert ours.updates == theirs.updates == 3
    found = differences(folder / layout.name, folder / REFERENCE.name)
    assert_within({kind: found[kind] for kind in (PARAMETER, *MOMENTS)}, allowed)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_saves_each_element_once(layout: Layout, folder: Path) -> None:
    reader = ShardReader(folder / layout.name / "checkpoint")
    ranks = [json.loads(path.read_text()) for path in (folder / layout.name / "checkpoint").glob("rank_*.json")]
    assert len(ranks) == layout.ranks
    for name, shape in reader.shapes.items():
        assert sum(rank[name]["stop"] - rank[name]["start"] for rank in ranks) == math.prod(shape)


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
def test_every_layout_goes_on_from_the_checkpoint_of_any(
    layout: Layout, folder: Path, allowed: dict[str, float]
) -> None:
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
        assert largest_relative_difference(state, read_state(folder / source)) <= allowed["state"]
        assert all(torch.equal(state[name], tensor) for name, tensor in read_kind(saved, PARAMETER).items())
    went_on = [read_figures(folder / name / "went_on.json") for name in (layout.name, REFERENCE.name)]
    assert largest_relative_difference(*went_on) <= allowed["figures"]


def train_in_bfloat16(rank: int, layout: Layout, config: Config, folder: Path, rendezvous: str) -> None:
    trainer = build(rank, layout, config, folder, rendezvous)
    outcomes = [take_step(trainer, rank, layout) for _ in range(2)]
    write_state(folder / layout.name, trainer)
    if rank == 0:
        write_outcomes(folder / layout.name / "outcomes.json", outcomes)
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param(TENSOR_2, id=TENSOR_2.name), *LAYOUTS[-2:]])
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
@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], pytest.param(TENSOR_2, id=TENSOR_2.name, marks=pytest.mark.proof), *LAYOUTS[-2:]]
)
def test_offloaded_shards_train_alike(layout: Layout, folder: Path, allowed: dict[str, float], tmp_path: Path) -> None:
    save_model(tiny_llama(), tmp_path / "model")
    config = layout.config()
    config.trainer.offload = Offload.cpu
    run_ranks(train, layout, config, tmp_path)
    assert_within(differences(tmp_path / layout.name, folder / REFERENCE.name), allowed)


def test_offloading_to_the_cpu_without_a_gpu_is_refused() -> None:
    config = tiny_config()
    check_offload(config, has_gpu=False)
    config.trainer.offload = Offload.cpu
    check_offload(config, has_gpu=True)
    with pytest.raises(ConfigError, match="trainer.offload=cpu has no effect on a machine without a GPU"):
        check_offload(config, has_gpu=False)
