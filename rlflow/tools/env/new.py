"""`rlflow env new`: a folder with a small environment that works, to be changed."""

from pathlib import Path

from rlflow.errors import ConfigError

_FILES = {
    "data.py": '''"""The tasks of {name}."""

from rlflow.types import Message, Task

WORDS = ("river", "lantern", "pepper", "window", "marble", "forest")


def make_tasks(size: int) -> list[Task]:
    """`size` tasks; ids are unique and stay the same between runs."""
    return [_task(WORDS[index % len(WORDS)], index) for index in range(size)]


def _task(word: str, index: int) -> Task:
    question = Message(role="user", content=f"Spell the word {{word}} backwards, in small letters.")
    return Task(id=f"{name}/{{index}}", prompt=(question,), answer=word[::-1])
''',
    "env.py": '''"""The world of {name}: one wrong answer is forgiven."""

from functools import partial

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.types import Message, Task

from .data import make_tasks
from .reward import exact


def load(size: int = 600) -> EnvironmentSpec:
    """size: number of tasks."""
    return EnvironmentSpec(tasks=partial(make_tasks, size), build=World, reward=exact)


class World(Environment):
    """One episode. Built for it, and closed after it."""

    def __init__(self) -> None:
        self.answer = ""
        self.is_last = False

    async def reset(self, task: Task) -> Prompt:
        self.answer = str(task.answer)
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        if self.is_last or reply["content"].strip() == self.answer:
            return Step(done=True)
        self.is_last = True
        return Step(messages=[Message(role="user", content="That is not right. Try once more, with the word only.")])
''',
    "reward.py": '''"""The reward of {name}."""


def exact(completion: str, answer: str) -> float:
    """1.0 when the last reply is the answer and nothing else. Parameters go by name; `None` would mean no verdict."""
    return float(completion.strip() == answer)
''',
    "config.yaml": """# The defaults of `load`, to copy into a recipe under env.args.
size: 600
""",
    "README.md": """# {name}

    rlflow env check {path}/env.py:load                 # play it with scripts, without a model
    rlflow train recipe=environment env.name={path}/env.py:load

`data.py` makes the tasks, `env.py` is the world of one episode, `reward.py` says what an episode was worth, and
`config.yaml` lists the arguments of `load`.
""",
}


def env_new(path: Path) -> list[Path]:
    """Write the five files into a new folder; returns them. Raises ConfigError when it exists or has a bad name."""
    if not path.name.isidentifier():
        raise ConfigError(f"{path.name!r} cannot be an environment's name; use letters, digits and underscores")
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name")
    path.mkdir(parents=True)
    for file, content in _FILES.items():
        (path / file).write_text(content.format(name=path.name, path=path))
    return [path / file for file in _FILES]
