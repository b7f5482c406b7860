"""rlflow as a library: what `rlflow.train` makes of its keywords, and whole runs from a script and from a cell."""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from children import TIMEOUT_S
from house import ROOT
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from transcripts import said

import rlflow
from rlflow import run as running
from rlflow.config import Config, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.environments.pool import EnvironmentPool
from rlflow.envs.base import Environment, Prompt, Step
from rlflow.errors import ConfigError
from rlflow.plugins.given import text_for
from rlflow.rewards.call import ChosenReward
from rlflow.rewards.choose import choose_rewards
from rlflow.rewards.pool import ScorerPool
from rlflow.settings.compose import compose
from rlflow.tools.eval import evaluate as evaluating
from rlflow.tools.eval.evaluate import Evaluated
from rlflow.tools.target import Target
from rlflow.types import Message, Task

ROWS = [{"prompt": "What is 1 + 1?", "answer": "2"}, {"prompt": "What is 2 + 2?", "answer": 4}]


def importable(completion: str) -> float:
    return float(len(completion))


class Guess(Environment):
    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt))

    async def step(self, reply: Message) -> Step:
        return Step(done=True, reward=1.0)


Seen = dict[str, Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Seen]:
    """What the driver would have begun with, in place of a run."""
    found: Seen = {}

    def train(config: Config) -> tuple[Path, None]:
        found["config"] = config
        found["spec"] = load_environment(config.env, config.reward)
        found["tasks"] = found["spec"].tasks()
        found["rewards"] = choose_rewards(config.reward, found["spec"].reward)
        return tmp_path, None

    monkeypatch.setattr(running, "train", train)
    yield found


def test_functions_and_rows_reach_the_driver_as_they_are(seen: Seen, tmp_path: Path) -> None:
    bonus = 0.5

    def exact(completion: str, answer: str) -> float:
        return bonus + (completion == answer)

    run = rlflow.train(
        model=tmp_path,
        reward=[exact, "exact_match"],
        data=iter(ROWS),
        settings={"run.steps": 7, "reward.weights": [1, 2]},
    )
    assert run == rlflow.Run(tmp_path)
    config: Config = seen["config"]
    assert (config.model.path, config.run.steps, config.run.name) == (str(tmp_path), 7, "run")
    assert config.env.name == "dataset"
    assert config.env.args == {"path": "<given to rlflow.train>:data, 2 rows"}
    assert config.reward.function == ["<given to rlflow.train>:exact", "exact_match"]
    assert [(one.name, one.weight) for one in seen["rewards"]] == [("exact", 1), ("exact_match", 2)]
    assert seen["rewards"][0].function is exact
    assert [(task.id, task.prompt[0]["content"]) for task in seen["tasks"]] == [
        ("data/0", "What is 1 + 1?"),
        ("data/1", "What is 2 + 2?"),
    ]
    with pytest.raises(ConfigError, match="stands for an object that this process does not have; call rlflow.train or"):
        choose_rewards(RewardConfig(function="<given to rlflow.train>:exact"), None)  # as from the command line


def test_an_environment_class_plays_the_rows(seen: Seen) -> None:
    class Inner(Guess):
        pass

    rlflow.train(environment=Inner, data=ROWS)
    assert seen["config"].env.name == "<given to rlflow.train>:Inner"
    assert seen["spec"].build.func is Inner
    assert len(seen["tasks"]) == 2


def test_what_other_processes_can_import_goes_by_its_path(seen: Seen) -> None:
    rlflow.train(environment=Guess, data=ROWS, evaluation_data=ROWS[:1], reward=importable)
    config: Config = seen["config"]
    assert (config.env.name, config.reward.function) == ("test_library:Guess", "test_library:importable")
    assert config.env.args["evaluation_path"] == "<given to rlflow.train>:evaluation_data, 1 rows"
    assert text_for(math.sqrt) == "math:sqrt"
    assert text_for(functools.partial(math.pow, 2)) == "<given to rlflow.train>:pow"
    assert text_for(lambda: 1) == "<given to rlflow.train>:lambda"
    assert text_for(threading.Lock().acquire) == "<given to rlflow.train>:acquire"


async def test_code_that_no_module_holds_runs_in_its_processes() -> None:
    """By value, as from a notebook: with what it uses of the function around it."""
    bonus = 0.5

    class Inner(Guess):
        async def step(self, reply: Message) -> Step:
            return Step(done=True, reward=bonus * len(reply["content"]))

    scorers = ScorerPool(
        [ChosenReward(name="half", function=lambda completion: bonus * len(completion))], workers=1, timeout_s=30
    )
    environments = EnvironmentPool(Inner)
    try:
        assert (await scorers.score(said("four"))).reward == 2.0
        world = await environments.open(1, Task(id="1", prompt=()))
        assert isinstance(world, Environment)
        prompt = await world.reset(Task(id="1", prompt=({"role": "user", "content": "Say it"},)))
        assert prompt.messages == [{"role": "user", "content": "Say it"}]
        assert (await world.step({"role": "assistant", "content": "six"})).reward == 1.5
        await world.close()
    finally:
        await scorers.close()
        await environments.close()


def test_a_recipe_keeps_what_was_not_given(seen: Seen) -> None:
    rlflow.train(recipe="smoke", settings={"trainer": {"learning_rate": 0.5}, "algorithm": "tis"})
    config: Config = seen["config"]
    assert (config.run.steps, config.run.name, config.trainer.learning_rate) == (3, "smoke", 0.5)
    assert config.reward.function == "rlflow.envs.arithmetic.reward:share_of_digits"
    assert "tis" in config.algorithm.corrections


def test_arguments_of_another_environment_or_reward_do_not_stay(seen: Seen) -> None:
    rlflow.train(recipe="smoke", settings={"env.args": {"size": 3}})
    assert seen["config"].env.args == {"size": 3}
    rlflow.train(recipe="search", data=ROWS, reward=importable, settings={"env.args.system_prompt": "Be brief."})
    assert set(seen["config"].env.args) == {"path", "system_prompt"}
    assert (seen["config"].reward.args, seen["config"].reward.weights) == ({}, None)


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"data": ["a"]}, r"^data must be dicts such as .* row 0 is 'a'"),
        ({"data": [{"text": "a"}], "reward": importable}, "^data, row 0 has no prompt; give it the column `prompt`"),
        ({"reward": 3}, "^reward must be code or a name; got 3"),
        ({"environment": {}}, "^environment must be code or a name; got {}"),
        ({"reward": [lambda completion: 1, lambda completion: 2]}, "^reward: two functions have the name 'lambda'"),
        ({"reward": lambda completion: LOCK}, "^reward=lambda cannot be sent to its process: cannot pickle"),
        ({"settings": {"algorithm.loss": importable}}, r"^settings\['algorithm.loss'\] must be a value such as text"),
        ({"model": "tiny", "settings": {"model.path": "x"}}, r"^settings\['model.path'\] is a keyword of this call"),
        ({"settings": {"recipe": "smoke"}}, r"^settings\['recipe'\] is a keyword of this call"),
        ({"settings": {"trainer.learning_rat": 1}}, "is not a setting; did you mean trainer.learning_rate"),
        ({"settings": {"run.steps": "many"}}, "^run.steps must be a whole number; got many"),
        ({"settings": {"run.steps": 0}}, "^run.steps must be positive; got 0"),
        ({"recipe": "smke"}, "^there is no recipe smke; did you mean smoke"),
        ({"reward": importable, "data": ROWS, "settings": {"reward.args.importable.x": 1}}, "x is not an argument"),
    ],
)
def test_what_cannot_be_used_is_refused(keywords: Any, message: str, seen: Seen) -> None:
    if isinstance(code := keywords.get("reward"), types.FunctionType) and code.__name__ == "<lambda>":
        # As in a notebook, whose functions travel with what they use.
        code = types.FunctionType(code.__code__, {"LOCK": LOCK, "__name__": "__main__"}, "lambda")
        keywords = {**keywords, "reward": code}
    with pytest.raises(ValueError, match=message):
        rlflow.train(**keywords)


def test_a_program_keeps_its_own_hydra(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [schema]\n")
    store = ConfigStore.instance()
    store.store(name="schema", node={"of": "the program"})
    try:
        with initialize_config_dir(str(tmp_path), version_base="1.2"):
            theirs = GlobalHydra.instance()
            assert compose({"run.steps": 5}, recipe="smoke").run.steps == 5
            with pytest.raises(ConfigError):
                compose({}, recipe="smke")
            assert GlobalHydra.instance() is theirs
            assert hydra_compose("mine") == {"of": "the program"}
    finally:
        store.repo.pop("schema.yaml")
    assert not GlobalHydra.instance().is_initialized()


def test_a_run_that_is_there_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run's directory"):
        rlflow.open(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    run = rlflow.open(str(tmp_path))
    assert (run.metrics, run.evaluations, run.samples, run.checkpoint) == ([], [], [], None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.75}\n{"st')
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    assert [record["reward"] for record in run.metrics] == [0.5, 0.75]
    assert run.checkpoint == tmp_path / "checkpoints" / "step_2"
    pytest.importorskip("pandas")
    assert run.dataframe()["reward"].to_dict() == {1: 0.5, 2: 0.75}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the fleet would have begun with, in place of an evaluation."""
    found: Seen = {}

    def evaluate_target(target: Target, **options: Any) -> Evaluated:
        found.update(options, target=target, spec=load_environment(target.config.env, target.config.reward))
        found["tasks"] = (found["spec"].evaluation_tasks or found["spec"].tasks)()
        found["rewards"] = choose_rewards(target.config.reward, found["spec"].reward)
        return Evaluated(tables=[])

    monkeypatch.setattr(evaluating, "evaluate_target", evaluate_target)
    return found


def write_run(folder: Path, **sections: Any) -> Path:
    """The settings of a run, and what names its checkpoints of steps 2 and 4."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    for step in (2, 4):
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return folder


def test_a_run_is_measured_with_what_it_was_given(tmp_path: Path, measured: Seen, seen: Seen) -> None:
    def exact(completion: str, answer: str) -> float:
        return float(completion == answer)

    write_run(
        tmp_path / "run",
        env={"name": "dataset", "args": {"path": "<given to rlflow.train>:data, 2 rows", "system_prompt": "Be brief."}},
        reward={"function": "<given to rlflow.train>:exact", "args": {}, "weights": [2.0]},
    )
    trained = rlflow.train(reward=exact, data=ROWS)
    run = rlflow.Run(tmp_path / "run", trained.given)
    run.evaluate(step=2, tasks=7, base=True, settings={"eval.episodes": 3, "rollout": {"temperature": 0.5}})
    target: Target = measured["target"]
    assert (target.name, target.run, target.step) == ("run step 2", tmp_path / "run", "2")
    assert (measured["folder"], measured["base"], measured["num_tasks"]) == (None, True, 7)
    assert (target.config.eval.every, target.config.eval.episodes, target.config.rollout.temperature) == (1, 3, 0.5)
    assert (measured["rewards"][0].function, measured["rewards"][0].weight) == (exact, 2.0)
    assert [task.prompt[-1]["content"] for task in measured["tasks"]] == ["What is 1 + 1?", "What is 2 + 2?"]

    run.evaluate(data=ROWS[1:], reward="exact_match", settings={"run.dir": tmp_path / "out"})
    config: Config = measured["target"].config
    assert [task.prompt[0]["content"] for task in measured["tasks"]] == ["Be brief."]
    assert (config.reward.function, config.reward.weights) == ("exact_match", None)
    assert (measured["target"].step, measured["folder"]) == ("4", tmp_path / "out")

    run.evaluate(environment=Guess, data=ROWS[:1])
    assert (measured["target"].config.env.name, measured["spec"].build.func) == ("test_library:Guess", Guess)
    assert (len(measured["tasks"]), measured["rewards"][0].name) == (1, "environment")


def test_what_an_opened_run_was_given_is_given_again(tmp_path: Path, measured: Seen) -> None:
    folder = write_run(tmp_path / "run", reward={"function": "<given to rlflow.train>:exact"})
    run = rlflow.open(folder)
    with pytest.raises(ConfigError, match="call rlflow.train or Run.evaluate with it again"):
        run.evaluate()
    with pytest.raises(ConfigError, match="has no checkpoint of step 3; it has 2, 4"):
        run.evaluate(step=3)
    with pytest.raises(ConfigError, match=r"^settings\['env.name'\] is a keyword of this call"):
        run.evaluate(environment=Guess, settings={"env.name": "guess_number"})
    with pytest.raises(ConfigError, match="eval.episode is not a setting; did you mean eval.episodes"):
        run.evaluate(settings={"eval.episode": 3})
    exact = types.FunctionType((lambda completion: 1.0).__code__, {"__name__": "__main__"}, "exact")
    exact.__qualname__ = "exact"
    run.evaluate(reward=exact)
    assert measured["rewards"][0].function is exact


def test_the_package_loads_nothing_large() -> None:
    code = "import sys, rlflow; rlflow.train; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert not {"torch", "ray", "vllm", "hydra", "numpy", "pydantic", "asyncio"} & set(loaded.split())
    assert set(rlflow.__all__) <= set(dir(rlflow))
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        rlflow.tain  # type: ignore[attr-defined]  # noqa: B018


def notebook_cells() -> list[str]:
    cells = json.loads((ROOT / "docs" / "first_run.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_asks_for_a_run_that_can_begin(seen: Seen) -> None:
    first, second, *_ = notebook_cells()
    exec(compile(f"{first}\n{second}", "notebook", "exec"), {"__name__": "__main__"})
    assert (seen["config"].run.steps, len(seen["tasks"]), seen["rewards"][0].name) == (30, 100, "digits")


CELL = """
import asyncio, json
from pathlib import Path

bonus = 0.25

async def cell():
    share = 0.5
    rewards = [lambda completion: bonus + share, exact]
    settings = {"run.dir": run.path, "run.steps": 3}
    return rlflow.train(recipe="smoke", reward=rewards, data=rows, settings=settings)

async def next_cell():
    return again.evaluate(tasks=2, base=True, settings={"eval.episodes": 1})

again = asyncio.run(cell())
assert again == run == rlflow.open(run.path)
evaluated = asyncio.run(next_cell())
(kept,) = run.path.glob("evaluations/*/evaluation.json")
assert json.loads(kept.read_text()) == evaluated.records
assert [record["model"] for record in evaluated.records] == ["run step 3", "base tiny"]
assert [record["eval/reward"] for record in evaluated.records] == [0.75, 0.75]
assert all(Path(record["answers"]).parent == kept.parent for record in evaluated.records)
print(json.dumps([[record["step"] for record in run.metrics], run.metrics[-1]["reward"], run.checkpoint.name]))
"""


@pytest.mark.slow
def test_a_script_trains_and_a_cell_goes_on_with_its_run(tmp_path: Path) -> None:
    """README's script, with the tiny model and two steps; then more, from a thread whose event loop runs, as a cell's
    does. The functions are of `__main__`, and use what is around them."""
    section = (ROOT / "README.md").read_text().partition("### In Python")[2].partition("\n### ")[0]
    (script,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert 'recipe="grpo_arithmetic"' in script and '{"run.steps": 20}' in script
    script = script.replace("grpo_arithmetic", "smoke")
    script = script.replace('{"run.steps": 20}', f'{{"run.steps": 2, "run.dir": "{tmp_path}/run"}}')
    (tmp_path / "train.py").write_text(script + CELL)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, 2, 3], 0.75, "step_3"]
    assert "resumed at step 2 of 3" in done.stdout
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["reward"]["function"] == ["<given to rlflow.train>:lambda", "<given to rlflow.train>:exact"]
    assert kept["env"]["args"] == {"path": "<given to rlflow.train>:data, 100 rows"}
