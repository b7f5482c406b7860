"""How models write tool calls: which syntax a chat template teaches, and what begins a call in a reply. Pure.

The names are those of vLLM's tool parsers. A row of the table only suggests a parser: the renderer has it read back a
call that the template wrote, before any reply is read with it (`Renderer.tool_support`).
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
    closing: re.Pattern[str] | None = None
    """What ends a call that is whole, where the parser would also read half of one."""
    has_named_ids: bool = False
    """The id of a call holds its name: functions.NAME:N, where N counts the calls of the conversation."""


def _ours(parser: str, style: CallStyle, written: str, opening: str) -> Syntax:
    return Syntax(parser=parser, written=re.compile(written), opening=re.compile(opening), style=style)


def _vllm(
    parser: str, written: str, opening: str = "", closing: str | None = None, *, has_named_ids: bool = False
) -> Syntax:
    """`opening` is `written` unless it is given."""
    return Syntax(
        parser=parser,
        written=re.compile(written),
        opening=re.compile(opening or written),
        style=None,
        closing=None if closing is None else re.compile(closing),
        has_named_ids=has_named_ids,
    )


_DEEPSEEK = "<\uff5ctool▁call▁begin\uff5c>"
_PYTHONIC = r"\A\s*\[\s*[A-Za-z_][\w.]*\("

SYNTAXES = (
    _ours("hermes", CallStyle.TAGGED, r"<tool_call>\s*\{", "<tool_call>"),
    _vllm("qwen3_coder", r"<tool_call>\s*<function=", r"<tool_call>(?:\s*<function=)?|<function=", "</function>"),
    _vllm("glm45", r"<tool_call>[\w.-]+\s*<arg_key>", "<tool_call>", "</tool_call>"),
    _ours("openai", CallStyle.HARMONY, r"to=functions\.", r"to=[\w.]"),
    _vllm("mistral", r"\[TOOL_CALLS\]", closing=r"\}"),
    _vllm("deepseek_v3", f"{_DEEPSEEK}function<\uff5ctool▁sep\uff5c>", _DEEPSEEK),
    _vllm("deepseek_v31", _DEEPSEEK + r"[\w.-]+" + "<\uff5ctool▁sep\uff5c>", _DEEPSEEK),
    _vllm("kimi_k2", r"<\|tool_call_begin\|>", closing=r"<\|tool_call_end\|>", has_named_ids=True),
    _vllm("minimax_m2", "<minimax:tool_call>", closing="</minimax:tool_call>"),
    _vllm("gemma4", r"<\|tool_call>call:", r"<\|tool_call>", r"<tool_call\|>"),
    _vllm("functiongemma", "<start_function_call>", closing="<end_function_call>"),
    _vllm("lfm2", r"<\|tool_call_start\|>"),
    _vllm("seed_oss", "<seed:tool_call>", closing="</seed:tool_call>"),
    _vllm("granite", r"<\|tool_call\|>", closing=r"\]"),
    _vllm("phi4_mini_json", r"functools\["),
    _vllm("muse_glimmer", "<atem:function_calls>"),
    _vllm("olmo3", "<function_calls>"),
    _vllm("longcat", "<longcat_tool_call>"),
    _vllm("jamba", r"<tool_calls>\s*\[", "<tool_calls>"),
    _vllm("llama4_pythonic", r"<\|python_start\|>\s*\[", r"<\|python_start\|>\s*\[|" + _PYTHONIC),
    _vllm("pythonic", _PYTHONIC),
    _ours("llama3_json", CallStyle.BARE, r'\{"name"', r'\A\s*\{(?s:.*)"name"'),
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

    `has_begun`: the prompt already holds <think>.

    Example: after_thoughts("<think>a call?</think>no", has_begun=False) == "no"
    """
    begun = next(iter(_THOUGHTS)) if has_begun else text.lstrip()
    closes = next((closes for opens, closes in _THOUGHTS.items() if begun.startswith(opens)), None)
    return text.partition(closes)[2] if closes is not None and closes in text else text
