"""Images from an environment's message to ids and spans: written out once, kept once a group, or refused."""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vision_models import IMAGE_TOKEN, picture, save_vision_model

from rlflow.config import Config
from rlflow.environments.wire import plain, step_of
from rlflow.envs.base import Environment, Prompt, Step
from rlflow.envs.images import file_of, with_images
from rlflow.errors import EnvironmentFailure
from rlflow.models.images import ImageProcessor, collapsed, expanded, key_of, open_image, open_images
from rlflow.models.resolve import resolve_model
from rlflow.rollout.chat import Chat, anchor_of
from rlflow.rollout.client import RemoteCalls
from rlflow.rollout.images import Album
from rlflow.rollout.payloads import load_payloads, save_payloads
from rlflow.rollout.render import Renderer, open_renderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import (
    EpisodeEnd,
    EpisodePayload,
    GroupOrder,
    ImageSpan,
    Message,
    PlayedGroup,
    Sample,
    Task,
    Transcript,
    Verdict,
)
from rlflow.workers.runner import EpisodeRunner

FIRST, SECOND = picture(1), picture(2, width=50, height=20)
TASK = Task(id="t", prompt=(Message(role="user", content="x"),))
END = 2


def asked(*parts: object) -> Message:
    """What an environment writes, as it arrives at the runner."""
    content = [part if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    return with_images({"role": "user", "content": content})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def renderer(folder: str) -> Renderer:
    return open_renderer(Config(), folder)


@pytest.fixture(scope="module")
def processor(folder: str) -> ImageProcessor:
    found = open_images(folder, trust=False)
    assert found is not None
    return found


@dataclass
class LetterEngine:
    """Says `ok` each time."""

    renderer: Renderer
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        ids = [*self.renderer._encode("ok"), END]
        return Completion(ids=ids, logprobs=[-1.0] * 3, versions=[0] * 3, cache_versions=[0] * 3, finish_reason="stop")


async def test_two_turns_write_each_image_out_once(renderer: Renderer, processor: ImageProcessor) -> None:
    engine = LetterEngine(renderer)
    chat = Chat(engine.generate, renderer, Config(), album=Album(processor))
    talk = await chat.taken_up([asked("see ", FIRST, "?")])
    first = await chat.reply(talk)
    talk = [*talk, first.message, *await chat.taken_up([asked(SECOND, FIRST, "again?")])]
    second = await chat.reply(talk)

    before, after = (request.prompt_ids for request in engine.requests)
    assert after[: len(before) + 3] == before + first.turn.output_ids
    assert (second.turn.continues, chat.num_forks, chat.num_branches) == (0, 0, 0)
    assert [span.key for span in second.turn.images] == [key_of(each) for each in (FIRST, SECOND, FIRST)]
    for span in second.turn.images:
        assert after[span.start : span.start + span.num_tokens] == [4, 5, *[IMAGE_TOKEN] * 4, 4]
    # Collapsed, it is what the template writes of the whole conversation.
    assert collapsed(after, IMAGE_TOKEN, second.turn.images) == renderer.prompt(talk)
    assert engine.requests[1].pictures == {key_of(FIRST): FIRST, key_of(SECOND): SECOND}
    assert before.count(IMAGE_TOKEN) == 4


async def test_a_limit_counts_the_tokens_of_images(renderer: Renderer, processor: ImageProcessor) -> None:
    written = len(renderer.prompt([asked(FIRST, "?")]))
    config = Config()
    config.model.max_length = written + 6  # an image takes seven tokens, and its placeholder one
    chat = Chat(LetterEngine(renderer).generate, renderer, config, album=Album(processor))
    with pytest.raises(Exception, match=f"the prompt has {written + 6} tokens"):
        await chat.reply(await chat.taken_up([asked(FIRST, "?")]))


@pytest.mark.parametrize("text", ["<image>", "two <image><image>"])
async def test_a_text_that_spells_the_token_is_refused(
    renderer: Renderer, processor: ImageProcessor, text: str
) -> None:
    chat = Chat(LetterEngine(renderer).generate, renderer, Config(), album=Album(processor))
    with pytest.raises(EnvironmentFailure, match="a text may not hold the model's own text for an image"):
        await chat.reply(await chat.taken_up([asked(text, FIRST)]))
    assert chat.failure is None  # the episode fails, and not the group


def test_tokens_and_places() -> None:
    tokens_of = {"a": [1, 90, 90], "b": [90]}
    ids, spans = expanded([7, 90, 8, 90], 90, ["a", "b"], tokens_of, start=10)
    assert ids == [7, 1, 90, 90, 8, 90]
    assert spans == (ImageSpan(key="a", start=11, num_tokens=3), ImageSpan(key="b", start=15, num_tokens=1))
    assert collapsed([0] * 10 + ids, 90, spans) == [0] * 10 + [7, 90, 8, 90]
    with pytest.raises(ValueError, match="a conversation with 1 images has 2 tokens"):
        expanded([90, 90], 90, ["a"], tokens_of)


def test_the_notations_of_an_image(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(FIRST)
    text = base64.b64encode(FIRST).decode()
    for part in (
        {"type": "image", "image": FIRST},
        {"type": "image", "image": str(path)},
        {"type": "image", "path": path},
        {"type": "image", "base64": text},
        {"type": "image", "image": {"bytes": FIRST, "path": None}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
    ):
        shown = with_images({"role": "user", "content": [part, {"type": "text", "text": " ?"}]})
        assert (shown["role"], shown["content"]) == ("user", "[image] ?")
        first, second = shown["parts"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
        assert first["type"] == "image" and file_of(first["image"]) == FIRST
        assert second == {"type": "text", "text": " ?"}
    drawn = with_images({"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (8, 8), "red")}]})
    (part,) = drawn["parts"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
    assert part["type"] == "image"
    assert open_image(base64.b64decode(part["image"].partition(",")[2])).getpixel((0, 0)) == (255, 0, 0)


def test_parts_of_text_alone_are_a_text() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert with_images(message) == Message(role="user", content="ab")
    plain_text = Message(role="user", content="a")
    assert with_images(plain_text) is plain_text


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image", "image": "https://host/cat.png"}, "is not fetched from an address"),
        ({"type": "image", "image": "no such file.png"}, "must be a path, base64 or a data URL"),
        ({"type": "image"}, "bytes, a path, base64 or a picture of Pillow; got None"),
        ({"type": "audio", "audio": "x"}, "a part of a message is a text or an image"),
        ({"type": "image", "image": bytes(5 << 20)}, "has 5242880 bytes, and may have 4194304"),
    ],
)
def test_what_is_no_image_is_the_environments_failure(part: dict[str, Any], problem: str) -> None:
    step = Step(messages=[{"role": "user", "content": [part]}])  # pyright: ignore[reportArgumentType]
    with pytest.raises(EnvironmentFailure, match=problem):
        plain("step", step, Step)


def test_a_step_with_an_image_survives_the_wire() -> None:
    step = Step(messages=[{"role": "user", "content": [{"type": "image", "image": FIRST}]}], reward=1.0)  # type: ignore[typeddict-item]
    assert step_of(plain("step", step, Step)).messages == [asked(FIRST)]
    fields = plain("step", Step(), Step) | {"messages": [{"role": "user", "content": "", "parts": [{"type": "video"}]}]}
    with pytest.raises(EnvironmentFailure, match="`parts` of a message are texts and images"):
        step_of(fields)


def test_a_file_that_is_no_image_is_refused(processor: ImageProcessor) -> None:
    large = io.BytesIO()
    Image.new("L", (4097, 4096)).save(large, "PNG")
    for file, problem in ((b"GIF8 no", "cannot be read as PNG"), (large.getvalue(), "4097 x 4096 pixels")):
        with pytest.raises(EnvironmentFailure, match=problem):
            Album(processor).taken_up([asked(file)])


def test_pictures_make_anchors_differ() -> None:
    one, other = (Message(role="user", content="[image]", parts=[{"type": "image", "image": key}]) for key in "ab")
    assert anchor_of([one]) != anchor_of([other])


@dataclass
class Looking(Environment):
    """Shows one picture, and after a reply another."""

    messages: Sequence[Message] = (asked("see ", FIRST, "?"),)
    num_steps: int = 0

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(self.messages))

    async def step(self, reply: Message) -> Step:
        self.num_steps += 1
        if self.num_steps == 2:
            return Step(done=True, reward=1.0)
        return Step(messages=[asked(SECOND, "and?")])


@dataclass
class Worlds:
    messages: Sequence[Message] = (asked("see ", FIRST, "?"),)

    def lease(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def open(self, seed: int, task: Task) -> Environment:
        return Looking(messages=self.messages)


class Scorer:
    async def score(self, transcript: Transcript) -> Verdict:
        assert transcript.prompt[0]["content"] == "see [image]?"
        return Verdict(reward=1.0)


@dataclass
class Remote:
    call: Any

    def remote(self, *arguments: Any) -> Any:
        return self.call(*arguments)


@dataclass
class Handle:
    engine: LetterEngine

    @property
    def generate(self) -> Remote:
        return Remote(self.engine.generate)


def runner_of(renderer: Renderer, images: ImageProcessor | None, worlds: Any) -> tuple[EpisodeRunner, LetterEngine]:
    engine = LetterEngine(renderer)
    calls = RemoteCalls(cancel=lambda call: None, is_lost=lambda error: False)
    runner = EpisodeRunner(
        Config(),
        "",
        worlds,
        Scorer(),  # pyright: ignore[reportArgumentType]
        Handle(engine),  # pyright: ignore[reportArgumentType]
        renderer=renderer,
        calls=calls,
        images=images,
    )
    return runner, engine


async def test_a_groups_picture_is_stored_once(renderer: Renderer, processor: ImageProcessor, tmp_path: Path) -> None:
    runner, _ = runner_of(renderer, processor, Worlds())
    shared: list[bytes] = []
    runner._share = lambda file: shared.append(file) or file
    played, *payloads = await runner.play(GroupOrder(group_id=1, task=TASK, num_episodes=4, seed=0))
    assert isinstance(played, PlayedGroup)
    assert [episode.end for episode in played.episodes] == [EpisodeEnd.COMPLETED] * 4
    files = {key_of(FIRST): FIRST, key_of(SECOND): SECOND}
    assert (played.pictures, played.num_images, shared) == (files, 2, [FIRST, SECOND])
    assert all(FIRST[:32] not in pickle.dumps(payload) for payload in payloads)
    sizes = [payload.samples[0].num_tokens for payload in payloads if isinstance(payload, EpisodePayload)]
    assert len(sizes) == 4
    assert played.num_bytes > len(FIRST) + len(SECOND)
    assert played.num_bytes < 20 * sum(sizes) + len(FIRST) + len(SECOND)

    stored = [*payloads, files]
    save_payloads(tmp_path / "ready", stored)  # type: ignore[arg-type]
    loaded = load_payloads(tmp_path / "ready")
    assert loaded[-1] == files
    for before, after in zip(payloads, loaded, strict=False):
        assert isinstance(before, EpisodePayload) and isinstance(after, EpisodePayload)
        assert after.samples[0].images == before.samples[0].images
        assert [image.key for image in after.samples[0].images] == list(files)
        assert after.messages == before.messages


async def test_an_image_for_a_model_of_text_ends_the_episode() -> None:
    renderer = open_renderer(Config(), resolve_model("tiny"))
    runner, engine = runner_of(renderer, None, Worlds())
    played, *_ = await runner.play(GroupOrder(group_id=1, task=TASK, num_episodes=2, seed=0))
    assert isinstance(played, PlayedGroup)
    assert [episode.end for episode in played.episodes] == [EpisodeEnd.ENVIRONMENT_ERROR] * 2
    assert "a message shows an image, and the model at model.path takes none" in played.episodes[0].detail
    assert engine.requests == []


def test_payloads_of_text_are_the_bytes_that_they_were(tmp_path: Path) -> None:
    zeros = np.zeros(2, np.int32)
    sample = Sample(
        prompt_ids=np.array([7, 8], np.int32),
        completion_ids=np.array([41, 42], np.int32),
        loss_mask=np.ones(2, np.bool_),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=zeros,
        cache_versions=zeros,
    )
    said = [Message(role="user", content="2 + 3 ="), Message(role="assistant", content="5")]
    digest = save_payloads(tmp_path / "ready", [EpisodePayload(samples=[sample], messages=said)])
    assert digest == hashlib.sha256((tmp_path / "ready").read_bytes()).hexdigest()
    assert digest == "44b4e9a115365bccf0b31135be164a0e39b275da553098dd41fc61be400ee509"
