"""Tiny models for an engine, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlflow.config import Config
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.workers.engine.engine import RolloutEngine

PROMPT = [1, *range(40, 80)]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.3,
            eos_token_id=2,
        )
    )


def tiny_mixture(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            initializer_range=0.3,
            eos_token_id=2,
        )
    )


def tiny_config(max_length: int = 192) -> Config:
    config = Config()
    config.model.max_length = max_length
    config.rollout.kv_cache_gb = 0.05
    config.rollout.max_new_tokens = 64
    return config


def request(seed: int, prompt_ids: list[int] = PROMPT, max_new_tokens: int = 32) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt_ids, seed=seed, max_new_tokens=max_new_tokens, prefix_key=None)


async def sample(engine: RolloutEngine, requests: Iterable[GenerateRequest]) -> list[Completion]:
    return await asyncio.gather(*[engine.generate(each) for each in requests])


async def whole_reply(engine: RolloutEngine, request: GenerateRequest) -> Completion:
    part = reply = await engine.generate(request)
    while part.reply:
        part = await engine.go_on(part.reply)
        reply.ids += part.ids
        reply.logprobs += part.logprobs
        reply.versions += part.versions
        reply.finish_reason = part.finish_reason
    return reply


def differences(model: PreTrainedModel, completion: Completion, prompt_ids: list[int] = PROMPT) -> torch.Tensor:
    """|engine's log-probability - transformers'| of each sampled token."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + completion.ids])).logits[0, len(prompt_ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
    return (expected - torch.tensor(completion.logprobs)).abs()


async def until_sampling(engine: RolloutEngine) -> None:
    """Return once requests that were sent before have sampled something: short ones sent after them are answered."""
    await sample(engine, [request(99, [7], max_new_tokens=4)])
