"""A model without a chat template is given ChatML if its vocabulary has its marks, and is refused otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow.models.chatml import CHATML, chatml_end
from rlflow.models.opening import open_tokenizer
from rlflow.models.resolve import REWARD, check_folder, resolve_model
from rlflow.rollout.render import Renderer
from rlflow.tools.export import _copy_files
from rlflow.types import Message
from rlflow.workers.engine.setup import stop_token_ids

CONVERSATION = [
    Message(role="system", content="Add."),
    Message(role="user", content="2+3"),
    Message(role="assistant", content="5"),
    Message(role="user", content="4+4"),
]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """`tiny` without its chat template, which is ChatML; engines would stop at the token 0 only."""
    folder = shutil.copytree(resolve_model("tiny"), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), "eos_token_id": 0}))
    return folder


def test_a_model_with_the_marks_of_chatml_is_given_it(bare: Path) -> None:
    renderer = Renderer(open_tokenizer(str(bare), trust=False))
    own = Renderer(open_tokenizer(resolve_model("tiny"), trust=False))
    assert renderer.prompt(CONVERSATION) == own.prompt(CONVERSATION)
    held = [*renderer.prompt(CONVERSATION[:2]), *renderer.as_sampled("5")]
    assert held + (renderer.extend(held, CONVERSATION[:3], CONVERSATION[3:]) or []) == renderer.prompt(CONVERSATION)
    assert resolve_model(str(bare)) == str(bare)


def test_engines_stop_at_the_end_of_its_turns(bare: Path) -> None:
    assert (chatml_end(bare), stop_token_ids(str(bare))) == (2, [0, 2])
    shutil.copy(Path(resolve_model("tiny")) / "chat_template.jinja", bare)
    assert (chatml_end(bare), stop_token_ids(str(bare))) == (None, [0])


def test_other_vocabularies_are_refused(bare: Path) -> None:
    text = (bare / "tokenizer.json").read_text()
    (bare / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|start_header_id|>"))
    with pytest.raises(ConfigError, match="has no chat template, .* put a chat_template.jinja into the folder"):
        resolve_model(str(bare))


def test_a_reward_model_is_given_nothing(bare: Path) -> None:
    """Its scores are of conversations as it was trained on them."""
    with pytest.raises(ConfigError, match="reward.model: .* has no chat template"):
        check_folder(bare, REWARD)
    assert not open_tokenizer(str(bare), trust=False, setting=REWARD).chat_template


def test_an_exported_model_has_it_with_the_end_of_its_turns(bare: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    _copy_files(bare, out, "float32")
    assert (out / "chat_template.jinja").read_text() == CHATML
    assert (chatml_end(out), stop_token_ids(str(out))) == (None, [0, 2])
    assert Renderer(open_tokenizer(str(out), trust=False)).ends()[0] == 2
