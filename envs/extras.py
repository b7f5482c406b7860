"""Importing what only some installations have."""

import importlib
from types import ModuleType

from rlflow.errors import ConfigError


def need(module: str, extra: str) -> ModuleType:
    """The module; ConfigError, with the extra of rlflow that brings it, when it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ConfigError(f"{module} is not installed; pip install 'rlflow[{extra}]'") from error
