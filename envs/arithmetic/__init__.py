"""Arithmetic and other puzzles from reasoning-gym: endless, verifiable, without a download."""

from rlflow.envs.arithmetic.env import load as load
