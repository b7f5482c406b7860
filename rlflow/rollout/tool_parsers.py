"""Tool calls read by vLLM's own parsers, for the families whose syntax `tool_calls.py` does not read.

They are loaded for the first conversation with tools, because that takes seconds and about 140 MB.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlflow.errors import ConfigError
from rlflow.rollout.tool_calls import call_or_garbage
from rlflow.rollout.tool_syntax import Syntax
from rlflow.types import FunctionCall, Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_calls(
    text: str, syntax: Syntax, tools: Sequence[dict[str, Json]], tokenizer: "PreTrainedTokenizerBase"
) -> list[FunctionCall]:
    """The calls in a reply, in order; `tools` say which types their arguments have.

    What begins like a call and is none becomes a call without a name whose arguments are that text. Raises ConfigError
    without vLLM.
    """
    starts = [found.start() for found in syntax.opening.finditer(text)]
    if not starts:
        return []
    pieces = [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    are_whole = all(map(partial(_is_whole, syntax), pieces))
    whole = _read(text, text.strip(), syntax, tools, tokenizer)
    if are_whole and len(whole) >= len(pieces) and all(call["name"] for call in whole):
        return whole
    # A parser may drop what it cannot read, and all that stands beside it: each call alone is read or kept as garbage.
    apart: list[FunctionCall] = []
    for piece in pieces:
        calls = _read(text[: starts[0]] + piece, piece, syntax, tools, tokenizer) if _is_whole(syntax, piece) else []
        apart += calls or [FunctionCall(name="", arguments=piece)]
    # Text that begins a call may also stand inside an argument.
    return whole if are_whole and _num_named(whole) > _num_named(apart) else apart


def _is_whole(syntax: Syntax, piece: str) -> bool:
    return syntax.closing is None or syntax.closing.search(piece) is not None


def _num_named(calls: Sequence[FunctionCall]) -> int:
    return sum(bool(call["name"]) for call in calls)


def _read(
    text: str,
    garbage: str,
    syntax: Syntax,
    tools: Sequence[dict[str, Json]],
    tokenizer: "PreTrainedTokenizerBase",
) -> list[FunctionCall]:
    """What vLLM's parser reads, `garbage` where that is no call; [] if it reads nothing, or raises."""
    parser_class, tool_class, request_class = _load(syntax.parser)
    known = [tool_class.model_validate(tool) for tool in map(_as_openai, tools) if tool is not None]
    request = request_class(messages=[{"role": "user", "content": ""}], tools=known or None)
    # A parser keeps what it has read: each reply needs its own.
    try:
        found = parser_class(tokenizer, known).extract_tool_calls(text, request)
    except Exception:  # they raise anything for a text that no model should write
        return []
    calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
    return [call_or_garbage(name, arguments, garbage) for name, arguments in calls]


def _load(name: str) -> tuple[Any, Any, Any]:
    """vLLM's parser, and its classes for a tool and for a request. Raises ConfigError without vLLM."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(
            f"the model's tool calls are read by vLLM's parser {name!r}, and vLLM cannot be imported here: {error}; "
            "install rlflow with the extra cpu or gpu on the machines of the runners"
        ) from error
    for module in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(module).setLevel(logging.CRITICAL)  # they log each text that they cannot read
    if name not in ToolParserManager.list_registered():
        raise ConfigError(
            f"the model's tool calls are read by vLLM's parser {name!r}, which the vLLM installed here does not have; "
            "install a newer one"
        )
    return ToolParserManager.get_tool_parser(name), ChatCompletionToolsParam, ChatCompletionRequest


def _as_openai(tool: dict[str, Json]) -> dict[str, Json] | None:
    """The tool's schema as OpenAI has it; None if it has no name."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    return {"type": "function", "function": function}
