"""The chat template of one model: messages -> text -> tokens, and what it was found to do with replies and tools.

What is not written down anywhere is tried out: which syntax the template writes tool calls in, whether it takes a
sampled call as text, and what ends a reply.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from rlflow.errors import ConfigError
from rlflow.plugins.names import did_you_mean
from rlflow.rollout.tool_calls import arguments_of, harmony_fields, with_named_ids
from rlflow.rollout.tool_syntax import CallStyle, Syntax, syntax_of
from rlflow.types import FunctionCall, Json, Message, TextPart, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHT = "<think>"
REFUSALS = (TemplateError, TypeError, KeyError, ValueError)
_PROBE, _NEXT = "zq_probe_zq", "zq_next_zq"
PROBE_TOOL: dict[str, Json] = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {"type": "integer", "description": "A number."},
                "word": {"type": "string", "description": "A word."},
            },
            "required": ["number", "word"],
        },
    },
}
PROBE_CALL = FunctionCall(name=_PROBE, arguments='{"number": 1, "word": "two"}')
_USER = Message(role="user", content="x")


@dataclass(kw_only=True, slots=True, frozen=True)
class ProbedCall:
    """What a chat template made of PROBE_CALL."""

    syntax: Syntax | None = None
    """The syntax that it seems to be."""
    text: str = ""
    """The call as a model would sample it."""
    end: int | None = None
    """The token that ends a reply with a call, if none does that ends another reply."""
    reason: str = ""
    """Why there is no syntax."""
    is_apart: bool = False
    """A sampled call must be given to the template apart from the text of its reply, because it refuses or loses it
    there, or loses the tool's answer."""


class ChatTemplate:
    """A tokenizer with its chat template."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template_args: Mapping[str, Any], *, has_images: bool
    ) -> None:
        """Raises ConfigError if there is no chat template, or one that does not read all of `template_args`."""
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path: the tokenizer has no chat template, so messages cannot be turned into tokens; use an "
                "instruction-tuned model, or add a chat_template.jinja to the model's folder"
            )
        self.tokenizer = tokenizer
        self._has_images = has_images
        self._template_args = dict(template_args)
        if self._template_args:
            _check_template_args(tokenizer, self._template_args)
        self._arguments_are_text = False
        self.is_harmony = False
        """True for gpt-oss, whose template takes thoughts, text and calls of a reply apart."""
        self.has_special_calls = False
        """True if the model writes calls with special tokens, which then belong to the text of a reply."""
        self.call = self._probe_call()

    def apply(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]], *, is_over: bool = False) -> str:
        """The text of a conversation, up to the next reply; `is_over`: nobody is asked to reply."""
        text = self.tokenizer.apply_chat_template(
            [self._for_template(message) for message in messages],
            tools=list(tools) or None,  # pyright: ignore[reportArgumentType]  schemas are dicts
            tokenize=False,
            add_generation_prompt=not is_over,
            **self._template_args,
        )
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def parse(self, ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens, but for those with which the model writes calls."""
        if not self.has_special_calls:
            return self.decode(ids, skip_special_tokens=True)
        of_text = (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        last, ends = len(ids), self._ending.union(each for each in of_text if isinstance(each, int))
        while last and ids[last - 1] in ends:
            last -= 1
        return self.decode(ids[:last], skip_special_tokens=False)

    def ends(self) -> list[int]:
        """The special tokens that the template writes after a reply, at the end or before a question; maybe none."""
        return [id_ for after in self._after_replies() for id_ in after]

    def ending(self) -> list[int]:
        """The token that the template writes after a reply; [] if there is none."""
        written = self.apply([_USER, Message(role="assistant", content=_PROBE)], [])
        return self.encode(written[written.rfind(_PROBE) + len(_PROBE) :])[:1]

    def to_end(self, ids: list[int]) -> list[int]:
        """The tokens of a reply up to the one that ends the turn, which is kept."""
        if self.is_harmony:  # a turn of several messages, which end alike
            return ids
        last = next((place for place, id_ in enumerate(ids) if id_ in self._ending), len(ids))
        return ids[: last + 1]

    @cached_property
    def begins_thoughts(self) -> bool:
        """True if prompts end with the tag that opens a thought."""
        return self.apply([_USER], []).rstrip().endswith(THOUGHT)

    def _after_replies(self) -> list[list[int]]:
        """The special tokens after a reply: at the end, and before a question."""
        talk, found = [_USER, Message(role="assistant", content=_PROBE)], list[list[int]]()
        for messages in (talk, [*talk, Message(role="user", content=_NEXT)]):
            with suppress(*REFUSALS):
                written = self.apply(messages, [], is_over=True)
                after = self.encode(written[written.rfind(_PROBE) + len(_PROBE) :].partition(_NEXT)[0])
                found.append([id_ for id_ in after if id_ in self._special])
        return found

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(id_ for id_, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def _ending(self) -> frozenset[int]:
        return frozenset(after[0] for after in self._after_replies() if after)

    def _probe_call(self) -> ProbedCall:
        """Tries it out: the template must show tools, calls, and the answers of tools."""
        call = ToolCall(id="call00000", type="function", function=PROBE_CALL)
        said = Message(role="assistant", content="", tool_calls=[call])
        answer = Message(role="tool", content=_NEXT, tool_call_id="call00000", name=_PROBE)
        reason = ""
        try:
            if _PROBE not in self.apply([_USER], [PROBE_TOOL]):
                return ProbedCall(reason="the chat template shows no tools")
            before = self.apply([_USER], [])
        except REFUSALS as error:
            return ProbedCall(reason=f"the chat template refuses tools: {error}")
        for is_text, has_named_ids in ((False, False), (True, False), (False, True)):
            self._arguments_are_text = is_text
            talk = with_named_ids([_USER, said, answer]) if has_named_ids else [_USER, said, answer]
            try:
                with_call, with_answer = self.apply(talk[:2], [], is_over=True), self.apply(talk, [])
            except REFUSALS as error:
                reason = f"the chat template refuses a call and its answer: {error}"
                continue
            written = _after_common(before, with_call)
            syntax = syntax_of(written)
            if syntax is not None and syntax.has_named_ids and not has_named_ids:
                continue
            if _NEXT not in with_answer:
                return ProbedCall(reason="the chat template does not show the answers of tools")
            if _PROBE not in written:
                return ProbedCall(reason="the chat template does not show calls")
            if syntax is None:
                return ProbedCall(reason=f"no parser reads what the chat template writes for a call: {written!r}")
            self.is_harmony = syntax.style is CallStyle.HARMONY
            ids = self.to_end(self.encode(written))
            self.has_special_calls = bool(self._special & set(ids) - self._ending)
            text = self.parse(ids)
            is_apart = self.is_harmony or self._loses(before, text, with_answer)
            has_own_end = ids[-1] in self._special and not self._ending & set(ids)
            return ProbedCall(syntax=syntax, text=text, is_apart=is_apart, end=ids[-1] if has_own_end else None)
        return ProbedCall(reason=reason)

    def _loses(self, before: str, text: str, with_answer: str) -> bool:
        """Whether a call within the text of its reply, or what follows it, is lost where a call apart is kept."""
        said, answer = Message(role="assistant", content=text), Message(role="tool", content=_NEXT)
        try:
            shown = self.apply([_USER, said, answer], [])
        except REFUSALS:
            return True
        held = before + text
        return _NEXT not in shown or (with_answer.startswith(held) and not shown.startswith(held))

    def _for_template(self, message: Message) -> dict[str, Any]:
        """The message as the template takes it: for most, a call's arguments are an object where OpenAI has text."""
        shown: dict[str, Any] = {name: value for name, value in message.items() if name != "parts"}
        if self._has_images:
            text = [TextPart(type="text", text=message["content"])]
            shown["content"] = [
                part if part["type"] == "text" else {"type": "image"} for part in message.get("parts", text)
            ]
        elif message["role"] == "assistant" and self.is_harmony:
            shown |= harmony_fields(message["content"])
            if not shown["thinking"]:
                del shown["thinking"]
            elif "tool_calls" in message:
                shown["content"] = ""  # it takes one of them beside a call
        if "tool_calls" in message and not self._arguments_are_text:
            shown["tool_calls"] = [
                {**call, "function": {"name": call["function"]["name"], "arguments": arguments_of(call["function"])}}
                for call in message["tool_calls"]
            ]
        return shown


def _after_common(text: str, longer: str) -> str:
    """`longer` from where it differs from `text`.

    Example: _after_common("ab", "ac") == "c"
    """
    pairs = enumerate(zip(text, longer, strict=False))
    return longer[next((place for place, (a, b) in pairs if a != b), min(len(text), len(longer))) :]


def _check_template_args(tokenizer: "PreTrainedTokenizerBase", template_args: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that the chat template does not read, or is given anyway."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    given = {"messages", *signature(tokenizer.apply_chat_template).parameters} - {"documents"}
    given, read = given | tokenizer.special_tokens_map.keys(), set[str]()
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        environment = _compile_jinja_template(template).environment
        given |= environment.globals.keys()
        read |= find_undeclared_variables(environment.parse(template))
    for name in template_args.keys() - (read - given):
        others = sorted(read - given)
        raise ConfigError(
            f"rollout.template_args.{name} has no effect: beside what it is always given, the model's chat template "
            f"reads {', '.join(others) or 'nothing'}{did_you_mean(name, others) or '; leave it out'}"
        )
