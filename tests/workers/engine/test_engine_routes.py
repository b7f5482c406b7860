"""The experts that vLLM chose: when it is asked for them, in which parts they come, how the trainer repeats them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import PROMPT, request, tiny_config, tiny_llama, tiny_mixture, whole_reply
from recording import RecordingEngine

from rlflow.batching.pack import pack
from rlflow.config import Speculative
from rlflow.errors import ConfigError, RunError
from rlflow.rollout.client import rest_of
from rlflow.rollout.requests import Completion, FinishReason, GenerateRequest
from rlflow.rollout.samples import sample_of
from rlflow.runtime.derived import without_training
from rlflow.types import ExpertArray, TrainSample, Turn
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.engine.replies import Reply
from rlflow.workers.engine.routes import num_replayed, routes_of
from rlflow.workers.engine.setup import engine_arguments
from rlflow.workers.trainer.policy import Policy, load_policy
from rlflow.workers.trainer.routing import replay_routes

ON_GPU = torch.cuda.is_available()


def routes(first: int, last: int) -> ExpertArray:
    """Of the tokens from `first` up to `last`: experts [position, position + 1] in one layer."""
    return np.array([[[place, place + 1]] for place in range(first, last)], np.uint16)


def given(experts: list[int]) -> ExpertArray:
    """As vLLM gives the experts of three tokens, in two layers."""
    return np.array(experts, np.uint8).reshape(3, 2, 2)


def test_vllm_is_asked_on_a_gpu_for_a_mixture_that_is_trained(tmp_path: Path) -> None:
    config, path = tiny_config(), str(tmp_path / "mixture")
    tiny_mixture(seed=1).config.save_pretrained(path)
    tiny_llama(seed=1).config.save_pretrained(tmp_path / "dense")
    assert num_replayed(config, path, on_gpu=True) == 4
    assert num_replayed(config, path, on_gpu=False) == 0
    assert num_replayed(config, str(tmp_path / "dense"), on_gpu=True) == 0
    assert num_replayed(without_training(config), path, on_gpu=True) == 0
    assert engine_arguments(config, path, 0, on_gpu=True, says_routes=True)["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in engine_arguments(config, path, 0, on_gpu=True)
    config.rollout.speculative = Speculative.suffix
    with pytest.raises(ConfigError, match=r"speculative=suffix takes .* set rollout.replay_experts=false"):
        num_replayed(config, path, on_gpu=True)
    config.rollout.replay_experts = False
    assert num_replayed(config, path, on_gpu=True) == 0


def test_an_older_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_mixture(seed=1).config.save_pretrained(tmp_path)
    monkeypatch.setattr("rlflow.workers.engine.routes.known_arguments", lambda: ("enable_return_routed_experts",))
    with pytest.raises(ConfigError, match=r"install vLLM 0.32, or set rollout.replay_experts=false"):
        num_replayed(tiny_config(), str(tmp_path), on_gpu=True)


def test_choices_that_were_not_recorded_are_an_error() -> None:
    with pytest.raises(RunError, match=r"every token went to expert 0, .* rollout.engine_args.moe_backend=triton"):
        routes_of(given([0] * 12), num_experts=8, num_tokens=3)
    with pytest.raises(AssertionError, match="vLLM gave the experts of 3 tokens instead of 4"):
        routes_of(given([0, 1] * 6), num_experts=8, num_tokens=4)


def test_an_expert_takes_one_byte_where_that_leaves_room_for_none() -> None:
    assert routes_of(given([254, 1] * 6), num_experts=255, num_tokens=3).dtype == np.uint8
    assert routes_of(given([255, 1] * 6), num_experts=256, num_tokens=3).dtype == np.uint16


async def test_routes_come_with_the_part_after_which_vllm_gave_them() -> None:
    asked = GenerateRequest(prompt_ids=[7] * 10, seed=3, max_new_tokens=300, prefix_key=None, num_routed=4)
    reply = Reply(asked, max_length=1000)
    ended: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    async def sample() -> FinishReason:
        return await ended

    reply.start(asyncio.create_task(sample()))
    reply.begin(1, None)
    reply.add([1] * 256, [-0.5] * 256)
    assert reply.num_unrouted == 10 + 256 - 1 - 4
    reply.add_routes(routes(4, 265))
    first = await reply.take_part()
    reply.begin(1, None)  # a seeded reply is one request a part; this one reads the last token of the part before
    reply.add([1] * 3, [-0.5] * 3)
    assert (reply.num_routed, reply.num_unrouted) == (265, 3)
    reply.add_routes(routes(265, 268))
    ended.set_result("stop")
    second = await reply.take_part()
    assert first.experts is not None and second.experts is not None
    assert first.experts.tolist() == routes(4, 265).tolist()
    first.add(second)
    assert first.experts.tolist() == routes(4, 268).tolist()


def test_a_reply_that_goes_on_elsewhere_asks_for_what_is_not_known() -> None:
    asked = GenerateRequest(prompt_ids=[7] * 10, seed=3, max_new_tokens=300, prefix_key=None, num_routed=4)
    reply = Completion(ids=[], logprobs=[], versions=[], cache_versions=[], finish_reason="length")
    without = Completion(
        ids=[1] * 5, logprobs=[0.0] * 5, versions=[0] * 5, cache_versions=[0] * 5, finish_reason="part"
    )
    reply.add(without)
    assert (len(rest_of(asked, reply).prompt_ids), rest_of(asked, reply).num_routed) == (15, 4)
    # Given back before an update of the weights: the engine has read all tokens but the last.
    back = Completion(ids=[2], logprobs=[0.0], versions=[0], cache_versions=[0], finish_reason="abort")
    back.experts = routes(4, 15)
    reply.add(back)
    assert (len(rest_of(asked, reply).prompt_ids), rest_of(asked, reply).num_routed) == (16, 15)
    last = Completion(ids=[3, 4], logprobs=[0.0] * 2, versions=[1] * 2, cache_versions=[1] * 2, finish_reason="stop")
    last.experts = routes(15, 17)
    reply.add(last)
    assert reply.experts is not None
    assert reply.experts.tolist() == routes(4, 17).tolist()
    assert (reply.num_routes, len(reply.ids)) == (13, 8)


@pytest.mark.slow
def test_the_trainer_repeats_what_the_engine_chose(tmp_path: Path) -> None:
    """Two turns of a mixture in vLLM. Without GPUs the test records its routers, because vLLM does so on GPUs only."""
    model = tiny_mixture(seed=1)
    model.save_pretrained(tmp_path)
    arena = Arena([(name, each.dtype, tuple(each.shape)) for name, each in model.named_parameters()])

    async def play() -> list[Turn]:
        engine = (RolloutEngine if ON_GPU else RecordingEngine)(tiny_config(), str(tmp_path), index=0, threads=1)
        await engine.start()
        turns: list[Turn] = []
        try:
            await engine.load_weights(arena.stage(1, model.named_parameters()))
            if isinstance(engine, RecordingEngine):
                await engine.record()
            for number in range(2):
                held = [*turns[-1].prompt_ids, *turns[-1].output_ids, 5, 6] if turns else PROMPT
                known = len(held) - 3 if turns else 0
                asked = replace(request(number, held, max_new_tokens=24), num_routed=known)
                said = await whole_reply(engine, asked)
                turns.append(
                    Turn(
                        prompt_ids=held,
                        output_ids=said.ids,
                        logprobs=said.logprobs,
                        versions=said.versions,
                        cache_versions=said.cache_versions,
                        finish_reason="length",
                        experts=said.experts,
                        first_routed=known,
                        continues=0 if turns else None,
                    )
                )
        finally:
            await engine.shutdown()
        return turns

    sample = sample_of(asyncio.run(play()))
    arena.close()
    assert sample.experts is not None
    assert sample.experts.shape == (sample.num_tokens, 2, 2)
    assert (sample.experts[:-1] < 4).all() and (sample.experts[-1] == 255).all()
    tokens = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[None], output_router_logits=True).router_logits
    live = torch.stack([each.topk(2).indices.sort(-1).values for each in logits], 1).numpy()
    agreeing = (live[:-1] == np.sort(sample.experts[:-1], -1)).mean()
    policy = Policy(load_policy(tiny_config(), str(tmp_path)).model, temperature=1.0)
    packed = pack([[TrainSample(sample=sample, advantage=1.0)]])
    assert packed.experts is not None
    replay_routes(policy.model)
    with torch.no_grad():
        difference = np.abs(policy(packed)[0].numpy() - packed.behaviour_logprobs)
        wrong = np.where(packed.experts == 255, packed.experts, (packed.experts + 1) % 4)
        elsewhere = np.abs(policy(replace(packed, experts=wrong))[0].numpy() - packed.behaviour_logprobs)
    print(
        f"{len(difference)} tokens, {agreeing:.4f} of the choices as transformers makes them; mean |log pi - log mu| "
        f"{difference.mean():.1e} with replay, {elsewhere.mean():.1e} with other experts"
    )
    assert agreeing > (0.9 if ON_GPU else 0.99)
    assert difference.mean() <= (0.1 if ON_GPU else 1e-5)
    assert elsewhere.mean() > 0.1
