"""What a guess is worth: 1 for the number, and 0 for any other."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![\w.-])[0-9]{1,9}(?![\w]|\.[0-9])")


def guess_in(text: str) -> int | None:
    """The only whole number in a reply; None if there is none, or if there are several different ones."""
    numbers = {int(found) for found in _NUMBER.findall(text)}
    return numbers.pop() if len(numbers) == 1 else None


def worth(guess: int | None, number: int) -> float:
    """1.0 when the guess is the number, else 0.0."""
    return float(guess == number)
