"""A request to a rollout engine and its answer. Plain data: no vLLM and no Ray here."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""`abort`: the engine returned the request unfinished; the client continues elsewhere after the tokens that it has."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerateRequest:
    """One reply to sample.

    Example: GenerateRequest(prompt_ids=[1, 17, 5], seed=3, max_new_tokens=16, prefix_key="group 12")
    """

    prompt_ids: list[int]
    seed: int | None
    """The same seed, prompt and weights give the same tokens; None uses the engine's own generator."""
    max_new_tokens: int
    prefix_key: str | None
    """Equal for requests that share a prompt and arrive together; None if nothing is shared."""
    is_greedy: bool = False
    """Take the likeliest token each time instead of sampling."""
    engine: int | None = None
    """The only engine that may answer; None leaves the choice to the client."""


@dataclass(kw_only=True, slots=True)
class Completion:
    """The sampled tokens, with the policy version of each.

    Example: Completion(ids=[9, 2], logprobs=[-0.4, -0.1], versions=[3, 4], cache_versions=[3, 3], finish_reason="stop")
    """

    ids: list[int]  # [num_tokens], the stop token included
    logprobs: list[float]  # [num_tokens], of the sampling distribution, temperature applied
    versions: list[int]  # [num_tokens], policy version that sampled each token
    cache_versions: list[int]  # [num_tokens], the oldest version that computed any of its context
    finish_reason: FinishReason
    support: list[list[int]] | None = None
    """[num_tokens], the tokens that each was chosen among; None without top_k, where it was among all."""
