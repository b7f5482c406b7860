"""The recipes that ship with rlflow, read without Hydra, so that `rlflow recipes` answers at once."""

from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.plugins.names import did_you_mean

_RECIPES = Path(__file__).parent.parent / "recipes" / "recipe"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in _RECIPES.glob("*.yaml"))


def recipe_text(name: str) -> str:
    """The YAML of a recipe. Raises ConfigError for an unknown name."""
    if name not in recipe_names():
        near = did_you_mean(name, recipe_names()) or "."
        raise ConfigError(f"there is no recipe {name}{near} There are: {', '.join(recipe_names())}")
    return (_RECIPES / f"{name}.yaml").read_text()


def recipe_summary(name: str) -> str:
    """The first comment line of a recipe that is not a directive to Hydra."""
    lines = recipe_text(name).splitlines()
    return next((line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")), "")
