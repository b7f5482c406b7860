"""The images of a row, in its prompt or its column `images` or `image`, put where the messages show them.

A path stays one, and the file is read where the image is shown; what the row itself holds travels with the task.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlflow.envs.images import image_part
from rlflow.errors import ConfigError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
MAX_INLINE_BYTES = 64 << 20
"""Images that the rows of a data set may hold themselves, as base64: the driver keeps all tasks in memory."""
_MARK = re.compile("<image>")


def place_images(columns: Mapping[str, Any], prompt_column: str, folder: Path, where: str) -> dict[str, Any]:
    """The row without a column of images, which stand in the messages of its prompt: in the place of each part
    `{"type": "image"}` or text <image>, else before the text of the first message of the user.

    Raises ConfigError if there are more or fewer images than places, and for what is no image.
    """
    given = columns.get("images")
    if given is None:
        given = columns.get("image") if _is_image(columns.get("image")) else []
    found = {name: value for name, value in columns.items() if name != "images" and not (name == "image" and given)}
    images = iter([_reference(each, folder, where) for each in (given if isinstance(given, list) else [given])])
    prompt, has_images = found[prompt_column], bool(given)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and has_images else prompt
    if not isinstance(messages, list):
        return found
    shown = [_shown(message, images, folder, where, has_images) for message in messages]
    first = next((message for message in shown if isinstance(message, dict) and message.get("role") == "user"), None)
    if left := list(images):
        is_placed = any(_images_of(message) for message in shown)
        if first is None or is_placed:
            raise ConfigError(f"{where} has {len(left)} more images than its prompt has places for them")
        content = first["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        first["content"] = [*({"type": "image", "image": image} for image in left), *text]
    return found if shown == prompt else found | {prompt_column: shown}


def _shown(message: Any, images: Iterator[str], folder: Path, where: str, has_images: bool) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str) and has_images and _MARK.search(content):
        texts = _MARK.split(content)
        content = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    if not isinstance(content, list):
        return message
    return {
        **message,
        "content": [_part(part, images, folder, where) for part in content if part != {"type": "text", "text": ""}],
    }


def _part(part: Any, images: Iterator[str], folder: Path, where: str) -> Any:
    """A part of Parquet has all fields that any has, most of them null."""
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else part
    own = next((part[name] for name in ("image", "path", "base64") if part.get(name) is not None), None)
    image = next(images, None) if own is None else _reference(own, folder, where)
    if image is None:
        raise ConfigError(f"{where} has fewer images than its prompt has places for them")
    return {"type": "image", "image": image}


def _is_image(value: Any) -> bool:
    """A column `image` may hold something else, such as the name of a container's image."""
    if isinstance(value, str):
        return value.startswith("data:image/") or value.lower().endswith(SUFFIXES)
    return value is not None


def _images_of(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, dict) else None
    return [part for part in content if part.get("type") == "image"] if isinstance(content, list) else []


def _reference(image: Any, folder: Path, where: str) -> str:
    """A whole path, or a data URL."""
    path = image.get("path") if isinstance(image, Mapping) and not image.get("bytes") else image
    if isinstance(path, str) and len(path) < 4096 and (folder / path).is_file():
        return str((folder / path).absolute())
    try:
        return image_part(image)["image"]
    except (ValueError, OSError) as error:
        raise ConfigError(f"{where}: {error}; paths start at {folder}") from error
