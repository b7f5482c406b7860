"""From groups of episodes to the rows that go through the model. Pure NumPy.

    groups (metadata) -> plan_micro_batches -> for each rank, micro-batches of pieces     (which episodes, where) pieces
    (payloads) -> pack               -> one flat row, shared tokens once           (which tokens, how they attend)

Rules: a plan depends on the metadata alone, so every rank computes the same plan. Every episode is in exactly one
micro-batch, and all ranks have equally many micro-batches. Packing never changes a gradient: a token attends to its
prompt and its own completion only, however the samples are cut into rows.

Example: groups of 3 and 1 episodes on two ranks may become rank 0: [group 0, episodes 0 and 1], rank 1: [group 0,
episode 2; group 1, episode 0]. `PackedBatch` shows a row.

Shape letters: T tokens of the row, N loss tokens, S prompt segments, C completion segments.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.runtime.balance import karmarkar_karp
from rlflow.types import (
    BoolArray,
    EpisodeSummary,
    ExpertArray,
    FloatArray,
    ImageSpan,
    IntArray,
    Pictures,
    Sample,
    TrainSample,
    no_route,
)

IndexArray = NDArray[np.int64]

_ATTENTION_TOKENS = 12288
"""The length s at which attention costs as much as the linear layers: a layer costs 24 h^2 s + 4 h s^2, with h =
2048."""
_BALANCED = 1.1
"""A plan is balanced when no rank costs more than this many times the mean."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchPiece:
    """Episodes of one group that go through the model together and share their prompt."""

    group: int
    """Index into the groups that were planned."""
    episodes: tuple[int, ...]
    """Indices into the group's episodes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MicroBatchPlan:
    """What one rank sends through the model at once. It is empty if the rank only keeps step with the others."""

    pieces: tuple[BatchPiece, ...] = ()


@dataclass(kw_only=True, slots=True, frozen=True)
class Conversation:
    """A conversation that is scored by its last token, cut where the conversations of its task begin to differ."""

    prompt_ids: IntArray  # [P], at least one token
    reply_ids: IntArray  # [R]


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedBatch:
    """One flat row of tokens without padding. A segment is contiguous; a completion comes after its prompt.

    Example: prompt [5 6] with completions [7 8] and [9], every completion token sampled:
        input_ids          [5 6 7]     the last token of a completion predicts nothing and is left out
        position_ids       [0 1 2]
        loss_positions     [1 2 1]     a first completion token is predicted by the prompt's last token
        targets            [7 8 9]
    """

    input_ids: IndexArray  # [T]
    position_ids: IndexArray  # [T]
    prompt_starts: IndexArray  # [S]
    prompt_lengths: IndexArray  # [S]
    completion_starts: IndexArray  # [C]
    completion_lengths: IndexArray  # [C]
    completion_prompts: IndexArray  # [C], the prompt segment that it continues
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
    experts: ExpertArray | None = None  # [T, layers, k], the route that each token is to take; None: none has one
    images: tuple[ImageSpan, ...] = ()  # by their place in the row
    pictures: Pictures = field(default_factory=dict)  # the files of `images`

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets)


def plan_micro_batches(
    groups: Sequence[Sequence[EpisodeSummary]], num_ranks: int, micro_batch_tokens: int
) -> list[list[MicroBatchPlan]]:
    """Rank -> its micro-batches, in order; every episode is in exactly one, and all ranks have equally many.

    A group stays together unless it exceeds `micro_batch_tokens`, or the ranks could not be balanced otherwise. An
    episode that exceeds `micro_batch_tokens` by itself gets a micro-batch of its own.
    """
    if num_ranks < 1 or micro_batch_tokens < 1:
        raise ValueError(
            f"num_ranks and micro_batch_tokens must be at least 1; got {num_ranks} and {micro_batch_tokens}"
        )
    pieces = [
        piece for index, episodes in enumerate(groups) for piece in _cut_to_size(index, episodes, micro_batch_tokens)
    ]
    ranks = [_fill(pieces, groups, micro_batch_tokens) for pieces in _balance(pieces, groups, num_ranks)]
    longest = max(len(plans) for plans in ranks)
    return [plans + [MicroBatchPlan()] * (longest - len(plans)) for plans in ranks]


def in_order_of_training(plans: Sequence[MicroBatchPlan]) -> list[tuple[int, int]]:
    """The (group, episode) pairs of a rank's micro-batches, one after the other."""
    return [(piece.group, index) for plan in plans for piece in plan.pieces for index in piece.episodes]


def _cut_to_size(group: int, episodes: Sequence[EpisodeSummary], max_tokens: int) -> list[BatchPiece]:
    """Runs of the group's episodes, each at most `max_tokens` long unless a single episode exceeds it."""
    pieces: list[BatchPiece] = []
    run: list[int] = []
    for index in range(len(episodes)):
        if run and _num_tokens([episodes[i] for i in (*run, index)]) > max_tokens:
            pieces.append(BatchPiece(group=group, episodes=tuple(run)))
            run = []
        run.append(index)
    if run:
        pieces.append(BatchPiece(group=group, episodes=tuple(run)))
    return pieces


def _balance(
    pieces: Sequence[BatchPiece], groups: Sequence[Sequence[EpisodeSummary]], num_ranks: int
) -> list[list[BatchPiece]]:
    """Share the pieces out by cost; halve the largest piece of the costliest rank until balanced."""
    costs = {piece: _cost(_select(piece, groups)) for piece in pieces}
    while True:
        ordered = sorted(costs, key=lambda piece: (piece.group, piece.episodes))
        shares = karmarkar_karp([costs[piece] for piece in ordered], num_ranks)
        ranks = [[ordered[index] for index in share] for share in shares]
        costliest = ranks[0]
        load = sum(costs[piece] for piece in costliest)
        divisible = [piece for piece in costliest if len(piece.episodes) > 1]
        if not divisible or load <= _BALANCED * sum(costs.values()) / num_ranks:
            return ranks
        largest = max(divisible, key=lambda piece: costs[piece])
        half = len(largest.episodes) // 2
        del costs[largest]
        for episodes in (largest.episodes[:half], largest.episodes[half:]):
            piece = BatchPiece(group=largest.group, episodes=episodes)
            costs[piece] = _cost(_select(piece, groups))


def _fill(
    pieces: Sequence[BatchPiece], groups: Sequence[Sequence[EpisodeSummary]], max_tokens: int
) -> list[MicroBatchPlan]:
    """Pack pieces into micro-batches: first fit, longest first."""
    lengths = {piece: _num_tokens(_select(piece, groups)) for piece in pieces}
    bins: list[list[BatchPiece]] = []
    rooms: list[int] = []
    for piece in sorted(pieces, key=lambda piece: (-lengths[piece], piece.group, piece.episodes)):
        fitting = [index for index, room in enumerate(rooms) if lengths[piece] <= room]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            rooms.append(max_tokens)
        bins[fitting[0]].append(piece)
        rooms[fitting[0]] -= lengths[piece]
    return [MicroBatchPlan(pieces=tuple(sorted(found, key=lambda p: (p.group, p.episodes)))) for found in bins]


def _select(piece: BatchPiece, groups: Sequence[Sequence[EpisodeSummary]]) -> list[EpisodeSummary]:
    return [groups[piece.group][index] for index in piece.episodes]


def _num_tokens(episodes: Iterable[EpisodeSummary]) -> int:
    """The number of tokens of episodes that share their prompt."""
    prompt = completions = 0
    for episode in episodes:
        prompt = max(prompt, episode.num_prompt_tokens)
        completions += episode.num_completion_tokens
    return prompt + completions


def _cost(episodes: Sequence[EpisodeSummary]) -> float:
    """Relative cost of a piece: its tokens, plus the keys of every query (the shared prompt's and its own)."""
    prompt = max(episode.num_prompt_tokens for episode in episodes)
    pairs = prompt**2
    for episode in episodes:
        pairs += episode.num_completion_tokens * (2 * prompt + episode.num_completion_tokens)
    return _num_tokens(episodes) + pairs / _ATTENTION_TOKENS


def pack(groups: Sequence[Sequence[TrainSample]], share_prompts: bool = True) -> PackedBatch:
    """Lay all samples out in one row.

    With `share_prompts`, samples with equal prompts share one prompt segment, and among them, samples with equal
    completions share one completion segment: a policy that is sure of its answer often repeats it. Equal are tokens and
    the images that they stand for. A shared prompt has the routes of the first sample that has any; completions with
    different routes are not shared.

    The loss tokens come in the order of the samples. Tokens that no loss token depends on are left out: samples without
    loss tokens, and a completion from its last loss token on. A row without loss tokens holds one token, so that an
    idle rank can still go through forward and backward; its gradient is zero.

    Raises ValueError for an empty prompt, and if only some of the samples have log-probabilities of a frozen model.
    """
    row = _Row()
    prompts: dict[tuple[bytes, tuple[ImageSpan, ...]], int] = {}
    completions: dict[tuple[int, bytes, bytes, tuple[ImageSpan, ...]], int] = {}
    samples = [sample for group in groups for sample in group if sample.sample.loss_mask.any()]
    for sample in samples:
        before, after = _images_of(sample.sample)
        key = sample.sample.prompt_ids.tobytes(), before
        prompt = prompts.get(key) if share_prompts else None
        if prompt is None:
            prompt = prompts[key] = row.add_prompt(sample.sample.prompt_ids, before)
        loss_indices = np.flatnonzero(sample.sample.loss_mask)
        ids = sample.sample.completion_ids[: loss_indices[-1]]
        experts = sample.sample.experts
        routes = None if experts is None else experts[len(sample.sample.prompt_ids) :][: len(ids)]
        seen = tuple(image for image in after if image.start < len(ids))
        own = (prompt, ids.tobytes(), b"" if routes is None else routes.tobytes(), seen)
        start = completions.get(own) if share_prompts else None
        if start is None:
            start = completions[own] = row.add_completion(prompt, ids, seen)
        if experts is not None and routes is not None:
            row.add_routes(prompt, experts, start, routes)
        row.add_loss(prompt, start, loss_indices)
    if not samples:
        row.add_prompt(np.zeros(1, np.int64))
    return row.packed(samples)


def runs_of(samples: Sequence[TrainSample], max_tokens: int, *, padded: bool) -> list[list[TrainSample]]:
    """Runs of samples that have at most `max_tokens` tokens, each with a prompt of its own; a longer sample goes alone.

    If they are `padded`, a run's samples count as long as its longest.
    """
    runs: list[list[TrainSample]] = []
    longest = total = 0
    for sample in samples:
        tokens = sample.sample.num_tokens
        longest, total = max(longest, tokens), total + tokens
        if not runs or (longest * (len(runs[-1]) + 1) if padded else total) > max_tokens:
            runs.append([])
            longest = total = tokens
        runs[-1].append(sample)
    return runs


def row_tokens(conversations: Sequence[Conversation]) -> int:
    """The most tokens that the packed row of these conversations can have."""
    prompts = {conversation.prompt_ids.tobytes(): len(conversation.prompt_ids) for conversation in conversations}
    return sum(prompts.values()) + sum(len(conversation.reply_ids) for conversation in conversations)


def pack_conversations(conversations: Sequence[Conversation]) -> PackedBatch:
    """One row; its loss positions [N] are the last token of each conversation, in order."""
    samples: list[TrainSample] = []
    for conversation in conversations:
        # One loss token behind the conversation, because the state of the last token predicts it.
        length = len(conversation.reply_ids) + 1
        sample = Sample(
            prompt_ids=conversation.prompt_ids,
            completion_ids=np.append(conversation.reply_ids, np.int32(0)),
            loss_mask=np.arange(length) == length - 1,
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            cache_versions=np.zeros(length, np.int32),
        )
        samples.append(TrainSample(sample=sample, advantage=0.0))
    return pack([samples])


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


class _Row:
    """A row that grows."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._input_ids: list[NDArray[np.integer]] = []
        self._position_ids: list[IndexArray] = []
        self._prompts: list[tuple[int, int]] = []  # start, length
        self._completions: list[tuple[int, int, int]] = []  # start, length, prompt segment
        self._loss_positions: list[IndexArray] = []
        self._routes: dict[int, ExpertArray] = {}  # by the first token of the segment
        self._images: list[ImageSpan] = []

    def add_prompt(self, ids: NDArray[np.integer], images: Sequence[ImageSpan] = ()) -> int:
        """Append a prompt segment and return its index."""
        if not len(ids):
            raise ValueError("a sample's prompt must have at least one token; got none")
        self._prompts.append((self._append(ids, 0, images), len(ids)))
        return len(self._prompts) - 1

    def add_completion(self, prompt: int, ids: NDArray[np.integer], images: Sequence[ImageSpan] = ()) -> int:
        """Append a completion segment, unless it is empty, and return where it starts."""
        start = self._append(ids, self._prompts[prompt][1], images)
        if len(ids):
            self._completions.append((start, len(ids), prompt))
        return start

    def add_loss(self, prompt: int, start: int, loss_indices: IndexArray) -> None:
        """Append the loss tokens at these indices of the completion that starts at `start`."""
        last_of_prompt = sum(self._prompts[prompt]) - 1
        self._loss_positions.append(np.where(loss_indices == 0, last_of_prompt, start + loss_indices - 1))

    def add_routes(self, prompt: int, experts: ExpertArray, start: int, routes: ExpertArray) -> None:
        """Routes of a sample, which begins with the prompt, and of its completion at `start`. The first ones stay."""
        first, length = self._prompts[prompt]
        self._routes.setdefault(first, experts[:length])
        if len(routes):
            self._routes.setdefault(start, routes)

    def _experts(self) -> ExpertArray | None:
        if not self._routes:
            return None
        like = next(iter(self._routes.values()))
        experts = np.full((self._num_tokens, *like.shape[1:]), no_route(like), like.dtype)
        for start, routes in self._routes.items():
            experts[start : start + len(routes)] = routes
        return experts

    def packed(self, samples: Sequence[TrainSample]) -> PackedBatch:
        prompts = np.array(self._prompts, np.int64).reshape(-1, 2)
        completions = np.array(self._completions, np.int64).reshape(-1, 3)
        masks = [sample.sample.loss_mask for sample in samples]
        targets = [sample.critic for sample in samples if sample.critic is not None]
        assert len(targets) in (0, len(samples)), "all samples of a row have targets for a critic, or none has"

        first = np.cumsum([0, *(mask.sum() for mask in masks)])
        supports = [_support(one.sample, start) for one, start in zip(samples, first, strict=False)]

        def of_loss(rows: Iterable[NDArray[Any]]) -> list[NDArray[Any]]:
            return [row[mask] for row, mask in zip(rows, masks, strict=True)]

        versions = _join(of_loss(one.sample.versions for one in samples))
        advantages = (np.broadcast_to(one.advantage, mask.shape) for one, mask in zip(samples, masks, strict=True))
        return PackedBatch(
            input_ids=_join(self._input_ids),
            position_ids=_join(self._position_ids),
            prompt_starts=prompts[:, 0],
            prompt_lengths=prompts[:, 1],
            completion_starts=completions[:, 0],
            completion_lengths=completions[:, 1],
            completion_prompts=completions[:, 2],
            loss_positions=_join(self._loss_positions),
            targets=_join(of_loss(one.sample.completion_ids for one in samples)),
            behaviour_logprobs=_join_floats(of_loss(one.sample.logprobs for one in samples)),
            versions=versions,
            is_on_older_cache=_join(of_loss(one.sample.cache_versions for one in samples)) < versions,
            advantages=_join_floats(of_loss(advantages)),
            frozen_logprobs=_frozen(samples),
            values=_join_floats(of_loss(target.values for target in targets)) if targets else None,
            returns=_join_floats(of_loss(target.returns for target in targets)) if targets else None,
            sequence_of=np.repeat(np.arange(len(samples)), [int(mask.sum()) for mask in masks]),
            num_sequences=len(samples),
            support_ids=_join(ids for ids, _ in supports),
            support_of=_join(of for _, of in supports),
            experts=self._experts(),
            images=tuple(self._images),
            pictures=dict(item for one in samples for item in one.pictures.items()),
        )

    def _append(self, ids: NDArray[np.integer], position: int, images: Sequence[ImageSpan]) -> int:
        start = self._num_tokens
        self._images += [replace(image, start=start + image.start) for image in images]
        self._input_ids.append(ids)
        self._position_ids.append(np.arange(position, position + len(ids)))
        self._num_tokens += len(ids)
        return start


def _images_of(sample: Sample) -> tuple[tuple[ImageSpan, ...], tuple[ImageSpan, ...]]:
    """Those in the prompt, and those in the completion by their place in it."""
    length = len(sample.prompt_ids)
    before = tuple(image for image in sample.images if image.start < length)
    after = (replace(image, start=image.start - length) for image in sample.images if image.start >= length)
    return before, tuple(after)


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
    places = np.repeat(np.arange(len(sample.loss_mask)), sample.support.counts)
    is_loss = sample.loss_mask[places]
    return sample.support.ids[is_loss], first + np.cumsum(sample.loss_mask)[places[is_loss]] - 1


def _join(parts: Iterable[NDArray[np.integer]]) -> IndexArray:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _join_floats(parts: Sequence[NDArray[np.floating]]) -> FloatArray:
    return np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32)
