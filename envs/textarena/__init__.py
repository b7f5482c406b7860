"""Games of TextArena."""

from rlflow.envs.textarena.env import load as load
