"""Are the tools called that should be, with the right arguments? The rules of TL-Training (arXiv:2412.15495)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.types import Message

UNUSABLE = -2.0
"""A call whose arguments are no JSON object, a call of an unknown tool, or no call when one is expected."""
WRONG_TOOL = -1.5
WRONG_VALUES = -0.25
RIGHT = 1.0
CLIP = 5.0
"""The sum over an episode's calls is within -CLIP and CLIP."""

Schemas = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Call:
    name: str
    arguments: dict[str, Any] | None
    """None when they are no JSON object."""


def tool_calls(
    messages: Sequence[Message], expected_calls: Sequence[Mapping[str, Any]], tools: Schemas | None = None
) -> float:
    """The sum over all calls of the episode, each beside the expected call that it resembles most.

    expected_calls: a column, [{"name": "add", "arguments": {"a": 1}}], or in OpenAI's form.
    tools: a column with the tools' schemas, in OpenAI's form, which tells hallucinated arguments (that the tool does
    not have) from redundant ones (that are not expected); without it all are redundant, and no tool is unknown.

    -2 unusable; -1.5 wrong tool; wrong argument names, the worst first: hallucinated, redundant and missing -1.8,
    hallucinated with one of the others -1.3, redundant and missing -1.0, hallucinated -0.8, redundant or missing -0.5;
    wrong values -0.25; right +1. Nothing called where nothing is expected: +1.
    """
    expected = [_expected(call) for call in expected_calls]
    schemas = None
    if tools is not None:
        functions = [tool.get("function", tool) for tool in tools]
        schemas = {each["name"]: set(each.get("parameters", {}).get("properties", {})) for each in functions}
    made = [_parsed(call) for message in messages for call in message.get("tool_calls", [])]
    if not made and not expected:
        return RIGHT
    total = sum(_score(call, goal, schemas) for call, goal in _pairs(made, expected))
    return max(-CLIP, min(CLIP, total))


def _expected(call: Mapping[str, Any]) -> _Call:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    return _Call(name=function["name"], arguments=json.loads(arguments) if isinstance(arguments, str) else arguments)


def _parsed(call: Mapping[str, Any]) -> _Call:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    return _Call(name=call["function"]["name"], arguments=arguments if isinstance(arguments, dict) else None)


def _pairs(made: Sequence[_Call], expected: Sequence[_Call]) -> list[tuple[_Call | None, _Call | None]]:
    """Equal calls first, then those of one tool, then the rest in order; None beside what is too many or missing."""
    calls, goals = list(made), list(expected)
    pairs: list[tuple[_Call | None, _Call | None]] = []
    for is_equal in (
        lambda call, goal: call == goal,
        lambda call, goal: call.name == goal.name,
        lambda call, goal: True,
    ):
        for goal in list(goals):
            match = next((call for call in calls if is_equal(call, goal)), None)
            if match is not None:
                calls.remove(match)
                goals.remove(goal)
                pairs.append((match, goal))
    return [*pairs, *((call, None) for call in calls), *((None, goal) for goal in goals)]


def _score(call: _Call | None, goal: _Call | None, schemas: Mapping[str, set[str]] | None) -> float:
    if call is None or call.arguments is None or (schemas is not None and call.name not in schemas):
        return UNUSABLE
    if goal is None or call.name != goal.name:
        return WRONG_TOOL
    assert goal.arguments is not None
    extra = call.arguments.keys() - goal.arguments.keys()
    hallucinated = set() if schemas is None else extra - schemas[call.name]
    redundant, missing = extra - hallucinated, goal.arguments.keys() - call.arguments.keys()
    if hallucinated:
        return (-0.8, -1.3, -1.8)[bool(redundant) + bool(missing)]
    if redundant or missing:
        return -1.0 if redundant and missing else -0.5
    return RIGHT if call.arguments == goal.arguments else WRONG_VALUES
