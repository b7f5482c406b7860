"""What about images is refused before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaConfig, PreTrainedConfig, Qwen3VLMoeConfig
from vision_models import IMAGE_TOKEN, QWENS, picture, save_vision_model

from rlflow.config import Backend, Config
from rlflow.envs.images import with_images
from rlflow.errors import ConfigError
from rlflow.models.images import open_image, open_images
from rlflow.models.opening import open_config
from rlflow.models.resolve import resolve_model
from rlflow.types import Task
from rlflow.workers.engine.setup import image_arguments
from rlflow.workers.engine.tokens import check_shown, check_tokens
from rlflow.workers.trainer.vision import policy_class

SHOWN = with_images({"role": "user", "content": [{"type": "image", "image": picture(1)}]})
TASKS = [Task(id="first", prompt=({"role": "user", "content": "x"},)), Task(id="second", prompt=(SHOWN,))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


def test_a_task_that_a_model_of_text_cannot_see_is_named(folder: str) -> None:
    tiny = resolve_model("tiny")
    with pytest.raises(ConfigError, match="task second shows an image, and the model in .* takes none"):
        check_shown(Config(), tiny, TASKS)
    check_shown(Config(), tiny, TASKS[:1])
    check_shown(Config(), folder, TASKS)


def with_lora(config: Config) -> None:
    config.lora.rank = 4


def with_reference(config: Config) -> None:
    config.algorithm.kl_coefficient = 0.1


def with_teacher(config: Config) -> None:
    config.teacher.models = {"default": "a"}


def with_deepspeed(config: Config) -> None:
    config.trainer.backend = Backend.deepspeed


def with_slices(config: Config) -> None:
    config.trainer.ranks = config.trainer.tensor_parallel = 2


def with_shared_rows(config: Config) -> None:
    config.trainer.ranks = config.trainer.sequence_parallel = 2


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        (with_lora, "lora.rank=null"),
        (with_reference, "algorithm.kl_coefficient=0"),
        (with_teacher, "teacher.models={}"),
        (with_deepspeed, "trainer.backend=fsdp"),
        (with_slices, "trainer.tensor_parallel=1"),
        (with_shared_rows, "trainer.sequence_parallel=1"),
    ],
)
def test_settings_that_do_not_go_with_images_are_refused(
    folder: str, change: Callable[[Config], None], cure: str
) -> None:
    config = Config()
    config.algorithm.kl_coefficient = 0.0
    check_tokens(config, folder)
    change(config)
    with pytest.raises(ConfigError, match=f"critic; set {cure}$"):
        check_tokens(config, folder)


def test_a_processor_that_cannot_be_opened_is_an_error_of_the_model(folder: str, tmp_path: Path) -> None:
    for file in Path(folder).iterdir():
        if file.name != "processor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match="the processor in .*, which prepares images, cannot be opened"):
        check_tokens(Config(), str(tmp_path))


@pytest.mark.parametrize("config", [Qwen3VLMoeConfig(), LlavaConfig()], ids=["a mixture", "another"])
def test_other_families_of_images_are_refused_with_those_that_are_known(config: PreTrainedConfig) -> None:
    known = "idefics3, smolvlm, qwen2_5_vl, qwen3_vl can be trained"
    with pytest.raises(ConfigError, match=f"a {config.model_type} model; .* {known}"):
        policy_class(config)


@pytest.mark.parametrize(
    ("family", "limits"), [("idefics3", {}), *((each, {"limit_mm_per_prompt": {"video": 0}}) for each in QWENS)]
)
def test_engines_take_pixels_as_the_processor_prepares_them(
    tmp_path: Path, family: str, limits: dict[str, Any]
) -> None:
    config = open_config(save_vision_model(tmp_path, family=family), trust=False)
    assert image_arguments(config) == {"mm_device_do_normalize": False, **limits}
    assert image_arguments(open_config(resolve_model("tiny"), trust=False)) == {}


@pytest.mark.parametrize("family", QWENS)
def test_a_processor_of_images_and_videos_opens_without_torchvision(tmp_path: Path, family: str) -> None:
    processor = open_images(save_vision_model(tmp_path, family=family), trust=False)
    assert processor is not None
    shown = open_image(picture(1, width=48, height=16))
    assert processor.tokens(shown) == [IMAGE_TOKEN] * 3
    assert processor.grid(processor.pixels([shown])) == (1, 3)
