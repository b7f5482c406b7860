"""Samples as right-padded rows, for models whose layers cannot be told where a sample of a packed row begins.

    PackedBatch -> Rows -> the model, as transformers runs it -> [T, hidden size], where the packed row has its tokens

Each sample brings its own copy of what it shares. No token of a causal model depends on a later one, so padding on the
right changes nothing, whatever a layer keeps of earlier tokens.
"""

from dataclasses import dataclass

import numpy as np

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
