"""Messages <-> tokens, through the chat template of the model's own tokenizer.

Sampled tokens are never tokenised again: a conversation grows by the template's text after the held tokens. If that
text does not start with the held tokens (the template rewrote history, or the tokenizer does not round-trip), it forks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateError

from rlflow.config import Config
from rlflow.errors import TemplateRefused
from rlflow.models.images import takes_images
from rlflow.models.opening import open_config, open_tokenizer
from rlflow.rollout.chat_template import PROBE_CALL, PROBE_TOOL, THOUGHT, ChatTemplate
from rlflow.rollout.tool_calls import (
    arguments_of,
    describe_tools,
    find_calls,
    tools_as_text,
    with_named_ids,
    without_calls,
)
from rlflow.rollout.tool_parsers import CallReader
from rlflow.rollout.tool_syntax import CallStyle, Syntax, after_thoughts
from rlflow.types import FunctionCall, Json, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolSchemas = Sequence[dict[str, Json]]

_TAG = re.compile("<tool_call>")


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolSupport:
    """How tools and their calls are written."""

    syntax: Syntax | None
    """The model's own; None if the system message describes the tools and calls stand between <tool_call> tags."""
    reason: str = ""
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
        """The tool calls in a reply; `tools` say which types their arguments have.

        Without tools there are none in a syntax that vLLM reads. Raises EnvironmentFailure for a tool with a schema
        that vLLM does not take.
        """
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

    Tools and their answers go through the template if it shows both and its calls can be read; otherwise they are
    written into the messages of system and user (`tool_calls.py`).
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
        self._template = ChatTemplate(tokenizer, template_args or {}, has_images=has_images)

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        return self._template.encode(self._text(messages, tools))

    def extend(
        self,
        held_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas = (),
    ) -> list[int] | None:
        text = self._text([*messages_so_far, *new_messages], tools)
        held = self._template.decode(held_ids, skip_special_tokens=False)
        return self._template.encode(text[len(held) :]) if text.startswith(held) else None

    def parse(self, ids: Sequence[int]) -> str:
        return self._template.parse(ids)

    def calls(self, text: str, tools: ToolSchemas = ()) -> list[FunctionCall]:
        said, probed = self._after_thoughts(text), self._template.call
        if not tools and probed.syntax is not None and probed.syntax.style is None:
            return []  # nothing is loaded without tools
        # Nor for a reply that holds no call in either way.
        if not _TAG.search(said) and not (probed.syntax and probed.syntax.opening.search(said)):
            return []
        return self._calls(said, tools, self.tool_support.syntax)

    def given(self, messages: Sequence[Message], reply: Message, tools: ToolSchemas = ()) -> list[int]:
        before = self._text(messages, tools)
        whole = self._text([*messages, reply], tools, is_over=True)
        if not whole.startswith(before):  # as with templates that begin a reply for the model
            if "tool_calls" in reply:
                raise TemplateRefused(
                    "the model's chat template begins replies itself, so that a given reply cannot be taken out of it, "
                    "and this one has tool calls; write them into its content as the model does, without tool_calls"
                )
            has_begun = before.rstrip().endswith(THOUGHT) and reply["content"].startswith(THOUGHT)
            return self.as_sampled(reply["content"].removeprefix(THOUGHT).lstrip() if has_begun else reply["content"])
        return self._template.to_end(self._template.encode(whole[len(before) :]))

    def as_sampled(self, text: str) -> list[int]:
        """The tokens of a reply as a model would sample it: the text and the template's end of turn."""
        ids = self._template.encode(text)
        return ids if ids and ids[-1] == self._template.call.end else [*ids, *self._template.ending()]

    def ends(self) -> list[int]:
        """The special tokens that the template writes after a reply, at the end or before a question; maybe none."""
        return self._template.ends()

    @property
    def begins_thoughts(self) -> bool:
        """True if prompts end with the tag that opens a thought."""
        return self._template.begins_thoughts

    @property
    def has_special_calls(self) -> bool:
        """True if the model writes calls with special tokens, which then belong to the text of a reply."""
        return self._template.has_special_calls

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Has a call read back as the template writes it. Raises ConfigError if that needs vLLM and there is none."""
        call = self._template.call
        if call.syntax is None:
            return ToolSupport(syntax=None, reason=call.reason)
        read = self._calls(self._after_thoughts(call.text), [PROBE_TOOL], call.syntax)
        wanted = (PROBE_CALL["name"], arguments_of(PROBE_CALL))
        if [(each["name"], arguments_of(each)) for each in read] == [wanted]:
            return ToolSupport(syntax=call.syntax)
        reason = f"the parser {call.syntax.parser} reads {read} in what the chat template writes: {call.text!r}"
        return ToolSupport(syntax=None, reason=reason)

    def probe_call(self) -> str:
        """PROBE_CALL as the model would sample it, without thoughts."""
        if self.tool_support.syntax is None:
            written = json.dumps({"name": PROBE_CALL["name"], "arguments": arguments_of(PROBE_CALL)})
            return f"<tool_call>\n{written}\n</tool_call>"
        return self._after_thoughts(self._template.call.text).strip("\n")

    def _after_thoughts(self, text: str) -> str:
        return after_thoughts(text, has_begun=self.begins_thoughts)

    @cached_property
    def _reader(self) -> CallReader:
        syntax = self._template.call.syntax
        assert syntax is not None, "the template has a syntax"
        return CallReader(syntax, self._template.tokenizer)

    def _calls(self, said: str, tools: ToolSchemas, syntax: Syntax | None) -> list[FunctionCall]:
        if syntax is not None and syntax.style is None:
            return self._reader.read(said, tools)
        return find_calls(said, CallStyle.TAGGED if syntax is None or syntax.style is None else syntax.style)

    def _holds_calls(self, message: Message) -> bool:
        """Whether the text of a reply with calls holds them, as that of a sampled one does."""
        syntax = self.tool_support.syntax if "tool_calls" in message else None
        opening = syntax.opening if syntax else _TAG
        return "tool_calls" in message and opening.search(self._after_thoughts(message["content"])) is not None

    def _text(self, messages: Sequence[Message], tools: ToolSchemas, *, is_over: bool = False) -> str:
        """`is_over`: nobody is asked to reply."""
        is_of_tools = bool(tools) or any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        syntax = self.tool_support.syntax if is_of_tools else None
        if syntax is not None and syntax.has_named_ids:
            messages = with_named_ids(messages)
        shown = self._with_calls_as_text(messages)
        other = None if syntax is None else self._with_calls_apart(messages, syntax)
        if other is not None and self._template.call.is_apart:
            shown, other = other, shown
        if is_of_tools and syntax is None:
            shown, tools = tools_as_text(describe_tools(shown, tools) if tools else shown), ()
        try:
            try:
                text = self._template.apply(shown, tools, is_over=is_over)
            except TemplateError:
                # Some templates look for a call before the answer of a tool; some take no broken one.
                if other is None:
                    raise
                text = self._template.apply(other, tools, is_over=is_over)
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateRefused(
                f"the model's chat template refused a conversation with the roles {roles}: {error}; change the "
                "environment's messages, or use a model whose template takes them"
            ) from error
        # JSON may hold halves of characters (surrogates), which tokenizers refuse: join them, or write a question mark.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _with_calls_as_text(self, messages: Sequence[Message]) -> list[Message]:
        """A sampled reply holds its calls as text already."""
        return [
            Message(role=message["role"], content=message["content"]) if self._holds_calls(message) else message
            for message in messages
        ]

    def _with_calls_apart(self, messages: Sequence[Message], syntax: Syntax) -> list[Message]:
        """For the template to write them: the text of a reply goes without the calls that it holds."""
        if self._template.is_harmony:  # it takes such a text to pieces itself
            return list(messages)
        return [
            Message(**{**message, "content": without_calls(message["content"], syntax.style)})
            if self._holds_calls(message)
            else message
            for message in messages
        ]


def open_renderer(config: Config, folder: str) -> Renderer:
    """The renderer of the model in `folder`, with `rollout.template_args`. Raises ConfigError."""
    tokenizer = open_tokenizer(folder, trust=config.model.trust_remote_code)
    model_config = open_config(folder, trust=config.model.trust_remote_code)
    return Renderer(tokenizer, config.rollout.template_args, has_images=takes_images(model_config))
