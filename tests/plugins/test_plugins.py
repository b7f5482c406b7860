"""Loading a user's object by path."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import ConfigError
from rlflow.plugins.loading import load_object

SOURCE = """
from dataclasses import dataclass
from helper_beside import WORD

def reward(task, completion):
    return 1.0

@dataclass(slots=True)
class Thing:
    word: str = WORD

    @classmethod
    def make(cls):
        return cls()
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside.py").write_text("WORD = 'beside'\n")
    file = tmp_path / "my.plugin.py"
    file.write_text(SOURCE)
    return file


def test_an_object_of_a_module_is_found() -> None:
    assert load_object("json:dumps") is json.dumps
    assert load_object("os.path:join.__name__") == "join"


def test_an_object_of_a_file_is_found_and_its_module_loaded_once(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plugin.parent)
    make: Any = load_object("my.plugin.py:Thing.make")
    assert make().word == "beside"
    assert load_object(f"{plugin}:reward") is load_object("my.plugin.py:reward")


def test_files_of_the_same_name_in_two_folders_do_not_meet(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.py").write_text(f"WORD = {name!r}\n")
        (tmp_path / name / "env.py").write_text("from .data import WORD\ndef load():\n    return WORD\n")
    loads: list[Any] = [load_object(f"{tmp_path / name}/env.py:load") for name in ("one", "two")]
    assert [load() for load in loads] == ["one", "two"]
    assert pickle.loads(pickle.dumps(loads[0])) is loads[0]


def test_an_object_of_a_file_pickles_into_a_process_that_never_loaded_it(plugin: Path) -> None:
    frame = pickle.dumps(load_object(f"{plugin}:reward"))
    script = f"import pickle; print(pickle.loads({frame!r})(None, ''))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert found.stdout == "1.0\n"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("json.dumps", "expected `package.module:Name` or `file.py:Name`; got 'json.dumps'"),
        ("json:dumpz", "json has no attribute 'dumpz' (from 'json:dumpz'); did you mean dump, dumps?"),
        ("jsn:dumps", "there is no module 'jsn' (from 'jsn'); did you mean"),
        ("email.massage:Message", "there is no module 'email.massage' (from 'email.massage'); did you mean message"),
        ("my file:reward", "'my file' is neither a module name nor the path of a .py file"),
    ],
)
def test_a_wrong_path_says_what_is_near(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(path)
    assert str(caught.value).startswith(message)


def test_a_missing_file_says_what_is_near(plugin: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(f"{plugin.parent}/my_plugin.py:reward")
    assert str(caught.value) == f"there is no file {plugin.parent}/my_plugin.py; did you mean my.plugin.py?"


def test_a_failing_import_is_reported_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    with pytest.raises(ConfigError, match=r"importing .*broken\.py failed: ZeroDivisionError: division by zero"):
        load_object(f"{tmp_path}/broken.py:reward")
    with pytest.raises(ConfigError, match=r"importing .*needy\.py failed: it needs the module 'no_such_package'"):
        load_object(f"{tmp_path}/needy.py:reward")
