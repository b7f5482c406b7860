"""`rlflow env check` and `rlflow env new`, and through them every shipped environment."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tool_templates import tokenizer_of

from rlflow.cli import main
from rlflow.models.resolve import resolve_model
from rlflow.tools.env.check import Played, _problems
from rlflow.types import EpisodeEnd, EpisodeSummary

SHIPPED = {
    "arithmetic": [],
    "calculator": [],
    "dialogue": ["env.args.guest=rules"],
    "guess_number": ["env.args.highest=30", "env.args.guesses=5"],
    "python_repair": [],
    "search": [],
    "reasoning_gym": ["env.args.dataset=gcd"],
}


def check(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = main(["env", "check", *arguments, "--json"])
    return code, json.loads(capfd.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_an_expert_earns_everything_and_nonsense_does_not(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, found = check(capfd, name, *SHIPPED[name], "--tasks", "4")
    assert (code, found["problems"]) == (0, [])
    assert found["scripts"]["expert"] == {"episodes": 4, "reward": 1.0, "ends": {"completed": 4}}
    assert found["scripts"]["nonsense"]["reward"] < 0.5
    assert found["scripts"]["broken call"]["episodes"] == 4
    assert set(found["template_forks"].values()) == {0}
    assert found["tool_parser"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("family", "parser"), [("Qwen3.5, no thoughts", "qwen3_coder"), ("Mistral", "mistral")])
def test_an_expert_calls_tools_as_the_family_does(
    family: str, parser: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer_of(family).save_pretrained(tmp_path)
    shutil.copy(Path(resolve_model("smollm2-135m")) / "config.json", tmp_path)
    save_file({}, tmp_path / "model.safetensors")  # nothing is sampled
    code, found = check(capfd, "calculator", f"model.path={tmp_path}", "--tasks", "2")
    assert (code, found["problems"], found["tool_parser"]) == (0, [], parser)
    assert found["scripts"]["expert"] == {"episodes": 2, "reward": 1.0, "ends": {"completed": 2}}


@pytest.mark.slow
def test_a_new_environment_works_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "new", "spelling"]) == 0
    names = ["data.py", "env.py", "reward.py", "config.yaml", "README.md"]
    assert capfd.readouterr().out.split() == [f"spelling/{name}" for name in names]
    code, found = check(capfd, "spelling/env.py:load", "--tasks", "3")
    assert (code, found["problems"]) == (0, [])
    assert found["scripts"]["expert"]["reward"] == 1.0
    assert main(["env", "new", "spelling"]) == 2
    assert "spelling exists already; choose another name" in capfd.readouterr().err
    assert main(["env", "new", "my-env"]) == 2
    assert "'my-env' cannot be an environment's name" in capfd.readouterr().err


BROKEN = """
from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step
from rlflow.types import Task

class World(Environment):
    async def reset(self, task):
        return Prompt(messages=list(task.prompt))

    async def step(self, reply):
        return Step(done=True, reward=1.0 / (len(reply["content"]) - 14))

def tasks():
    return [Task(id="1", prompt=({"role": "user", "content": "What?"},), answer="That.")]

def load():
    return EnvironmentSpec(tasks=tasks, build=World)
"""


@pytest.mark.slow
def test_what_is_wrong_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    code, found = check(capfd, f"{tmp_path}/broken.py:load")
    assert code == 1
    (nonsense,) = found["problems"]
    assert nonsense.startswith("nonsense: 1 of 1 episodes ended as environment_error: step: ZeroDivisionError: ")
    assert "broken.py" in nonsense


def ended(end: EpisodeEnd, **changes: Any) -> EpisodeSummary:
    return EpisodeSummary(
        end=end,
        reward=None if end.is_error else 1.0,
        num_prompt_tokens=1,
        num_completion_tokens=1,
        num_loss_tokens=1,
        oldest_version=0,
        newest_version=0,
        **changes,
    )


def test_one_failure_with_other_numbers_and_addresses_is_shown_once() -> None:
    whole = 'run: agent exited with code 1; its standard error ends with:\n{}agent.py", line 3, in {}\nKeyError: {}'
    details = [whole.format("p/a1/", "main", 1), whole.format("mp/b22/", "main", 22), whole.format("tmp/c/", "x", 33)]
    failed = [ended(EpisodeEnd.ENVIRONMENT_ERROR, detail=detail) for detail in (*details, "run: TypeError: no")]
    said = f"nonsense: 4 of 4 episodes ended as environment_error: {details[0]}; run: TypeError: no"
    assert _problems([Played(name="nonsense", episodes=failed)], []) == [said]


def test_an_environment_that_does_not_close_is_a_problem() -> None:
    failure = "close: OSError: no such container"
    played = Played(name="expert", episodes=[ended(EpisodeEnd.COMPLETED, close_failure=failure)])
    assert _problems([played], []) == [f"expert: 1 of 1 environments did not close: {failure}"]


def gsm8k_rows(count: int) -> list[dict[str, str]]:
    """Problems of our own with GSM8K's columns: `answer` is a solution whose last line is "#### <number>"."""
    rows = []
    for index in range(count):
        first, each = 1_000 + 37 * index, 3 + index % 7
        question = f"A mill grinds {first} sacks in May and {each} times as many in June. How many sacks is that?"
        steps = f"In June it grinds {first}*{each} = <<{first}*{each}={first * each}>>{first * each:,} sacks.\n"
        total = first + first * each
        steps += (
            f"In May and June it grinds {first}+{first * each} = <<{first}+{first * each}={total}>>{total} sacks.\n"
        )
        rows.append({"question": question, "answer": f"{steps}#### {total:,}"})
    return rows


@pytest.mark.slow
def test_solutions_of_gsm8k_score_1_and_are_said_to_be_cut_off_where_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in gsm8k_rows(50)))
    settings = [f"env.args.path={rows}", "env.args.evaluation_path=null", "model.path=tiny"]
    settings += ["reward.workers=1", "reward.timeout_s=100"]  # importing SymPy takes long on a busy machine
    code, found = check(capfd, "recipe=gsm8k_1gpu", *settings, "--tasks", "50")
    assert (code, found["problems"]) == (0, [])
    assert found["scripts"]["expert"] == {"episodes": 50, "reward": 1.0, "ends": {"completed": 50}}
    assert found["scripts"]["nonsense"]["reward"] == 0.0

    code, found = check(capfd, "recipe=gsm8k_1gpu", *settings, "rollout.max_new_tokens=16", "--tasks", "3")
    (problem,) = (each for each in found["problems"] if each.startswith("expert: "))
    assert code == 1
    assert problem.startswith("expert: 3 of 3 episodes were cut off, such as: a reply has ")
    assert problem.endswith(
        " tokens, and rollout.max_new_tokens leaves it 16; raise that setting, or choose a recipe with more room"
    )
    code, found = check(
        capfd, "recipe=gsm8k_1gpu", *settings, "model.max_length=200", "rollout.max_new_tokens=199", "--tasks", "3"
    )
    assert code == 1
    assert any("and model.max_length leaves it" in each for each in found["problems"])
