"""Whatever a program sends is read or refused, and never fails otherwise."""

from typing import Any

import pytest
from visiting import ADD, USER

from rlflow.rollout.gateway.server import APIS
from rlflow.rollout.gateway.wire import JsonObject, Refused

STRANGE: list[Any] = [True, 0, -1, 1.5, "x", [], [1], [[]], {}, {"type": []}, {"type": "tool"}, [{"type": "function"}]]
NESTED = ["function", "format", "json_schema", "edits", "content", "output", "arguments", "tool_calls", "input", "type"]
FIELDS: dict[str, list[str]] = {
    "chat/completions": [
        *("messages", "tools", "tool_choice", "response_format", "n", "stop", "stream_options", "chat_template_kwargs"),
        *(
            "max_tokens",
            "max_completion_tokens",
            "logprobs",
            "model",
            "stream",
            "logit_bias",
            "functions",
            "modalities",
        ),
    ],
    "responses": [
        *("input", "instructions", "tools", "tool_choice", "text", "include", "previous_response_id", "truncation"),
        *("max_output_tokens", "background", "conversation", "metadata", "model"),
    ],
    "messages": [
        *("messages", "system", "tools", "tool_choice", "output_config", "output_format", "context_management"),
        *("max_tokens", "stop_sequences", "mcp_servers", "thinking", "model"),
    ],
}


def is_read_or_refused(path: str, fields: JsonObject) -> bool:
    try:
        request = APIS[path].read({"messages": [USER], "input": "hi", **fields}, {})
    except Refused as refusal:
        return refusal.status == 400 and bool(str(refusal))
    return bool(request.messages) and bool(request.agent)


@pytest.mark.parametrize("path", APIS)
def test_strange_values_are_read_or_refused(path: str) -> None:
    for name in FIELDS[path]:
        for strange in STRANGE:
            assert is_read_or_refused(path, {name: strange})
            for inner in NESTED:
                for place in (
                    {inner: strange},
                    {"type": "json_schema", inner: strange},
                    {"type": "function", inner: strange},
                ):
                    assert is_read_or_refused(
                        path, {name: place, "tools": [ADD]} if name != "tools" else {name: [place]}
                    )


@pytest.mark.parametrize("path", APIS)
def test_strange_messages_are_read_or_refused(path: str) -> None:
    field = "input" if path == "responses" else "messages"
    for strange in STRANGE:
        assert is_read_or_refused(path, {field: [strange]})
        for kind in ("message", "function_call", "function_call_output", "tool_use", "tool_result", "thinking", "text"):
            for inner in ("text", "content", "output", "arguments", "input", "name", "call_id", "tool_use_id"):
                part = {"type": kind, "role": "user", inner: strange}
                assert is_read_or_refused(path, {field: [part]})
                assert is_read_or_refused(path, {field: [{"role": "user", "content": [part]}]})
        for role in ("user", "assistant", "tool", "developer"):
            assert is_read_or_refused(path, {field: [{"role": role, "content": strange, "tool_calls": strange}, USER]})
