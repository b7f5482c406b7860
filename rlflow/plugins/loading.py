"""Loading a user's object by path: `package.module:Name` or `file.py:Name`.

A file becomes a module below `rlflow.plugins.loading`, in a package named after the absolute path of its folder. So its
functions and classes pickle by reference: any process that can import rlflow and read the file finds them again,
workers included. It may import the files beside it: as `from .beside import name`, which cannot meet a file of that
name elsewhere, or by the bare name.
"""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote

from rlflow.errors import ConfigError
from rlflow.plugins.given import find_given, is_given
from rlflow.plugins.names import did_you_mean

# Makes this module a package in the eyes of the import system; _FileFinder finds what is below it.
__path__: list[str] = []
_PREFIX = f"{__name__}."


def load_object(path: str) -> object:
    """The object at `package.module:Name` or `file.py:Name`, or the one that a text of `rlflow.plugins.given` means.

    A file's path is absolute or relative to the current directory; `Name` may be dotted, such as `Class.method`. A file
    may import the files beside it.

    Raises:
        ConfigError: the path is malformed, the file, module or attribute is missing, or importing it failed.
    """
    if is_given(path):
        return find_given(path)
    source, colon, name = path.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"expected `package.module:Name` or `file.py:Name`; got {path!r}")
    if source.endswith(".py"):
        file = Path(source).expanduser().resolve()
        if not file.is_file():
            hint = _hint(file.name, (other.name for other in file.parent.glob("*.py")))
            raise ConfigError(f"there is no file {file}{hint}")
        found: object = _import(f"{_PREFIX}{_quoted(str(file.parent))}.{_quoted(file.stem)}", shown=str(file))
    elif all(part.isidentifier() for part in source.split(".")):
        found = _import(source, shown=source)
    else:
        raise ConfigError(f"{source!r} is neither a module name nor the path of a .py file")
    for part in name.split("."):
        if not hasattr(found, part):
            hint = _hint(part, (known for known in dir(found) if not known.startswith("_")))
            raise ConfigError(f"{source} has no attribute {part!r} (from {path!r}){hint}")
        found = getattr(found, part)
    return found


def _import(name: str, *, shown: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            parent, _, last = missing.rpartition(".")
            search = getattr(sys.modules.get(parent), "__path__", None) if parent else None
            names = (module.name for module in pkgutil.iter_modules(search))
            raise ConfigError(f"there is no module {missing!r} (from {shown!r}){_hint(last, names)}") from error
        cause = f"it needs the module {missing!r}, which is not installed"
        raise ConfigError(f"importing {shown} failed: {cause}") from error
    except Exception as error:
        raise ConfigError(f"importing {shown} failed: {type(error).__name__}: {error}") from error


def _hint(name: str, known: Iterable[str]) -> str:
    """The similar names, or all if they are few."""
    names = sorted(set(known))
    found = f"; found {', '.join(names)}" if 0 < len(names) <= 12 else "; nothing there has a similar name"
    return did_you_mean(name, names, most=3) or found


def _quoted(path: str) -> str:
    return quote(path, safe="").replace(".", "%2E")


class _FileFinder(MetaPathFinder):
    """Finds `rlflow.plugins.loading.<quoted absolute path of a folder>`, and below it the files of that folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX + "%2F"):
            return None
        folder, _, stem = fullname.removeprefix(_PREFIX).partition(".")
        if not stem:
            package = ModuleSpec(fullname, None, is_package=True)
            package.submodule_search_locations = [unquote(folder)]
            if unquote(folder) not in sys.path:
                sys.path.append(unquote(folder))
            return package
        if "." in stem:
            return None
        file = Path(unquote(folder)) / f"{unquote(stem)}.py"
        if not file.is_file():
            raise ConfigError(
                f"there is no file {file} on this machine; put the code where every node sees it, or into an installed "
                "package"
            )
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.append(_FileFinder())
