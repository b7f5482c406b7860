"""How models write tool calls: which syntax a chat template teaches, and what begins a call in a reply. Pure.

The names are those of vLLM's tool parsers. A row of the table only suggests a parser: the renderer has it read a call back
that the template wrote, before any reply is read with it (`Renderer.tool_support`).
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class CallStyle(StrEnum):
    """A syntax that is read without vLLM (`tool_calls.py`)."""

    TAGGED = "tagged"
    """Qwen, Hermes and others: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""
    BARE = "bare"
    """Llama 3: the reply is {"name": ..., "parameters": ...} and nothing else."""
    HARMONY = "harmony"
    """gpt-oss: a message to functions.NAME on a channel."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Syntax:
    """One way to write tool calls."""

    parser: str
    """The name of vLLM's parser."""
    written: re.Pattern[str]
    """Found in what a template of this syntax writes for a call."""
    opening: re.Pattern[str]
    """What begins a call in a reply. A reply without it holds no call."""
    style: CallStyle | None
    """None if vLLM's parser reads it."""
    has_named_ids: bool = False
    """The id of a call holds its name: functions.NAME:N, where N counts the calls of the conversation."""


def _row(
    parser: str, written: str, opening: str, style: CallStyle | None = None, *, has_named_ids: bool = False
) -> Syntax:
    written_, opening_ = re.compile(written), re.compile(opening)
    return Syntax(parser=parser, written=written_, opening=opening_, style=style, has_named_ids=has_named_ids)


SYNTAXES = (
    _row("hermes", r"<tool_call>\s*\{", "<tool_call>", CallStyle.TAGGED),
    _row("qwen3_coder", r"<tool_call>\s*<function=", r"<tool_call>(?:\s*<function=)?|<function="),
    _row("glm45", r"<tool_call>[\w.-]+\s*<arg_key>", "<tool_call>"),
    _row("openai", r"to=functions\.", r"to=[\w.]", CallStyle.HARMONY),
    _row("mistral", r"\[TOOL_CALLS\]", r"\[TOOL_CALLS\]"),
    _row("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"),
    _row("deepseek_v31", r"<｜tool▁call▁begin｜>[\w.-]+<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"),
    _row("kimi_k2", r"<\|tool_call_begin\|>", r"<\|tool_call_begin\|>", has_named_ids=True),
    _row("minimax_m2", "<minimax:tool_call>", "<minimax:tool_call>"),
    _row("gemma4", r"<\|tool_call>call:", r"<\|tool_call>"),
    _row("functiongemma", "<start_function_call>", "<start_function_call>"),
    _row("lfm2", r"<\|tool_call_start\|>", r"<\|tool_call_start\|>"),
    _row("seed_oss", "<seed:tool_call>", "<seed:tool_call>"),
    _row("granite", r"<\|tool_call\|>", r"<\|tool_call\|>"),
    _row("phi4_mini_json", r"functools\[", r"functools\["),
    _row("muse_glimmer", "<atem:function_calls>", "<atem:function_calls>"),
    _row("olmo3", "<function_calls>", "<function_calls>"),
    _row("longcat", "<longcat_tool_call>", "<longcat_tool_call>"),
    _row("jamba", r"<tool_calls>\s*\[", "<tool_calls>"),
    _row("llama4_pythonic", r"<\|python_start\|>\s*\[", r"<\|python_start\|>\s*\[|\A\s*\[\s*[A-Za-z_][\w.]*\("),
    _row("pythonic", r"\A\s*\[\s*\w+\(", r"\A\s*\[\s*[A-Za-z_][\w.]*\("),
    _row("llama3_json", r'\{"name"', r'\A\s*\{(?s:.*)"name"', CallStyle.BARE),
)
"""The first row whose `written` is found is a template's."""

_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>"}


def syntax_of(written: str) -> Syntax | None:
    """The syntax of a call that a chat template wrote; None if no row of the table knows it.

    Example: syntax_of('<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>').parser == "hermes"
    """
    return next((syntax for syntax in SYNTAXES if syntax.written.search(written)), None)


def after_thoughts(text: str, *, has_begun: bool) -> str:
    """A reply from where its thoughts end; all of it if it has none, or if they do not end.

    `has_begun`: the prompt already holds the tag that opens them.

    Example: after_thoughts("<think>a call?</think>no", has_begun=False) == "no"
    """
    said = text.lstrip()
    for opens, closes in _THOUGHTS.items():
        if said.startswith(opens) or (has_begun and closes in said):
            return text.partition(closes)[2] if closes in text else text
    return text
