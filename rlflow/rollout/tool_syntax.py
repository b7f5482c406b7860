"""How models write tool calls: which syntax a chat template teaches, and what begins a call in a reply. Pure.

The names are those of vLLM's tool parsers. A row of the table only suggests a parser: the renderer has it read back a
call that the template wrote, before any reply is read with it (`Renderer.tool_support`).
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from rlflow.envs.texts import THOUGHTS


class CallStyle(StrEnum):
    """A syntax that is read without vLLM (`tool_calls.py`)."""

    TAGGED = "tagged"
    """Qwen, Hermes and others: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""
    BARE = "bare"
    """Llama 3: the reply is {"name": ..., "parameters": ...} and nothing else."""
    HARMONY = "harmony"
    """gpt-oss: a message to functions.NAME on a channel."""


_CALL, _BEGINS, _ENDS = range(3)


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
    begins_argument: re.Pattern[str] | None = None
    """What stands before each argument, where that is not JSON."""
    ends_argument: re.Pattern[str] | None = None
    """What stands after it; None if that is the same mark again, which may then be left out beside a number."""
    has_named_ids: bool = False
    """The id of a call holds its name: functions.NAME:N, where N counts the calls of the conversation."""

    def starts(self, text: str) -> list[int]:
        """Where the calls in a reply begin. What looks like a call inside an argument is none."""
        marks = [(found.start(), _CALL) for found in self.opening.finditer(text)]
        if self.begins_argument is not None:
            marks += [(found.start(), _BEGINS) for found in self.begins_argument.finditer(text)]
        if self.ends_argument is not None:
            marks += [(found.start(), _ENDS) for found in self.ends_argument.finditer(text)]
        starts, is_inside = list[int](), False
        for start, kind in sorted(marks):
            if kind == _CALL and not is_inside:
                starts.append(start)
            elif kind == _BEGINS and starts:
                is_inside = self.ends_argument is not None or not is_inside
            elif kind == _ENDS:
                is_inside = False
        return starts

    def is_whole(self, piece: str) -> bool:
        """Whether a call ends, and each of its arguments. A parser would read the rest of one that does not."""
        if self.closing is not None and not self.closing.search(piece):
            return False
        if self.begins_argument is None:
            return True
        num_begun = len(self.begins_argument.findall(piece))
        if self.ends_argument is None:
            return num_begun % 2 == 0
        return num_begun == len(self.ends_argument.findall(piece))

    def num_arguments(self, text: str) -> int | None:
        """The arguments of the whole calls in a text; None if the syntax does not mark each of them."""
        if self.begins_argument is None or self.ends_argument is None:
            return None
        return len(self.begins_argument.findall(text))


def _ours(parser: str, style: CallStyle, written: str, opening: str) -> Syntax:
    return Syntax(parser=parser, written=re.compile(written), opening=re.compile(opening), style=style)


def _vllm(
    parser: str,
    written: str,
    opening: str = "",
    closing: str | None = None,
    *,
    argument: tuple[str, str] | str | None = None,
    has_named_ids: bool = False,
) -> Syntax:
    """`opening` is `written` unless it is given. `argument`: what begins and ends one, or what does both."""
    begins, ends = argument if isinstance(argument, tuple) else (argument, None)
    return Syntax(
        parser=parser,
        written=re.compile(written),
        opening=re.compile(opening or written),
        style=None,
        closing=None if closing is None else re.compile(closing),
        begins_argument=None if begins is None else re.compile(begins),
        ends_argument=None if ends is None else re.compile(ends),
        has_named_ids=has_named_ids,
    )


_DEEPSEEK = "<\uff5ctool▁call▁begin\uff5c>"
_PARAMETER = ("<parameter[ =]", "</parameter>")
_PYTHONIC = r"\A\s*\[\s*[A-Za-z_][\w.]*\("

SYNTAXES = (
    _ours("hermes", CallStyle.TAGGED, r"<tool_call>\s*\{", "<tool_call>"),
    _vllm(
        "qwen3_coder",
        r"<tool_call>\s*<function=",
        r"<tool_call>(?:\s*<function=)?|<function=",
        "</function>",
        argument=_PARAMETER,
    ),
    _vllm(
        "glm45",
        r"<tool_call>[\w.-]+\s*<arg_key>",
        "<tool_call>",
        "</tool_call>",
        argument=("<arg_key>", "</arg_value>"),
    ),
    _ours("openai", CallStyle.HARMONY, r"to=functions\.", r"to=[\w.]"),
    _vllm("mistral", r"\[TOOL_CALLS\]", closing=r"\}"),
    _vllm("deepseek_v3", f"{_DEEPSEEK}function<\uff5ctool▁sep\uff5c>", _DEEPSEEK),
    _vllm("deepseek_v31", _DEEPSEEK + r"[\w.-]+" + "<\uff5ctool▁sep\uff5c>", _DEEPSEEK),
    _vllm("kimi_k2", r"<\|tool_call_begin\|>", closing=r"<\|tool_call_end\|>", has_named_ids=True),
    _vllm("minimax_m2", "<minimax:tool_call>", closing="</minimax:tool_call>", argument=_PARAMETER),
    _vllm("gemma4", r"<\|tool_call>call:", r"<\|tool_call>", r"<tool_call\|>", argument=r'<\|"\|>'),
    _vllm("functiongemma", "<start_function_call>", closing="<end_function_call>", argument="<escape>"),
    _vllm("lfm2", r"<\|tool_call_start\|>"),
    _vllm("seed_oss", "<seed:tool_call>", closing="</seed:tool_call>", argument=_PARAMETER),
    _vllm("granite", r"<\|tool_call\|>", closing=r"\]\s*\Z"),
    _vllm("phi4_mini_json", r"functools\["),
    _vllm("muse_glimmer", "<atem:function_calls>", argument=("<atem:parameter ", "</atem:parameter>")),
    _vllm("olmo3", "<function_calls>"),
    _vllm("longcat", "<longcat_tool_call>"),
    _vllm("jamba", r"<tool_calls>\s*\[", "<tool_calls>"),
    _vllm("llama4_pythonic", r"<\|python_start\|>\s*\[", r"<\|python_start\|>\s*\[|" + _PYTHONIC),
    _vllm("pythonic", _PYTHONIC),
    _ours("llama3_json", CallStyle.BARE, r'\{"name"', r'\A\s*\{(?s:.*)"name"'),
)
"""The first row whose `written` is found is a template's."""


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
    begun = next(iter(THOUGHTS)) if has_begun else text.lstrip()
    closes = next((closes for opens, closes in THOUGHTS.items() if begun.startswith(opens)), None)
    return text.partition(closes)[2] if closes is not None and closes in text else text
