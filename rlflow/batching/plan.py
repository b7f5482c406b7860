"""Which rank takes which episodes, and which of them go through the model together. Pure.

    groups (metadata) -> plan_micro_batches -> for each rank, micro-batches of pieces     (which episodes, where)

Rules: a plan depends on the metadata alone, which is all that the driver has. Every episode is in exactly one
micro-batch, and all ranks have equally many micro-batches.

Example: groups of 3 and 1 episodes on two ranks may become rank 0: [group 0, episodes 0 and 1], rank 1: [group 0,
episode 2; group 1, episode 0].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlflow.batching.tree import Tree
from rlflow.runtime.balance import karmarkar_karp
from rlflow.types import EpisodeSummary, TrainSample

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
    """Relative cost of a piece: its tokens, plus the keys of every query. What an episode's samples have behind the
    prompt counts as one completion, which is the most that it can cost."""
    prompt = max(episode.num_prompt_tokens for episode in episodes)
    pairs = prompt**2
    for episode in episodes:
        pairs += episode.num_completion_tokens * (2 * prompt + episode.num_completion_tokens)
    return _num_tokens(episodes) + pairs / _ATTENTION_TOKENS


def packed_runs(samples: Sequence[TrainSample], max_tokens: int) -> list[list[TrainSample]]:
    """Runs of samples that have at most `max_tokens` tokens when packed; a longer sample goes alone."""
    runs: list[list[TrainSample]] = []
    tree = Tree()
    for sample in samples:
        tree.add(sample.sample)
        if not runs or tree.num_tokens > max_tokens:
            runs.append([])
            tree = Tree()
            tree.add(sample.sample)
        runs[-1].append(sample)
    return runs


def runs_of(samples: Sequence[TrainSample], max_tokens: int, *, padded: bool) -> list[list[TrainSample]]:
    """Runs of samples that have at most `max_tokens` tokens when nothing is shared; a longer sample goes alone.

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
