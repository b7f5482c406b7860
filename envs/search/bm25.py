"""Okapi BM25 over a few thousand short documents (Robertson and Zaragoza 2009, section 3)."""

import math
import re
from collections import Counter
from collections.abc import Sequence

SATURATION = 1.2
LENGTH_WEIGHT = 0.75
_WORD = re.compile(r"\w+")


class Index:
    """Finds the documents that fit a query best."""

    def __init__(self, documents: Sequence[str]) -> None:
        self._documents = documents
        self._counts = [Counter(_WORD.findall(document.lower())) for document in documents]
        lengths = [counts.total() for counts in self._counts]
        mean = sum(lengths) / max(len(lengths), 1)
        self._norms = [SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length / mean) for length in lengths]
        self._found_in: Counter[str] = Counter()
        for counts in self._counts:
            self._found_in.update(counts.keys())

    def search(self, query: str, limit: int) -> list[str]:
        """At most `limit` documents that share a word with the query, the best first, equals in their order."""
        words = set(_WORD.findall(query.lower()))
        scored = [(self._score(index, words), -index) for index in range(len(self._documents))]
        best = sorted((pair for pair in scored if pair[0] > 0), reverse=True)[:limit]
        return [self._documents[-index] for _, index in best]

    def _score(self, index: int, words: set[str]) -> float:
        counts, norm = self._counts[index], self._norms[index]
        total = 0.0
        for word in words & counts.keys():
            rarity = math.log(1 + (len(self._documents) - self._found_in[word] + 0.5) / (self._found_in[word] + 0.5))
            total += rarity * counts[word] * (SATURATION + 1) / (counts[word] + norm)
        return total
