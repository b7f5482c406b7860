"""Agents that are programs of their own: any command or function that speaks to an OpenAI-compatible endpoint."""

from rlflow.envs.agent.env import load as load
