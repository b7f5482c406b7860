"""Images in messages: what environments and data may write, and the one form in which a message travels.

    content: a list of parts, as OpenAI and Hugging Face write them -> `with_images` -> Message with `parts`

Example, the content of a message: [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]
"""

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rlflow.models.images import MAX_FILE_BYTES
from rlflow.types import ImagePart, Message, Part, TextPart

SHOWN = "[image]"
"""What the text of a message says in the place of an image."""
_HEAD = "data:image/"


def with_images(message: Mapping[str, Any], *, read: bool = True) -> Message:
    """The message with its content as text, and as parts if it shows an image; one whose content is text as it is.

    An image is a picture of Pillow, the bytes of a file, a path to it, base64, or a data URL. Without `read` a path
    stays a path, until the message comes here again. Raises ValueError for anything else, and for a file that is
    missing or too large.
    """
    content = message.get("parts") or message.get("content")
    if not isinstance(content, list):
        return cast(Message, message)
    parts = [_part(each, read) for each in content]
    has_image = any(part["type"] == "image" for part in parts)
    shown = {**message, "content": "".join(SHOWN if part["type"] == "image" else part["text"] for part in parts)}
    return cast(Message, shown | {"parts": parts} if has_image else shown)


def image_part(image: object, *, read: bool = True) -> ImagePart:
    """See `with_images`."""
    if isinstance(image, str) and (image.startswith(_HEAD) or (not read and Path(image).is_absolute())):
        return ImagePart(type="image", image=image)
    file = image if isinstance(image, bytes) else _file_of(image)
    if len(file) > MAX_FILE_BYTES:
        raise ValueError(f"an image has {len(file)} bytes, and may have {MAX_FILE_BYTES}; make it smaller")
    return ImagePart(type="image", image=f"{_HEAD}*;base64,{base64.b64encode(file).decode()}")


def file_of(url: str) -> bytes:
    """The file that a data URL or base64 holds. Raises ValueError."""
    text = url.partition(",")[2] if url.startswith("data:") else url
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"an image must be a path, base64 or a data URL of it; got {url[:80]!r}") from error


def _part(part: object, read: bool) -> Part:
    if isinstance(part, str):
        return TextPart(type="text", text=part)
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            return TextPart(type="text", text=part["text"])
        if kind == "image_url":
            given = part.get("image_url")
            return image_part(given.get("url") if isinstance(given, Mapping) else given, read=read)
        if kind == "image":
            given = next((part[name] for name in ("image", "path", "base64", "url") if part.get(name)), None)
            return image_part(given, read=read)
    raise ValueError(
        f"a part of a message is a text or an image, such as {{'type': 'text', 'text': ..}}; got {part!r:.80}"
    )


def _file_of(image: object) -> bytes:
    if isinstance(image, Mapping) and (image.get("bytes") or image.get("path")):  # a column of images of `datasets`
        return bytes(image["bytes"]) if image.get("bytes") else _file_of(Path(image["path"]))
    if isinstance(image, Path) or (isinstance(image, str) and len(image) < 4096 and Path(image).is_file()):
        return Path(image).expanduser().read_bytes()
    if isinstance(image, str):
        if image.startswith(("http://", "https://")):
            raise ValueError(f"an image is not fetched from an address such as {image[:80]!r}; give its file")
        return file_of(image)
    if callable(save := getattr(image, "save", None)):
        file = io.BytesIO()
        save(file, format="PNG")
        return file.getvalue()
    raise ValueError(f"an image is bytes, a path, base64 or a picture of Pillow; got {image!r:.80}")
