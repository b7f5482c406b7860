"""Tool calls in sampled text, and conversations with tools for models that know none."""

import json

import pytest

from rlflow.rollout.tool_calls import describe_tools, find_calls, harmony_fields, tools_as_text, without_calls
from rlflow.rollout.tool_syntax import CallStyle, after_thoughts, syntax_of
from rlflow.types import Message, ToolCall

TAGGED, BARE, HARMONY = CallStyle.TAGGED, CallStyle.BARE, CallStyle.HARMONY
HEADER = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>to=functions.g<|end|><|start|>assistant"


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
        (THOUGHT + HEADER + '{"x": 1}<|call|>', HARMONY, [("f", '{"x": 1}')]),
        (HEADER + '{"x": <|call|>', HARMONY, [("", '{"x": ')]),
        (HEADER + "[1]", HARMONY, [("", "[1]")]),
        (HEADER.replace("functions.f", "browser.find") + "{}<|call|>", HARMONY, [("browser.find", "{}")]),
        ("<|channel|>final<|message|>to=functions.f", HARMONY, []),
        ("mail it to=me", HARMONY, []),
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
    # A program of the gateway is not told the style.
    assert without_calls('a [TOOL_CALLS]f[ARGS]{"x": "to=b"}', BARE) == without_calls("a [TOOL_CALLS]f", None) == "a"
    assert (
        without_calls(f"{THOUGHT}<|channel|>commentary<|message|>a<|end|><|start|>assistant{HEADER}{{}}", BARE) == "a"
    )
    assert without_calls("sent to=b", None) == "sent to=b"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("4", ("4", "")),
        ("<|channel|>final<|message|>4<|return|>", ("4", "")),
        ("<|channel|>analysis<|message|>2<|end|><|start|>assistant<|channel|>final<|message|>4", ("4", "2")),
        (THOUGHT + HEADER + "{}<|call|>", ("", "to=functions.g")),
    ],
)
def test_a_reply_of_harmony_is_taken_to_pieces(text: str, fields: tuple[str, str]) -> None:
    assert harmony_fields(text) == dict(zip(("content", "thinking"), fields, strict=True))


@pytest.mark.parametrize(
    ("text", "has_begun", "said"),
    [
        ("<think>a</think>b", False, "b"),
        ("a</think>b", True, "b"),
        ("a</think>b", False, "a</think>b"),
        ("<think>a", False, "<think>a"),
        ("[THINK]a[/THINK]b", False, "b"),
        ("a", True, "a"),
    ],
)
def test_where_thoughts_end(text: str, has_begun: bool, said: str) -> None:
    assert after_thoughts(text, has_begun=has_begun) == said


@pytest.mark.parametrize(
    ("written", "parser"),
    [
        ('<tool_call>\n{"name": "f"}', "hermes"),
        ("<tool_call>\n<function=f>", "qwen3_coder"),
        ("<tool_call>f\n<arg_key>x</arg_key>", "glm45"),
        ('{"name": "f", "parameters": {}}', "llama3_json"),
        ("[f(x=1)]", "pythonic"),
        ("f(1)", None),
    ],
)
def test_which_syntax_a_template_writes(written: str, parser: str | None) -> None:
    found = syntax_of(written)
    assert (found.parser if found else None) == parser


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
