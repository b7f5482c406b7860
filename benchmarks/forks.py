"""Episodes that fork at every turn: a chat template in the manner of Qwen3's leaves out earlier thoughts.

    python benchmarks/forks.py SAMPLES.npz

They are recorded by `rlflow.rollout`, with the tokenizer of `Config()`'s model; replies and observations are random
words. Four episodes of one task make eight samples each.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

from rlflow.batching.tree import num_distinct_tokens
from rlflow.config import Config
from rlflow.models.opening import open_tokenizer
from rlflow.models.resolve import resolve_model
from rlflow.rollout.chat import Chat
from rlflow.rollout.demonstration import show
from rlflow.rollout.render import Renderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import Message, Sample, Task

EPISODES, TURNS = 4, 8
PROMPT, THOUGHT, ANSWER, OBSERVATION = 50, 10, 6, 32
"""Words. An eighth of what agents with tools have or less, so that a step on a CPU takes seconds."""
WORDS = "a the to of in and it is on at be this that from for with as by an are was one two if or not".split()  # noqa: SIM905
TEMPLATE = """
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set asked.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set is_old = message['role'] == 'assistant' and loop.index0 < asked.last %}
    {%- set content = message['content'].split('</think>')[-1] if is_old else message['content'] %}
    {{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


async def record(random: np.random.Generator, config: Config, tokenizer: object) -> list[Sample]:
    """The samples of one episode, one for each turn."""

    def words(number: int) -> str:
        return " ".join(random.choice(WORDS, number))

    async def nobody(request: GenerateRequest) -> Completion:
        raise AssertionError("every reply is given")

    talk: list[Message] = []
    for _ in range(TURNS):
        talk.append(Message(role="assistant", content=f"<think>{words(THOUGHT)}</think>{words(ANSWER)}"))
        talk.append(Message(role="user", content=words(OBSERVATION)))
    prompt = " ".join(np.random.default_rng(0).choice(WORDS, PROMPT))  # the same for each episode
    task = Task(id="forks", prompt=(Message(role="user", content=prompt),), demonstrations=(tuple(talk[:-1]),))
    played = await show(task, 0, Chat(nobody, Renderer(tokenizer), config))  # pyright: ignore[reportArgumentType]
    return played.payload.samples


async def write(path: Path) -> None:
    """The arrays that `training_sides.read_groups` reads, an episode in the place of a group."""
    config, random = Config(), np.random.default_rng(1)
    tokenizer = open_tokenizer(resolve_model(config.model.path), trust=False)
    tokenizer.chat_template = TEMPLATE
    config.model.max_length = 1 << 14
    samples = [sample for _ in range(EPISODES) for sample in await record(random, config, tokenizer)]
    assert len(samples) == EPISODES * TURNS, f"{len(samples)} samples, so the template did not fork at each turn"
    assert all(sample.loss_mask.all() for sample in samples), "a sample is a prompt and one reply"

    def padded(rows: list[np.ndarray]) -> np.ndarray:
        table = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for place, row in zip(table, rows, strict=True):
            place[: len(row)] = row
        return table.reshape(EPISODES, TURNS, -1)

    completions = padded([sample.completion_ids for sample in samples])
    arrays = {
        "prompts": padded([sample.prompt_ids for sample in samples]),
        "prompt_lengths": np.array([len(sample.prompt_ids) for sample in samples]).reshape(EPISODES, TURNS),
        "completions": completions,
        "lengths": np.array([len(sample.completion_ids) for sample in samples]).reshape(EPISODES, TURNS),
        "logprobs": random.normal(-10, 0.5, completions.shape).astype(np.float32),
        "advantages": np.repeat(random.normal(0, 1, (EPISODES, 1)), TURNS, axis=1).astype(np.float32),
    }
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    whole = sum(sample.num_tokens for sample in samples)
    print(f"{whole} tokens, of which {num_distinct_tokens(samples)} differ", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1])))
