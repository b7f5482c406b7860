"""Typed functions as tools: what the model is shown, and what it gets back."""

from __future__ import annotations

import asyncio
import threading

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


def test_functions_that_cannot_be_tools() -> None:
    with pytest.raises(ConfigError, match="tool bare: .* needs type hints, and a docstring"):
        ToolSet([bare])
    with pytest.raises(ConfigError, match="two tools have the same name"):
        ToolSet([multiply, multiply])


@pytest.mark.parametrize(
    ("name", "arguments", "content", "is_failure"),
    [
        ("multiply", '{"left": 2, "right": 3}', "6", False),
        ("divide", '{"left": 1, "right": 2}', '{"quotient": 0.5}', False),
        ("divide", '{"left": 1, "right": 0}', '{"error": "division by zero"}', True),
        ("multiply", '{"left": 2', '{"error": "not valid JSON: Expecting \',\' delimiter: line 1 column 11 ', True),
        ("multiply", "[" * 100_000, '{"error": "not valid JSON: ', True),
        ("multiply", "[2, 3]", '{"error": "expected a JSON object; got [2, 3]"}', True),
        ("multiply", "", '{"error": "multiply: missing a required argument: \'left\'"}', True),
        (
            "multiply",
            '{"left": 2, "top": 3}',
            '{"error": "multiply: got an unexpected keyword argument \'top\'"}',
            True,
        ),
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
