"""Versions of the weights on disk: what is written, what is kept, and what an engine makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Model, models, run_layout, sources
from safetensors.torch import load_file
from stores import TINY, Engine, Trainer, random_weights, with_changes

from rlflow.weights.disk import writer as store
from rlflow.weights.disk.delta import Changes
from rlflow.weights.disk.manifest import ParameterSpec, box_key, parse_box_key, rank_file, version_folder, versions_in
from rlflow.weights.disk.reader import StoreReader
from rlflow.weights.disk.writer import ANCHOR_EVERY, Part, StoreWriter
from rlflow.weights.shape.landings import Landing
from rlflow.weights.shape.layout import Layout, Region, fsdp_layout


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, fsdp_layout(TINY.shapes(), "float32", 3))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, TINY, 2)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), model=models(), tensor_parallel=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**30))
def test_anchors_and_deltas_give_any_engine_the_bits_of_any_trainer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, model: Model, tensor_parallel: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    trainer = Trainer(folder, data.draw(sources(model.shapes())))
    followed, anchored = (Engine(folder, model, tensor_parallel) for _ in range(2))
    weights = random_weights(model.shapes(), seed)
    assert trainer.write(1, weights).base is None
    followed.follow(1)
    followed.check(weights)
    weights = with_changes(weights, seed + 1, probability=0.03)
    is_delta = trainer.write(2, weights).base is not None
    assert followed.follow(2) == [[2]] * tensor_parallel
    followed.check(weights)
    assert anchored.follow(2) == [[1, 2] if is_delta else [2]] * tensor_parallel
    anchored.check(weights)


def test_two_hundred_versions_as_deltas_and_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's own weights are of float32; few of the engines' bits change in an update."""
    monkeypatch.setattr("os.fsync", lambda _: None)  # the disk would take most of the time
    layout = fsdp_layout(TINY.shapes(), "float32", 2)
    folders = [tmp_path / "delta", tmp_path / "dense"]
    changing, dense = (Trainer(folder, layout) for folder in folders)
    engines = [Engine(folder, TINY, 2) for folder in folders]
    random = torch.Generator().manual_seed(0)
    masters = {name: torch.randn(shape, generator=random) for name, shape in TINY.shapes().items()}
    num_anchors = 0
    for version in range(1, 201):
        for tensor in masters.values():
            tensor += 1e-4 * tensor.abs() * torch.randn(tensor.shape, generator=random)
        manifest = changing.write(version, masters)
        num_anchors += manifest.base is None
        for writer in dense.writers:
            writer._base = None
        assert dense.write(version, masters).base is None
        for engine in engines:
            engine.follow(version)
        assert len(versions_in(folders[0])) <= ANCHOR_EVERY + 1
        assert versions_in(folders[1]) == list(range(max(1, version - 1), version + 1))
        if version > 1:
            assert 0 < manifest.density < 0.1
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}
    for engine in engines:
        engine.check(expected)
    assert num_anchors == 200 // ANCHOR_EVERY
    late = Engine(folders[0], TINY, 4)
    assert late.follow(200)[0] == list(range(181, 201))
    late.check(expected)


def test_float32_is_written_dense_since_all_of_it_changes(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, fsdp_layout(TINY.shapes(), "float32", 2), dtype="float32")
    engine = Engine(tmp_path, TINY, 1, dtype="float32")
    weights = {name: torch.randn(shape) for name, shape in TINY.shapes().items()}
    trainer.write(1, weights)
    engine.follow(1)
    weights = {name: tensor * 1.001 for name, tensor in weights.items()}
    manifest = trainer.write(2, weights)
    assert manifest.base is None
    assert manifest.density > 0.9
    engine.follow(2)
    engine.check(weights)


def test_a_version_without_changes_is_an_empty_delta(trainer: Trainer, engine: Engine) -> None:
    weights = random_weights(TINY.shapes())
    trainer.write(1, weights)
    engine.follow(1)
    manifest = trainer.write(2, weights)
    assert (manifest.base is not None, manifest.density) == (True, 0.0)
    assert manifest.num_bytes < 100
    engine.follow(2)
    engine.check(weights)


def test_the_fall_back_counts_all_ranks(tmp_path: Path) -> None:
    """100 elements over two ranks: 10 changed ones are written as they are, 11 are not; wherever they are."""
    trainer = Trainer(tmp_path, fsdp_layout({"w": (100,)}, "float32", 2))
    weights = {"w": torch.zeros(100, dtype=torch.bfloat16)}
    assert trainer.write(1, weights).base is None
    weights = {"w": weights["w"].index_fill(0, torch.arange(10), 1.0)}
    assert trainer.write(2, weights).base is not None
    weights = {"w": weights["w"].index_fill(0, torch.arange(45, 56), 1.0)}
    manifest = trainer.write(3, weights)
    assert (manifest.base, manifest.density) == (None, 0.11)


def test_a_rank_does_not_remember_more_changes_than_it_has_weights(tmp_path: Path) -> None:
    """A large part that hardly changes, and a small one that does: 6 bytes for each of more than a third."""
    trainer = Trainer(tmp_path, Layout(num_ranks=2, placements=dict(uneven().placements)))
    weights = {"large": torch.zeros(1000, dtype=torch.bfloat16), "small": torch.zeros(30, dtype=torch.bfloat16)}
    trainer.write(1, weights)
    weights["small"] = weights["small"].index_fill(0, torch.arange(11), 1.0)
    assert trainer.compare(2, weights) == Changes(
        num_changed=11, num_elements=1030, delta_bytes=66, dense_bytes=2060, num_without_base=1
    )


def uneven() -> Layout:
    """Rank 0 has all of one parameter, rank 1 of the other."""
    shapes = {"large": (1000,), "small": (30,)}
    placements = fsdp_layout(shapes, "float32", 1).placements
    return Layout(
        num_ranks=2,
        placements={
            "large": replace(placements["large"], ranks=(*placements["large"].ranks, ())),
            "small": replace(placements["small"], ranks=((), *placements["small"].ranks)),
        },
    )


def test_versions_may_be_skipped_and_come_twice(trainer: Trainer, engine: Engine) -> None:
    weights = random_weights(TINY.shapes())
    for version in range(1, 7):
        trainer.write(version, weights)
        if version == 2:
            assert engine.follow(2) == [[1, 2], [1, 2]]
        weights = with_changes(weights, version) if version < 6 else weights
    assert engine.follow(6) == [[3, 4, 5, 6]] * 2
    assert engine.follow(6) == [[], []]
    engine.check(weights)


def test_a_chain_and_the_one_before_are_kept(tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ANCHOR_EVERY", 3)
    weights, kept = random_weights(TINY.shapes()), list[list[int]]()
    for version in range(1, 9):
        trainer.write(version, weights)
        kept.append(versions_in(tmp_path))
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [7, 8]]
    assert sorted(path.name for path in version_folder(tmp_path, 8).iterdir()) == [
        "manifest.json",
        "rank_0.safetensors",
        "rank_1.safetensors",
        "rank_2.safetensors",
    ]


def test_other_parts_than_before_make_an_anchor(tmp_path: Path) -> None:
    weights = random_weights({"w": (6,)})
    specs = {"w": ParameterSpec(shape=(6,), dtype="bfloat16")}
    writer = StoreWriter(tmp_path, 0, 1, specs)
    for version, cut in ((1, 6), (2, 6), (3, 2), (4, 2)):
        bounds = [(0, cut), (cut, 6)]
        parts = [Part(name="w", start=(a,), stop=(b,), tensor=weights["w"][a:b]) for a, b in bounds]
        writer.write(writer.compare(version, parts))
        assert (writer.publish().base is None) == (version in (1, 3))


def test_files_are_of_the_safetensors_format(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, run_layout({"w": (3, 2), "scale": ()}, "float32", 1))
    weights = {"w": torch.arange(6.0).view(3, 2), "scale": torch.tensor(1.0)}
    trainer.write(1, weights)
    anchor = load_file(rank_file(version_folder(tmp_path, 1), 0))
    assert {name: tensor.tolist() for name, tensor in anchor.items()} == {
        "w[0:3,0:2]": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
        "scale[]": 1.0,
    }
    assert {tensor.dtype for tensor in anchor.values()} == {torch.bfloat16}


def test_a_delta_on_disk(tmp_path: Path) -> None:
    """Rank 1 of 2 has rows 2 and 3 of 4; element 2 of row 3 changes, which is the 20th of all."""
    trainer = Trainer(tmp_path, fsdp_layout({"w": (4, 6)}, "float32", 2))
    weights = {"w": torch.zeros(4, 6)}
    trainer.write(1, weights)
    weights["w"][3, 2] = 5
    trainer.write(2, weights)
    assert load_file(rank_file(version_folder(tmp_path, 2), 0)) == {}
    (positions, values) = load_file(rank_file(version_folder(tmp_path, 2), 1)).values()
    assert (positions.tolist(), positions.dtype) == ([20], torch.int32)
    assert (values.tolist(), values.dtype) == ([5.0], torch.bfloat16)


def test_what_the_trainer_does_after_the_comparison_is_not_written(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, fsdp_layout({"w": (20,)}, "float32", 1))
    reader_target = torch.zeros(20, dtype=torch.bfloat16)
    landing = Landing(tensor="w", dtype="bfloat16", regions=(Region(start=(0,), stop=(20,), offset=0, strides=(1,)),))
    reader = StoreReader(tmp_path, {"w": reader_target}, {"w": [landing]}, {"w": (20,)})
    tensor = torch.zeros(20, dtype=torch.bfloat16)
    for version in (1, 2):
        tensor[0] = version
        total = trainer.compare(version, {"w": tensor})
        tensor[0] = -1
        trainer.writers[0].write(total)
        trainer.writers[0].publish()
        list(reader.apply(reader.fetch(version)))
        assert reader_target.tolist() == [version] + [0] * 19


@pytest.mark.parametrize("box", [((), ()), ((3,), (5,)), ((0, 12, 3), (4, 13, 5))])
def test_boxes_have_names(box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert parse_box_key(box_key("model.layers.0.weight", *box)) == ("model.layers.0.weight", box[0])
