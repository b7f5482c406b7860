"""The mask of flex attention, built from the segments, and how often it is compiled."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.config import patch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from rlflow.batching.pack import PackedBatch
from rlflow.workers.trainer.attention import (
    attention_layout,
    block_mask_of,
    compile_for_any_length,
    has_flash,
)

CPU = torch.device("cpu")


Branch: TypeAlias = "int | tuple[int, Sequence[Branch]]"
"""The length of a segment, and the segments that continue it."""


def row(*branches: Branch) -> PackedBatch:
    """A row without loss tokens."""
    segments: list[tuple[int, int, int, int]] = []  # start, length, parent, depth

    def grow(branch: Branch, parent: int, depth: int) -> None:
        length, further = (branch, ()) if isinstance(branch, int) else branch
        index, start = len(segments), sum(segments[-1][:2]) if segments else 0
        segments.append((start, length, parent, depth))
        for each in further:
            grow(each, index, depth + length)

    for branch in branches:
        grow(branch, -1, 0)
    starts, lengths, parents, depths = np.array(segments, np.int64).T
    positions = np.concatenate([depth + np.arange(length) for depth, length in zip(depths, lengths, strict=True)])
    nothing, no_floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return PackedBatch(
        input_ids=np.zeros_like(positions),
        position_ids=positions,
        segment_starts=starts,
        segment_lengths=lengths,
        segment_parents=parents,
        loss_positions=nothing,
        targets=nothing,
        behaviour_logprobs=no_floats,
        versions=nothing,
        advantages=no_floats,
        frozen_logprobs={},
        values=None,
        returns=None,
        sequence_of=nothing,
        num_sequences=0,
        is_on_older_cache=nothing > 0,
        support_ids=nothing,
        support_of=nothing,
    )


def random_row(seed: int) -> PackedBatch:
    draw = np.random.default_rng(seed)
    longest, most, deepest = [(300, 4, 3), (60, 30, 1), (1500, 3, 1), (3, 3, 4), (100, 1, 9)][seed % 5]

    def branch(depth: int) -> Branch:
        further = [branch(depth + 1) for _ in range(draw.integers(0, most + 1)) if depth < deepest]
        return int(draw.integers(1, longest + 1)), further

    return row(*(branch(0) for _ in range(draw.integers(1, 4))))


def seen_by(packed: PackedBatch) -> Tensor:
    """[T, T], written out for each token: its own segment's tokens up to itself, and all of those it continues."""
    found = torch.zeros(len(packed.input_ids), len(packed.input_ids), dtype=torch.bool)
    for segment, (start, length) in enumerate(zip(packed.segment_starts, packed.segment_lengths, strict=True)):
        for token in range(start, start + length):
            found[token, start : token + 1] = True
            earlier = packed.segment_parents[segment]
            while earlier >= 0:
                first = packed.segment_starts[earlier]
                found[token, first : first + packed.segment_lengths[earlier]] = True
                earlier = packed.segment_parents[earlier]
    return found


@pytest.mark.parametrize("seed", range(24))
def test_tiles_from_segments_are_those_of_the_whole_mask(seed: int) -> None:
    packed = random_row(seed)
    num_tokens = len(packed.input_ids)
    found = block_mask_of(packed, CPU)
    length = found.shape[-1]
    wanted = create_block_mask(found.mask_mod, None, None, length, length, device="cpu")
    for name in ("kv", "q", "full_kv", "full_q"):
        for table in (f"{name}_num_blocks", f"{name}_indices"):
            assert torch.equal(getattr(found, table), getattr(wanted, table)), table
    tokens = torch.arange(num_tokens)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(found.mask_mod(zero, zero, tokens[:, None], tokens[None]), seen_by(packed))


def test_a_row_is_padded_to_whole_tiles_and_at_least_two() -> None:
    lengths = {
        num_tokens: attention_layout(row((num_tokens, [])), CPU, use_flex=True).num_padding
        for num_tokens in (1, 128, 256, 257)
    }
    assert lengths == {1: 255, 128: 128, 256: 0, 257: 127}


def listed(counts: Tensor, indices: Tensor) -> list[list[int]]:
    return [tiles[:count].tolist() for count, tiles in zip(counts[0, 0].tolist(), indices[0, 0], strict=True)]


def test_a_tile_of_one_prompts_tokens_is_full_and_one_across_prompts_is_left_out() -> None:
    # Tiles of 128: prompt 0 has tiles 0 and 1, its completions tile 2; prompt 1 has tile 3.
    mask = block_mask_of(row((256, [100, 28]), (128, [])), CPU)
    assert mask.full_kv_indices is not None
    assert mask.full_kv_num_blocks is not None
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    assert full == [[], [0], [0, 1], []]
    assert partial == [[0], [1], [2], [3]]


def test_a_row_of_128k_tokens_takes_megabytes() -> None:
    tracemalloc.start()
    mask = block_mask_of(row((2**16, [2**13] * 8)), CPU)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tables = (mask.kv_indices, mask.q_indices, mask.full_kv_indices, mask.full_q_indices)
    assert peak < 64 * 2**20  # T x T bools are 16 GiB
    assert [tuple(table.shape) for table in tables if table is not None] == [(1, 1, 1024, 1024)] * 4


def attend(packed: PackedBatch, kernel: Callable[..., Tensor], heads: int = 4) -> None:
    layout = attention_layout(packed, CPU, use_flex=True)
    length = len(packed.input_ids) + layout.num_padding
    query, key, value = (torch.randn(1, number, length, 16) for number in (heads, 2, 2))
    assert layout.block_masks is not None
    kernel(query, key, value, block_mask=layout.block_masks[None], scale=0.25, enable_gqa=True)


def test_rows_of_any_length_are_one_graph() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, example: object) -> object:
        graphs.append(graph)
        return graph.forward

    kernel = compile_for_any_length(flex_attention, backend=count)
    for num_tokens in (1, 5, 127, 128, 129, 300, 512, 700, 1100):
        attend(row((num_tokens, [num_tokens])), kernel)
    assert len(graphs) == 1


def test_past_the_limit_of_graphs_compiled_attention_fails_instead_of_running_eagerly() -> None:
    kernel = compile_for_any_length(flex_attention, backend="eager")
    attend(row((300, [])), kernel)
    with patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        attend(row((300, [])), kernel, heads=2)


@pytest.mark.parametrize(
    ("capability", "release", "wanted"),
    [
        ((9, 0), "4.0.0b27", True),
        ((9, 0), "4.0.0", True),
        ((9, 0), "4.0.0b19", False),
        ((9, 0), None, False),
        ((8, 0), "4.0.0", False),
        ((10, 0), "4.0.0", False),
    ],
)
def test_flash_attention_is_taken_where_its_gradients_are_known_to_be_right(
    capability: tuple[int, int], release: str | None, wanted: bool
) -> None:
    assert has_flash(capability, release) is wanted
