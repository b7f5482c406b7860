"""One way from a name to code, for everything that a setting can name.

name -> of rlflow | of an installed package, by entry point | package.module:Name | file.py:Name -> path -> object

A name means the same in every process that can import the package, or read the file: actors on other machines look it
up again.
"""

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.plugins.loading import load_object
from rlflow.plugins.names import did_you_mean


def modules_of(package: str, attribute: Callable[[str], str] = str) -> dict[str, str]:
    """Name -> path of what each module of the package defines; `base` and `registry` define nothing of the kind.

    `attribute` makes the name of the definition from that of its module; by default they are the same. Imports the
    package alone.
    """
    modules = (each.name for each in pkgutil.iter_modules(import_module(package).__path__))
    return {name: f"{package}.{name}:{attribute(name)}" for name in modules if name not in ("base", "registry")}


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What one setting may name.

    Example: Catalog(setting="algorithm.loss", what="a loss", shipped=modules_of("rlflow.algorithms.loss"),
    group="rlflow.losses")
    """

    setting: str
    what: str
    """What it names, with its article, for messages."""
    shipped: Mapping[str, str]
    """Name -> path, for what comes with rlflow."""
    group: str | None = None
    """The entry points by which packages offer more: `name = "package.module:Name"`. None: they cannot."""
    others: tuple[str, ...] = ()
    """Names that the setting takes beside those of the catalog; messages list them too."""

    def offers(self) -> dict[str, dict[str, str]]:
        """Name -> the paths that it may mean -> who offers each: "rlflow", or an installed package with its version.

        More than one meaning is an error only when the name is used.
        """
        found = {name: {path: "rlflow"} for name, path in self.shipped.items()}
        # Installing a package changes a folder of sys.path.
        state_of_path = tuple((path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.exists(path))
        for each in _installed(state_of_path):
            if each.group == self.group:
                package = f"{each.dist.name} {each.dist.version}" if each.dist else "an unnamed package"
                found.setdefault(each.name, {}).setdefault(f"{each.module}:{each.attr}", package)
        return found

    def path_of(self, name: str) -> str:
        """`package.module:Name`, or a file's absolute path with a name, for processes in other directories.

        Raises ConfigError for an unknown name, with the nearest one, and for a name with two meanings.
        """
        source, colon, attribute = name.rpartition(":")
        if colon:
            return f"{Path(source).expanduser().resolve()}:{attribute}" if source.endswith(".py") else name
        offers = self.offers()
        if name not in offers:
            known = [*self.others, *offers]
            raise ConfigError(
                f"{self.setting}={name} is not {self.what}{did_you_mean(name, known) or '.'} There are "
                f"{', '.join(known)}; your own is package.module:Name or file.py:Name"
            )
        path, *others = offers[name]
        if others:
            raise ConfigError(
                f"{self.setting}={name}: two installed packages register {name!r} in {self.group}: {path} and "
                f"{others[0]}; name the one you mean by its path"
            )
        return path

    def find(self, name: str) -> object:
        """What the name means, loaded. Raises ConfigError when it is unknown, ambiguous or cannot be imported."""
        path = self.path_of(name)
        try:
            return load_object(path)
        except ConfigError as error:
            asked = self.setting if ":" in name else f"{self.setting}={name}"
            raise ConfigError(f"{asked}: {error}") from error


@lru_cache(maxsize=1)
def _installed(state_of_path: tuple[tuple[str, int], ...]) -> list[EntryPoint]:
    """The entry points of all installed packages for rlflow. Reading them takes tens of milliseconds."""
    found = entry_points()
    groups = [group for group in found.groups if group.startswith("rlflow.")]
    return sorted(each for group in groups for each in found.select(group=group))
