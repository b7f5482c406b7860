"""Arithmetic that needs a tool."""

from rlflow.envs.calculator.env import load

__all__ = ["load"]
