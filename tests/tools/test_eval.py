"""`rlflow eval`: which model and settings are meant, what is played, the table."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import commit
from children import TIMEOUT_S
from fakes import make_tasks, make_world, run_virtually

from rlflow.config import Config
from rlflow.errors import ConfigError
from rlflow.groups.evaluation import Evaluation, evaluate
from rlflow.groups.ledger import Ledger
from rlflow.groups.sampler import SamplerState
from rlflow.groups.scores import Score
from rlflow.rundir.directory import plain
from rlflow.rundir.store import CheckpointStore, RunState
from rlflow.runtime.signals import handlers_kept, run_until_done
from rlflow.tools.eval.evaluate import Evaluated, EvaluationTable, _unless_stopped, evaluate_target
from rlflow.tools.target import find_target
from rlflow.types import EpisodeEnd, GroupOrder, PlayedGroup, Task

SAMPLER = SamplerState(kind="uniform", tasks="", rows="", put_back=[], curriculum={})


def write_run(run: Path) -> Path:
    """A run with checkpoints of steps 2 and 4, of which the first is the best."""
    config = Config()
    config.model.path, config.env.args, config.reward.function = "tiny", {"size": 5}, "exact"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    store = CheckpointStore(run / "checkpoints", keep=2)
    for step in (2, 4):
        partial = store.begin(step)
        Ledger(partial / "ledger.db").close()
        commit(store, partial, RunState(step=step, version=step, sampler=SAMPLER, ready=[]))
    store.name_best(2)
    return run


def test_a_run_means_its_last_checkpoint_unless_a_step_is_given(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert (find_target(str(run), None, []).step, find_target(str(run), "best", []).step) == ("4", "2")
    best = find_target(str(run / "checkpoints" / "best"), None, [])
    assert (best.run, best.step, best.name, best.config.model.path) == (run, "2", "run step 2", "tiny")
    with pytest.raises(ConfigError, match="has no checkpoint of step 3; it has 2, 4"):
        find_target(str(run), "3", [])
    with pytest.raises(ConfigError, match="--step has no effect on tiny"):
        find_target("tiny", "3", [])


def test_settings_are_those_of_the_run_with_others_over_them(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run"))
    same = find_target(run, None, ["eval.every=1", "eval.episodes=4", "env.args.size=9", "env.args.seed=[1,2]"]).config
    assert (same.eval.episodes, same.env.args, same.reward.function) == (4, {"size": 9, "seed": [1, 2]}, "exact")
    other = find_target(run, None, ["env.args.highest=4", "env.name=guess_number", "reward.timeout_s=3"]).config
    assert (other.env.name, other.env.args, other.reward.function) == ("guess_number", {"highest": 4}, None)
    assert other.reward.timeout_s == 3
    with pytest.raises(ConfigError, match="eval.episode"):
        find_target(run, None, ["eval.episode=4"])
    with pytest.raises(ConfigError, match="eval.episodes"):
        find_target(run, None, ["eval.episodes=many"])
    with pytest.raises(ConfigError, match="recipe"):
        find_target(run, None, ["recipe=smoke"])


def test_a_model_takes_its_settings_from_the_command_line() -> None:
    config = find_target("my model, new", None, ["eval.every=1", "recipe=smoke", "eval.episodes=3"]).config
    assert (config.model.path, config.model.max_length, config.eval.episodes) == ("my model, new", 256, 3)


@pytest.mark.parametrize(
    ("words", "num_tasks", "message"),
    [
        ([], 0, "^the number of tasks must be at least 1; got 0"),
        (["env.name=dataset", "env.args.path=none.jsonl", "reward.function=math"], None, "none.jsonl is not a file"),
        (["reward.model=no/such"], None, "no/such"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_checkpoint_is_written_out(
    words: list[str], num_tasks: int | None, message: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")  # its checkpoints hold no model
    with pytest.raises(ConfigError, match=message):
        evaluate_target(find_target(str(run), None, ["eval.every=1", *words]), num_tasks=num_tasks)
    assert not (run / "evaluations").exists()


def test_too_little_room_for_the_replies_of_a_benchmark_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "2 + 2 =", "answer": "4"}\n')
    words = ["env.name=math500", f"env.args.evaluation_path={tmp_path / 'rows.jsonl'}", "reward.model=no/such"]
    for limit, warns in ((2047, True), (2048, False)):
        room = [f"rollout.max_new_tokens={limit}", "model.max_length=4096"]
        with pytest.raises(ConfigError, match="no/such"):
            evaluate_target(find_target("tiny", None, ["eval.every=1", *room, *words]))
        assert ("env.name=math500 needs rollout.max_new_tokens=2048" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("number", "raised", "code"), [(signal.SIGINT, KeyboardInterrupt, ()), (signal.SIGTERM, SystemExit, (143,))]
)
def test_a_signal_ends_an_evaluation_and_names_the_answers(
    number: signal.Signals, raised: type[BaseException], code: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async def play() -> Evaluation:
        os.kill(os.getpid(), number)
        await asyncio.sleep(TIMEOUT_S)
        raise AssertionError("no signal came")

    with handlers_kept(), pytest.raises(raised) as ended:
        run_until_done(_unless_stopped(play(), Path("answers.jsonl")))
    assert ended.value.args == code
    assert "stopping; the answers so far are in answers.jsonl" in capsys.readouterr().err


def test_a_fleet_without_training_plays_greedily_too_and_keeps_every_answer(tmp_path: Path) -> None:
    config = Config()
    config.eval.episodes = 2
    world = make_world(tmp_path, config=config)
    world.engines.version = 0
    kept: dict[str, int] = {}

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        assert order.engine is None and order.is_last_greedy and order.num_episodes == 3
        return (0.0, 1.0, 0.5)[index], EpisodeEnd.COMPLETED

    async def keep(task: Task, played: PlayedGroup) -> None:
        kept[task.id] = len(played.payloads)

    async def main() -> None:
        world.engines.awake.set()
        workers, tasks = world.driver._workers, make_tasks(3)
        found.append(await evaluate(config, workers, tasks, step=0, version=0, plays_greedy=True, keep=keep))

    world.runners.outcome = outcome
    found: list[Evaluation] = []
    run_virtually(main())
    record = found[0].record()
    assert (record["eval/reward"], record["eval/pass_at_1"], record["eval/pass_at_2"]) == (0.5, 0.5, 1.0)
    assert (record["eval/greedy/reward"], record["eval/greedy/pass_at_1"], record["eval/episodes"]) == (0.5, 0.0, 6)
    assert kept == {"t0": 3, "t1": 3, "t2": 3}


def test_the_table_has_the_rows_of_each_model_beneath_each_other() -> None:
    def table(model: str, reward: float) -> EvaluationTable:
        sampled = Score(
            num_tasks=4, num_episodes=7, num_failed=1, reward=reward, error=0.1, passes={1: 0.5, 2: 1.0}, truncated=0.25
        )
        greedy = Score(num_tasks=4, num_episodes=4, is_greedy=True, reward=1.0, passes={1: 1.0}, truncated=0.0)
        return EvaluationTable(model=model, scores=[sampled, greedy], answers=Path(f"{model}.jsonl"))

    evaluated = Evaluated(tables=[table("run step 4", 0.75), table("base tiny", 0.25)])
    assert [record["eval/reward"] for record in evaluated.records] == [0.75, 0.25]
    assert repr(evaluated).splitlines() == [
        "model       tokens   kind  tasks  reward  95 %     pass@1  pass@2  failed  cut off",
        "run step 4  sampled  all   4      0.750   +-0.100  0.500   1.000   1       25%",
        "base tiny   sampled  all   4      0.250   +-0.100  0.500   1.000   1       25%",
        "run step 4  greedy   all   4      1.000   -        1.000   -       0       0%",
        "base tiny   greedy   all   4      1.000   -        1.000   -       0       0%",
        "answers: run step 4.jsonl",
        "answers: base tiny.jsonl",
    ]


@pytest.mark.slow
def test_the_tiny_model_is_evaluated_and_its_answers_are_saved(tmp_path: Path) -> None:
    words = ["env.args.evaluation_size=4", "eval.episodes=2", "recipe=smoke", f"run.dir={tmp_path / 'out'}"]
    done = subprocess.run(
        [sys.executable, "-m", "rlflow", "eval", "tiny", *words, "--json"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = json.loads(done.stdout)
    answers: list[dict[str, Any]] = [json.loads(line) for line in Path(figures["answers"]).read_text().splitlines()]
    assert Path(figures["answers"]).parent == tmp_path / "out"
    assert (figures["eval/tasks"], figures["eval/episodes"], figures["eval/greedy/episodes"]) == (4, 8, 4)
    sampled = [each["reward"] for each in answers if not each["is_greedy"]]
    assert figures["eval/reward"] == pytest.approx(sum(sampled) / 8)
    assert len(answers) == 12 and all(each["expected"] and each["prompt"] and each["reply"] for each in answers)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["answers-tiny.jsonl", "evaluation.json"]
