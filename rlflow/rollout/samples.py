"""From the turns of an episode to the samples that are trained on. Pure.

    turns -> chains_of: turns that continue each other -> sample_of: one flat sample for each chain

Rules: each sampled token is in exactly one sample, with loss mask 1; a token that was observed has loss mask 0,
log-probability 0 and versions NO_VERSION. What stands before a token in its sample is what the policy saw.

Example: turns 0, 1 (continues 0) and 2 (continues 0 too) are two samples: [0, 1] and [2].
"""

from collections.abc import Sequence

import numpy as np

from rlflow.types import Sample, Support, Turn

NO_VERSION = -1


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


def sample_of(chain: Sequence[Turn]) -> Sample:
    """The sample of a chain, whose turns each continue the one before.

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
    )


def support_of(places: Sequence[Sequence[int]]) -> Support | None:
    """From the tokens at each place, [] where it was all of them; None if it was everywhere."""
    if not any(places):
        return None
    return Support(
        ids=np.array([token for place in places for token in place], dtype=np.int32),
        counts=np.array([len(place) for place in places], dtype=np.int32),
    )
