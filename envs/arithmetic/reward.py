"""Is the last number of the reply the answer, and has the reply ended?

Exact decimals, no tolerance: "5.0" and "1,000" equal "5" and "1000", and "0.33" is not 1/3.
"""

import re
from decimal import Decimal

from rlflow.envs.answers import text_of
from rlflow.types import EpisodeEnd, Task

# A sign belongs to the number unless something that can be subtracted from stands before it: "10-4" ends in 4.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,4}(?![0-9]))?"
    r"|(?:(?<![\w)])[-+])?(?<![0-9])\.[0-9]+"
)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, or None."""
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def is_right(task: Task, completion: str) -> float | None:
    """1.0 for the right answer, else 0.0; None (no verdict) for a task without an answer.

    Numeric answers are compared with the last number of the reply; other answers with the whole reply, stripped.
    """
    if task.answer is None:
        return None
    answer = text_of(task.answer).strip()
    if _NUMBER.fullmatch(answer):
        return float(last_number(completion) == last_number(answer))
    return float(completion.strip() == answer)


def answered(task: Task, completion: str, end: EpisodeEnd) -> float | None:
    """`is_right` of a reply that ends by itself. One that is cut off gives no answer, whatever its last number."""
    found = is_right(task, completion)
    return found if found is None or end is EpisodeEnd.COMPLETED else 0.0


def share_of_digits(task: Task, completion: str) -> float:
    """The share of a reply's characters that are digits: a reward that even a random model earns some of."""
    return sum(character in "0123456789" for character in completion) / max(len(completion), 1)
