"""From the turns of an episode to the samples that are trained on. Pure.

    turns -> chains_of: turns that continue each other -> sample_of: one flat sample for each chain

Rules: each sampled token is in exactly one sample, with loss mask 1; a token that was observed has loss mask 0,
log-probability 0 and versions NO_VERSION. What stands before a token in its sample is what the policy saw.

Example: turns 0, 1 (continues 0) and 2 (continues 0 too) are two samples: [0, 1] and [2].
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlflow.batching.routes import no_route
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import NO_VERSION, ExpertArray, Sample, Support, Turn


def chains_of(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each sample, in order.

    A turn is appended to the sample that ends with the turn which it `continues`. If there is none, or another turn was
    appended there before (a program asked for two replies to the same conversation), it begins a sample of its own.
    """
    chains: list[list[Turn]] = []
    ending_with: dict[int, list[Turn]] = {}
    for index, turn in enumerate(turns):
        chain = ending_with.pop(turn.continues, None) if turn.continues is not None else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(turn)
        ending_with[index] = chain
    return chains


def turns_before(turns: Sequence[Turn], turn: Turn) -> list[Turn]:
    """The turns that `turn` continues, the first one first."""
    found: list[Turn] = []
    while turn.continues is not None:
        turn = turns[turn.continues]
        found.append(turn)
    return found[::-1]


def sample_of(chain: Sequence[Turn], before: Sequence[Turn] = ()) -> Sample:
    """The sample of a chain, whose turns each continue the one before; `before` are those that the first continues.

    Example: turns (prompt P0 P1, output A0) and (prompt P0 P1 A0 O0, output B0) become prompt P0 P1, completion
    A0 O0 B0, loss mask 1 0 1.
    """
    ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    cache_versions: list[int] = []
    support: list[list[int]] = []
    num_prompt_tokens = len(chain[0].prompt_ids)
    root = [*before, *chain][0]
    told = root.teacher_prompt_ids
    if told is not None:
        told = told + chain[0].prompt_ids[len(root.prompt_ids) :]
    for turn in chain:
        held = num_prompt_tokens + len(ids)
        assert turn.prompt_ids[num_prompt_tokens:held] == ids, "a turn that continues another holds its tokens"
        observed = turn.prompt_ids[held:]
        ids += observed + turn.output_ids
        loss_mask += [False] * len(observed) + [True] * len(turn.output_ids)
        logprobs += [0.0] * len(observed) + turn.logprobs
        versions += [NO_VERSION] * len(observed) + turn.versions
        cache_versions += [NO_VERSION] * len(observed) + turn.cache_versions
        support += [[]] * len(observed) + (turn.support or [[]] * len(turn.output_ids))
    return Sample(
        prompt_ids=np.array(chain[0].prompt_ids, dtype=np.int32),
        completion_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.bool_),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        cache_versions=np.array(cache_versions, dtype=np.int32),
        support=support_of(support),
        experts=experts_of([*before, *chain], num_prompt_tokens + len(ids)),
        images=chain[-1].images,
        teacher_prompt_ids=None if told is None else np.array(told, dtype=np.int32),
    )


def as_told(sample: Sample) -> Sample:
    """What a teacher reads: the same completion, after the prompt that is meant for the teacher."""
    if sample.teacher_prompt_ids is None:
        return sample
    # The routes are those of the policy after its own prompt.
    return replace(sample, prompt_ids=sample.teacher_prompt_ids, teacher_prompt_ids=None, experts=None)


def sample_of_reply(request: GenerateRequest, reply: Completion) -> Sample:
    """A reply by itself, without the experts that the engine chose for it."""
    return sample_of([replace(turn_of(request, reply), experts=None)])


def turn_of(request: GenerateRequest, reply: Completion) -> Turn:
    """A reply to a request, which continues no earlier one."""
    return Turn(
        prompt_ids=request.prompt_ids,
        output_ids=reply.ids,
        logprobs=reply.logprobs,
        versions=reply.versions,
        cache_versions=reply.cache_versions,
        finish_reason=reply.finish_reason,
        support=reply.support,
        experts=reply.experts,
        first_routed=request.num_routed,
        images=request.images,
    )


def experts_of(turns: Sequence[Turn], num_tokens: int) -> ExpertArray | None:
    """The routes of all tokens of the last of `turns`, which each continue the one before; None if none is known.

    A token keeps the route of the first turn that has it, because its log-probability, if it was sampled, is of that
    route. Tokens of which no turn has the route, such as the last one, have `no_route`.
    """
    routed = [(turn.first_routed, turn.experts) for turn in turns if turn.experts is not None]
    if not routed:
        return None
    first = routed[0][1]
    joined = np.full((num_tokens, *first.shape[1:]), no_route(first), first.dtype)
    num_known = 0
    for start, experts in routed:
        new = experts[max(0, num_known - start) :]
        num_known = max(num_known, start + len(experts))
        joined[num_known - len(new) : num_known] = new
    return joined


def support_of(places: Sequence[Sequence[int]]) -> Support | None:
    """From the tokens at each place, [] where it was all of them; None if it was everywhere."""
    if not any(places):
        return None
    return Support(
        ids=np.array([token for place in places for token in place], dtype=np.int32),
        counts=np.array([len(place) for place in places], dtype=np.int32),
    )
