"""The chat template of a model that has none: ChatML, if its tokenizer has ChatML's two marks.

The marks are all of it. What other vocabularies suggest comes in versions (headers, dates, spaces, system messages).
"""

import json
from pathlib import Path

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def has_template(folder: Path) -> bool:
    """Whether a chat template lies in the folder, as a file or within tokenizer_config.json."""
    settings = folder / "tokenizer_config.json"
    is_beside = any((folder / f"chat_template.{ending}").is_file() for ending in ("jinja", "json"))
    return is_beside or (settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template")))


def chatml_end(folder: Path) -> int | None:
    """The id of `<|im_end|>` if the model in the folder is given ChatML, else None."""
    file = folder / "tokenizer.json"
    if has_template(folder) or not file.is_file():
        return None
    ids = {token["content"]: token["id"] for token in json.loads(file.read_text())["added_tokens"]}
    return ids[END] if START in ids and END in ids else None
