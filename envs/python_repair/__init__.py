"""Repair a Python function until its tests pass: several turns, with what the sandbox said in between."""

from rlflow.envs.python_repair.env import load as load
