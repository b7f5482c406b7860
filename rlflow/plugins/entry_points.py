"""What installed packages offer to rlflow by name, through entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from rlflow.errors import ConfigError


def offered(group: str) -> dict[str, str]:
    """Name -> `package.module:Name`, of every installed package that registers something in the group.

    Raises ConfigError where two packages use one name for different things.
    """
    found: dict[str, str] = {}
    for each in entry_points(group=group):
        path = f"{each.module}:{each.attr}"
        if found.setdefault(each.name, path) != path:
            raise ConfigError(
                f"two installed packages register {each.name!r} in {group}: {found[each.name]} and {path}; name "
                "the one you mean by its path"
            )
    return found
