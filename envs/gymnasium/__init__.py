"""Gymnasium environments, in words."""

from rlflow.envs.gymnasium.env import load as load
