"""Versions of the weights on disk that are interrupted, damaged, gone or wrong: each is noticed, and can be mended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from layouts import Model
from stores import TINY, Engine, Trainer, random_weights, with_changes

from rlflow.errors import ConfigError, RunError, WeightsDamaged, WeightsOvertaken
from rlflow.weights.disk import reader as store_reader
from rlflow.weights.disk.delta import land
from rlflow.weights.disk.manifest import ParameterSpec, PartFile, rank_file, read_manifest, version_folder, versions_in
from rlflow.weights.disk.writer import Part, StoreWriter
from rlflow.weights.shape.layout import fsdp_layout


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, fsdp_layout(TINY.shapes(), "float32", 3))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, TINY, 2)


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
            list(reader.apply(reader.fetch(2)))
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
    trainer.writers[1]._base = None
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
    trainer.writers[0]._base = None
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
        list(reader.apply(update))
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
