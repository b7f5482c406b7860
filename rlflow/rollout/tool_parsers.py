"""Tool calls read by vLLM's own parsers, for the families whose syntax `tool_calls.py` does not read.

They are loaded for the first conversation with tools, because that takes seconds and about 120 MB.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlflow.errors import ConfigError, EnvironmentFailure
from rlflow.rollout.tool_calls import arguments_of, call_or_garbage
from rlflow.rollout.tool_syntax import Syntax
from rlflow.types import FunctionCall, Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CallReader:
    """Reads the calls of one syntax."""

    def __init__(self, syntax: Syntax, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises ConfigError if vLLM is missing, or too old to have the parser."""
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
            from vllm.tokenizers.hf import get_cached_tokenizer
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigError(
                f"the model's tool calls are read by vLLM's parser {syntax.parser!r}, and vLLM cannot be imported: "
                f"{error}; install rlflow with the extra cpu or gpu on the machines of the runners"
            ) from error
        if syntax.parser not in ToolParserManager.list_registered():
            raise ConfigError(
                f"the model's tool calls are read by vLLM's parser {syntax.parser!r}, which the vLLM installed here "
                "does not have; install a newer one"
            )
        for module in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(module).setLevel(logging.CRITICAL)  # they log each text that they cannot read
        self._syntax = syntax
        self._tool = ChatCompletionToolsParam
        self._request: Any = ChatCompletionRequest  # pyright takes its optional fields for required ones
        self._parser = ToolParserManager.get_tool_parser(syntax.parser)
        self._tokenizer: Any = get_cached_tokenizer(tokenizer)  # pyright: ignore[reportArgumentType]
        """Each parser asks for the whole vocabulary, which takes 30 ms if it is not kept."""

    def read(self, text: str, tools: Sequence[dict[str, Json]]) -> list[FunctionCall]:
        """The calls in a reply, in order; `tools` say which types their arguments have.

        What begins like a call and is none becomes a call without a name whose arguments are that text.

        Raises EnvironmentFailure for a tool whose schema vLLM does not take.
        """
        starts = self._syntax.starts(text)
        if not starts:
            return []
        known = self._known(tools)
        pieces = [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        are_whole = all(map(self._syntax.is_whole, pieces))
        together = self._read(text, text[starts[0] :].strip(), known) if are_whole else []
        if len(together) >= len(pieces) and all(call["name"] for call in together):
            return together
        # A parser may drop what it cannot read, and all that stands beside it: each call alone is read or kept.
        apart: list[FunctionCall] = []
        for piece in pieces:
            calls = self._read(text[: starts[0]] + piece, piece, known) if self._syntax.is_whole(piece) else []
            apart += calls or [FunctionCall(name="", arguments=piece)]
        # Text that begins a call may also stand inside an argument.
        return together if _num_named(together) > _num_named(apart) else apart

    def _known(self, tools: Sequence[dict[str, Json]]) -> list[Any]:
        """The tools as vLLM has them, without those that have no name."""
        known: list[Any] = []
        for tool in map(_as_openai, tools):
            if tool is None:
                continue
            try:
                known.append(self._tool.model_validate(tool))
            except ValidationError as error:
                faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
                raise EnvironmentFailure(
                    f"the schema of the tool {_name_of(tool)!r} is not one that models are shown: {'; '.join(faults)}; "
                    "correct it where the environment gives its tools"
                ) from error
        return known

    def _read(self, text: str, garbage: str, known: list[Any]) -> list[FunctionCall]:
        """What vLLM's parser reads, `garbage` where that is no call; [] if it raises, or loses any of it."""
        request = self._request(messages=[{"role": "user", "content": ""}], tools=known or None)
        try:
            # A parser keeps what it has read: each reply needs its own.
            found = self._parser(self._tokenizer, [*known]).extract_tool_calls(text, request)
        except Exception:  # they raise anything for a text that no model should write
            return []
        calls = [call_or_garbage(call.function.name, call.function.arguments, garbage) for call in found.tool_calls]
        wanted = self._syntax.num_arguments(garbage)
        has_all = wanted is None or wanted == sum(len(arguments_of(call)) for call in calls if call["name"])
        return calls if has_all else []


def _num_named(calls: Sequence[FunctionCall]) -> int:
    return sum(bool(call["name"]) for call in calls)


def _name_of(tool: dict[str, Json]) -> Json:
    function = tool["function"]
    assert isinstance(function, dict), "as OpenAI has it"
    return function["name"]


def _as_openai(tool: dict[str, Json]) -> dict[str, Json] | None:
    """The tool's schema as OpenAI has it; None if it has no name."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    return {"type": "function", "function": function}
