"""The product's modules, their lines and who imports whom, read from the source without importing any of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKED = ("workers", "envs", "recipes")
"""Folders at the top that are imported as `rlflow.<folder>`."""

_NAME = re.compile(r"rlflow(\.\w+)+")


@dataclass(frozen=True, kw_only=True)
class House:
    """Every module of the product: dotted name -> file."""

    files: Mapping[str, Path]

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text()) for name, path in self.files.items()}

    @cached_property
    def lines(self) -> dict[str, int]:
        return {name: path.read_text().count("\n") for name, path in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, frozenset[str]]:
        """Also those inside functions and under TYPE_CHECKING."""
        return {name: frozenset(self._imported_by(name)) - {name} for name in self.files}

    @cached_property
    def named(self) -> dict[str, frozenset[str]]:
        """Modules that a string of the module names, to be run or imported by it."""
        return {
            name: frozenset(
                known
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
                for found in _NAME.finditer(node.value)
                if (known := self._module(found[0]))
            )
            for name, tree in self.trees.items()
        }

    def reachable(self, roots: Iterable[str]) -> set[str]:
        """What is loaded by the roots, at once or later, with the packages that hold it."""
        seen: set[str] = set()
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            waiting += self.imports[name] | self.named[name]
            waiting += [parent for parent in _parents(name) if parent in self.files]
        return seen

    def functions(self) -> Iterator[tuple[str, int]]:
        """module:function, lines."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert node.end_lineno is not None
                    yield f"{name}:{node.name}", node.end_lineno - node.lineno + 1

    def _imported_by(self, name: str) -> Iterator[str]:
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (known for alias in node.names if (known := self._module(alias.name)))
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} imports relatively"
                for alias in node.names:
                    if known := self._module(f"{node.module}.{alias.name}"):
                        yield known

    def _module(self, dotted: str) -> str | None:
        """The module that an imported name is, or lies in."""
        return next((name for name in (dotted, *_parents(dotted)) if name in self.files and name != "rlflow"), None)


def read_house(root: Path = ROOT) -> House:
    files = {}
    for folder in ("rlflow", *LINKED):
        prefix = () if folder == "rlflow" else ("rlflow",)
        for path in sorted((root / folder).rglob("*.py")):
            inside = path.relative_to(root)
            if inside.parts[0] == "rlflow" and inside.parts[1] in LINKED:
                continue
            dotted = ".".join((*prefix, *inside.with_suffix("").parts)).removesuffix(".__init__")
            files[dotted] = path
    return House(files=files)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
