"""Gymnasium's observations and actions in words, if the user brings no functions for that. Pure."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from rlflow.envs.extras import need
from rlflow.envs.texts import answer_part, text_of
from rlflow.errors import ConfigError
from rlflow.types import Message

ParseAction = Callable[[Message], object]
"""Raises ValueError, with a message for the model, for a reply that is no action."""

_WHOLE_NUMBER = re.compile(r"(?<![\w.])-?[0-9]+(?!\.?\w)")
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)


def observation_text(observation: object, drawing: object) -> str:
    """The observation as text or JSON, and below it the environment's own drawing, if it makes one.

    A terminal marks the player's place by colour; here it stands in brackets.
    """
    text = text_of(_plain(observation))
    if not isinstance(drawing, str):
        return text
    bare = _COLOURED.sub(r"[\1]", drawing).strip("\n")
    return f"{text}\n\n{bare}"


def parser_of(space: Any) -> ParseAction:
    """How a reply becomes an action of `space`: its last whole number or numbers, or for a text what it says.

    Raises ConfigError when the space has no obvious words.
    """
    spaces = need("gymnasium.spaces", "gymnasium")
    if isinstance(space, spaces.Text):
        return answer_part
    if isinstance(space, spaces.Discrete):
        return lambda reply: _checked(space, _numbers(reply, 1)[0], f"a whole number {_range(space)}")
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        size = space.shape[0]
        return lambda reply: _checked(space, _numbers(reply, size), f"{size} whole numbers {_ranges(space)}")
    if not isinstance(space, spaces.Box) and space.contains("any text"):  # a space of texts that is not Gymnasium's own
        return answer_part
    raise ConfigError(
        f"actions of {space} have no words of their own; give env.args.action_parser, a function from the reply's text "
        "to an action, which raises ValueError for what is none"
    )


def instructions_for(name: str, space: Any) -> str:
    """What the model is told if `instructions` is not given."""
    spaces = need("gymnasium.spaces", "gymnasium")
    if isinstance(space, spaces.Discrete):
        return f"You play {name}. After each observation reply with one action: a whole number {_range(space)}."
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        kinds = f"{space.shape[0]} whole numbers, {_ranges(space)}"
        return f"You play {name}. After each observation reply with one action: {kinds}."
    return f"You play {name}. After each observation reply with one action."


def _numbers(reply: Message, count: int) -> list[int]:
    found = _WHOLE_NUMBER.findall(answer_part(reply))
    if len(found) < count:
        raise ValueError(f"Your reply has no action. Reply with {count} whole number{'s' if count > 1 else ''}.")
    return [int(number[-19:]) for number in found[-count:]]


def _checked(space: Any, action: int | list[int], expected: str) -> object:
    values = action if isinstance(action, int) else need("numpy", "gymnasium").array(action, dtype=space.dtype)
    if not space.contains(values):
        raise ValueError(f"{action} is not an action. Reply with {expected}.")
    return values


def _range(space: Any) -> str:
    return f"from {int(space.start)} to {int(space.start + space.n - 1)}"


def _ranges(space: Any) -> str:
    pairs = zip(space.start.tolist(), (space.start + space.nvec - 1).tolist(), strict=True)
    return "and ".join(f"from {low} to {high}, " for low, high in pairs).rstrip(", ")


def _plain(value: object) -> object:
    """numpy's numbers and arrays as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else value
