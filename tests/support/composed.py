"""A recipe as the command line composes it."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from rlflow.config import Config


def compose_recipe(*overrides: str) -> Config:
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_module("rlflow.recipes", version_base="1.3"):
        composed = compose("config", ["run.name=test", *overrides])
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config
