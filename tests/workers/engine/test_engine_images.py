"""An engine that is shown images: its log-probabilities are the trainer's, and it samples no token of an image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from engines import sample, tiny_config, whole_reply
from vision_models import IMAGE_TOKEN, NEEDS_NUM2WORDS, QWENS, album, picture, save_vision_model, written

from rlflow.batching.pack import pack
from rlflow.errors import RunError
from rlflow.models.images import ImageProcessor
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import ImageSpan, Sample, TrainSample
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.engine.prompts import Prompts
from rlflow.workers.trainer.policy import Policy, load_policy

FIRST, SECOND = picture(1), picture(2, width=64, height=16)  # 2 x 2 and 1 x 4 pieces in the eyes of Qwen-VL
ALBUM = album(FIRST, SECOND)


@dataclass(kw_only=True)
class Bench:
    runner: asyncio.Runner
    engine: RolloutEngine
    arena: Arena
    policy: Policy
    images: ImageProcessor
    version: int = 0

    def load(self) -> None:
        """What the trainer has now."""
        self.version += 1
        staged = self.arena.stage(self.version, self.policy.model.named_parameters())
        self.runner.run(self.engine.load_weights(staged))
        report = self.runner.run(self.engine.compare_weights(staged))
        assert report == {"num_equal": len(self.arena.slots), "different": [], "unverified": []}

    def ask(self, *requests: GenerateRequest) -> list[Completion]:
        return self.runner.run(sample(self.engine, requests))

    def difference(self, request: GenerateRequest, reply: Completion) -> float:
        """Mean |engine - trainer| of the log-probabilities of a reply."""
        count = len(reply.ids)
        zeros = np.zeros(count, np.int32)
        found = Sample(
            prompt_ids=np.array(request.prompt_ids, np.int32),
            completion_ids=np.array(reply.ids, np.int32),
            loss_mask=np.ones(count, np.bool_),
            logprobs=np.array(reply.logprobs, np.float32),
            versions=zeros,
            cache_versions=zeros,
            images=request.images,
        )
        with torch.no_grad():
            own, _ = self.policy(pack([[TrainSample(sample=found, advantage=0.0, pictures=ALBUM)]]))
        return float((own - torch.tensor(reply.logprobs)).abs().mean())

    def request(self, *parts: str | bytes, seed: int = 0) -> GenerateRequest:
        ids, spans = written(self.images, parts, np.random.default_rng(seed))
        return GenerateRequest(
            prompt_ids=ids, seed=seed, max_new_tokens=24, prefix_key=None, images=spans, pictures=ALBUM
        )


IDEFICS = (
    "idefics3",
    "idefics3 in tiles",
    *(pytest.param(each, marks=[pytest.mark.proof, NEEDS_NUM2WORDS]) for each in ("smolvlm", "smolvlm in tiles")),
)


@pytest.fixture(scope="module", params=[*IDEFICS, *QWENS])
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Bench]:
    family, _, in_tiles = request.param.partition(" in ")
    folder = save_vision_model(tmp_path_factory.mktemp("vision"), family=family, tiles=bool(in_tiles))
    config = tiny_config()
    policy = load_policy(config, folder)
    assert policy.vision is not None
    engine = RolloutEngine(config, folder, index=0, threads=1)
    arena = Arena([(name, each.dtype, tuple(each.shape)) for name, each in policy.model.named_parameters()])
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield Bench(runner=runner, engine=engine, arena=arena, policy=policy, images=policy.vision.processor)
        runner.run(engine.shutdown())
    arena.close()


@pytest.mark.slow
def test_engine_and_trainer_agree(bench: Bench) -> None:
    bench.load()
    requests = [
        bench.request("no picture at all"),
        bench.request("what ", FIRST, "?", seed=1),
        bench.request(FIRST, "and", SECOND, "?", seed=2),
        # The same tokens and another picture: neither blocks of the cache nor features may be taken for the first's.
        bench.request("what ", SECOND, "?", seed=1),
    ]
    replies = bench.ask(*requests)
    found = [bench.difference(*each) for each in zip(requests, replies, strict=True)]
    print(bench.policy.model.config.model_type, "engine - trainer, nats:", *map("{:.1g}".format, found))
    assert found == pytest.approx([0] * 4, abs=1e-4)
    assert bench.difference(replace(requests[1], images=requests[3].images), replies[1]) > 0.05


@pytest.mark.slow
def test_a_second_turn_goes_on_after_what_was_sampled(bench: Bench) -> None:
    bench.load()
    first = bench.request("what ", FIRST, "?", seed=3)
    (reply,) = bench.ask(first)
    held = first.prompt_ids + reply.ids
    added, spans = written(bench.images, ["look", SECOND, "?"], np.random.default_rng(4), start=len(held))
    second = replace(first, prompt_ids=held + added, images=(*first.images, *spans), seed=5)
    (again,) = bench.ask(second)
    assert bench.difference(first, reply) < 1e-4
    assert bench.difference(second, again) < 1e-4


@pytest.mark.slow
def test_no_piece_of_an_image_is_ever_sampled(bench: Bench) -> None:
    """Though it is nearly certain in the eyes of the model."""
    kept = {name: each.detach().clone() for name, each in bench.policy.model.named_parameters()}
    with torch.no_grad():
        embeddings = bench.policy.model.get_input_embeddings().get_parameter("weight")
        embeddings[IMAGE_TOKEN] = 4 * embeddings.mean(0) + 4 * embeddings[100]
    try:
        bench.load()
        requests = [replace(bench.request(FIRST, "?", seed=seed), is_greedy=seed % 2 == 0) for seed in range(8)]
        replies = bench.ask(*requests)
        assert not any(IMAGE_TOKEN in reply.ids for reply in replies)
        found = [bench.difference(*each) for each in zip(requests[1::2], replies[1::2], strict=True)]
        assert max(found) < 1e-4
    finally:
        with torch.no_grad():
            for name, each in bench.policy.model.named_parameters():
                each.copy_(kept[name])


@pytest.mark.slow
def test_tokens_that_vllm_would_not_write_are_refused(bench: Bench) -> None:
    bench.load()
    request = bench.request(FIRST, "?")
    (span,) = request.images
    wrong = replace(request, images=(replace(span, num_tokens=span.num_tokens - 1),))
    with pytest.raises(RunError, match="the model's processor as"):
        bench.runner.run(whole_reply(bench.engine, wrong))


def test_an_image_for_a_model_of_text_is_refused() -> None:
    prompts = Prompts(None)
    assert prompts.bad_words is None
    shown = GenerateRequest(
        prompt_ids=[7, 8],
        seed=None,
        max_new_tokens=4,
        prefix_key=None,
        images=(ImageSpan(key="a", start=0, num_tokens=1),),
    )
    with pytest.raises(ValueError, match="1 images, and the model takes none"):
        asyncio.run(prompts.prompt(shown, [7, 8], None))
