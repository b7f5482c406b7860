"""Environment classes written for TRL."""

from rlflow.envs.trl.env import load as load
