"""Arithmetic behind a slow tool: for measuring how well a run goes on while episodes wait."""

from rlflow.envs.latency.env import load as load
