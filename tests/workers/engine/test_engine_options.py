"""An engine that guesses tokens ahead and ends replies at a text: what is sampled stays what the model says."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import PROMPT, differences, request, sample, tiny_config, tiny_llama
from transformers import AutoTokenizer, LlamaForCausalLM

from rlflow.batching.pack import pack
from rlflow.config import Dtype, Speculative
from rlflow.models.resolve import resolve_model
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import Sample, TrainSample
from rlflow.weights.shm.arena import Arena
from rlflow.workers.engine.engine import RolloutEngine
from rlflow.workers.trainer.policy import load_policy

END_OF_REPLY = 2
STOP = (51, 10)
"""Tokens whose text ends a reply. Each token of the tiny model is one byte, so that the text ends where they do."""
NUM_GREEDY = 48


@dataclass(kw_only=True)
class Guessing:
    runner: asyncio.Runner
    engine: RolloutEngine
    model: LlamaForCausalLM

    def sample(self, prompt_ids: list[int], count: int, *, num: int, greedy: bool = False) -> list[Completion]:
        requests = [
            GenerateRequest(prompt_ids=prompt_ids, seed=None, max_new_tokens=num, prefix_key=None, is_greedy=greedy)
        ] * count
        return self.runner.run(sample(self.engine, requests))

    def probabilities(self, prompt_ids: list[int], completion: Completion) -> torch.Tensor:
        """[L, V] at each sampled token, by transformers."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt_ids + completion.ids])).logits[0, len(prompt_ids) - 1 : -1]
        return logits.double().softmax(-1)


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guessing]:
    model, folder, letters = tiny_llama(seed=1), tmp_path_factory.mktemp("tiny"), Path(resolve_model("tiny"))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(letters / name, folder)
    config = tiny_config()
    if torch.cuda.is_available():  # on a CPU, vLLM 0.32 reports wrong log-probabilities for tokens that were guessed
        config.rollout.speculative = Speculative.ngram
    config.rollout.stop = [AutoTokenizer.from_pretrained(folder).decode(list(STOP))]
    arena = Arena([(name, value.dtype, tuple(value.shape)) for name, value in model.named_parameters()])
    engine = RolloutEngine(config, str(folder), index=0, threads=1)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        runner.run(engine.load_weights(arena.stage(1, model.named_parameters())))
        yield Guessing(runner=runner, engine=engine, model=model)
        runner.run(engine.shutdown())
    arena.close()


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_the_model_up_to_the_text(guessing: Guessing) -> None:
    expected: list[int] = []
    with torch.no_grad():
        while len(expected) < NUM_GREEDY and END_OF_REPLY not in expected:
            logits = guessing.model(torch.tensor([PROMPT + expected])).logits[0, -1]
            expected.append(int(logits.argmax()))
    end = list(pairwise(expected)).index(STOP) + 2
    assert 2 < end < NUM_GREEDY, "the text must come in the middle"
    (completion,) = guessing.sample(PROMPT, 1, num=NUM_GREEDY, greedy=True)
    assert (completion.ids, completion.finish_reason) == (expected[:end], "stop")
    assert completion.versions == [1] * end


@pytest.mark.slow
def test_sampled_tokens_follow_the_model_where_they_were_guessed_too(guessing: Guessing) -> None:
    """If the model draws each token, the sum of (was it one that could be guessed) - p(that) is a martingale."""
    prompt_ids = [*PROMPT, 60, 61]  # 62 came after these before, and has a probability of 0.10
    excess = variance = 0.0
    num_guessable = 0
    for completion in guessing.sample(prompt_ids, 400, num=24):
        tokens = prompt_ids + completion.ids
        is_at_text = [pair == STOP for pair in pairwise(completion.ids)]
        assert not any(is_at_text[:-1])
        if completion.finish_reason == "stop":
            assert completion.ids[-1] == END_OF_REPLY or is_at_text[-1]
        assert differences(guessing.model, completion, prompt_ids).max() < 1e-3
        for place, row in enumerate(guessing.probabilities(prompt_ids, completion), start=len(prompt_ids)):
            last = tuple(tokens[place - 2 : place])
            followers = {tokens[index + 2] for index in range(place - 2) if tuple(tokens[index : index + 2]) == last}
            if not followers:
                continue
            num_guessable += 1
            share = float(row[list(followers)].sum())
            excess += (tokens[place] in followers) - share
            variance += share * (1 - share)
    assert num_guessable >= 400, "each reply begins behind a text that came before"
    assert variance > 25
    assert abs(excess) < 5 * variance**0.5


@pytest.mark.slow
@pytest.mark.parametrize("float32_head", [True, False])
def test_a_float32_head_does_not_round_logits(float32_head: bool, tmp_path: Path) -> None:
    """Without layers both sides have the same states, so that only the output layer can differ."""
    model = tiny_llama(seed=1).bfloat16()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value.zero_()
        model.model.embed_tokens.weight *= 0.1  # otherwise a token is almost certain, whatever is rounded
    model.save_pretrained(tmp_path)
    config = tiny_config()
    config.model.dtype, config.model.float32_head = Dtype.bfloat16, float32_head
    engine = RolloutEngine(config, str(tmp_path), index=0, threads=1)
    arena = Arena([(name, value.dtype, tuple(value.shape)) for name, value in model.named_parameters()])
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        runner.run(engine.load_weights(arena.stage(1, model.named_parameters())))
        (completion,) = runner.run(sample(engine, [request(0)]))
        runner.run(engine.shutdown())
    arena.close()
    zeros = np.zeros(len(completion.ids), np.int32)
    asked = Sample(
        prompt_ids=np.array(PROMPT, np.int32),
        completion_ids=np.array(completion.ids, np.int32),
        loss_mask=zeros == 0,
        logprobs=zeros.astype(np.float32),
        versions=zeros,
        cache_versions=zeros,
    )
    config.model.float32_head = True
    with torch.no_grad():
        policy = load_policy(config, str(tmp_path), dtype=torch.bfloat16)
        exact, *_ = policy(pack([[TrainSample(sample=asked, advantage=0.0)]]))
    difference = (exact - torch.tensor(completion.logprobs)).abs().max()
    assert difference < 1e-4 if float32_head else difference > 1e-3
