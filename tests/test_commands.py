"""Each command that the documents show is one that rlflow takes: its verb, its options, its settings."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from documents import DOCUMENTS, commands, files, verbs_mentioned
from house import ROOT

from rlflow import cli
from rlflow.algorithms.registry import check_functions
from rlflow.config import Config
from rlflow.curriculum.registry import make_curriculum
from rlflow.environments.find import load_environment
from rlflow.errors import ConfigError, RunError
from rlflow.settings.compose import train

SETTINGS = ("train", "submit", "doctor")
"""Verbs whose words are settings of a run."""
STAND_INS = {
    "R": "grpo_arithmetic",
    "NAME": "grpo_arithmetic",
    "HEAD:6379": "10.0.0.1:6379",
    "http://HEAD:8265": "http://10.0.0.1:8265",
    "REGISTRY/rlflow:1": "registry.example/rlflow:1",
}
"""What a reader puts in place of a word, or of a setting's value."""

SHOWN = [
    pytest.param(words, id=f"{path.relative_to(ROOT)}: {' '.join(words)[:70]}")
    for path in DOCUMENTS
    for words in commands(path.read_text())
]


PLAYED = ("README.md", "docs/tutorial.md", "docs/environments.md", "docs/curricula.md")
"""Documents whose commands and files belong together."""
ROW = {"prompt": "What is 2 + 2?", "answer": "4"}


def files_named(words: Sequence[str]) -> set[str]:
    """The files of a reader's own that a command names, such as `my.py` in `reward.function=[math,my.py:brief]`."""
    return {found for word in words for found in re.findall(r"[\w/]+\.py", word)}


def is_on_hub(words: Sequence[str]) -> bool:
    """Whether a command reads its rows from the hub, which a test cannot reach."""
    paths = [word.removeprefix("env.args.path=") for word in words if word.startswith("env.args.path=")]
    return any("." not in path for path in paths)


def filled(words: Sequence[str]) -> list[str]:
    """A command as a reader would type it. What `...` leaves out is left out."""
    typed = []
    for word in words:
        key, equals, value = word.partition("=")
        if word == "..." or value == "...":
            continue
        typed.append(key + equals + STAND_INS.get(value, value) if equals else STAND_INS.get(word, word))
    return typed


def composed(settings: Sequence[str]) -> list[Config]:
    """What Hydra makes of the settings of one command. Raises what it refuses."""
    found: list[Config] = []

    def refused(error: ConfigError | RunError) -> int:
        raise error

    def keep(config: Config) -> int:
        found.append(config)
        return 0

    words = list(settings) if any(word.startswith("recipe=") for word in settings) else [*settings, "run.name=run"]
    if not any(word.startswith("-") for word in words):
        words.append("--run")  # else Hydra composes twice, at first to find out whether it is a sweep
    train(words, refused, keep, needs_recipe=False)
    return found


@pytest.mark.parametrize("words", SHOWN)
def test_a_command_of_the_documents_is_taken(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    typed = filled(words)
    verb = cli._VERBS[typed[0]]
    options = cli.parse(typed, importlib.import_module(verb.module).add_arguments)
    if typed[0] in SETTINGS:
        composed(options.words)
    capsys.readouterr()


def test_the_verbs_that_the_documents_mention_exist() -> None:
    assert set().union(*(verbs_mentioned(path.read_text()) for path in DOCUMENTS)) <= cli._VERBS.keys()


def test_commands_and_files_are_found_in_a_document() -> None:
    text = """
Run it with `rlflow stop RUN`:

    rlflow train recipe=smoke \\
        run.steps=2    # two steps
    make test

```python
# my.py
def one(completion):
    return 1.0
```
"""
    assert list(commands(text)) == [["train", "recipe=smoke", "run.steps=2"]]
    assert verbs_mentioned(text) == {"stop"}
    assert files(text) == {"my.py": "def one(completion):\n    return 1.0\n"}


@pytest.mark.parametrize("word", ["trainer.learning_rat=1e-5", "rollout.engines=-1"])
def test_a_command_that_would_be_refused_is_found(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        composed(["recipe=smoke", word])


def with_own_files(verb: str) -> list[object]:
    """(document, words) of the commands that name files which their document shows."""
    return [
        pytest.param(name, words, id=" ".join(words))
        for name in PLAYED
        for words in commands((ROOT / name).read_text())
        if words[0] == verb and words[:2] != ["env", "new"] and files_named(words) and not is_on_hub(words)
    ]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes what a document shows as files into an empty folder, which becomes the current one."""

    def of_document(name: str) -> None:
        monkeypatch.chdir(tmp_path)
        Path("rows.jsonl").write_text(json.dumps(ROW) + "\n")
        document = (ROOT / name).read_text()
        for file, text in files(document).items():
            Path(file).write_text(text)
        for words in commands(document):
            if words[:2] == ["env", "new"]:
                assert cli.main(words) == 0

    return of_document


@pytest.mark.parametrize(("document", "words"), with_own_files("train"))
def test_the_files_of_a_document_work_with_its_commands(
    document: str, words: list[str], write: Callable[[str], None]
) -> None:
    write(document)
    (config,) = composed(filled(words)[1:])
    check_functions(config)
    tasks = load_environment(config.env, config.reward).tasks()
    assert make_curriculum(config.curriculum, tasks, config.run.seed).next() in tasks


@pytest.mark.slow
@pytest.mark.parametrize(("document", "words"), with_own_files("env"))
def test_an_environment_of_a_document_can_be_played(
    document: str, words: list[str], write: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    write(document)
    assert cli.main(words) == 0, capfd.readouterr()
