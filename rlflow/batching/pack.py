"""From the samples of a micro-batch to the row that goes through the model. Pure NumPy.

    pieces (payloads) -> pack -> one flat row, shared tokens once     (which tokens, how they attend)

Packing never changes a gradient: a token attends to the tokens before it in its own samples only, however the samples
are cut into rows. `PackedBatch` shows a row.

Shape letters: T tokens of the row, N loss tokens, S segments.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batching.routes import no_route
from rlflow.batching.tree import Segment, Tree
from rlflow.types import (
    BoolArray,
    ExpertArray,
    FloatArray,
    ImageSpan,
    IntArray,
    Pictures,
    Sample,
    Support,
    TrainSample,
)

IndexArray = NDArray[np.int64]


@dataclass(kw_only=True, slots=True, frozen=True)
class Conversation:
    """A conversation that is scored by its last token, cut where the conversations of its task begin to differ."""

    prompt_ids: IntArray  # [P], at least one token
    reply_ids: IntArray  # [R]


@dataclass(kw_only=True, slots=True, frozen=True)
class LikelyTokens:
    """What a teacher finds likeliest in the places of a row's targets; see types.Likely."""

    ids: IndexArray  # [K]
    of: IndexArray  # [K], index of the target
    logprobs: FloatArray  # [K]


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedBatch:
    """One flat row of tokens without padding: a tree of segments, each contiguous and behind all that it continues.

    A token sees those before it in its segment and all of the segments that it continues. The order is depth first, so
    that everything which continues a segment follows it without a gap.

    Example: prompt [5 6] with completions [7 8 2], [7 9 3] and [4], every completion token sampled:
        input_ids          [5 6 7 8 9]      the last token of a completion predicts nothing and is left out
        position_ids       [0 1 2 3 3]
        segment_starts     [0 3 4]
        segment_lengths    [3 1 1]
        segment_parents    [-1 0 0]
        loss_positions     [1 2 3 1 2 4 1]  7 has an entry for each of two samples
        targets            [7 8 2 7 9 3 4]
    """

    input_ids: IndexArray  # [T]
    position_ids: IndexArray  # [T], how many tokens come before each in its samples
    segment_starts: IndexArray  # [S], ascending
    segment_lengths: IndexArray  # [S]
    segment_parents: IndexArray  # [S], the segment that each continues; -1 for those that begin a sample
    loss_positions: IndexArray  # [N], whose hidden state predicts the target
    targets: IndexArray  # [N]
    behaviour_logprobs: FloatArray  # [N]
    versions: IndexArray  # [N], that sampled the target
    is_on_older_cache: BoolArray  # [N], whether an older version computed some of the target's context
    advantages: FloatArray  # [N]
    frozen_logprobs: Mapping[str, FloatArray]  # [N], by what a frozen model is to the row; see roles
    values: FloatArray | None  # [N], the critic's before the update; None unless the critic learns
    returns: FloatArray | None  # [N]
    sequence_of: IndexArray  # [N], the target's sample, counting samples with loss tokens only
    num_sequences: int
    support_ids: IndexArray  # [K], the tokens that targets were chosen among; see types.Support
    support_of: IndexArray  # [K], index of the target; a target that has none was chosen among all tokens
    likely: LikelyTokens | None = None  # None: no teacher said
    experts: ExpertArray | None = None  # [T, layers, k], the route that each token is to take; None: none has one
    images: tuple[ImageSpan, ...] = ()  # by their place in the row
    pictures: Pictures = field(default_factory=dict)  # the files of `images`

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets)

    def path(self, segment: int) -> IndexArray:
        """The tokens that the last one of a segment sees, in their order."""
        parts: list[IndexArray] = []
        while segment >= 0:
            start = self.segment_starts[segment]
            parts.append(np.arange(start, start + self.segment_lengths[segment]))
            segment = int(self.segment_parents[segment])
        return np.concatenate(parts[::-1])


def pack(groups: Sequence[Sequence[TrainSample]], share_prefixes: bool = True) -> PackedBatch:
    """Lay all samples out in one row.

    With `share_prefixes`, what samples begin with in common is computed once, as `tree` says: the prompt of a group,
    turns before the place where episodes part, completions that a policy repeats. A shared token has the route of the
    first sample, and an entry among the loss tokens for each sample that learns from it.

    The loss tokens come in the order of the samples. Tokens that no loss token depends on are left out: samples without
    loss tokens, and a completion from its last loss token on. A row without loss tokens holds one token, so that an
    idle rank can still go through forward and backward; its gradient is zero.

    Raises ValueError for an empty prompt, and if only some of the samples have log-probabilities of a frozen model.
    """
    samples = [sample for group in groups for sample in group if sample.sample.loss_mask.any()]
    tree, ends = Tree(), list[Segment]()
    predictive = [_predictive(one.sample) for one in samples]
    for one, places in zip(samples, predictive, strict=True):
        ends.append(tree.add(one.sample, int(places[-1]) + 1, share=share_prefixes))
    if not samples:
        tree.add(_until(np.zeros(1, np.int32)), 1)
    segments = tree.segments()
    starts = np.array([segment.start for segment in segments])
    lengths = np.array([segment.stop for segment in segments]) - starts
    first = np.cumsum([0, *lengths[:-1]])
    row_of = dict(zip(segments, first.tolist(), strict=True))
    index_of = {segment: index for index, segment in enumerate(segments)} | {None: -1}
    return PackedBatch(
        input_ids=_join(segment.ids for segment in segments),
        position_ids=np.arange(tree.num_tokens) - np.repeat(first - starts, lengths),
        segment_starts=first,
        segment_lengths=lengths,
        segment_parents=np.array([index_of[segment.parent] for segment in segments]),
        loss_positions=_in_row(predictive, ends, row_of),
        experts=_experts(row_of, tree.num_tokens),
        images=tuple(
            replace(image, start=start + image.start - segment.start)
            for segment, start in row_of.items()
            for image in segment.images
        ),
        pictures=dict(item for one in samples for item in one.pictures.items()),
        **_of_loss(samples),
    )


def row_tokens(conversations: Sequence[Conversation]) -> int:
    """The most tokens that the packed row of these conversations can have."""
    prompts = {conversation.prompt_ids.tobytes(): len(conversation.prompt_ids) for conversation in conversations}
    return sum(prompts.values()) + sum(len(conversation.reply_ids) for conversation in conversations)


def pack_conversations(conversations: Sequence[Conversation]) -> PackedBatch:
    """One row; its loss positions [N] are the last token of each conversation, in order."""
    ids = (np.concatenate([conversation.prompt_ids, conversation.reply_ids]) for conversation in conversations)
    return pack([[TrainSample(sample=_until(each), advantage=0.0) for each in ids]])


def _until(ids: IntArray) -> Sample:
    """A sample with one loss token behind these, which the state of the last one predicts."""
    zero = np.zeros(1, np.int32)
    return Sample(
        prompt_ids=ids,
        completion_ids=zero,
        loss_mask=np.ones(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        versions=zero,
        cache_versions=zero,
    )


def spread_over_turns(samples: Sequence[Sample], values: Sequence[float]) -> list[FloatArray]:
    """One value for each turn of an episode -> [L] for each of its samples, 0 where there is no loss.

    A turn is a run of loss tokens, because something is always observed between two replies.

    Example: values [1, -2] for a sample with loss mask [1 1 0 1] give [1 1 0 -2].
    """
    spread: list[FloatArray] = []
    first = 0
    for sample in samples:
        mask = sample.loss_mask
        starts = mask & ~np.concatenate([[False], mask[:-1]])
        turn_of = first + np.cumsum(starts) - 1
        row = np.zeros(len(mask), np.float32)
        row[mask] = np.asarray(values, np.float32)[turn_of[mask]]
        spread.append(row)
        first += int(starts.sum())
    assert first == len(values), f"{len(values)} values for {first} turns"
    return spread


def _predictive(sample: Sample) -> IndexArray:
    """The tokens of a sample that predict its loss tokens."""
    return len(sample.prompt_ids) - 1 + np.flatnonzero(sample.loss_mask)


def _in_row(predictive: Sequence[IndexArray], ends: Sequence[Segment], row_of: Mapping[Segment, int]) -> IndexArray:
    """Where these tokens of each sample lie in the row; `ends` are the segments in which the samples end."""
    paths = [(number, segment) for number, end in enumerate(ends) for segment in end.path()]
    starts = np.array([segment.start for _, segment in paths], np.int64)
    rows = np.array([row_of[segment] for _, segment in paths], np.int64)
    # All samples are looked up at once, each in a range of its own.
    ranges = np.array([number for number, _ in paths], np.int64) << 32
    own = np.repeat(np.arange(len(ends)), [len(places) for places in predictive]) << 32
    places = _join(predictive)
    return places + (rows - starts)[np.searchsorted(starts + ranges, places + own, side="right") - 1]


def _experts(row_of: Mapping[Segment, int], num_tokens: int) -> ExpertArray | None:
    routes = [
        (start, segment.prefix.sample.experts[segment.start : segment.stop])
        for segment, start in row_of.items()
        if segment.prefix.sample.experts is not None
    ]
    if not routes:
        return None
    like = routes[0][1]
    experts = np.full((num_tokens, *like.shape[1:]), no_route(like), like.dtype)
    for start, found in routes:
        experts[start : start + len(found)] = found
    return experts


def _of_loss(samples: Sequence[TrainSample]) -> dict[str, Any]:
    """The fields of a row with an entry for each loss token, and what counts these."""
    masks = [sample.sample.loss_mask for sample in samples]
    targets = [sample.critic for sample in samples if sample.critic is not None]
    assert len(targets) in (0, len(samples)), "all samples of a row have targets for a critic, or none has"
    counts = [int(mask.sum()) for mask in masks]
    starts = np.cumsum([0, *counts])
    supports = [_support(one.sample, start) for one, start in zip(samples, starts, strict=False)]

    def of_loss(rows: Iterable[NDArray[Any]]) -> list[NDArray[Any]]:
        return [row[mask] for row, mask in zip(rows, masks, strict=True)]

    versions = _join(of_loss(one.sample.versions for one in samples))
    advantages = (np.broadcast_to(one.advantage, mask.shape) for one, mask in zip(samples, masks, strict=True))
    return {
        "targets": _join(of_loss(one.sample.completion_ids for one in samples)),
        "behaviour_logprobs": _join_floats(of_loss(one.sample.logprobs for one in samples)),
        "versions": versions,
        "is_on_older_cache": _join(of_loss(one.sample.cache_versions for one in samples)) < versions,
        "advantages": _join_floats(of_loss(advantages)),
        "frozen_logprobs": _frozen(samples),
        "values": _join_floats(of_loss(target.values for target in targets)) if targets else None,
        "returns": _join_floats(of_loss(target.returns for target in targets)) if targets else None,
        "sequence_of": np.repeat(np.arange(len(samples)), counts),
        "num_sequences": len(samples),
        "support_ids": _join(ids for ids, _ in supports),
        "support_of": _join(of for _, of in supports),
        "likely": _likely(samples, starts.tolist()),
    }


def _frozen(samples: Sequence[TrainSample]) -> dict[str, FloatArray]:
    found: dict[str, FloatArray] = {}
    for name in sorted({name for one in samples for name in one.frozen_logprobs}):
        rows = [one.frozen_logprobs[name][one.sample.loss_mask] for one in samples if name in one.frozen_logprobs]
        if len(rows) != len(samples):
            raise ValueError(
                f"all samples of a batch have log-probabilities of the {name}, or none has; got {len(rows)} of "
                f"{len(samples)}"
            )
        found[name] = _join_floats(rows)
    return found


def _support(sample: Sample, first: int) -> tuple[IntArray, IndexArray]:
    """ids [K] and, counting the sample's loss tokens from `first`, the token of each [K]."""
    if sample.support is None:
        return np.zeros(0, np.int32), np.zeros(0, np.int64)
    kept, of = _of_loss_tokens(sample.support, sample.loss_mask, first)
    return sample.support.ids[kept], of


def _likely(samples: Sequence[TrainSample], starts: Sequence[int]) -> LikelyTokens | None:
    """`starts`: how many loss tokens come before each sample. Raises ValueError if only some samples have them."""
    found = [(one.likely, one.sample.loss_mask, first) for one, first in zip(samples, starts, strict=False)]
    said = [(likely, *_of_loss_tokens(likely.tokens, mask, first)) for likely, mask, first in found if likely]
    if not said:
        return None
    if len(said) != len(samples):
        raise ValueError(
            f"all samples of a batch have a teacher's likeliest tokens, or none has; got {len(said)} of {len(samples)}"
        )
    return LikelyTokens(
        ids=_join(likely.tokens.ids[kept] for likely, kept, _ in said),
        of=_join(of for *_, of in said),
        logprobs=_join_floats([likely.logprobs[kept] for likely, kept, _ in said]),
    )


def _of_loss_tokens(tokens: Support, mask: BoolArray, first: int) -> tuple[BoolArray, IndexArray]:
    """Which of the ids [K] are those of loss tokens, and, counting loss tokens from `first`, the token of each."""
    places = np.repeat(np.arange(len(mask)), tokens.counts)
    kept = mask[places]
    return kept, first + np.cumsum(mask)[places[kept]] - 1


def _join(parts: Iterable[NDArray[np.integer]]) -> IndexArray:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _join_floats(parts: Sequence[NDArray[np.floating]]) -> FloatArray:
    return np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32)
