"""A compressed trie of samples, in which a prefix that several of them begin with lies once. Pure NumPy.

    samples -> Tree.add, one by one -> segments, runs of tokens between the places where samples part

Two samples have a token in common if their tokens are equal up to there, and so are the images that these stand for
and, outside of prompts, the experts that they went to. Samples with routes share nothing with others.

Example: samples [5 6 7 8], [5 6 9] and [5 6 7] are the segments [5 6] and, below it, [7 8] and [9].
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlflow.types import ImageSpan, IntArray, Sample


@dataclass(slots=True, eq=False, frozen=True)
class Prefix:
    """The first tokens of a sample."""

    sample: Sample
    ids: IntArray  # [n]
    symbols: NDArray[np.integer]  # [n], the ids; where an image begins, a number that only this image has


@dataclass(slots=True, eq=False)
class Segment:
    """The tokens of `prefix` from `start` to `stop`. So many come before it as `start` says."""

    prefix: Prefix
    start: int
    stop: int
    parent: "Segment | None"
    children: "dict[int, list[Segment]]" = field(default_factory=dict)
    """By their first symbol; several of them only where samples differ in their experts, or share nothing."""

    @property
    def ids(self) -> IntArray:
        return self.prefix.ids[self.start : self.stop]

    @property
    def images(self) -> Iterator[ImageSpan]:
        """Those that begin here, by their place in the sample."""
        return (image for image in self.prefix.sample.images if self.start <= image.start < self.stop)

    def path(self) -> "list[Segment]":
        """From the first tokens to this segment."""
        found: list[Segment] = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]


class Tree:
    """Samples that were added, each with its first tokens or all of them."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """What goes through the model."""
        self._roots: dict[int, list[Segment]] = {}
        self._images: dict[tuple[str, int], int] = {}

    def add(self, sample: Sample, length: int | None = None, *, share: bool = True) -> Segment:
        """The segment within which the first `length` tokens of a sample end, or all of them.

        Without `share` nothing that was added before is looked at. Raises ValueError for an empty prompt.
        """
        prefix = self._prefix(sample, length)
        at, parent, children = 0, None, self._roots
        while True:
            siblings = children.setdefault(int(prefix.symbols[at]), [])
            for child in siblings if share else ():
                if count := _num_common(child, prefix):
                    break
            else:
                siblings.append(Segment(prefix, at, len(prefix.ids), parent))
                self.num_tokens += len(prefix.ids) - at
                return siblings[-1]
            at += count
            if at == len(prefix.ids):
                return child
            if at < child.stop:
                child = _cut(child, at, siblings)
            parent, children = child, child.children

    def segments(self) -> list[Segment]:
        """All of them, depth first: each before those below it, and these in the order in which they came."""
        found: list[Segment] = []
        waiting = _last_first(self._roots.values())
        while waiting:
            found.append(waiting.pop())
            waiting += _last_first(found[-1].children.values())
        return found

    def _prefix(self, sample: Sample, length: int | None) -> Prefix:
        if not len(sample.prompt_ids):
            raise ValueError("a sample's prompt must have at least one token; got none")
        ids = np.concatenate([sample.prompt_ids, sample.completion_ids])[:length]
        symbols = ids
        if sample.images:
            symbols = ids.astype(np.int64)
            for image in sample.images:
                if image.start < len(ids):
                    number = self._images.setdefault((image.key, image.num_tokens), len(self._images))
                    symbols[image.start] = -1 - number
        return Prefix(sample, ids, symbols)


def num_distinct_tokens(samples: Iterable[Sample]) -> int:
    """The tokens of samples, a prefix that several of them begin with counted once."""
    tree = Tree()
    for sample in samples:
        tree.add(sample)
    return tree.num_tokens


def _last_first(siblings: Iterable[Sequence[Segment]]) -> list[Segment]:
    return [each for some in siblings for each in some][::-1]


def _num_common(segment: Segment, prefix: Prefix) -> int:
    """How many tokens of a segment the prefix has too; before it they agree. An image is common whole, or not."""
    count = _num_alike(segment, prefix)
    for image in prefix.sample.images:
        if image.start < segment.start + count < image.start + image.num_tokens:
            count = max(0, image.start - segment.start)
    return count


def _num_alike(segment: Segment, prefix: Prefix) -> int:
    """The same of tokens and their routes."""
    start, stop = segment.start, min(segment.stop, len(prefix.ids))
    count = _num_true(segment.prefix.symbols[start:stop] == prefix.symbols[start:stop])
    one, other = segment.prefix.sample, prefix.sample
    if one.experts is None or other.experts is None:
        return count if one.experts is other.experts else 0
    # In both prompts any routes do, because engines compute a prompt several times and may choose differently.
    first, last = max(start, min(len(one.prompt_ids), len(other.prompt_ids))), start + count
    if first >= last:
        return count
    return first - start + _num_true((one.experts[first:last] == other.experts[first:last]).all(axis=(1, 2)))


def _num_true(each: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    place = int(each.argmin()) if len(each) else 0
    return len(each) if not len(each) or each[place] else place


def _cut(segment: Segment, at: int, siblings: list[Segment]) -> Segment:
    """Cut a segment in two; returns the upper half. The lower one stays the segment in which samples end."""
    upper = Segment(segment.prefix, segment.start, at, segment.parent, {int(segment.prefix.symbols[at]): [segment]})
    siblings[siblings.index(segment)] = upper
    segment.start, segment.parent = at, upper
    return upper
