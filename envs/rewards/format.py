"""Does the reply have the form that was asked for?"""

import re

from rlflow.errors import ConfigError

THINK_THEN_ANSWER = (
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*"
)


def format(completion: str, *, pattern: str = THINK_THEN_ANSWER) -> float:
    """1 if the whole last reply matches the regular expression, in which "." is any character; else 0.

    pattern: as Python's `re` reads it. The default is <think>...</think> <answer>...</answer>, each once.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.args.format.pattern is no regular expression ({error}); got {pattern!r}") from error
    return float(compiled.fullmatch(completion) is not None)
