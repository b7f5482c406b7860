"""How many words of the reply are words of the answer, and the other way round?"""

from collections.abc import Sequence

from rlflow.envs.answers import final_answer, references, token_f1
from rlflow.types import Json


def f1(
    completion: str, answer: Json, answers: Sequence[Json] | None = None, *, separator: str | None = None
) -> float | None:
    """The largest F1 of the reply's final answer with a right one, over sets of words; None without an answer.

    Words are compared as SQuAD does (arXiv:1606.05250).
    answers: a column with several right answers; separator: what stands between several in `answer`.
    """
    right = references(answer, answers, separator)
    said = final_answer(completion)
    return max((token_f1(said, each) for each in right), default=None)
