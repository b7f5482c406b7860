"""The images of a group: each file is kept once, by its key, and its tokens are written once.

message with data URLs -> `Album.taken_up` -> message with keys -> `written_out` -> ids with the images' tokens
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from rlflow.envs.images import file_of
from rlflow.errors import EnvironmentFailure
from rlflow.models.images import ImageProcessor, collapsed, expanded, key_of, open_image
from rlflow.types import ImageSpan, Message

MAX_ALBUM_BYTES = 1 << 28
"""The files of all images that the episodes of one group show."""


class Album:
    """The images that the episodes of one group have shown so far."""

    def __init__(self, processor: ImageProcessor | None, share: Callable[[bytes], object] = lambda file: file) -> None:
        """`processor` None for a model without images; `share` puts a file where engines find it."""
        self._processor = processor
        self._share = share
        self.files: dict[str, bytes] = {}
        self._handles: dict[str, object] = {}
        self._tokens: dict[str, list[int]] = {}

    def taken_up(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with keys in the place of files. Raises EnvironmentFailure for what the model cannot take."""
        return [self._taken_up(message) if "parts" in message else message for message in messages]

    def _taken_up(self, message: Message) -> Message:
        if self._processor is None:
            raise EnvironmentFailure(
                "a message shows an image, and the model at model.path takes none; choose one that does, such as "
                "SmolVLM, or leave the image out"
            )
        shown = dict(message, parts=[dict(part) for part in message.get("parts", ())])
        for part in shown["parts"]:  # type: ignore[union-attr]
            if part["type"] == "image" and part["image"] not in self.files:
                part["image"] = self._add(part["image"])
        return cast(Message, shown)

    def _add(self, url: str) -> str:
        assert self._processor is not None
        try:
            file = file_of(url)
            key = key_of(file)
            if key not in self.files:
                if sum(map(len, self.files.values())) + len(file) > MAX_ALBUM_BYTES:
                    raise ValueError(f"the images of a group have more than {MAX_ALBUM_BYTES} bytes; show fewer")
                self._tokens[key] = self._processor.tokens(open_image(file))
                self._handles[key] = self._share(file)
                self.files[key] = file
        except ValueError as error:
            raise EnvironmentFailure(f"a message shows an image that cannot be used: {error}") from error
        return key

    def held_in(self, ids: Sequence[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Tokens that were sent, as the chat template writes them: one for each image."""
        if not spans:
            return list(ids)
        assert self._processor is not None, "there are no images without it"
        return collapsed(ids, self._processor.token, spans)

    def written_out(
        self, ids: list[int], messages: Sequence[Message], start: int
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """The tokens that the template wrote of messages, after `start` others, with those of the images.

        Raises EnvironmentFailure if it has not written one for each image.
        """
        if self._processor is None:
            return ids, ()
        keys = [part["image"] for each in messages for part in each.get("parts", ()) if part["type"] == "image"]
        try:
            return expanded(ids, self._processor.token, keys, self._tokens, start)
        except ValueError as error:
            raise EnvironmentFailure(str(error)) from error

    def handles(self, spans: Sequence[ImageSpan]) -> Mapping[str, object]:
        """What engines are given."""
        return {span.key: self._handles[span.key] for span in spans}
