"""Positions of three axes (time, height, width), as the Qwen-VL families rotate queries and keys by them.

    PackedBatch, rows and columns of each image -> `axes_of` -> [3, T]

A text goes on by one on all three axes. The pieces of an image share their time, and have the row and column of each in
height and width; what comes after goes on behind the longer side (Qwen2-VL, arXiv:2409.12191, section 2.1).
"""

from collections.abc import Mapping

import numpy as np

from rlflow.batching.pack import IndexArray, PackedBatch

Grid = tuple[int, int]
"""Rows and columns of an image's pieces."""


def axes_of(packed: PackedBatch, grids: Mapping[str, Grid]) -> IndexArray:
    """[3, T]; a sample begins with 0, and a segment goes on where the one that it continues ends. `grids` are by key.

    Example: one prompt of a token, an image of 2 x 3 pieces and a token
        time    [0 1 1 1 1 1 1 4]
        height  [0 1 1 1 2 2 2 4]
        width   [0 1 2 3 1 2 3 4]
    """
    steps, within = np.ones(len(packed.input_ids), np.int64), np.zeros((3, len(packed.input_ids)), np.int64)
    for image in packed.images:
        rows, columns = grids[image.key]
        assert image.num_tokens == rows * columns, f"{image.num_tokens} tokens for {rows} x {columns} pieces"
        pieces = slice(image.start, image.start + image.num_tokens)
        steps[pieces] = 0
        steps[pieces.stop - 1] = max(rows, columns)
        within[1, pieces], within[2, pieces] = np.divmod(np.arange(image.num_tokens), columns)
    ends = np.concatenate([[0], np.cumsum(steps)])  # where the token after each stands, if segments went on
    origins = np.empty_like(steps)
    after = np.zeros(len(packed.segment_starts) + 1, np.int64)  # where each segment ends; the last: before any
    segments = zip(packed.segment_starts, packed.segment_lengths, packed.segment_parents, strict=True)
    for segment, (start, length, parent) in enumerate(segments):
        origins[start : start + length] = ends[start] - after[parent]
        after[segment] = ends[start + length] - ends[start] + after[parent]
    return ends[:-1] - origins + within
