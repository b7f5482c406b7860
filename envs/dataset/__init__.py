"""Single-turn tasks from rows: a file, a folder, or a data set of the hub."""

from rlflow.envs.dataset.env import load as load
