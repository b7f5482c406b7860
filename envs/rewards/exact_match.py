"""Is the reply the answer?"""

from collections.abc import Sequence

from rlflow.envs.answers import final_answer, normalise, references
from rlflow.types import Json


def exact_match(
    completion: str,
    answer: Json,
    answers: Sequence[Json] | None = None,
    *,
    separator: str | None = None,
    normalised: bool = False,
) -> float | None:
    """1 if the reply's final answer is one of the right ones, else 0; None for a task without an answer.

    answers: a column with several right answers; separator: what stands between several in `answer`.
    normalised: without regard to case, punctuation, articles and space, as SQuAD compares.
    """
    right = references(answer, answers, separator)
    if not right:
        return None
    said = final_answer(completion)
    if normalised:
        return float(normalise(said) in [normalise(each) for each in right])
    return float(said in [each.strip() for each in right])
