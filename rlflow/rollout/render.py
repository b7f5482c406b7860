"""Messages <-> tokens, through the chat template of the model's own tokenizer.

Sampled tokens are never tokenised again: a conversation grows by the template's text after the held tokens. If that
text does not start with the held tokens (the template rewrote history, or the tokenizer does not round-trip), it forks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from rlflow.config import Config
from rlflow.errors import ConfigError, TemplateRefused
from rlflow.models.images import takes_images
from rlflow.models.opening import open_config, open_tokenizer
from rlflow.plugins.names import did_you_mean
from rlflow.rollout.tool_calls import (
    arguments_of,
    describe_tools,
    find_calls,
    harmony_fields,
    tools_as_text,
    with_named_ids,
    without_calls,
)
from rlflow.rollout.tool_parsers import read_calls
from rlflow.rollout.tool_syntax import CallStyle, Syntax, after_thoughts, syntax_of
from rlflow.types import FunctionCall, Json, Message, TextPart, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolSchemas = Sequence[dict[str, Json]]

_PROBE, _NEXT = "zq_probe_zq", "zq_next_zq"
_THOUGHT = "<think>"
_TAG = re.compile("<tool_call>")
_REFUSALS = (TemplateError, TypeError, KeyError, ValueError)
PROBE_TOOL: dict[str, Json] = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}, "word": {"type": "string"}}},
    },
}
PROBE_CALL = FunctionCall(name=_PROBE, arguments='{"number": 1, "word": "two"}')


@dataclass(kw_only=True, slots=True, frozen=True)
class _Probed:
    """What a chat template makes of tools."""

    syntax: Syntax | None = None
    written: str = ""
    """The call that it wrote."""
    reason: str = ""
    """Why there is no syntax."""
    is_text: bool = False
    """The template takes the arguments of a call as text, not as an object."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolSupport:
    """How tools and their calls are written."""

    syntax: Syntax | None
    """The model's own; None if the system message describes the tools and calls stand between <tool_call> tags."""
    reason: str
    """Why it is not the model's own."""


class ChatRenderer(Protocol):
    """Messages <-> tokens."""

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        """The tokens of a whole conversation, up to where the policy's next reply starts."""
        ...

    def extend(
        self,
        held_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas = (),
    ) -> list[int] | None:
        """The tokens to append to `held_ids` so that they read as the whole conversation, up to the next reply.

        `held_ids` are a prompt and the reply sampled after it; `messages_so_far` ends with that reply. If no
        end-of-turn token was sampled, the template's is part of the answer. None if the text of the conversation does
        not start with the text of the held tokens: then only `prompt` of the whole conversation is faithful.
        """
        ...

    def parse(self, ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens, but for those with which the model writes calls."""
        ...

    def calls(self, text: str, tools: ToolSchemas = ()) -> list[FunctionCall]:
        """The tool calls in a reply; `tools` say which types their arguments have."""
        ...

    def given(self, messages: Sequence[Message], reply: Message, tools: ToolSchemas = ()) -> list[int]:
        """The tokens of a reply that somebody else gave to a conversation, to the end of its turn."""
        ...


class Renderer:
    """ChatRenderer of one model.

    Example, as text, with a ChatML template:
        prompt([user "2+2"])    "<|im_start|>user\\n2+2<|im_end|>\\n<|im_start|>assistant\\n"
        sampled                 "4<|im_end|>"
        extend(.., [user "no"]) "\\n<|im_start|>user\\nno<|im_end|>\\n<|im_start|>assistant\\n"

    Tools and their answers go through the template if it shows both; otherwise they are written into the messages of
    system and user (`tool_calls.py`).
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_args: Mapping[str, Any] | None = None,
        *,
        has_images: bool = False,
    ) -> None:
        """`has_images`: the template shows contents as lists of parts, as those of models that take images do.

        Raises ConfigError if there is no chat template, or one that does not read all of `template_args`.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path: the tokenizer has no chat template, so messages cannot be turned into tokens; use an "
                "instruction-tuned model, or add a chat_template.jinja to the model's folder"
            )
        self._tokenizer = tokenizer
        self._has_images = has_images
        self._template_args = dict(template_args or {})
        if self._template_args:
            _check_template_args(tokenizer, self._template_args)
        self._arguments_are_text = False
        self._is_harmony = False
        self._probed = self._probe()
        self._is_harmony = self._probed.syntax is not None and self._probed.syntax.style is CallStyle.HARMONY

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        return self._encode(self._text(messages, tools))

    def extend(
        self,
        held_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas = (),
    ) -> list[int] | None:
        text = self._text([*messages_so_far, *new_messages], tools)
        held = self._decode(held_ids, skip_special_tokens=False)
        return self._encode(text[len(held) :]) if text.startswith(held) else None

    def parse(self, ids: Sequence[int]) -> str:
        if not self.has_special_calls:
            return self._decode(ids, skip_special_tokens=True)
        last = len(ids)
        while last and ids[last - 1] in self._ending:
            last -= 1
        return self._decode(ids[:last], skip_special_tokens=False)

    def calls(self, text: str, tools: ToolSchemas = ()) -> list[FunctionCall]:
        said = after_thoughts(text, has_begun=self.begins_thoughts)
        openings = [_TAG, self._probed.syntax.opening] if self._probed.syntax else [_TAG]
        # Nothing is loaded for a reply without calls.
        is_call = any(opening.search(said) for opening in openings)
        return self._calls(said, tools, self.tool_support.syntax) if is_call else []

    @cached_property
    def has_special_calls(self) -> bool:
        """True if the model writes calls with special tokens, which then belong to the text of a reply."""
        written = self._encode(self._probed.written) if self._probed.syntax else []
        return bool(self._special & set(written) - self._ending)

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Has a call read back that the template wrote. Raises ConfigError if that needs vLLM and there is none."""
        probed = self._probed
        if probed.syntax is None:
            return ToolSupport(syntax=None, reason=probed.reason)
        text = self.parse(self._to_end(self._encode(probed.written)))
        said = after_thoughts(text, has_begun=self.begins_thoughts)
        read = self._calls(said, [PROBE_TOOL], probed.syntax)
        if [(call["name"], arguments_of(call)) for call in read] == [(_PROBE, arguments_of(PROBE_CALL))]:
            return ToolSupport(syntax=probed.syntax, reason="")
        reason = f"the parser {probed.syntax.parser} reads {read} in what the template writes: {probed.written!r}"
        return ToolSupport(syntax=None, reason=reason)

    def probe_call(self) -> str:
        """What the model would sample for PROBE_CALL, without thoughts that the template puts before it."""
        support = self.tool_support
        if support.syntax is None:
            return f"<tool_call>\n{json.dumps({'name': _PROBE, 'arguments': arguments_of(PROBE_CALL)})}\n</tool_call>"
        text = self.parse(self._to_end(self._encode(self._probed.written)))
        opening = support.syntax.opening.search(text)
        assert opening is not None, "a call that was read back"
        return text[opening.start() :].rstrip()

    def _holds_calls(self, text: str) -> bool:
        """Whether something in a reply begins like a call."""
        syntax = self.tool_support.syntax
        said = after_thoughts(text, has_begun=self.begins_thoughts)
        return (syntax.opening if syntax else _TAG).search(said) is not None

    def _calls(self, said: str, tools: ToolSchemas, syntax: Syntax | None) -> list[FunctionCall]:
        if syntax is not None and syntax.style is None:
            return read_calls(said, syntax, tools, self._tokenizer)
        return find_calls(said, CallStyle.TAGGED if syntax is None or syntax.style is None else syntax.style)

    def given(self, messages: Sequence[Message], reply: Message, tools: ToolSchemas = ()) -> list[int]:
        """The tokens of a reply that somebody else gave to a conversation, to the end of its turn."""
        ...


class Renderer:
    """ChatRenderer of one model.

    Example, as text, with a ChatML template:
        prompt([user "2+2"])    "<|im_start|>user\\n2+2<|im_end|>\\n<|im_start|>assistant\\n"
        sampled                 "4<|im_end|>"
        extend(.., [user "no"]) "\\n<|im_start|>user\\nno<|im_end|>\\n<|im_start|>assistant\\n"

    Tools and their answers go through the template if it shows both; otherwise they are written into the messages of
    system and user (`tool_calls.py`).
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_args: Mapping[str, Any] | None = None,
        *,
        has_images: bool = False,
    ) -> None:
        """`has_images`: the template shows contents as lists of parts, as those of models that take images do.

        Raises ConfigError if there is no chat template, or one that does not read all of `template_args`.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path: the tokenizer has no chat template, so messages cannot be turned into tokens; use an "
                "instruction-tuned model, or add a chat_template.jinja to the model's folder"
            )
        self._tokenizer = tokenizer
        self._has_images = has_images
        self._template_args = dict(template_args or {})
        if self._template_args:
            _check_template_args(tokenizer, self._template_args)
        self._arguments_are_text = False
        self._is_harmony = False
        self._probed = self._probe()
        self._is_harmony = self._probed.syntax is not None and self._probed.syntax.style is CallStyle.HARMONY

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        return self._encode(self._text(messages, tools))

    def extend(
        self,
        held_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas = (),
    ) -> list[int] | None:
        text = self._text([*messages_so_far, *new_messages], tools)
        held = self._decode(held_ids, skip_special_tokens=False)
        return self._encode(text[len(held) :]) if text.startswith(held) else None

    def parse(self, ids: Sequence[int]) -> str:
        if not self.has_special_calls:
            return self._decode(ids, skip_special_tokens=True)
        last = len(ids)
        while last and ids[last - 1] in self._ending:
            last -= 1
        return self._decode(ids[:last], skip_special_tokens=False)

    def calls(self, text: str, tools: ToolSchemas = ()) -> list[FunctionCall]:
        said = after_thoughts(text, has_begun=self.begins_thoughts)
        openings = [_TAG, self._probed.syntax.opening] if self._probed.syntax else [_TAG]
        # Nothing is loaded for a reply without calls.
        is_call = any(opening.search(said) for opening in openings)
        return self._calls(said, tools, self.tool_support.syntax) if is_call else []

    @cached_property
    def has_special_calls(self) -> bool:
        """True if the model writes calls with special tokens, which then belong to the text of a reply."""
        written = self._encode(self._probed.written) if self._probed.syntax else []
        return bool(self._special & set(written) - self._ending)

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Has a call read back that the template wrote. Raises ConfigError if that needs vLLM and there is none."""
        probed = self._probed
        if probed.syntax is None:
            return ToolSupport(syntax=None, reason=probed.reason)
        text = self.parse(self._to_end(self._encode(probed.written)))
        said = after_thoughts(text, has_begun=self.begins_thoughts)
        read = self._calls(said, [PROBE_TOOL], probed.syntax)
        if [(call["name"], arguments_of(call)) for call in read] == [(_PROBE, arguments_of(PROBE_CALL))]:
            return ToolSupport(syntax=probed.syntax, reason="")
        reason = f"the parser {probed.syntax.parser} reads {read} in what the template writes: {probed.written!r}"
        return ToolSupport(syntax=None, reason=reason)

    def probe_call(self) -> str:
        """What the model would sample for PROBE_CALL, without thoughts that the template puts before it."""
        support = self.tool_support
        if support.syntax is None:
            return f"<tool_call>\n{json.dumps({'name': _PROBE, 'arguments': arguments_of(PROBE_CALL)})}\n</tool_call>"
        text = self.parse(self._to_end(self._encode(self._probed.written)))
        opening = support.syntax.opening.search(text)
        assert opening is not None, "a call that was read back"
        return text[opening.start() :].rstrip()

    def _holds_calls(self, text: str) -> bool:
        """Whether something in a reply begins like a call."""
        opening = self._probed.syntax.opening if self._probed.syntax else _TAG
        said = after_thoughts(text, has_begun=self.begins_thoughts)
        return opening.search(said) is not None or _TAG.search(said) is not None

    def _calls(self, text: str, tools: ToolSchemas, syntax: Syntax | None) -> list[FunctionCall]:
        said = after_thoughts(text, has_begun=self.begins_thoughts)
        if syntax is not None and syntax.style is None:
            return read_calls(said, syntax, tools, self._tokenizer)
        return find_calls(said, CallStyle.TAGGED if syntax is None or syntax.style is None else syntax.style)

    def given(self, messages: Sequence[Message], reply: Message, tools: ToolSchemas = ()) -> list[int]:
        before = self._text(messages, tools)
        whole = self._text([*messages, reply], tools, is_over=True)
        if not whole.startswith(before):  # as with templates that begin a reply for the model
            if "tool_calls" in reply:
                raise TemplateRefused(
                    "the model's chat template begins replies itself, so that a given reply cannot be taken out of it, "
                    "and this one has tool calls; write them into its content as the model does, without tool_calls"
                )
            has_begun = before.rstrip().endswith(_THOUGHT) and reply["content"].startswith(_THOUGHT)
            return self.as_sampled(reply["content"].removeprefix(_THOUGHT).lstrip() if has_begun else reply["content"])
        return self._to_end(self._encode(whole[len(before) :]))

    def as_sampled(self, text: str) -> list[int]:
        """The tokens of a reply as a model would sample it: the text and the template's end of turn."""
        written = self._apply([Message(role="user", content="x"), Message(role="assistant", content=_PROBE)], [])
        ending = self._encode(written[written.rfind(_PROBE) + len(_PROBE) :])
        return [*self._encode(text), *ending[:1]]

    def ends(self) -> list[int]:
        """The special tokens that the template writes after a reply, at the end or before a question; maybe none."""
        return [id_ for after in self._after_replies() for id_ in after]

    def _after_replies(self) -> list[list[int]]:
        """The special tokens after a reply: at the end, and before a question."""
        talk, found = [Message(role="user", content="x"), Message(role="assistant", content=_PROBE)], list[list[int]]()
        for messages in (talk, [*talk, Message(role="user", content=_NEXT)]):
            with suppress(*_REFUSALS):
                written = self._apply(messages, [], add_generation_prompt=False)
                after = self._encode(written[written.rfind(_PROBE) + len(_PROBE) :].partition(_NEXT)[0])
                found.append([id_ for id_ in after if id_ in self._special])
        return found

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(id_ for id_, token in self._tokenizer.added_tokens_decoder.items() if token.special)

    def _to_end(self, ids: list[int]) -> list[int]:
        """The tokens up to the one that ends the turn, which is kept."""
        if self._is_harmony:  # a turn of several messages, which end alike
            return ids
        last = next((place for place, id_ in enumerate(ids) if id_ in self._ending), len(ids))
        return ids[: last + 1]

    @cached_property
    def _ending(self) -> frozenset[int]:
        return frozenset(after[0] for after in self._after_replies() if after)

    @cached_property
    def begins_thoughts(self) -> bool:
        """True if prompts end with the tag that opens a thought."""
        return self._apply([Message(role="user", content="x")], []).rstrip().endswith(_THOUGHT)

    def _probe(self) -> _Probed:
        """Tries it out: the template must show tools, calls in a known syntax, and the answers of tools."""
        user = Message(role="user", content="x")
        call = ToolCall(id="call00000", type="function", function=PROBE_CALL)
        said = Message(role="assistant", content="", tool_calls=[call])
        answer = Message(role="tool", content=_NEXT, tool_call_id="call00000", name=_PROBE)
        try:
            if _PROBE not in self._apply([user], [PROBE_TOOL]):
                return _Probed(reason="the chat template shows no tools")
            before = self._apply([user], [])
        except _REFUSALS as error:
            return _Probed(reason=f"the chat template refuses tools: {error}")
        reason = ""
        for is_text, has_named_ids in ((False, False), (True, False), (False, True)):
            self._arguments_are_text = is_text
            talk = with_named_ids([user, said, answer]) if has_named_ids else [user, said, answer]
            try:
                with_call = self._apply(talk[:2], [], add_generation_prompt=False)
                with_answer = self._apply(talk, [])
            except _REFUSALS as error:
                reason = f"the chat template refuses a call and its answer: {error}"
                continue
            written = with_call[len(commonprefix([before, with_call])) :]
            syntax = syntax_of(written)
            if syntax is not None and syntax.has_named_ids and not has_named_ids:
                continue
            if _NEXT not in with_answer:
                return _Probed(reason="the chat template does not show the answers of tools")
            if _PROBE not in written:
                return _Probed(reason="the chat template does not show calls")
            reason = "" if syntax else f"no parser reads what the chat template writes for a call: {written!r}"
            return _Probed(syntax=syntax, written=written, reason=reason)
        return _Probed(reason=reason)

    def _text(self, messages: Sequence[Message], tools: ToolSchemas, *, is_over: bool = False) -> str:
        """`is_over`: nobody is asked to reply."""
        if self._probed.syntax is not None and self._probed.syntax.has_named_ids:
            messages = with_named_ids(messages)
        # A sampled reply holds its calls as text already.
        shown = [
            Message(role=message["role"], content=message["content"])
            if "tool_calls" in message and not self._is_harmony and self._holds_calls(message["content"])
            else message
            for message in messages
        ]
        if (tools or any(map(_is_of_tools, messages))) and self.tool_support.syntax is None:
            shown = tools_as_text(describe_tools(shown, tools) if tools else shown)
            tools = ()
        try:
            text = self._apply(shown, tools, add_generation_prompt=not is_over)
        except (TemplateError, TypeError) as error:
            text = self._rewritten(messages, tools, is_over=is_over)
            if text is None:
                roles = ", ".join(message["role"] for message in messages)
                raise TemplateRefused(
                    f"the model's chat template refused a conversation with the roles {roles}: {error}; change the "
                    "environment's messages, or use a model whose template takes them"
                ) from error
        # JSON may hold halves of characters (surrogates), which tokenizers refuse: join them, or write a question mark.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _rewritten(self, messages: Sequence[Message], tools: ToolSchemas, *, is_over: bool) -> str | None:
        """The text, for a template that takes calls only apart from what was said; None if it takes none so either."""
        syntax = self.tool_support.syntax
        if syntax is None:
            return None
        apart = [
            Message(**{**message, "content": without_calls(message["content"], syntax.style)})
            if "tool_calls" in message and self._holds_calls(message["content"])
            else message
            for message in messages
        ]
        try:
            return self._apply(apart, tools, add_generation_prompt=not is_over)
        except (TemplateError, TypeError):
            return None

    def _apply(self, messages: Sequence[Message], tools: ToolSchemas, *, add_generation_prompt: bool = True) -> str:
        text = self._tokenizer.apply_chat_template(
            [self._for_template(message) for message in messages],
            tools=list(tools) or None,  # pyright: ignore[reportArgumentType]  schemas are dicts
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._template_args,
        )
        assert isinstance(text, str)
        return text

    def _for_template(self, message: Message) -> dict[str, Any]:
        """The message as the template takes it: for most, a call's arguments are an object where OpenAI has text."""
        shown: dict[str, Any] = {name: value for name, value in message.items() if name != "parts"}
        if self._has_images:
            text = [TextPart(type="text", text=message["content"])]
            shown["content"] = [
                part if part["type"] == "text" else {"type": "image"} for part in message.get("parts", text)
            ]
        elif message["role"] == "assistant" and self._is_harmony:
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

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def open_renderer(config: Config, folder: str) -> Renderer:
    """The renderer of the model in `folder`, with `rollout.template_args`. Raises ConfigError."""
    tokenizer = open_tokenizer(folder, trust=config.model.trust_remote_code)
    model_config = open_config(folder, trust=config.model.trust_remote_code)
    return Renderer(tokenizer, config.rollout.template_args, has_images=takes_images(model_config))


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


def _is_of_tools(message: Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message
