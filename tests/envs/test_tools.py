"""Typed functions as tools: what the model is shown, and what it gets back."""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

import pytest
from playing import call, calling, play, say

from rlflow.envs.base import EnvironmentSpec
from rlflow.envs.tools import ToolBroken, ToolEnvironment, ToolSet
from rlflow.errors import ConfigError
from rlflow.types import Message, Task

TASK = Task(id="t", prompt=(Message(role="user", content="What is 2 * 3?"),))


def multiply(left: int, right: int = 1) -> int:
    """
    Multiply two numbers.

    Args:
        left: The first one.
        right: The second one.
    """
    return left * right


async def divide(left: float, right: float) -> dict[str, float]:
    """
    Divide one number by another.

    Args:
        left: What is divided.
        right: By what.
    """
    return {"quotient": left / right}


def broken() -> str:
    """Ask a server."""
    raise ToolBroken("the server is gone")


def bare(left, right):  # pyright: ignore
    return left + right


def test_the_schema_comes_from_hints_and_docstring() -> None:
    assert ToolSet([multiply]).schemas == [
        {
            "type": "function",
            "function": {
                "name": "multiply",
                "description": "Multiply two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "left": {"type": "integer", "description": "The first one."},
                        "right": {"type": "integer", "description": "The second one."},
                    },
                    "required": ["left"],
                },
            },
        }
    ]


def book(days: list[int], room: Literal["single", "double"], note: str | None = None) -> str:
    """
    Book a room.

    Longer words about it.

    Args:
        days: Days of the month,
            in order.
        room (str): Which kind.
        note: For the staff.

    Returns:
        A number.
    """
    return f"{days} {room} {note}"


async def test_richer_types() -> None:
    tools = ToolSet([book])
    assert tools.schemas[0]["function"] == {
        "name": "book",
        "description": "Book a room. Longer words about it.",
        "parameters": {
            "type": "object",
            "properties": {
                "days": {"type": "array", "items": {"type": "integer"}, "description": "Days of the month, in order."},
                "room": {"type": "string", "enum": ["single", "double"], "description": "Which kind."},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "For the staff."},
            },
            "required": ["days", "room"],
        },
    }
    answer = await tools.call(call("book", '{"days": ["1", 2], "room": "double"}', 0))
    assert answer.message["content"] == "[1, 2] double None"


def undescribed(left: int) -> int:
    """Says nothing of its argument."""
    return left


def odd(left: threading.Lock) -> int:
    """
    Takes what JSON cannot hold.

    Args:
        left: A lock.
    """
    return 1


def test_functions_that_cannot_be_tools() -> None:
    with pytest.raises(ConfigError, match="tool bare: argument left has no type hint; a tool needs type hints"):
        ToolSet([bare])
    with pytest.raises(ConfigError, match="tool undescribed: argument left is not described; a tool needs"):
        ToolSet([undescribed])
    with pytest.raises(ConfigError, match="tool odd: .* a tool needs type hints that JSON can hold"):
        ToolSet([odd])
    with pytest.raises(ConfigError, match="two tools have the same name"):
        ToolSet([multiply, multiply])


@pytest.mark.parametrize(
    ("name", "arguments", "content", "is_failure"),
    [
        ("multiply", '{"left": 2, "right": 3}', "6", False),
        ("divide", '{"left": 1, "right": 2}', '{"quotient": 0.5}', False),
        ("divide", '{"left": 1, "right": 0}', '{"error": "float division by zero"}', True),
        ("multiply", '{"left": 2', '{"error": "not valid JSON: Expecting \',\' delimiter: line 1 column 11 ', True),
        ("multiply", "[" * 100_000, '{"error": "not valid JSON: ', True),
        ("multiply", "[2, 3]", '{"error": "expected a JSON object; got [2, 3]"}', True),
        ("multiply", "", '{"error": "left: Field required"}', True),
        ("multiply", '{"left": 2, "top": 3}', '{"error": "top: Extra inputs are not permitted"}', True),
        ("multiply", '{"left": "two"}', '{"error": "left: Input should be a valid integer', True),
        ("multiply", '{"left": "2", "right": "3"}', "6", False),
        ("multiplied", "{}", '{"error": "there is no tool multiplied; did you mean multiply?"}', True),
        ("x", "{}", '{"error": "there is no tool x; there are: multiply, divide"}', True),
    ],
)
async def test_a_call(name: str, arguments: str, content: str, is_failure: bool) -> None:
    answer = await ToolSet([multiply, divide]).call(call(name, arguments, 7))
    assert answer.is_failure == is_failure
    assert answer.message["content"].startswith(content)
    assert (answer.message["role"], answer.message.get("tool_call_id"), answer.message.get("name")) == (
        "tool",
        "call_7",
        name,
    )


async def test_calls_of_one_reply_run_at_the_same_time_and_answer_in_order() -> None:
    both = threading.Barrier(2, timeout=20)

    def meet(name: str) -> str:
        """
        Wait for the other one.

        Args:
            name: Who comes.
        """
        both.wait()
        return name

    async with asyncio.timeout(30):
        step = await ToolSet([meet]).answer([call("meet", {"name": name}) for name in ("a", "b")])
    assert [message["content"] for message in step.messages] == ["a", "b"]
    assert step.metrics == {"tools/calls": 2.0, "tools/failures": 0.0}
    assert not step.done


async def test_a_broken_tool_is_no_answer() -> None:
    for in_order in (False, True):
        with pytest.raises(ToolBroken, match="the server is gone"):
            await ToolSet([broken, multiply], in_order=in_order).answer(
                [call("multiply", {"left": 2}), call("broken", {})]
            )


async def test_an_environment_of_tools() -> None:
    class Calculator(ToolEnvironment):
        tools = (multiply, divide)

    replies = iter([calling(call("multiply", {"left": 2, "right": 3}), call("none", {})), say("6")])
    episode = await play(EnvironmentSpec(tasks=lambda: [TASK], build=Calculator), TASK, lambda _: next(replies))
    assert [schema["function"]["name"] for schema in episode.prompt.tools] == ["multiply", "divide"]  # pyright: ignore
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (episode.is_done, episode.reward) == (True, None)
    assert episode.metrics == {"tools/calls": 2.0, "tools/failures": 1.0}
