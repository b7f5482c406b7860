"""The documents, and the commands and files that they show a reader."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from house import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "envs").glob("*/README.md"))

_CONTINUED = re.compile(r" *\\\n\s*")
_COMMAND = re.compile(r"^ {4,}(rlflow [a-z].*)$", re.MULTILINE)
_MENTIONED = re.compile(r"`rlflow ([a-z]+)[^`\n]*`")
_BLOCK = re.compile(r"^( *)```(?:python|json|yaml)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"^\s*(?:#|//) (\w[\w./]*\.\w+)\n")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `rlflow ...` that a document shows on a line of its own, without `rlflow`."""
    for found in _COMMAND.findall(_CONTINUED.sub(" ", text)):
        yield shlex.split(found, comments=True)[1:]


def verbs_mentioned(text: str) -> set[str]:
    """The verbs of the commands that a document has in backquotes, perhaps without their arguments."""
    return set(_MENTIONED.findall(text))


def files(text: str) -> dict[str, str]:
    """Name -> text of the blocks of a document that begin with a comment that is a file's name, such as `# my.py`.

    Blocks with the same name make one file.
    """
    found: dict[str, str] = {}
    for _, block in _BLOCK.findall(text):
        if named := _NAME.match(block):
            found[named[1]] = found.get(named[1], "") + block[named.end() :]
    return found
