"""Samples with a copy of their prefix each, for models with layers that cannot share one.

    PackedBatch -> Rows, padded on the right -> the model, as transformers runs it -> [T, hidden size]
    PackedBatch -> end_to_end, one row -> the model, told where samples begin -> [T, hidden size]

Each sample brings its own copy of what it shares. No token of a causal model depends on a later one, so padding on the
right changes nothing, whatever a layer keeps of earlier tokens. Layers that forget at a boundary need none. States go
back to where the packed row has its tokens.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlflow.batching.pack import IndexArray, PackedBatch


@dataclass(kw_only=True, slots=True, frozen=True)
class Rows:
    """R samples of up to L tokens."""

    input_ids: IndexArray  # [R, L], 0 where there is no token
    tokens: IndexArray  # [R, L], which tokens of the packed row these are, -1 where there is none
    lengths: IndexArray  # [R]
    cells: IndexArray  # [T], of each token of the packed row: row * L + column; a shared token's in one of its rows


def rows_of(packed: PackedBatch, *, prefixes_alone: bool = False) -> Rows:
    """A row for each segment that no other continues, with all that it continues.

    With `prefixes_alone` every segment has a row that ends with it, and `cells` points there.
    """
    continued = set() if prefixes_alone else set(packed.segment_parents.tolist())
    paths = [packed.path(segment) for segment in range(len(packed.segment_starts)) if segment not in continued]
    lengths = np.array([len(path) for path in paths])
    tokens = np.full((len(paths), int(lengths.max())), -1)
    cells = np.full(len(packed.input_ids), -1)
    # Backwards, so that the row of a segment comes after those of what continues it.
    for row, path in reversed(list(enumerate(paths))):
        tokens[row, : len(path)] = path
        cells[path] = row * tokens.shape[1] + np.arange(len(path))
    assert cells.min() >= 0, "every token belongs to a segment"
    input_ids = np.where(tokens < 0, 0, packed.input_ids[tokens])
    return Rows(input_ids=input_ids, tokens=tokens, lengths=lengths, cells=cells)


def end_to_end(packed: PackedBatch) -> tuple[PackedBatch, IndexArray]:
    """The rows of `rows_of` one after the other, each a segment of its own; and where each token is there, [T].

    Of a batch without images, because no family that takes some has layers that need this.
    """
    assert not packed.images, "a family with images has no layers with a state"
    rows = rows_of(packed)
    is_token = (rows.tokens >= 0).reshape(-1)
    tokens = rows.tokens.reshape(-1)[is_token]
    place_of = (np.cumsum(is_token) - 1)[rows.cells]
    row = replace(
        packed,
        input_ids=packed.input_ids[tokens],
        position_ids=packed.position_ids[tokens],
        segment_starts=np.cumsum(rows.lengths) - rows.lengths,
        segment_lengths=rows.lengths,
        segment_parents=np.full(len(rows.lengths), -1),
        loss_positions=place_of[packed.loss_positions],
        experts=None if packed.experts is None else packed.experts[tokens],
    )
    return row, place_of


def boundaries(lengths: IndexArray, num_padding: int, device: torch.device) -> dict[str, Tensor]:
    """Where segments of these lengths begin, as transformers takes it; padding behind them is one more."""
    if num_padding:
        lengths = np.append(lengths, num_padding)
    segment_of = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return {
        "cu_seq_lens_q": torch.from_numpy(np.cumsum(np.append(0, lengths))).to(device),  # [segments + 1]
        "seq_idx": torch.from_numpy(segment_of[None]).to(device),  # [1, T with padding]
    }
