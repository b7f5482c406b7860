"""Messages <-> tokens, through the chat template of the model's own tokenizer.

Sampled tokens are never tokenised again: a conversation grows by the template's text after the held tokens. If that
text does not start with the held tokens (the template rewrote history, or the tokenizer does not round-trip), it forks.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from rlflow.config import Config
from rlflow.errors import ConfigError, TemplateRefused
from rlflow.models.images import takes_images
from rlflow.models.opening import open_config, open_tokenizer
from rlflow.plugins.names import did_you_mean
from rlflow.rollout.tool_calls import CallStyle, arguments_of, describe_tools, find_calls, tools_as_text
from rlflow.types import FunctionCall, Json, Message, TextPart, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolSchemas = Sequence[dict[str, Json]]

_PROBE, _NEXT = "zq_probe_zq", "zq_next_zq"
_THOUGHT = "<think>"
_REFUSALS = (TemplateError, TypeError, KeyError, ValueError)
_PROBE_TOOL: dict[str, Json] = {
    "type": "function",
    "function": {"name": _PROBE, "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}


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
        """The text of a reply, without special tokens."""
        ...

    def calls(self, text: str) -> list[FunctionCall]:
        """The tool calls in a reply."""
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
        self.style = self._native_style()
        """How the template itself writes calls; None if it knows no tools."""

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
        return self._decode(ids, skip_special_tokens=True)

    def calls(self, text: str) -> list[FunctionCall]:
        return find_calls(text, self.style or CallStyle.TAGGED)

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
        ids = self._encode(whole[len(before) :])
        last = next((place for place, id_ in enumerate(ids) if id_ in self._ending), len(ids))
        return ids[: last + 1]

    def as_sampled(self, text: str) -> list[int]:
        """The tokens of a reply as a model would sample it: the text and the template's end of turn."""
        written = self._apply([Message(role="user", content="x"), Message(role="assistant", content=_PROBE)], [])
        ending = self._encode(written[written.rfind(_PROBE) + len(_PROBE) :])
        return [*self._encode(text), *ending[:1]]

    def ends(self) -> list[int]:
        """The special tokens that the template writes after a reply, at the end or before a question; maybe none."""
        talk, found = [Message(role="user", content="x"), Message(role="assistant", content=_PROBE)], list[int]()
        for messages in (talk, [*talk, Message(role="user", content=_NEXT)]):
            with suppress(*_REFUSALS):
                written = self._apply(messages, [], add_generation_prompt=False)
                found += self._encode(written[written.rfind(_PROBE) + len(_PROBE) :].partition(_NEXT)[0])
        special = {id_ for id_, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        return [id_ for id_ in found if id_ in special]

    @cached_property
    def _ending(self) -> frozenset[int]:
        return frozenset(self.ends())

    def _native_style(self) -> CallStyle | None:
        """Tries it out: the template must show tools, calls in a known style, and the answers of tools."""
        user = Message(role="user", content="x")
        function = FunctionCall(name="named", arguments="{}")
        call = Message(
            role="assistant", content="", tool_calls=[ToolCall(id="call00000", type="function", function=function)]
        )
        answer = Message(role="tool", content=_PROBE, tool_call_id="call00000", name="named")
        try:
            with_tools = self._apply([user], [_PROBE_TOOL])
            before = self._apply([user], [])
            with_call = self._apply([user, call], [], add_generation_prompt=False)
            with_answer = self._apply([user, call, answer], [])
        except _REFUSALS:
            return None
        if _PROBE not in with_tools or _PROBE not in with_answer:
            return None
        written = with_call[len(before) :] if with_call.startswith(before) else with_call
        style = CallStyle.TAGGED if "<tool_call>" in written else CallStyle.BARE
        if style is CallStyle.BARE:
            written = written[written.find("{") : written.rfind("}") + 1]
        calls = find_calls(written, style)
        return style if calls and calls[0] == function else None

    def _text(self, messages: Sequence[Message], tools: ToolSchemas, *, is_over: bool = False) -> str:
        """`is_over`: nobody is asked to reply."""
        # A sampled reply holds its calls as text already.
        shown = [
            Message(role=message["role"], content=message["content"])
            if "tool_calls" in message and self.calls(message["content"])
            else message
            for message in messages
        ]
        if self.style is None:
            shown = tools_as_text(describe_tools(shown, tools) if tools else shown)
            tools = ()
        try:
            text = self._apply(shown, tools, add_generation_prompt=not is_over)
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateRefused(
                f"the model's chat template refused a conversation with the roles {roles}: {error}; change the "
                "environment's messages, or use a model whose template takes them"
            ) from error
        # JSON may hold halves of characters (surrogates), which tokenizers refuse: join them, or write a question mark.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _apply(self, messages: Sequence[Message], tools: ToolSchemas, *, add_generation_prompt: bool = True) -> str:
        text = self._tokenizer.apply_chat_template(
            [_for_template(message, self._has_images) for message in messages],
            tools=list(tools) or None,  # pyright: ignore[reportArgumentType]  schemas are dicts
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._template_args,
        )
        assert isinstance(text, str)
        return text

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


def _for_template(message: Message, has_images: bool = False) -> dict[str, Any]:
    """The message with each call's arguments as an object, because templates expect one where OpenAI has text."""
    shown: dict[str, Any] = {name: value for name, value in message.items() if name != "parts"}
    if has_images:
        text = [TextPart(type="text", text=message["content"])]
        shown["content"] = [
            part if part["type"] == "text" else {"type": "image"} for part in message.get("parts", text)
        ]
    if "tool_calls" in message:
        shown["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": arguments_of(call["function"])}}
            for call in message["tool_calls"]
        ]
    return shown
