"""The reward of a search agent: words of the answer, or a penalty for a broken form (arXiv:2504.03160)."""

import re
from collections.abc import Sequence

from rlflow.envs.answers import references, tagged_answer, token_f1
from rlflow.types import Json, Message

BROKEN = -1.0
_TAG = re.compile(r"<(/?)(think|tool_call|answer)>")


def search_f1(
    messages: Sequence[Message],
    completion: str,
    answer: Json,
    answers: Sequence[Json] | None = None,
    *,
    separator: str | None = None,
) -> float | None:
    """The largest F1 of what the last reply has between <answer> and </answer> with a right answer (DeepResearcher).

    -1 if a tag <think>, <tool_call> or <answer> of any reply is not closed or was never opened, or if the last
    reply has no answer; None for a task without an answer.
    answers: a column with several right answers; separator: what stands between several in `answer`.
    """
    right = references(answer, answers, separator)
    if not right:
        return None
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    said = tagged_answer(completion)
    if said is None or not all(is_balanced(reply) for reply in replies):
        return BROKEN
    return max(token_f1(said, each) for each in right)


def is_balanced(reply: str) -> bool:
    """Whether each tag that opens is closed before it opens again."""
    is_open = dict.fromkeys(("think", "tool_call", "answer"), False)
    for slash, tag in _TAG.findall(reply):
        if is_open[tag] != bool(slash):
            return False
        is_open[tag] = not slash
    return not any(is_open.values())
