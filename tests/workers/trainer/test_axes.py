"""Positions of three axes are those that transformers gives each sample alone, wherever it lies in a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_models import IMAGE_TOKEN, QWENS, save_vision_model

from rlflow.batching.pack import PackedBatch, pack
from rlflow.types import ImageSpan, Sample, TrainSample
from rlflow.workers.trainer.axes import axes_of
from rlflow.workers.trainer.rows import rows_of

GRIDS = {f"{rows} x {columns}": (rows, columns) for rows in (1, 2, 3, 5) for columns in (1, 2, 4)}
TEXT = 7


def sample_of(prompt: Sequence[int | str], completion: Sequence[int | str]) -> TrainSample:
    """Numbers of text tokens, and images by their grid. A text ends the completion."""
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in (*prompt, *completion):
        if isinstance(part, str):
            rows, columns = GRIDS[part]
            spans.append(ImageSpan(key=part, start=len(ids), num_tokens=rows * columns))
            ids += [IMAGE_TOKEN] * (rows * columns)
        else:
            ids += [TEXT] * part
    length = sum(part if isinstance(part, int) else int(np.prod(GRIDS[part])) for part in prompt)
    mask = np.array(ids[length:]) == TEXT
    zeros = np.zeros(len(mask), np.int32)
    sample = Sample(
        prompt_ids=np.array(ids[:length], np.int32),
        completion_ids=np.array(ids[length:], np.int32),
        loss_mask=mask,
        logprobs=zeros.astype(np.float32),
        versions=zeros,
        cache_versions=zeros,
        images=tuple(spans),
    )
    return TrainSample(sample=sample, advantage=1.0)


def parts(random: np.random.Generator) -> list[int | str]:
    """Up to three images, with a text of up to five tokens before each, and one of at least two behind."""
    found: list[int | str] = []
    for _ in range(random.integers(0, 4)):
        found += [int(random.integers(1, 6)), str(random.choice(list(GRIDS)))]
    return [*found, int(random.integers(2, 6))]


def layout(seed: int) -> PackedBatch:
    """Up to three groups of up to three samples, which share their prompt, and one that goes on where another ends."""
    random = np.random.default_rng(seed)
    groups = []
    for _ in range(random.integers(1, 4)):
        prompt = parts(random)
        completions = [parts(random) for _ in range(random.integers(1, 4))]
        samples = [sample_of(prompt, completion) for completion in completions]
        groups.append([*samples, *(sample_of([*prompt, *completions[-1]], parts(random)) for _ in range(2))])
    return pack(groups)


@pytest.fixture(scope="module", params=QWENS)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    folder: Path = tmp_path_factory.mktemp("vision")
    config = AutoConfig.from_pretrained(save_vision_model(folder, family=request.param))
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config).model


@pytest.mark.parametrize("seed", range(20))
def test_a_row_has_the_positions_of_each_of_its_samples(model: Any, seed: int) -> None:
    packed = layout(seed)
    axes, rows = axes_of(packed, GRIDS), rows_of(packed)
    assert axes.shape == (3, len(packed.input_ids))
    key_at = {image.start: image.key for image in packed.images}
    for tokens, length in zip(rows.tokens, rows.lengths, strict=True):
        ids = torch.from_numpy(packed.input_ids[tokens[:length]])[None]
        shown = [(1, *(2 * side for side in GRIDS[key_at[place]])) for place in tokens[:length] if place in key_at]
        expected, _ = model.get_rope_index(
            ids, (ids == IMAGE_TOKEN).int(), image_grid_thw=torch.tensor(shown) if shown else None
        )
        np.testing.assert_array_equal(axes[:, tokens[:length]], expected[:, 0].numpy())


def test_what_follows_a_wide_image_goes_on_behind_its_longer_side() -> None:
    packed = pack([[sample_of([1, "2 x 4", 1], [3]), sample_of([1, "2 x 4", 1], [1, "2 x 2", 2])]])
    assert packed.input_ids.tolist() == [7, *[3] * 8, 7, 7, 7, *[3] * 4, 7]
    assert packed.segment_lengths.tolist() == [11, 1, 5]
    assert axes_of(packed, GRIDS).tolist() == [
        [0, *[1] * 8, 5, 6, 7, 7, 7, 7, 7, 9],
        [0, 1, 1, 1, 1, 2, 2, 2, 2, 5, 6, 7, 7, 7, 8, 8, 9],
        [0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 7, 8, 7, 8, 9],
    ]


def test_equal_tokens_of_another_grid_share_nothing() -> None:
    packed = pack([[sample_of([1, grid, 1], [2]) for grid in ("2 x 2", "1 x 4")]])
    assert packed.segment_parents.tolist() == [-1, 0, 0]
    assert packed.segment_lengths.tolist() == [1, 6, 6]  # the token before the images, and what follows
    assert axes_of(packed, GRIDS)[:, [5, 6, 11, 12]].tolist() == [[3, 4, 5, 6]] * 3


def test_text_has_the_same_position_on_each_axis() -> None:
    packed = pack([[sample_of([3], [4]), sample_of([3], [2])]])
    assert axes_of(packed, {}).tolist() == [packed.position_ids.tolist()] * 3
