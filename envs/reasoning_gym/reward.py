"""reasoning-gym's own score of the text between the last <answer> tags.

The rest of the reply does not count, because several data sets give partial credit to a text that merely contains the
answer, or to any text at all.
"""

from rlflow.envs.answers import tagged_answer
from rlflow.envs.reasoning_gym.data import item_of
from rlflow.types import Task

_REFUSALS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What `score_answer` of some data sets raises for an answer that it cannot read."""


def score(task: Task, completion: str) -> float:
    """reasoning-gym's score from 0 to 1; 0 for a reply without <answer> tags, or with an answer that cannot be read.

    An answer cannot be read where scoring it fails although scoring the data set's own answer does not. Any other
    failure is an error, not a score.
    """
    answer = tagged_answer(completion)
    if answer is None:
        return 0.0
    dataset, item = item_of(task)
    try:
        return float(dataset.score_answer(answer, item))
    except _REFUSALS:
        dataset.score_answer(item["answer"], item)
        return 0.0
