"""A model that takes images, in the trainer: what transformers computes of text and pixels, and nothing of it twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training import largest_relative_difference, tiny_config
from transformers import AutoModelForImageTextToText
from vision_models import IMAGE_TOKEN, NEEDS_NUM2WORDS, QWENS, album, picture, save_vision_model, written

from rlflow.batching.pack import pack
from rlflow.errors import ConfigError
from rlflow.models.images import ImageProcessor, open_image
from rlflow.types import Sample, TrainSample
from rlflow.workers.trainer import vision
from rlflow.workers.trainer.gate import gate_batch, settle_way
from rlflow.workers.trainer.policy import Policy, load_policy
from rlflow.workers.trainer.way import Way, go_in_rows

FIRST, SECOND = picture(1), picture(2, width=64, height=16)  # 2 x 2 and 1 x 4 pieces in the eyes of Qwen-VL
ALBUM = album(FIRST, SECOND)
TEMPERATURE = 0.7


@pytest.fixture(scope="module", params=["idefics3", pytest.param("smolvlm", marks=NEEDS_NUM2WORDS), *QWENS])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    return save_vision_model(tmp_path_factory.mktemp("vision"), family=request.param)


def policy_in(folder: str, dtype: torch.dtype = torch.float32) -> Policy:
    config = tiny_config()
    config.model.max_length, config.rollout.temperature = 128, TEMPERATURE
    return load_policy(config, folder, dtype=dtype)


def sample_of(
    processor: ImageProcessor, prompt: Sequence[str | bytes], completion: Sequence[str | bytes], seed: int
) -> TrainSample:
    """Texts and files of images as a prompt, texts (sampled) and files (observed) after it."""
    random = np.random.default_rng(seed)
    first, before = written(processor, prompt, random)
    rest, after = written(processor, completion, random, len(first))
    mask, zeros = np.ones(len(rest), np.bool_), np.zeros(len(rest), np.int32)
    for span in after:
        mask[span.start - len(first) :][: span.num_tokens] = False
    sample = Sample(
        prompt_ids=np.array(first, np.int32),
        completion_ids=np.array(rest, np.int32),
        loss_mask=mask,
        logprobs=zeros.astype(np.float32),
        versions=zeros,
        cache_versions=zeros,
        images=(*before, *after),
    )
    return TrainSample(sample=sample, advantage=float(random.normal()), pictures=ALBUM)


def groups_of(processor: ImageProcessor) -> list[list[TrainSample]]:
    """One image; two; a second one that comes after a reply; none. The first two prompts have equal tokens."""
    prompts = [["what ", FIRST, "?"], ["what ", SECOND, "?"], [FIRST, "and", SECOND, "?"], ["no picture"]]
    groups = [[sample_of(processor, prompt, [size * "a"], seed=5) for size in (3, 1)] for prompt in prompts]
    return [*groups, [sample_of(processor, [SECOND, "?"], ["a reply", FIRST, "another"], seed=6)]]


def plain_logprobs(model: Any, processor: ImageProcessor, sample: Sample, dtype: torch.dtype) -> Tensor:
    """[L], by transformers' own forward of ids and pixels."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
    pixels: dict[str, Tensor] = {}
    if sample.images:
        pixels = processor.pixels([open_image(ALBUM[image.key]) for image in sample.images])
        pixels["pixel_values"] = pixels["pixel_values"].to(dtype)
        if "image_grid_thw" in pixels:
            pixels["mm_token_type_ids"] = (ids == IMAGE_TOKEN)[None].int()
    logits = model(input_ids=ids[None], **pixels).logits[0, :-1] / TEMPERATURE
    logits[:, IMAGE_TOKEN] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0]


@pytest.mark.parametrize("in_rows", [False, True])
def test_a_row_of_text_alone_needs_no_image(folder: str, in_rows: bool) -> None:
    policy = policy_in(folder, torch.float64)
    assert policy.vision is not None
    processor = policy.vision.processor
    texts = [sample_of(processor, ["no picture"], [size * "a"], seed=size) for size in (9, 4)]
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    expected = [plain_logprobs(plain, processor, one.sample, torch.float64) for one in texts]
    if in_rows:
        go_in_rows(policy.model)
    assert (policy(pack([texts]))[0] - torch.cat(expected)).abs().max() < 1e-5


@pytest.mark.parametrize("in_rows", [False, True])
def test_log_probabilities_and_gradients_are_those_of_transformers(folder: str, in_rows: bool) -> None:
    policy = policy_in(folder, torch.float64)
    assert policy.vision is not None
    groups = groups_of(policy.vision.processor)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    expected = []
    for one in (one for group in groups for one in group):
        found = plain_logprobs(plain, policy.vision.processor, one.sample, torch.float64)
        expected.append(found[torch.from_numpy(one.sample.loss_mask)])
        (one.advantage * expected[-1].sum()).backward()
    if in_rows:
        go_in_rows(policy.model)
    packed = pack(groups)
    logprobs, _ = policy(packed)
    (logprobs * torch.from_numpy(packed.advantages)).sum().backward()
    difference = (logprobs - torch.cat(expected)).abs().max()
    own = {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}
    trained = {name: each.grad for name, each in plain.named_parameters() if name in own and each.grad is not None}
    assert set(own) == {
        name for name, _ in plain.named_parameters() if "text_model" in name or "language_model" in name
    }
    of_gradients = largest_relative_difference(own, trained)
    print(policy.model.config.model_type, f"log-probabilities {difference:.1g}, gradients {of_gradients:.1g}")
    assert max(difference, of_gradients) < 1e-5


def test_an_image_goes_through_the_tower_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_in(folder)
    assert policy.vision is not None
    calls: list[Any] = []
    real: Any = policy.model.get_image_features
    monkeypatch.setattr(policy.model, "get_image_features", lambda **pixels: calls.append(pixels) or real(**pixels))
    packed = pack(groups_of(policy.vision.processor))
    for _ in range(2):
        policy(packed)
    assert len(packed.images) == 6  # of ten in all samples, because the prompts of a group are shared
    assert len(calls) == 2


def test_features_are_kept_within_bounds(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_in(folder)
    assert policy.vision is not None
    packed = pack(groups_of(policy.vision.processor))
    expected, _ = policy(packed)
    monkeypatch.setattr(vision, "CACHED_BYTES", 4 * 64 * 4)  # of one image
    policy.vision._seen.clear()
    assert torch.equal(policy(packed)[0], expected)
    assert list(policy.vision._seen) == [packed.images[-1].key]


def test_prompts_of_equal_tokens_and_other_images_are_not_shared(folder: str) -> None:
    policy = policy_in(folder)
    assert policy.vision is not None
    first, second = groups_of(policy.vision.processor)[:2]
    assert first[0].sample.prompt_ids.tolist() == second[0].sample.prompt_ids.tolist()
    alone = [policy(pack([group]))[0] for group in (first, second)]
    assert torch.allclose(policy(pack([first, second]))[0], torch.cat(alone), atol=1e-5)
    assert (alone[0] - alone[1]).abs().mean() > 0.01


def test_the_token_of_a_piece_has_no_probability(folder: str) -> None:
    policy = policy_in(folder)
    assert policy.vision is not None
    one = sample_of(policy.vision.processor, ["x"], ["ab"], seed=1)
    one.sample.completion_ids[1] = IMAGE_TOKEN
    logprobs, entropies = policy(pack([[one]]))
    assert logprobs[1] < -1000
    assert torch.isfinite(entropies).all()


@pytest.mark.parametrize(
    ("family", "tiles", "num_tokens"),
    [
        ("idefics3", False, 7),
        ("idefics3", True, 34),
        *(pytest.param("smolvlm", tiles, size, marks=NEEDS_NUM2WORDS) for tiles, size in ((False, 7), (True, 34))),
        *((each, False, 4) for each in QWENS),
    ],
)
def test_the_gate_measures_an_image(tmp_path: Path, family: str, tiles: bool, num_tokens: int) -> None:
    policy = policy_in(save_vision_model(tmp_path, family=family, tiles=tiles))
    assert policy.vision is not None
    images = policy.vision.processor
    assert [image.num_tokens for image in gate_batch(policy.model, 128, images).images] == [num_tokens]

    def settled() -> Any:
        forward = partial(policy, has_plain=True)
        return settle_way(policy.model, forward, lambda each: each, torch.float32, 128, images=images)

    assert settled().way is Way.packed
    assert settled().difference < 1e-5


@pytest.mark.parametrize("family", QWENS)
def test_the_gate_notices_positions_of_one_axis(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_in(save_vision_model(tmp_path, family=family))
    assert policy.vision is not None
    monkeypatch.setattr(vision, "axes_of", lambda packed, grids: np.stack([packed.position_ids] * 3))
    with pytest.raises(ConfigError, match=f"a {family} model of which training computes something else"):
        settle_way(
            policy.model,
            partial(policy, has_plain=True),
            lambda each: each,
            torch.float32,
            128,
            images=policy.vision.processor,
        )
