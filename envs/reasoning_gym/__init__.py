"""Every data set of reasoning-gym, mixes of them, and their levels of difficulty."""

from rlflow.envs.reasoning_gym.env import load as load
