"""Does the mathematical expression in the reply equal the answer? Needs `pip install rlflow[math]`."""

import logging
from typing import Any

from rlflow.envs.answers import tagged_answer, text_of
from rlflow.errors import ConfigError
from rlflow.types import Json

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math(completion: str, answer: Json) -> float | None:
    r"""1 if the reply's expression equals the answer's, else 0; None if there is no answer that can be read.

    The expression of a reply is what its <answer> tags hold, else the last \boxed{...}, else the last formula or
    number. math-verify's own time-outs are off: they need signals, and what runs too long here is ended from outside,
    without a verdict.
    """
    math_verify = _math_verify()
    if answer is None:
        return None
    right = _expression(text_of(answer))
    if not right:
        return None
    tagged = tagged_answer(completion)
    said = _expression(tagged) if tagged is not None else math_verify.parse(completion, parsing_timeout=None)
    return float(math_verify.verify(right, said, timeout_seconds=None))


def _expression(text: str) -> list[Any]:
    """A text that is an expression as a whole, with or without the marks of LaTeX."""
    math_verify = _math_verify()
    if not any(mark in text for mark in _DELIMITERS):
        boxed = math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)
        if boxed:
            return boxed
    return math_verify.parse(text, parsing_timeout=None)


def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ConfigError("the reward math needs math-verify; pip install rlflow[math]") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time-outs that are off
    return math_verify
