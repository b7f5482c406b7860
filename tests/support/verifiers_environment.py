"""A package of a verifiers environment, as the tests install it: add until the user is content."""

from __future__ import annotations

import os

import verifiers as vf  # pyright: ignore
from datasets import Dataset


def load_environment(size: int = 20, is_grouped: bool = False):
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1), "info": {"number": i}} for i in range(size)]
    print("this is not an answer")

    async def is_right(completion, answer, info, **kwargs) -> float:
        if info["number"] == 18:
            raise KeyError("the judge is away")
        return float(completion[-1]["content"].strip() == answer)

    def length(completion) -> float:
        return float(len(completion))

    def ranks(completions, **kwargs) -> list[float]:
        return [1.0 for _ in completions]

    rubric = vf.Rubric(funcs=[ranks] if is_grouped else [is_right, length], weights=[1.0] if is_grouped else [1.0, 0.0])
    return Sums(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=4, system_prompt="Add.")


class Sums(vf.MultiTurnEnv):
    """Asks again until the last message says so."""

    async def env_response(self, messages, state, **kwargs):
        if state["info"]["number"] == 19:
            os._exit(4)
        return [{"role": "user", "content": "Are you sure?"}]

    @vf.stop
    async def two_replies(self, state, **kwargs) -> bool:
        return len(state["trajectory"]) >= 2
