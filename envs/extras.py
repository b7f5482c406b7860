"""Importing what only some installations have."""

from __future__ import annotations

import importlib
from types import ModuleType

from rlflow.errors import ConfigError


def need(module: str, extra: str) -> ModuleType:
    """The module.

    Raises:
        ConfigError: it is not installed; the message names the extra of rlflow that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ConfigError(f"{module} is not installed; pip install 'rlflow[{extra}]'") from error
