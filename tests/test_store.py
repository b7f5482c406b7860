"""Versions of the weights on disk: written by the ranks of a trainer, played in turn, and followed by an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Model, empty, engine_layout_by_hand, load, models, sources
from safetensors.torch import load_file
from torch import Tensor

from rlflow.errors import ConfigError, RunError, WeightsDamaged, WeightsOvertaken
from rlflow.weights import store, store_reader
from rlflow.weights.delta import Changes, land
from rlflow.weights.layout import Layout, Region, fsdp_layout, run_layout
from rlflow.weights.manifest import Manifest, ParameterSpec, rank_file, read_manifest, version_folder, versions_in
from rlflow.weights.part_files import PartFile, box_key, parse_box_key
from rlflow.weights.store import ANCHOR_EVERY, Part, StoreWriter
from rlflow.weights.store_reader import StoreReader
from rlflow.weights.tracing import Landing

TINY = Model(layers=1, hidden=8, intermediate=12, heads=4, key_value_heads=2, head_dim=2, vocabulary=40)
Weights = dict[str, Tensor]


def parts_of(layout: Layout, rank: int, weights: Weights) -> list[Part]:
    """What a rank holds and no rank before it, in turn as a view and flat."""
    parts: list[Part] = []
    for name, place in layout.placements.items():
        before = {(each.start, each.stop) for held in place.ranks[:rank] for each in held}
        for region in place.ranks[rank]:
            if (region.start, region.stop) not in before:
                box = weights[name][tuple(map(slice, region.start, region.stop))]
                tensor = box if len(parts) % 2 else box.reshape(-1)
                parts.append(Part(name=name, start=region.start, stop=region.stop, tensor=tensor))
    return parts


class Trainer:
    """All ranks of a trainer, one after the other."""

    def __init__(self, folder: Path, layout: Layout, dtype: str = "bfloat16") -> None:
        self.layout = layout
        specs = {name: ParameterSpec(shape=place.shape, dtype=dtype) for name, place in layout.placements.items()}
        self.writers = [StoreWriter(folder, rank, layout.num_ranks, specs) for rank in range(layout.num_ranks)]

    def compare(self, version: int, weights: Weights) -> Changes:
        counted = [
            writer.compare(version, parts_of(self.layout, rank, weights)) for rank, writer in enumerate(self.writers)
        ]
        return Changes.of([sum(counts) for counts in zip(*(each.counts() for each in counted), strict=True)])

    def write(self, version: int, weights: Weights) -> Manifest:
        total = self.compare(version, weights)
        for writer in self.writers:
            writer.write(total)
        return self.writers[0].publish()


class Engine:
    """All ranks of an engine; their tensors are as NumPy's loader would fill them, or not."""

    def __init__(self, folder: Path, model: Model, tensor_parallel: int, dtype: str = "bfloat16") -> None:
        self.layout = engine_layout_by_hand(model, tensor_parallel, dtype)
        self.targets = [self._empty(rank, getattr(torch, dtype)) for rank in range(tensor_parallel)]
        self.readers = [
            StoreReader(folder, targets, self._landings(rank, dtype), model.shapes())
            for rank, targets in enumerate(self.targets)
        ]

    def _empty(self, rank: int, dtype: torch.dtype) -> Weights:
        return {name: torch.zeros(len(array), dtype=dtype) for name, array in empty(self.layout, rank).items()}

    def _landings(self, rank: int, dtype: str) -> dict[str, list[Landing]]:
        return {
            name: [Landing(tensor=place.tensors[0], dtype=dtype, regions=place.ranks[rank])]
            for name, place in self.layout.placements.items()
            if place.ranks[rank]
        }

    def follow(self, version: int) -> list[list[int]]:
        """For each rank the versions that it applied."""
        applied: list[list[int]] = []
        for reader in self.readers:
            update = reader.fetch(version)
            reader.apply(update)
            applied.append([each.manifest.stamp.version for each in update.versions])
        return applied

    def check(self, weights: Weights) -> None:
        """That all ranks hold exactly these weights, by the bits."""
        patterns = {name: integers(tensor).numpy().astype(np.float64) for name, tensor in weights.items()}
        for found, expected in zip(self.targets, load(self.layout, patterns), strict=True):
            for name, array in expected.items():
                np.testing.assert_array_equal(integers(found[name]).numpy(), array, err_msg=name)


def integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Weights:
    """Any bits, NaN included."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15, shape, generator=random, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in shapes.items()
    }


def with_changes(weights: Weights, seed: int, probability: float = 0.02) -> Weights:
    random = torch.Generator().manual_seed(seed)
    other = random_weights({name: tuple(tensor.shape) for name, tensor in weights.items()}, seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=random) < probability, other[name], tensor)
        for name, tensor in weights.items()
    }


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


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


def test_two_hundred_versions_as_deltas_and_dense(tmp_path: Path) -> None:
    """The trainer's own weights are of float32; few of the engines' bits change in an update."""
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
            writer.start_over()
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


def test_an_interrupted_update_is_healed_by_the_anchor(
    trainer: Trainer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_weights(TINY.shapes())
    trainer.write(1, weights)
    engine.follow(1)
    weights = with_changes(weights, 1)
    trainer.write(2, weights)
    calls = iter(range(4))

    def failing(*arguments: object) -> int:
        if next(calls, None) is None:
            raise RuntimeError("the device is gone")
        return land(*arguments)  # pyright: ignore[reportArgumentType]

    reader = engine.readers[0]
    with monkeypatch.context() as patch:
        patch.setattr(store_reader, "land", failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            reader.apply(reader.fetch(2))
    assert reader.held is None
    assert engine.follow(2) == [[1, 2], [2]]
    engine.check(weights)


def damaged(path: Path, change: Callable[[bytearray], bytearray]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flip(content: bytearray, at: int) -> bytearray:
    content[at] ^= 1
    return content


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], r"should have \d+ bytes, found \d+"),
        (lambda content: content + b"\0", r"should have \d+ bytes, found \d+"),
        (partial(flip, at=-1), "should have the CRC-32"),
        (partial(flip, at=3), "should have the CRC-32"),
        (partial(flip, at=40), "should have the CRC-32"),
    ],
)
def test_damaged_files_are_not_applied_and_the_next_anchor_heals(
    tmp_path: Path,
    trainer: Trainer,
    engine: Engine,
    rank: int,
    change: Callable[[bytearray], bytearray],
    message: str,
) -> None:
    before = random_weights(TINY.shapes())
    weights = with_changes(before, 1)
    trainer.write(1, before)
    engine.follow(1)
    trainer.write(2, weights)
    damaged(rank_file(version_folder(tmp_path, 2), rank), change)
    trainer.write(3, with_changes(weights, 2))
    for version in (2, 3):
        with pytest.raises(WeightsDamaged, match=message):
            engine.follow(version)
        engine.check(before)
    trainer.writers[1].start_over()
    weights = with_changes(weights, 3)
    trainer.write(4, weights)
    assert engine.follow(4) == [[4], [4]]
    engine.check(weights)


def test_a_removed_anchor_is_missed_only_by_those_who_need_it(tmp_path: Path, trainer: Trainer, engine: Engine) -> None:
    weights = random_weights(TINY.shapes())
    trainer.write(1, weights)
    engine.follow(1)
    weights = with_changes(weights, 1)
    trainer.write(2, weights)
    shutil.rmtree(version_folder(tmp_path, 1))
    assert engine.follow(2) == [[2], [2]]
    engine.check(weights)
    late = Engine(tmp_path, TINY, 1)
    with pytest.raises(
        WeightsDamaged, match="version 2 of the weights is in .*, but not version 1, which it builds on"
    ):
        late.follow(2)
    trainer.writers[0].start_over()
    trainer.write(3, weights)
    late.follow(3)
    late.check(weights)


def test_a_version_that_is_gone_was_overtaken(
    tmp_path: Path, trainer: Trainer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_weights(TINY.shapes())
    trainer.write(1, weights)
    with pytest.raises(WeightsOvertaken, match="version 2 of the weights is not, or no longer, in"):
        engine.follow(2)
    fetched = [reader.fetch(1) for reader in engine.readers]

    def open_too_late(path: Path, _: object) -> PartFile:
        shutil.rmtree(path.parent)
        raise FileNotFoundError(2, "No such file", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(store_reader, "PartFile", open_too_late)
        with pytest.raises(WeightsOvertaken, match="version 1 of the weights was removed from .* while it was read"):
            engine.follow(1)
    for reader, update in zip(engine.readers, fetched, strict=True):  # what is open stays readable
        reader.apply(update)
    engine.check(weights)


def test_a_missing_file_is_named(tmp_path: Path, trainer: Trainer, engine: Engine) -> None:
    trainer.write(1, random_weights(TINY.shapes()))
    rank_file(version_folder(tmp_path, 1), 1).unlink()
    with pytest.raises(WeightsDamaged, match=r"is in .*, but not the file .*rank_1\.safetensors"):
        engine.follow(1)


def test_a_trainer_that_went_back_writes_other_versions_of_the_same_numbers(tmp_path: Path, engine: Engine) -> None:
    layout = fsdp_layout(TINY.shapes(), "float32", 3)
    first, weights = Trainer(tmp_path, layout), random_weights(TINY.shapes())
    for version in range(1, 6):
        first.write(version, weights)
    engine.follow(4)
    first.compare(6, weights)
    first.writers[1].write(first.compare(6, weights))
    assert versions_in(tmp_path, ".part") == [6]

    second = Trainer(tmp_path, layout)
    assert versions_in(tmp_path, ".part") == []
    other = with_changes(weights, 1)
    assert second.write(3, other).base is None
    assert versions_in(tmp_path) == [3]
    other = with_changes(other, 2)
    second.write(4, other)
    other = with_changes(other, 3)
    second.write(5, other)
    assert engine.follow(5) == [[3, 4, 5], [3, 4, 5]]
    engine.check(other)


def test_a_version_that_was_not_published_is_followed_by_an_anchor(tmp_path: Path, trainer: Trainer) -> None:
    weights = random_weights(TINY.shapes())
    trainer.write(1, weights)
    weights = with_changes(weights, 1)
    total = trainer.compare(2, weights)
    for writer in trainer.writers[:2]:
        writer.write(total)
    with pytest.raises(RunError, match="rank 2 of the trainer has not written its part"):
        trainer.writers[0].publish()
    assert versions_in(tmp_path) == [1]
    assert trainer.write(3, weights).base is None
    assert versions_in(tmp_path) == [1, 3]
    assert versions_in(tmp_path, ".part") == []
    assert trainer.write(3, weights).base is None, "a number that comes twice is no base"
    assert trainer.write(4, weights).base is not None


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([(0, 3), (4, 6)], "'w' has 6 elements, but the ranks wrote 5 of it to version 1; one rank must write each"),
        ([(0, 3), (0, 3)], r"2 ranks wrote the elements \(0,\) to \(3,\) of 'w'; one of them must"),
    ],
)
def test_all_elements_must_be_written_once(tmp_path: Path, bounds: list[tuple[int, int]], message: str) -> None:
    writers = [StoreWriter(tmp_path, rank, 2, {"w": ParameterSpec(shape=(6,), dtype="bfloat16")}) for rank in range(2)]
    for (first, last), writer in zip(bounds, writers, strict=True):
        part = Part(name="w", start=(first,), stop=(last,), tensor=torch.zeros(last - first))
        writer.write(writer.compare(1, [part]))
    with pytest.raises(RunError, match=message):
        writers[0].publish()
    assert versions_in(tmp_path) == []


def test_other_parts_than_before_make_an_anchor(tmp_path: Path) -> None:
    weights = random_weights({"w": (6,)})
    specs = {"w": ParameterSpec(shape=(6,), dtype="bfloat16")}
    writer = StoreWriter(tmp_path, 0, 1, specs)
    for version, cut in ((1, 6), (2, 6), (3, 2), (4, 2)):
        bounds = [(0, cut), (cut, 6)]
        parts = [Part(name="w", start=(a,), stop=(b,), tensor=weights["w"][a:b]) for a, b in bounds]
        writer.write(writer.compare(version, parts))
        assert (writer.publish().base is None) == (version in (1, 3))


def test_a_full_disk_is_told_and_leaves_no_version(tmp_path: Path) -> None:
    trainer, weights = Trainer(tmp_path, fsdp_layout({"w": (6,)}, "float32", 1)), random_weights({"w": (6,)})
    trainer.write(1, weights)
    total = trainer.compare(2, weights)
    part = version_folder(tmp_path, 2, ".part")
    part.mkdir()
    rank_file(part, 0).with_suffix(".json").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"no disk space left for the weights in .* \(\d+ MB free\); free some and run"):
        trainer.writers[0].write(total)
    assert list(part.iterdir()) == []
    assert versions_in(tmp_path) == [1]
    assert trainer.write(2, weights).base is None


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, 0, 1, {"w": ParameterSpec(shape=(4, 2), dtype="bfloat16")})
    tensor = torch.zeros(2, 2)
    for part, message in (
        (Part(name="v", start=(0, 0), stop=(2, 2), tensor=tensor), "'v' is none of the 1"),
        (Part(name="w", start=(3, 0), stop=(5, 2), tensor=tensor), r"shape \(4, 2\); got the box \(3, 0\) to \(5, 2\)"),
        (Part(name="w", start=(0, 0), stop=(3, 2), tensor=tensor), r"a box \(3, 2\) of 'w' must have that shape"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.compare(1, [part])


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        (Model(**{**vars(TINY), "hidden": 4}), "bfloat16", r"of the shape \(40, 4\); version 1 .* shape \(40, 8\)"),
        (Model(**{**vars(TINY), "has_bias": True}), "bfloat16", "'model.layers.0.self_attn.q_proj.bias' .* has none"),
        (TINY, "float32", "keeps 'model.embed_tokens.weight' as float32; version 1 in .* has bfloat16"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, trainer: Trainer, model: Model, dtype: str, message: str
) -> None:
    trainer.write(1, random_weights(TINY.shapes()))
    with pytest.raises(ConfigError, match=message):
        Engine(tmp_path, model, 1, dtype).follow(1)


def test_a_manifest_must_be_one(tmp_path: Path, trainer: Trainer) -> None:
    weights = random_weights(TINY.shapes())
    trainer.write(1, weights)
    manifest = trainer.write(2, weights)
    assert read_manifest(tmp_path, 2) == manifest
    path = version_folder(tmp_path, 2) / "manifest.json"
    content = json.loads(path.read_text())
    assert (content["num_ranks"], content["num_bytes"]) == (3, manifest.num_bytes)
    for changes, error, message in (
        ({"format": 2}, RunError, "has format 2, but this rlflow reads format 1"),
        ({"files": [{"num_bytes": 3}]}, WeightsDamaged, "is not the manifest that was written"),
        ({"base": {"version": 2, "id": "x"}}, WeightsDamaged, "cannot build on version 2"),
        ({"base": {"version": 1, "id": "x"}}, WeightsDamaged, "there is another of that number"),
        ({"stamp": {"version": 3, "id": "x"}}, WeightsDamaged, "is the manifest of version 3"),
    ):
        path.write_text(json.dumps({**content, **changes}))
        with pytest.raises(error, match=message):
            Engine(tmp_path, TINY, 1).follow(2)
    path.write_text(path.read_text()[:-1])
    with pytest.raises(WeightsDamaged, match="is not the manifest that was written"):
        read_manifest(tmp_path, 2)


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
        reader.apply(reader.fetch(version))
        assert reader_target.tolist() == [version] + [0] * 19


@pytest.mark.parametrize("box", [((), ()), ((3,), (5,)), ((0, 12, 3), (4, 13, 5))])
def test_boxes_have_names(box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert parse_box_key(box_key("model.layers.0.weight", *box)) == ("model.layers.0.weight", box[0])
