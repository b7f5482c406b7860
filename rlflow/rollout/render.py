"""Messages <-> tokens, through the chat template of the model's own tokenizer.

Sampled tokens are never tokenised again: a conversation grows by the template's text after the held tokens. Where that
text does not start with the held tokens (the template rewrote history, the tokenizer does not round-trip), it forks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from rlflow.errors import ConfigError
from rlflow.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Renderer:
    """Messages <-> tokens for one model.

    Example, as text, with a ChatML template:
        prompt([user "2+2"])    "<|im_start|>user\\n2+2<|im_end|>\\n<|im_start|>assistant\\n"
        sampled                 "4<|im_end|>"
        extend(.., [user "no"]) "\\n<|im_start|>user\\nno<|im_end|>\\n<|im_start|>assistant\\n"

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path: the tokenizer has no chat template, so messages cannot be turned into tokens; use an "
                "instruction-tuned model, or add a chat_template.jinja to the model's folder"
            )
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a whole conversation, up to where the policy's next reply starts."""
        return self._encode(self._text(messages))

    def extend(
        self, held_ids: Sequence[int], messages_so_far: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int] | None:
        """Tokens to append to `held_ids` so that they read as the whole conversation, up to the next reply.

        `held_ids` are a prompt and the reply sampled after it; `messages_so_far` ends with that reply. When no
        end-of-turn token was sampled, the template's is part of the answer. None when the text of the conversation does
        not start with the text of the held tokens: then only `prompt` of the whole conversation is faithful.
        """
        text = self._text([*messages_so_far, *new_messages])
        held = self._decode(held_ids, skip_special_tokens=False)
        return self._encode(text[len(held) :]) if text.startswith(held) else None

    def parse(self, ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens."""
        return self._decode(ids, skip_special_tokens=True)

    def _text(self, messages: Sequence[Message]) -> str:
        try:
            conversation = [{"role": message["role"], "content": message["content"]} for message in messages]
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the model's chat template refused a conversation with the roles {roles}: {error}; change the "
                "environment's messages, or use a model whose template takes them"
            ) from error
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
