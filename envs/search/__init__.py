"""Questions that need two searches in a small library."""

from rlflow.envs.search.env import load as load
