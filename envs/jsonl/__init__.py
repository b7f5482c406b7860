"""Single-turn tasks from a JSON Lines file."""

from rlflow.envs.jsonl.env import load

__all__ = ["load"]
