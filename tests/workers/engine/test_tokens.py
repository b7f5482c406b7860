"""Tokenizers, models and engines that do not agree on ids are refused before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.models.resolve import resolve_model
from rlflow.run import train
from rlflow.tools.doctor.software import load_model
from rlflow.tools.dry_run.command import dry_run
from rlflow.workers.engine.tokens import check_tokens

END = 2
"""`<|im_end|>` of the built-in model `tiny`, which has 259 rows."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good model to break."""
    return shutil.copytree(resolve_model("tiny"), tmp_path / "model")


def configure(folder: Path) -> Config:
    config = Config()
    config.model.path = str(folder)
    return config


def amend(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_the_built_in_models_agree(name: str) -> None:
    check_tokens(Config(), resolve_model(name))


@pytest.mark.parametrize(
    "entry",
    [train, lambda config: dry_run(config, json_wanted=False), load_model],
    ids=["train", "dry run", "doctor"],
)
def test_a_token_without_a_row_is_refused_wherever_the_model_is_checked(
    folder: Path, entry: Callable[[Config], object]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ConfigError, match="'<tool>' is token 259 of the tokenizer in .* the model's embedding has 259 rows"
    ):
        entry(configure(folder))


def test_a_placeholder_for_images_needs_no_row(folder: Path) -> None:
    """A text model may share the tokenizer of its siblings that see."""
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens={"image_token": "<image>"})
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).get_vocab()["<image>"] == 259
    check_tokens(Config(), str(folder))


@pytest.mark.parametrize(
    ("file", "name", "good", "bad"),
    [
        ("generation_config.json", "pad_token_id", 258, 259),
        ("generation_config.json", "eos_token_id", [0, END], [END, 259]),
        ("config.json", "pad_token_id", -1, 259),  # Llama's had no other way to say none
        ("config.json", "eos_token_id", END, 259),
    ],
)
def test_a_special_token_without_a_row_is_refused(
    folder: Path, file: str, name: str, good: object, bad: object
) -> None:
    amend(folder / file, **{name: bad})
    with pytest.raises(ConfigError, match=f"{name} of {file} is token 259 .* the model's embedding has 259 rows"):
        check_tokens(Config(), str(folder))
    amend(folder / file, **{name: good})
    check_tokens(Config(), str(folder))


def test_a_reply_must_end_where_engines_stop(folder: Path) -> None:
    amend(folder / "generation_config.json", eos_token_id=0)
    with pytest.raises(
        ConfigError, match=r"ends a reply with <\|im_end\|> \(2\), and engines stop at 0 .*; add 2 to eos_token_id"
    ):
        check_tokens(Config(), str(folder))
    config = Config()
    config.rollout.stop = ["</answer>"]
    check_tokens(config, str(folder))
    (folder / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}\n{% endfor %}")
    check_tokens(Config(), str(folder))  # no special token: the model ends its replies by itself


def test_what_the_chat_template_does_not_read_is_refused(folder: Path) -> None:
    config = configure(folder)
    config.rollout.template_args = {"enable_thinking": False}
    with pytest.raises(ConfigError, match="rollout.template_args.enable_thinking has no effect"):
        dry_run(config, json_wanted=False)
