"""Replies that end with a stop string of the request. Pure.

A reply is sampled as usual, and what follows the token that completes the string is dropped. Because tokens are sampled
one after the other, what is left has the distribution of a reply that stopped there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlflow.rollout.requests import Completion, GenerateRequest


@dataclass(kw_only=True, slots=True, frozen=True)
class Ending:
    """The stop string that a text has first."""

    text: str
    start: int
    """Characters before it."""


def first_stop(text: str, stop: Sequence[str]) -> Ending | None:
    """The stop string that is complete first.

    Example: first_stop("one two", ["two", "e"]) == Ending(text="e", start=2)
    """
    found = [Ending(text=each, start=text.find(each)) for each in stop if each in text]
    return min(found, key=lambda ending: (ending.start + len(ending.text), ending.start), default=None)


def stopped(
    completion: Completion, request: GenerateRequest, stop: Sequence[str], parse: Callable[[Sequence[int]], str]
) -> Completion:
    """The reply up to the token that completes a stop string; as it is if it has none."""
    ids = completion.ids
    if first_stop(parse(ids), stop) is None:
        return completion
    short, long = 0, len(ids)  # a reply of `short` tokens has none, one of `long` has one
    while long - short > 1:
        middle = (short + long) // 2
        if first_stop(parse(ids[:middle]), stop) is None:
            short = middle
        else:
            long = middle
    # The last token has no route, as if the model had not read it.
    num_routed = len(request.prompt_ids) + long - 1 - request.num_routed
    return replace(
        completion,
        ids=ids[:long],
        logprobs=completion.logprobs[:long],
        versions=completion.versions[:long],
        cache_versions=completion.cache_versions[:long],
        support=None if completion.support is None else completion.support[:long],
        experts=None if completion.experts is None else completion.experts[:num_routed],
        finish_reason="stop",
    )
