"""A request to a rollout engine and its answer. Plain data: no vLLM and no Ray here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from rlflow.types import ExpertArray, ImageSpan

PART_TOKENS = 256
"""A long reply arrives in parts of so many tokens. A lost engine costs one part. A call for a part takes engine and
runner half a millisecond each: 2 % of their time at 10,000 tokens a second."""

FinishReason: TypeAlias = Literal["stop", "length", "part", "abort"]
"""`part`: the engine goes on with the reply. `abort`: it does not, and the client continues after what it has."""


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
    num_sampled: int = 0
    """Tokens at the end of `prompt_ids` that the reply has sampled already, at an engine that could not go on."""
    num_routed: int = 0
    """Tokens at the start of `prompt_ids` whose experts are known already."""
    images: tuple[ImageSpan, ...] = ()
    """Those in `prompt_ids`, in their order."""
    pictures: Mapping[str, object] = field(default_factory=dict)
    """Key -> the image's file, or a handle to it, which an engine awaits."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ProbePrompt:
    """What engines are asked before the first episode; its images are `models.images.probe_picture`."""

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()


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
    experts: ExpertArray | None = None
    """[R, layers, k], of the next R tokens of prompt and reply whose experts were not known yet."""
    reply: str = ""
    """What the engine calls a reply that it goes on with; else empty."""
    is_crowded: bool = False
    """Whether other replies were waiting for a place in the engine or in its cache."""

    def add(self, part: "Completion") -> None:
        """Append the next part of the reply."""
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.cache_versions += part.cache_versions
        if part.support is not None:
            self.support = self.support or []
            self.support += part.support
        if part.experts is not None:
            self.experts = part.experts if self.experts is None else np.concatenate([self.experts, part.experts])
        self.finish_reason, self.reply = part.finish_reason, part.reply

    @property
    def num_routes(self) -> int:
        """Tokens whose experts it says."""
        return 0 if self.experts is None else len(self.experts)


def part_seed(seed: int, num_sampled: int) -> int:
    """The seed of the part that starts after `num_sampled` tokens of a reply; 31 bits. The first part uses `seed`.

    Each part has a seed of its own because the generator of a lost engine cannot be brought to another one.

    Example: part_seed(7, 0) == 7; part_seed(7, 256) == 7 * 69069 + 256
    """
    return (seed * 69069 + num_sampled) & 0x7FFFFFFF if num_sampled else seed
