"""Environments behind an OpenEnv server."""

from rlflow.envs.openenv.env import load as load
