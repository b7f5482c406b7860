"""Environment classes written for TRL."""

from rlflow.envs.trl.env import load

__all__ = ["load"]
