"""Runs that are made bad on purpose: which alarm comes at which step?

    python benchmarks/bad_runs.py [NAME ...]

Each is a run with one thing wrong, a minute or two of the tiny model, and of SmolLM2-135M where only a model that has
learned something can be misled. One line an alarm follows.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rlflow.envs.arithmetic.env import load
from rlflow.envs.base import Prompt, SingleTurn, Step
from rlflow.models.resolve import resolve_model
from rlflow.types import Message, Task

HERE = str(Path(__file__).resolve())
RUNS = {
    "learning_rate_x100": ["recipe=grpo_arithmetic", "run.steps=10", "trainer.learning_rate=1e-3"],
    "wrong_template": ["recipe=grpo_arithmetic", "run.steps=6", "model.path={folder}/model"],
    "cut_replies": ["run.steps=8", "rollout.max_new_tokens=1"],
    "constant_reward": ["run.steps=4", f"reward.function={HERE}:constant"],
    "broken_environment": ["run.steps=5", f"env.name={HERE}:Broken", "reward.function=null", "algorithm.group_size=8"],
    "one_component": [
        "run.steps=40",
        f"reward.function=[{HERE}:never,rlflow.envs.arithmetic.reward:share_of_digits]",
        "trainer.learning_rate=3e-3",
    ],
}


def constant(task: Task, completion: str) -> float:
    return 0.5


def never(task: Task, completion: str) -> float:
    return 0.0


class Broken(SingleTurn):
    """Raises in half of its episodes, and gives the others a reward by chance."""

    @staticmethod
    def tasks() -> list[Task]:
        return list(load(size=64).tasks())

    async def reset(self, task: Task) -> Prompt:
        if random.random() < 0.5:
            raise OSError("the service is down")
        return await super().reset(task)

    async def step(self, reply: Message) -> Step:
        return Step(done=True, reward=random.random())


def write_with_wrong_template(folder: Path) -> None:
    """SmolLM2-135M with the turns of another family: no token of them ends a reply."""
    shutil.copytree(resolve_model("smollm2-135m"), folder)
    template = "{% for message in messages %}[INST] {{ message['content'] }} [/INST]{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def main() -> None:
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            if name == "wrong_template":
                write_with_wrong_template(Path(folder, "model"))
            words = [word.format(folder=folder) for word in RUNS[name]]
            recipe = words.pop(0) if words[0].startswith("recipe=") else "recipe=smoke"
            command = [sys.executable, "-m", "rlflow", "train", recipe, f"run.dir={folder}/run"]
            command += ["algorithm.groups_per_step=8", "run.show_samples_every=100", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            alarms = Path(folder, "run", "alarms.jsonl")
            lines = alarms.read_text().splitlines() if alarms.is_file() else []
            print(f"{name}: exit {done.returncode}", *done.stderr.splitlines()[-1:], flush=True)
            for alarm in map(json.loads, lines):
                print(f"  step {alarm['step']:3} {alarm['state']:5} {alarm['name']}: {alarm['what']}", flush=True)
            print("  last lines:", *done.stdout.splitlines()[-2:], sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
