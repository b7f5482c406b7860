"""The final answer of a reply, and how it is compared with the right ones."""

import re
import string
from collections.abc import Sequence

from rlflow.envs.texts import after_thoughts
from rlflow.types import Json

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def tagged_answer(text: str) -> str | None:
    """The text between the last <answer> and </answer>, stripped; None without them."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def final_answer(text: str) -> str:
    """The tagged answer; else what follows the thoughts; else the whole text. Without space around it.

    Example: final_answer("<think>2 + 3</think> 5") == "5"
    """
    tagged = tagged_answer(text)
    return after_thoughts(text).strip() if tagged is None else tagged


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and repeated space, as SQuAD compares (arXiv:1606.05250).

    A text of nothing else keeps them, because an empty reply would equal the answer "A".
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()) or text.lower().strip()


def text_of(answer: Json) -> str:
    """An answer as a reply would say it. Raises TypeError for one that is neither text nor a number."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"a right answer is text or a number; got {answer!r:.80}")
    return str(answer)


def references(answer: Json, answers: Sequence[Json] | None, separator: str | None) -> list[str]:
    """All right answers: the list if there is one, else the answer, cut at `separator`; none is empty."""
    if answers is not None:
        return [text_of(each) for each in answers]
    if answer is None:
        return []
    text = text_of(answer)
    return [part.strip() for part in text.split(separator) if part.strip()] if separator else [text]


def token_f1(text: str, reference: str) -> float:
    """2 |both| / (|text| + |reference|) over the sets of normalised words; 1 if both are empty."""
    words, expected = set(normalise(text).split()), set(normalise(reference).split())
    if not words and not expected:
        return 1.0
    return 2 * len(words & expected) / (len(words) + len(expected))
