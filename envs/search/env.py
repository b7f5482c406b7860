"""The tool `search` over a library that is made when the environment is loaded."""

import json
from collections.abc import Sequence
from functools import cache, partial

from rlflow.envs.base import Environment, EnvironmentSpec
from rlflow.envs.rewards.search_f1 import search_f1
from rlflow.envs.search.bm25 import Index
from rlflow.envs.search.data import make_library, make_tasks
from rlflow.envs.seeds import seeded_tasks
from rlflow.envs.tools import ToolEnvironment
from rlflow.types import Message, Task

MAX_RESULTS = 3


def load(library_seed: int = 0, size: int = 2000, seed: int = 0, evaluation_size: int = 64) -> EnvironmentSpec:
    """Questions about the library of `library_seed`; half of them need what one search finds for the next one.

    size: number of tasks; seed: which ones; evaluation_size: number of tasks for `eval.every`, from another seed.
    """
    tasks, evaluation_tasks = seeded_tasks(partial(make_tasks, library_seed), size, seed, evaluation_size)
    return EnvironmentSpec(
        tasks=tasks,
        build=partial(build, library_seed),
        reward=search_f1,
        evaluation_tasks=evaluation_tasks,
        expert=look_up,
    )


def build(library_seed: int) -> Environment:
    index = library_index(library_seed)

    def search(query: str) -> str:
        """
        Search the library.

        Args:
            query: Words to look for.

        Returns:
            The documents that fit best.
        """
        return "\n".join(index.search(query, MAX_RESULTS)) or "Nothing was found."

    return ToolEnvironment([search])


@cache
def library_index(library_seed: int) -> Index:
    """One for all episodes of a process."""
    return Index(make_library(library_seed).documents)


def look_up(task: Task, messages: Sequence[Message]) -> str:
    """Searches for one thing after the other, then answers."""
    searches = task.data["searches"]
    assert isinstance(searches, list)
    done = sum(message["role"] == "tool" for message in messages)
    if done < len(searches):
        call = {"name": "search", "arguments": {"query": searches[done]}}
        return f"<think>I look it up.</think>\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return f"<think>I have found it.</think>\n<answer>{task.answer}</answer>"
