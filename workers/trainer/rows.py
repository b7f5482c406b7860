"""Samples as right-padded rows, for models whose layers cannot be told where a sample of a packed row begins.

    PackedBatch -> Rows -> the model, as transformers runs it -> [T, hidden size], where the packed row has its tokens

Each completion brings its own copy of its prompt. No token of a causal model depends on a later one, so padding on the
right changes nothing, whatever a layer keeps of earlier tokens.
"""

from dataclasses import dataclass

import numpy as np

from rlflow.batching import IndexArray, PackedBatch


@dataclass(kw_only=True, slots=True, frozen=True)
class Rows:
    """R samples of up to L tokens."""

    input_ids: IndexArray  # [R, L], 0 where there is no token
    tokens: IndexArray  # [R, L], which tokens of the packed row these are, -1 where there is none
    lengths: IndexArray  # [R]
    cells: IndexArray  # [T], of each token of the packed row: row * L + column; a prompt's tokens in one of its rows


def rows_of(packed: PackedBatch, *, prompts_alone: bool = False) -> Rows:
    """A row for each completion, and for each prompt that no completion continues.

    With `prompts_alone` every prompt has a row of its own, and `cells` points there.
    """
    alone = np.arange(len(packed.prompt_starts))
    if not prompts_alone:
        alone = np.setdiff1d(alone, packed.completion_prompts)
    prompts = np.concatenate([packed.completion_prompts, alone]).astype(np.int64)
    sizes = np.pad(packed.completion_lengths, (0, len(alone)))
    starts = np.pad(packed.completion_starts, (0, len(alone)))
    lengths = packed.prompt_lengths[prompts] + sizes
    tokens = np.full((len(prompts), int(lengths.max())), -1)
    cells = np.full(len(packed.input_ids), -1)
    for row, (prompt, start, size, length) in enumerate(zip(prompts, starts, sizes, lengths, strict=True)):
        first = packed.prompt_starts[prompt]
        tokens[row, : length - size] = np.arange(first, first + length - size)
        tokens[row, length - size : length] = np.arange(start, start + size)
        cells[tokens[row, :length]] = row * tokens.shape[1] + np.arange(length)
    assert cells.min() >= 0, "every token belongs to a segment"
    input_ids = np.where(tokens < 0, 0, packed.input_ids[tokens])
    return Rows(input_ids=input_ids, tokens=tokens, lengths=lengths, cells=cells)
