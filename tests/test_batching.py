"""Plans and packed rows, against literal layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batching.pack import PackedBatch, pack, spread_over_turns
from rlflow.batching.plan import BatchPiece, MicroBatchPlan, packed_runs, plan_micro_batches
from rlflow.batching.shares import Share, share_of, shares
from rlflow.batching.tree import num_distinct_tokens
from rlflow.roles import REFERENCE
from rlflow.types import EpisodeEnd, EpisodeSummary, ImageSpan, ReadyGroup, Sample, TrainSample


def episode(prompt: int, completion: int) -> EpisodeSummary:
    return EpisodeSummary(
        end=EpisodeEnd.COMPLETED,
        reward=1.0,
        num_prompt_tokens=prompt,
        num_completion_tokens=completion,
        num_loss_tokens=completion,
        oldest_version=0,
        newest_version=0,
    )


def train_sample(
    prompt: list[int], completion: list[int], mask: list[int], advantage: float, reference: list[float] | None = None
) -> TrainSample:
    sample = Sample(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        loss_mask=np.array(mask, np.bool_),
        logprobs=np.array([-0.5 * bit * (index + 1) for index, bit in enumerate(mask)], np.float32),
        versions=np.array([0 if bit else -1 for bit in mask], np.int32),
        cache_versions=np.array([0 if bit else -1 for bit in mask], np.int32),
    )
    frozen = {} if reference is None else {REFERENCE: np.array(reference, np.float32)}
    return TrainSample(sample=sample, advantage=advantage, frozen_logprobs=frozen)


def plan(*pieces: tuple[int, tuple[int, ...]]) -> MicroBatchPlan:
    return MicroBatchPlan(pieces=tuple(BatchPiece(group=group, episodes=episodes) for group, episodes in pieces))


def test_a_token_whose_context_an_older_version_computed_is_marked() -> None:
    one = train_sample([1], [2, 3, 4, 5], [1, 1, 0, 1], 1.0)
    versions, cache_versions = np.array([3, 4, -1, 4], np.int32), np.array([3, 3, -1, 4], np.int32)
    packed = pack([[replace(one, sample=replace(one.sample, versions=versions, cache_versions=cache_versions))]])
    assert packed.versions.tolist() == [3, 4, 4]
    assert packed.is_on_older_cache.tolist() == [False, True, False]


def test_plan_keeps_groups_whole_and_fills_micro_batches() -> None:
    groups = [[episode(10, 5)] * 2, [episode(10, 15)] * 2, [episode(10, 10)] * 2]  # 20, 40 and 30 tokens
    assert plan_micro_batches(groups, num_ranks=1, micro_batch_tokens=60) == [
        [plan((0, (0, 1)), (1, (0, 1))), plan((2, (0, 1)))]
    ]


def test_plan_cuts_a_group_that_exceeds_the_token_budget() -> None:
    # The prompt counts once in each piece: 10 + 2 x 20 fits into 50, 10 + 3 x 20 does not.
    found = plan_micro_batches([[episode(10, 20)] * 5], num_ranks=1, micro_batch_tokens=50)
    assert found == [[plan((0, (0, 1))), plan((0, (2, 3))), plan((0, (4,)))]]


def test_plan_cuts_groups_when_there_are_fewer_than_ranks() -> None:
    found = plan_micro_batches([[episode(4, 8)] * 4], num_ranks=2, micro_batch_tokens=100)
    assert found == [[plan((0, (0, 1)))], [plan((0, (2, 3)))]]


def test_plan_balances_ranks_by_cost() -> None:
    groups = [[episode(1, length)] * 2 for length in (60, 30, 20, 10)]
    found = plan_micro_batches(groups, num_ranks=2, micro_batch_tokens=1000)
    assert found == [[plan((1, (0, 1)), (2, (0, 1)), (3, (0, 1)))], [plan((0, (0, 1)))]]


def test_plan_gives_every_rank_equally_many_micro_batches() -> None:
    found = plan_micro_batches([[episode(10, 90)], [episode(10, 10)]], num_ranks=3, micro_batch_tokens=100)
    assert found == [[plan((0, (0,)))], [plan((1, (0,)))], [MicroBatchPlan()]]


def test_plan_lets_an_oversized_episode_go_alone() -> None:
    found = plan_micro_batches([[episode(10, 10), episode(10, 500)]], num_ranks=1, micro_batch_tokens=100)
    assert found == [[plan((0, (1,))), plan((0, (0,)))]]


def test_plan_of_nothing_is_empty() -> None:
    assert plan_micro_batches([], num_ranks=2, micro_batch_tokens=10) == [[], []]


def test_plan_rejects_no_ranks() -> None:
    with pytest.raises(ValueError, match="num_ranks and micro_batch_tokens must be at least 1; got 0 and 10"):
        plan_micro_batches([], num_ranks=0, micro_batch_tokens=10)


def test_runs_of_packed_samples_count_what_they_share_once() -> None:
    samples = [train_sample([1, 2, 3], completion, [1] * len(completion), 1.0) for completion in ([4, 5], [4, 6], [7])]
    samples.append(train_sample([8] * 9, [9], [1], 1.0))
    assert num_distinct_tokens([one.sample for one in samples[:3]]) == 7
    assert packed_runs(samples, 7) == [samples[:3], samples[3:]]
    assert packed_runs(samples, 6) == [samples[:2], samples[2:3], samples[3:]]
    assert packed_runs([], 6) == []


GROUPS = st.lists(
    st.integers(1, 60).flatmap(
        lambda prompt: st.lists(st.integers(1, 80).map(lambda length: episode(prompt, length)), min_size=1, max_size=6)
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(groups=GROUPS, num_ranks=st.integers(1, 5), micro_batch_tokens=st.integers(140, 400))
def test_plan_has_each_episode_once_within_the_budget(
    groups: list[list[EpisodeSummary]], num_ranks: int, micro_batch_tokens: int
) -> None:
    ranks = plan_micro_batches(groups, num_ranks, micro_batch_tokens)
    assert len(ranks) == num_ranks
    assert all(len(first) == len(second) for first, second in pairwise(ranks))
    pieces = [piece for plans in ranks for one in plans for piece in one.pieces]
    placed = sorted((piece.group, index) for piece in pieces for index in piece.episodes)
    assert placed == [(group, index) for group, episodes in enumerate(groups) for index in range(len(episodes))]
    for one in (one for plans in ranks for one in plans):
        tokens = sum(
            groups[piece.group][0].num_prompt_tokens
            + sum(groups[piece.group][index].num_completion_tokens for index in piece.episodes)
            for piece in one.pieces
        )
        assert tokens <= micro_batch_tokens


SAMPLES = [
    [
        train_sample([5, 6], [7, 8, 2], [1, 1, 1], advantage=1.0),
        train_sample([5, 6], [9], [1], advantage=-1.0),
    ],
    # An observation (4) between two replies, and one after the last loss token.
    [train_sample([3], [7, 4, 8, 4], [1, 0, 1, 0], advantage=0.5)],
]


def segments_of(packed: PackedBatch) -> list[tuple[int, int, int]]:
    """Start, length and parent of each."""
    table = (packed.segment_starts, packed.segment_lengths, packed.segment_parents)
    return list(zip(*(column.tolist() for column in table), strict=True))


def test_pack_shares_what_samples_begin_with() -> None:
    packed = pack(
        [
            [
                train_sample([5, 6], [7, 8, 2], [1, 1, 1], advantage=1.0),
                train_sample([5, 6], [7, 9, 3], [1, 1, 1], advantage=-1.0),
                train_sample([5, 6], [4], [1], advantage=2.0),
            ],
            [train_sample([3], [7, 4, 8, 4], [1, 0, 1, 0], advantage=0.5)],
        ]
    )
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 3, 7, 4]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 3, 0, 1, 2]
    assert segments_of(packed) == [(0, 3, -1), (3, 1, 0), (4, 1, 0), (5, 3, -1)]
    assert packed.loss_positions.tolist() == [1, 2, 3, 1, 2, 4, 1, 5, 7]
    assert packed.targets.tolist() == [7, 8, 2, 7, 9, 3, 4, 7, 8]
    assert packed.behaviour_logprobs.tolist() == [-0.5, -1.0, -1.5, -0.5, -1.0, -1.5, -0.5, -0.5, -1.5]
    assert packed.advantages.tolist() == [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 2.0, 0.5, 0.5]
    assert packed.frozen_logprobs == {}
    assert packed.num_loss_tokens == 9


def test_pack_shares_the_turns_before_a_fork() -> None:
    # The first reply [7 8] had a thought, 7, which the template leaves out once a second question, 4, has come.
    first, second = train_sample([5, 6], [7, 8], [1, 1], 1.0), train_sample([5, 6, 8, 4], [9, 2], [1, 1], 1.0)
    branch = train_sample([5, 6, 7, 8, 3], [9, 2], [1, 1], 1.0)
    packed = pack([[first, second, branch]])
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 3, 9, 8, 4, 9]
    assert segments_of(packed) == [(0, 2, -1), (2, 1, 0), (3, 3, 1), (6, 3, 0)]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4]
    assert packed.loss_positions.tolist() == [1, 2, 7, 8, 4, 5]


def test_pack_cuts_a_segment_wherever_samples_part() -> None:
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 7], [1, 2, 3, 4, 8], [9]]
    packed = pack([[train_sample(ids, [0], [1], 1.0) for ids in sequences]])
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5, 8, 6, 7, 9]
    assert packed.segment_lengths.tolist() == [1, 2, 1, 1, 1, 1, 1, 1]
    assert packed.segment_parents.tolist() == [-1, 0, 1, 2, 2, 1, 0, -1]
    assert packed.loss_positions.tolist() == [4, 6, 7, 5, 8]
    assert [packed.path(segment).tolist() for segment in (3, 5, 7)] == [[0, 1, 2, 3, 4], [0, 1, 2, 6], [8]]


def test_a_picture_is_part_of_what_is_equal() -> None:
    def seen(key: str, start: int) -> TrainSample:
        one = train_sample([1, 90, 90, 2], [90, 90, 3], [0, 0, 1], 1.0)
        return replace(one, sample=replace(one.sample, images=(ImageSpan(key=key, start=start, num_tokens=2),)))

    packed = pack([[seen("a", 1), seen("b", 1), seen("a", 4), seen("a", 1)]])
    assert segments_of(packed) == [(0, 1, -1), (1, 5, 0), (6, 5, 0), (11, 5, 0)]
    assert [(image.key, image.start) for image in packed.images] == [("a", 1), ("b", 6), ("a", 14)]


def test_a_picture_is_shared_whole_or_not() -> None:
    def routed(last: int) -> TrainSample:
        one = train_sample([1, 2], [3, 90, 90, 90, 5], [0, 0, 0, 0, 1], 1.0)
        experts = np.array([0, 0, 0, 0, 0, last, 0], np.uint8)[:, None, None]  # within the image
        images = (ImageSpan(key="a", start=3, num_tokens=3),)
        return replace(one, sample=replace(one.sample, images=images, experts=experts))

    packed = pack([[routed(0), routed(1)]])
    assert segments_of(packed) == [(0, 3, -1), (3, 3, 0), (6, 3, 0)]
    assert [(image.key, image.start) for image in packed.images] == [("a", 3), ("a", 6)]


def test_completions_with_other_routes_are_not_shared() -> None:
    def routed(*experts: int) -> TrainSample:
        one = train_sample([1, 2], [3, 4, 5], [1, 1, 1], 1.0)
        return replace(one, sample=replace(one.sample, experts=np.array(experts, np.uint8)[:, None, None]))

    packed = pack([[routed(0, 1, 2, 3, 9), routed(7, 7, 2, 0, 9), routed(7, 7, 2, 3, 9), routed(7, 7, 0, 3, 9)]])
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 4, 3, 4]
    assert segments_of(packed) == [(0, 2, -1), (2, 1, 0), (3, 1, 1), (4, 1, 1), (5, 2, 0)]
    assert packed.experts is not None
    assert packed.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 0, 3]


def test_pack_knows_the_sequence_of_each_token() -> None:
    packed = pack(SAMPLES)
    assert packed.sequence_of.tolist() == [0, 0, 0, 1, 2, 2]
    assert packed.num_sequences == 3


def test_each_turn_may_have_an_advantage_of_its_own() -> None:
    samples = [train_sample([3], [7, 8, 4, 9], [1, 1, 0, 1], 0.0), train_sample([5], [6], [1], 0.0)]
    rows = spread_over_turns([one.sample for one in samples], [1.0, -2.0, 0.5])
    assert [row.tolist() for row in rows] == [[1.0, 1.0, 0.0, -2.0], [0.5]]
    for one, row in zip(samples, rows, strict=True):
        one.advantage = row
    assert pack([samples]).advantages.tolist() == [1.0, 1.0, -2.0, 0.5]


def test_pack_without_sharing_repeats_prefixes() -> None:
    packed = pack(SAMPLES, share_prefixes=False)
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 5, 6, 3, 7, 4]
    assert segments_of(packed) == [(0, 4, -1), (4, 2, -1), (6, 3, -1)]
    assert packed.loss_positions.tolist() == [1, 2, 3, 5, 6, 8]
    assert packed.targets.tolist() == [7, 8, 2, 9, 7, 8]


def test_pack_leaves_out_samples_without_loss() -> None:
    packed = pack([[train_sample([5, 6], [7, 8], [0, 0], advantage=1.0), SAMPLES[0][1]]])
    assert packed.input_ids.tolist() == [5, 6]
    assert packed.targets.tolist() == [9]
    assert segments_of(packed) == [(0, 2, -1)]


def test_pack_of_nothing_is_one_token_without_loss() -> None:
    packed = pack([])
    assert packed.input_ids.tolist() == [0]
    assert segments_of(packed) == [(0, 1, -1)]
    assert packed.num_loss_tokens == 0


def test_pack_takes_reference_logprobs_where_there_is_loss() -> None:
    packed = pack([[train_sample([5], [7, 4, 8], [1, 0, 1], 1.0, reference=[-1.0, 0.0, -2.0])]])
    assert packed.frozen_logprobs.keys() == {REFERENCE}
    assert packed.frozen_logprobs[REFERENCE].tolist() == [-1.0, -2.0]


def test_pack_rejects_a_partial_reference() -> None:
    samples = [train_sample([5], [7], [1], 1.0, reference=[-1.0]), train_sample([5], [8], [1], 1.0)]
    with pytest.raises(ValueError, match="of the reference, or none has; got 1 of 2"):
        pack([samples])


def test_pack_rejects_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="at least one token; got none"):
        pack([[train_sample([], [7], [1], 1.0)]])


def test_a_share_has_the_episodes_of_its_own_micro_batches_alone() -> None:
    """Also what hangs on each episode: payload, advantage, the log-probabilities of frozen models, values."""
    first = ReadyGroup(
        group_id=7,
        task_id="sums",
        task_kind="",
        episodes=[episode(10, tokens) for tokens in (1, 2, 3)],
        payloads=["a", "b", "c"],
        advantages=[[1.0], None, [-1.0]],
        num_bytes=6,
        frozen={REFERENCE: ["ra", "rb", "rc"]},
        values=["va", "vb", "vc"],
        pictures="picture",
    )
    second = replace(first, group_id=8, payloads=["d", "e", "f"], advantages=[], frozen={}, values=None)
    found = share_of([first, second], [plan((1, (2,)), (0, (1,))), plan(), plan((0, (2, 0)))])
    assert found.plans == (plan((0, (0,)), (1, (0,))), plan(), plan((1, (1, 2))))
    assert [group.payloads for group in found.groups] == [["f"], ["b", "c", "a"]]
    one, other = found.groups
    assert (one.group_id, one.advantages, one.frozen, one.values, one.pictures) == (8, [], {}, None, "picture")
    assert (other.group_id, other.advantages) == (7, [None, [-1.0], [1.0]])
    assert (other.frozen, other.values) == ({REFERENCE: ["rb", "rc", "ra"]}, ["vb", "vc", "va"])
    assert [each.num_completion_tokens for each in other.episodes] == [2, 3, 1]
    assert first.payloads == ["a", "b", "c"], "what the driver has stays whole"


def test_without_groups_a_rank_has_nothing_to_do() -> None:
    assert shares([], 2, 100) == [Share(), Share()]


def test_what_is_sent_to_all_ranks_is_each_episode_once() -> None:
    groups = [
        ReadyGroup(
            group_id=number,
            task_id="",
            task_kind="",
            episodes=[episode(10, 20 + index) for index in range(8)],
            payloads=[f"{number}.{index}" for index in range(8)],
            advantages=[[0.0]] * 8,
            num_bytes=1,
        )
        for number in range(6)
    ]
    sent = [str(payload) for share in shares(groups, 5, 64) for group in share.groups for payload in group.payloads]
    assert sorted(sent) == [f"{number}.{index}" for number in range(6) for index in range(8)]
