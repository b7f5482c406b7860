"""Functions, classes and rows that `rlflow.train` was called with, and the text that stands for each in the settings.

    my_reward -> "<given to rlflow.train>:my_reward" -> my_reward, in the driver's process alone

What can be imported goes by its path instead, so that its settings can be used from the command line too.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from rlflow.errors import ConfigError

GIVEN = "<given to rlflow.train>"
_objects: dict[str, object] = {}


@contextmanager
def given(objects: Mapping[str, object]) -> Iterator[None]:
    """While the block lasts, each text stands for its object."""
    _objects.update(objects)
    try:
        yield
    finally:
        _objects.clear()


def is_given(text: str) -> bool:
    return text.startswith(f"{GIVEN}:")


def find_given(text: str) -> object:
    """The object that the text stands for. Raises ConfigError in a process that was not given it."""
    if text not in _objects:
        raise ConfigError(
            f"{text} stands for an object that this process does not have; call rlflow.train or Run.evaluate with it "
            "again. The command line needs a file: file.py:NAME for code, a .jsonl file for rows"
        )
    return _objects[text]


def text_for(code: object) -> str:
    """What stands for a function or class: `package.module:Name` if any process can import it, else a text for
    `given`.

    Example: text_for(math.sqrt) == "math:sqrt", and that of a lambda "<given to rlflow.train>:lambda"
    """
    named = code.func if isinstance(code, partial) else code
    name = getattr(named, "__qualname__", type(named).__name__)
    module = getattr(named, "__module__", None) or "__main__"
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    # The module of a file that was loaded by its path has a name that no import statement knows.
    if found is code and module != "__main__" and module.replace(".", "_").isidentifier():
        return f"{module}:{name}"
    return f"{GIVEN}:{name.rpartition('.')[2].strip('<>')}"
