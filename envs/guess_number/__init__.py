"""Guess a number in a few turns."""

from rlflow.envs.guess_number.env import load as load
