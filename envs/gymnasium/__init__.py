"""Gymnasium environments, in words."""

from rlflow.envs.gymnasium.env import load

__all__ = ["load"]
