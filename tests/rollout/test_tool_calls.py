"""Tool calls in sampled text, and conversations with tools for models that know none."""

import json

import pytest

from rlflow.rollout.tool_calls import CallStyle, describe_tools, find_calls, tools_as_text, without_calls
from rlflow.types import Message, ToolCall

TAGGED, BARE = CallStyle.TAGGED, CallStyle.BARE


@pytest.mark.parametrize(
    ("text", "style", "calls"),
    [
        ("no call", TAGGED, []),
        ('a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> b', TAGGED, [("f", '{"x": 1}')]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', TAGGED, [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', TAGGED, [("f", '{"x": 1}')]),
        (
            '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>',
            TAGGED,
            [("f", "{}"), ("g", "{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}', TAGGED, [("", '{"name": "f", "arguments": {"x": 1}')]),
        ("<tool_call>f(1)</tool_call>", TAGGED, [("", "f(1)")]),
        ("<tool_call>[1]</tool_call>", TAGGED, [("", "[1]")]),
        ('<tool_call>{"x": ' + "1" * 5000, TAGGED, [("", '{"x": ' + "1" * 5000)]),
        ("<tool_call>" + "[" * 100_000, TAGGED, [("", "[" * 100_000)]),
        ('{"name": "f", "parameters": {"x": 1}}', BARE, [("f", '{"x": 1}')]),
        (' {"name": "f", "parameters": ', BARE, [("", '{"name": "f", "parameters":')]),
        ('{"x": 1}', BARE, []),
        ('I say {"name": "f"}', BARE, []),
    ],
)
def test_calls_are_found_and_garbage_is_kept_as_it_is(
    text: str, style: CallStyle, calls: list[tuple[str, str]]
) -> None:
    assert [(call["name"], call["arguments"]) for call in find_calls(text, style)] == calls


def test_what_a_reply_says_beside_its_calls() -> None:
    assert without_calls('a\n<tool_call>{"name": "f"}</tool_call>', TAGGED) == "a"
    assert without_calls('{"name": "f", "parameters": {}}', BARE) == ""
    assert without_calls("three", BARE) == "three"


def test_tools_are_described_in_the_system_message() -> None:
    user = Message(role="user", content="x")
    first, second = describe_tools([user], [{"type": "function", "function": {"name": "f"}}])
    assert (first["role"], second) == ("system", user)
    assert '{"type": "function", "function": {"name": "f"}}' in first["content"]
    kept, _ = describe_tools([Message(role="system", content="Be brief."), user], [{"name": "f"}])
    assert kept["content"].startswith("Be brief.\n\n# Tools")


def test_answers_in_a_row_become_one_message_of_the_user() -> None:
    call = ToolCall(id="1", type="function", function={"name": "f", "arguments": '{"x": 1}'})
    conversation = [
        Message(role="user", content="x"),
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content="1", tool_call_id="1"),
        Message(role="tool", content="2", tool_call_id="2"),
    ]
    written = json.dumps({"name": "f", "arguments": {"x": 1}})
    assert tools_as_text(conversation) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": f"<tool_call>\n{written}\n</tool_call>"},
        {"role": "user", "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"},
    ]
