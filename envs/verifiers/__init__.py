"""Environments of the verifiers library, as they are."""

from rlflow.envs.verifiers.env import load as load
