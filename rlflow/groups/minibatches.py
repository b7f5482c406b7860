"""Which groups of a step go into which of its updates. Pure."""

from collections.abc import Sequence

import numpy as np


def minibatches(group_ids: Sequence[int], count: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """The groups of one epoch in `count` parts of equal size, shuffled; `count` divides their number.

    The parts depend on nothing but the arguments, and not on the order of `group_ids`, so that a run that is repeated
    makes the same updates. `step` counts from 0.
    """
    order = np.random.default_rng((seed, step, epoch)).permutation(sorted(group_ids))
    return [part.tolist() for part in np.split(order, count)]
