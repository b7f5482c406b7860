"""Games of TextArena."""

from rlflow.envs.textarena.env import load

__all__ = ["load"]
