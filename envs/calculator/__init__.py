"""Arithmetic that needs a tool."""

from rlflow.envs.calculator.env import load as load
