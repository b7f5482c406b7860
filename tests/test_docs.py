"""What the documents name exists: files, modules, and the tests that guard the invariants."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import DOCUMENTS, files
from house import LINKED, ROOT, House, read_house

SOURCES = ("rlflow", *LINKED, "tests", "scripts", "benchmarks")

EXAMPLES = {
    *("my.py", "mine.py", "my_agent.py", "my_game.py", "my_reward.py", "guess.py", "file.py", "tau2_env.py"),
    *("cluster/mine.yaml", "cluster/NAME.yaml"),
}
"""Files that a reader may have."""
OF_OTHERS = {"dashboard.py", "monitor.py"}
"""Files of Ray."""

_PATH = re.compile(r"(?<![\w/.:{$-])[\w-]+/[\w./{},*-]*[\w}*]/?")
_FILE = re.compile(r"(?<![\w/.}-])\w+\.py\b")
_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")
_MODULE = re.compile(r"(?<![\w./-])rlflow(?:\.\w+)+(?![\w(])")
_BRACES = re.compile(r"\{([^{}]*)\}")
_ROW = re.compile(r"^\| (\d+) \|.*\| ([^|]*) \|$", re.MULTILINE)
_GUARD = re.compile(r"`(test_\w+\.py)?(?:::(test_\w+))?`")


@pytest.fixture(scope="module")
def house() -> House:
    return read_house()


def expanded(path: str) -> Iterator[str]:
    """Example: expanded("a/{b,c}.py") yields "a/b.py" and "a/c.py"."""
    if found := _BRACES.search(path):
        for choice in found[1].split(","):
            yield from expanded(path[: found.start()] + choice.strip() + path[found.end() :])
    else:
        yield path


def missing_files(text: str, folder: Path) -> list[str]:
    """The files and folders that a document in `folder` names or links to, and that do not exist.

    A path begins at the top, in `rlflow/` or, like a link, in the document's folder; a Python file may be named alone.
    """
    places = (ROOT, ROOT / "rlflow", folder)
    rooms = {each.name for place in places for each in place.iterdir() if each.is_dir()}
    paths = [path for named in _PATH.findall(text) for path in expanded(named) if path.partition("/")[0] in rooms]
    # What has neither an ending nor a slash at its end may be two words, such as rewards/advantages.
    paths = [path for path in paths if path.endswith("/") or "." in path]
    alone = [name for name in _FILE.findall(text) if name not in OF_OTHERS and name not in files(text)]
    return [
        *(path for path in paths if path not in EXAMPLES and not any(any(place.glob(path)) for place in places)),
        *(name for name in alone if name not in EXAMPLES and not any(any((ROOT / top).rglob(name)) for top in SOURCES)),
        *(link for link in _LINK.findall(text) if not (folder / link).exists()),
    ]


def missing_modules(text: str, house: House) -> list[str]:
    """The dotted names that are neither a module, nor a name in one, nor a string of the code, such as the name of a
    group of entry points."""
    found = []
    for dotted in set(_MODULE.findall(text)):
        parts = dotted.split(".")
        depth = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in house.files)
        is_module = depth == len(parts)
        if not is_module and parts[depth] not in names_in(house.trees[".".join(parts[:depth])]):
            found.append(dotted)
    if not found:
        return []
    nodes = [node for tree in house.trees.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return sorted(set(found) - {node.value for node in nodes})


def names_in(tree: ast.Module) -> set[str]:
    """The names that a module defines, or says that it offers."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned = {target.id for target in targets if isinstance(target, ast.Name)}
            names |= assigned
            if "__all__" in assigned and isinstance(node.value, ast.List):  # what a package loads when it is asked for
                names |= {str(each.value) for each in node.value.elts if isinstance(each, ast.Constant)}
    return names


def guards_of(row: str) -> Iterator[tuple[str, str]]:
    """The tests in a row's last column: file, and test or "". A test without a file is of the file before it."""
    file = ""
    for named, test in _GUARD.findall(row):
        file = named or file
        yield file, test


def missing_guards(row: str, tests: Path) -> list[str]:
    """What a row names that is no test of the suite; proofs do not count, because the suite leaves them out."""
    missing = []
    for file, test in guards_of(row):
        paths = list(tests.rglob(file)) if file else []
        functions = [
            node
            for path in paths
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        in_suite = {
            each.name for each in functions if not any("proof" in ast.unparse(one) for one in each.decorator_list)
        }
        if not paths or (test and test not in in_suite):
            missing.append(f"{file}::{test}")
    return missing


def test_each_invariant_is_guarded_by_tests_of_the_suite() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## What always holds")[2].partition("\n## ")[0]
    rows = _ROW.findall(table)
    assert [int(number) for number, _ in rows] == list(range(1, 12))
    for number, guarded_by in rows:
        assert list(guards_of(guarded_by)), f"invariant {number} names no test"
        assert missing_guards(guarded_by, ROOT / "tests") == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(path: Path, house: House) -> None:
    text = path.read_text()
    assert missing_files(text, path.parent) == []
    assert missing_modules(text, house) == []


def test_what_the_modules_say_of_files_and_modules_is_so(house: House) -> None:
    missing = {}
    for name, tree in house.trees.items():
        text = ast.get_docstring(tree) or ""
        found = [*missing_files(text, house.files[name].parent), *missing_modules(text, house)]
        if found:
            missing[name] = found
    assert missing == {}


def test_names_of_what_does_not_exist_are_found(house: House) -> None:
    text = "`rlflow/driver.py` and `rlflow/drivers.py`, `rewards/{call,cell}.py`, `weights/p2p/`, `weights/p3p/`, "
    text += (
        "`cli.py`, `clii.py`, `my.py:exact`, [that](weights.md#x), [this](weight.md), true/false, rewards/advantages"
    )
    missing = ["rlflow/drivers.py", "rewards/cell.py", "weights/p3p/", "clii.py", "weight.md"]
    assert missing_files(text, ROOT / "docs") == missing
    text = "rlflow.types, rlflow.types.Task, rlflow.types.Tusk, rlflow.tipes, rlflow.rewards.call"
    assert missing_modules(text, house) == ["rlflow.tipes", "rlflow.types.Tusk"]


def test_guards_that_are_not_in_the_suite_are_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    lines = ["def test_a(): ...", "@pytest.mark.proof", "def test_b(): ..."]
    (tmp_path / "room" / "test_x.py").write_text("\n".join(lines))
    row = "`test_x.py::test_a`, `::test_b`, `::test_c`, `test_x.py`, `test_y.py`, `test_y.py::test_a`"
    missing = ["test_x.py::test_b", "test_x.py::test_c", "test_y.py::", "test_y.py::test_a"]
    assert missing_guards(row, tmp_path) == missing
