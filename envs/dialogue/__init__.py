"""Find out what a simulated guest wants, and book it."""

from rlflow.envs.dialogue.env import load as load
