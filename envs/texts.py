"""Texts from values, and actions from replies, for the environments that adapt other projects."""

import json
from collections.abc import Sequence

from rlflow.types import Json, Message

THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>", "<|channel>": "<channel|>"}
"""What begins the thoughts of a reply -> what ends them, by family; gpt-oss has channels."""
_FINAL = "<|channel|>final<|message|>"


def text_of(value: object) -> str:
    """A text as it is; anything else as JSON, or as `str` writes it if JSON cannot hold it; None is "".

    Example: text_of({"left": [1, 2]}) == '{"left": [1, 2]}'
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def after_thoughts(text: str) -> str:
    """The text after the last tag that ends thoughts; all of it without one.

    Example: after_thoughts("<think>7?</think> 12") == " 12"
    """
    for end in (*THOUGHTS.values(), _FINAL):
        text = text.rpartition(end)[2]
    return text


def answer_part(reply: Message) -> str:
    """The part of a reply after its thoughts, stripped.

    Example: answer_part({"role": "assistant", "content": "<think>7?</think> 12"}) == "12"
    """
    return after_thoughts(reply["content"]).strip()


def with_observation(prompt: Sequence[Message], observation: str) -> list[Message]:
    """The prompt with the first observation below the text of its last message, if there is one.

    It becomes a message of its own only if the prompt ends with another role, because many chat templates refuse two
    user messages in a row.
    """
    messages = list(prompt)
    if not observation:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, Message(role="user", content=observation)]
    last = messages[-1]["content"]
    return [*messages[:-1], Message(role="user", content=f"{last}\n\n{observation}" if last else observation)]


def prompt_of(system_prompt: str, instructions: str) -> tuple[Message, ...]:
    """A system message, if there is a text for it, and a user's message."""
    system = (Message(role="system", content=system_prompt),) if system_prompt else ()
    return (*system, Message(role="user", content=instructions))


def json_object(text: str) -> dict[str, Json]:
    """The JSON object that a model wrote. Raises ValueError, with a message for the model, for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object; got {text[:80]}")
    return value
