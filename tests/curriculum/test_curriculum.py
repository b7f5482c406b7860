"""Which task is played next: what each curriculum draws, what it learns from results, and what a checkpoint keeps."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from documents import files
from fakes import World, make_tasks, make_world, run_virtually
from house import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.config import Config, CurriculumConfig
from rlflow.curriculum.difficulty import Difficulty
from rlflow.errors import ConfigError
from rlflow.groups.ledger import Ledger
from rlflow.groups.sampler import SamplerState, TaskSampler
from rlflow.rundir.store import RunState, read_state, state_to_json
from rlflow.types import EpisodeEnd, GroupOrder, Task

KINDS = ("uniform", "difficulty", "balanced")


def make_kinds(*sizes: int) -> list[Task]:
    """Kind k has sizes[k] tasks."""
    return [
        Task(id=f"{kind}/{index}", prompt=(), kind=f"kind {kind}")
        for kind, size in enumerate(sizes)
        for index in range(size)
    ]


def make_sampler(tasks: Sequence[Task], kind: str, seed: int = 0, **args: Any) -> TaskSampler:
    return TaskSampler(tasks, seed, CurriculumConfig(kind=kind, args=args))


def drawn(sampler: TaskSampler, count: int) -> list[str]:
    return [sampler.next()[0].id for _ in range(count)]


def through_json(state: SamplerState) -> SamplerState:
    content = json.loads(json.dumps(state_to_json(RunState(step=0, version=0, sampler=state, ready=[]))))["sampler"]
    return SamplerState(**{**content, "put_back": [tuple(item) for item in content["put_back"]]})


# -- all kinds


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
    before=st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), max_size=4)), max_size=30
    ),
    num_after=st.integers(1, 20),
)
def test_a_restored_sampler_goes_on_as_the_first_would_have(
    kind: str, seed: int, before: list[tuple[bool, list[float]]], num_after: int
) -> None:
    tasks = make_kinds(2, 5)
    sampler = make_sampler(tasks, kind, seed)
    for is_lost, rewards in before:
        task, task_pass = sampler.next()
        if is_lost:
            sampler.put_back(task.id, task_pass or 0)
        else:
            sampler.on_result(task.id, rewards)
    restored = make_sampler(tasks, kind, seed)
    restored.restore(through_json(sampler.state))
    assert restored.state == sampler.state
    assert restored.metrics() == pytest.approx(sampler.metrics())
    assert [restored.next() for _ in range(num_after)] == [sampler.next() for _ in range(num_after)]


@given(kind=st.sampled_from(KINDS), put_back=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_tasks_that_were_put_back_come_first(kind: str, put_back: list[int]) -> None:
    sampler, other = (make_sampler(make_kinds(2, 5), kind) for _ in range(2))
    for index in put_back:
        sampler.put_back(f"1/{index}", 3)
    assert [(task.id, task_pass) for task, task_pass in (sampler.next() for _ in put_back)] == [
        (f"1/{index}", 3) for index in put_back
    ]
    assert [sampler.next() for _ in range(9)] == [other.next() for _ in range(9)]


def test_a_state_of_another_kind_or_of_other_tasks_is_refused() -> None:
    state = make_sampler(make_kinds(2, 2), "balanced").state
    with pytest.raises(ConfigError, match="curriculum.kind is uniform, but the checkpoint was saved with balanced"):
        make_sampler(make_kinds(2, 2), "uniform").restore(state)
    for tasks in (make_kinds(2, 3), make_kinds(2, 2)[::-1]):
        with pytest.raises(
            ConfigError, match="other tasks than the . that env.name and env.args give now, or in another"
        ):
            make_sampler(tasks, "balanced").restore(state)


def test_edited_tasks_are_named_whatever_their_column() -> None:
    tasks = make_tasks(9)
    state = make_sampler(tasks, "uniform").state
    assert make_sampler(make_tasks(9), "uniform").edited(state) == ""
    odd: Any = {"when": date(2026, 1, 2), (1, 2): 3, 4: [None, {"b": 1.5}]}
    edits = [{"answer": "7"}, {"kind": "x"}, {"data": odd}, {"prompt": ({"role": "user", "content": "0 "},)}]
    for edit in edits:
        changed = [replace(tasks[0], **edit), *tasks[1:]]
        assert make_sampler(changed, "uniform").edited(state) == "1 of 9 tasks ('t0')"
        assert make_sampler(changed, "uniform").edited(make_sampler(changed, "uniform").state) == ""
    all_of_them = make_sampler([replace(task, kind="x") for task in tasks], "uniform").edited(state)
    assert all_of_them == "9 of 9 tasks ('t0', 't1', 't2', 't3', 't4' and 4 more)"


# -- uniform and balanced


def test_uniform_shuffles_each_pass_by_seed_and_pass() -> None:
    sampler = make_sampler(make_tasks(20), "uniform", seed=3)
    for task_pass in range(3):
        order = list(range(20))
        random.Random(f"3/{task_pass}").shuffle(order)
        assert drawn(sampler, 20) == [f"t{index}" for index in order]


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_balanced_draws_each_kind_equally_and_each_task_of_a_kind_once_a_pass(sizes: list[int], seed: int) -> None:
    rounds = 18
    ids = drawn(make_sampler(make_kinds(*sizes), "balanced", seed), rounds * len(sizes))
    for start in range(0, len(ids), len(sizes)):
        kinds = [task_id.split("/")[0] for task_id in ids[start : start + len(sizes)]]
        assert sorted(kinds) == sorted(str(kind) for kind in range(len(sizes)))
    counts = Counter(ids)
    for kind, size in enumerate(sizes):
        assert {counts[f"{kind}/{index}"] for index in range(size)} <= {rounds // size, -(-rounds // size)}


def test_balanced_draws_kinds_by_weight() -> None:
    sampler = make_sampler(make_kinds(4, 4, 4), "balanced", weights={"kind 0": 3, "kind 1": 0.5})
    kinds = Counter(task_id.split("/")[0] for task_id in drawn(sampler, 90))
    assert kinds == {"0": 60, "1": 10, "2": 20}


def test_a_weight_of_a_kind_is_for_all_kinds_below_it() -> None:
    kinds = ("maths/sums", "maths/products", "code/python", "code/shell")
    tasks = [Task(id=kind, prompt=(), kind=kind) for kind in kinds]
    sampler = make_sampler(tasks, "balanced", weights={"maths": 2, "code/python": 1})
    counts = Counter(drawn(sampler, 80))
    assert counts == {"maths/sums": 20, "maths/products": 20, "code/python": 20, "code/shell": 20}


def test_a_checkpoint_of_other_kinds_is_refused() -> None:
    tasks = [Task(id=kind, prompt=(), kind=kind) for kind in ("a/b", "a/c", "d")]
    state = make_sampler(tasks, "balanced").state
    with pytest.raises(ConfigError, match="was saved with tasks drawn by the kinds a/b, a/c, d, and they are a, d now"):
        make_sampler(tasks, "balanced", weights={"a": 2}).restore(state)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"kind 2": 1}, "weights.kind 2 has no effect: no task is of this kind; did you mean kind"),
        ({"kind 0": 0}, "weights.kind 0 must be a positive number; got 0"),
        ({"kind 0": True}, "weights.kind 0 must be a positive number; got True"),
    ],
)
def test_a_weight_that_means_nothing_is_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sampler(make_kinds(2, 2), "balanced", weights=weights)


def test_balanced_needs_two_kinds() -> None:
    with pytest.raises(
        ConfigError, match="curriculum.kind=balanced has no effect where all 3 tasks are of one kind, ''"
    ):
        make_sampler(make_tasks(3), "balanced")


# -- difficulty


def test_the_signal_is_the_expected_variance_within_a_group() -> None:
    difficulty = Difficulty(make_tasks(4), 0)
    difficulty.on_result("t1", [1.0] * 8)
    difficulty.on_result("t2", [1.0, 0.0] * 4)
    difficulty.on_result("t3", [0.0] * 8)
    signals = [difficulty.signal(f"t{index}") for index in range(4)]
    assert signals == pytest.approx([1 / 8, 8.5 * 0.5 / 90, 4.5 * 4.5 / 90, 8.5 * 0.5 / 90])
    assert difficulty.metrics() == pytest.approx(
        {"seen": 3 / 4, "solved": 1 / 3, "unsolved": 1 / 3, "learnable": 1 / 3}
    )


def test_evidence_counts_half_after_a_half_life_and_adds_up() -> None:
    difficulty = Difficulty(make_tasks(4), 0, half_life=0.5)
    difficulty.on_result("t1", [1.0] * 8)
    for _ in range(2):
        difficulty.next()
    assert difficulty.signal("t1") == pytest.approx(4.5 * 0.5 / 30)
    difficulty.on_result("t1", [0.0] * 2)
    assert difficulty.signal("t1") == pytest.approx(4.5 * 2.5 / (7 * 8))
    difficulty.on_result("t1", [])
    assert difficulty.signal("t1") == pytest.approx(4.5 * 2.5 / (7 * 8))


def test_the_range_of_rewards_widens_to_what_was_seen() -> None:
    difficulty = Difficulty(make_tasks(3), 0)
    difficulty.on_result("t0", [0.0, 0.0])
    assert difficulty.metrics()["unsolved"] == 1.0
    difficulty.on_result("t1", [-1.0, -1.0])
    difficulty.on_result("t2", [1.0, 1.0])
    assert difficulty.metrics() == pytest.approx({"seen": 1.0, "solved": 1 / 3, "unsolved": 1 / 3, "learnable": 1 / 3})
    assert difficulty.signal("t0") == pytest.approx(1.5 * 1.5 / 12)


@settings(deadline=None)  # solved tasks are refused a thousand times a draw: 0.2 s, more on a busy machine
@given(seed=st.integers(0, 99), num_solved=st.integers(0, 10), explore=st.sampled_from([0.1, 0.25, 0.5]))
def test_every_task_has_its_turn(seed: int, num_solved: int, explore: float) -> None:
    difficulty = Difficulty(make_tasks(10), seed, explore=explore, half_life=1e6)
    for index in range(num_solved):
        difficulty.on_result(f"t{index}", [1.0] * 10_000)
    found = {difficulty.next().id for _ in range(math.ceil(10 / explore) + 1)}
    assert found == {f"t{index}" for index in range(10)}


def play_groups(draw: Callable[[], Task], on_result: Callable[[str, list[float]], None]) -> int:
    """Of 600 groups of a learner that gets better with each one that teaches something, how many do."""
    rng = random.Random(7)
    levels = {f"t{index}": rng.uniform(-12, 12) for index in range(300)}
    skill, taught = -4.0, 0
    for _ in range(600):
        task = draw()
        rate = 1 / (1 + math.exp(levels[task.id] - skill))
        rewards = [float(rng.random() < rate) for _ in range(8)]
        if len(set(rewards)) == 2:
            skill, taught = skill + 0.02, taught + 1
        on_result(task.id, rewards)
    return taught


def test_difficulty_gives_a_learner_more_groups_to_learn_from() -> None:
    taught = {}
    for kind in ("uniform", "difficulty"):
        sampler = make_sampler(make_tasks(300), kind)
        taught[kind] = play_groups(lambda sampler=sampler: sampler.next()[0], sampler.on_result)
    assert taught["difficulty"] > 1.25 * taught["uniform"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"explore": 0.0}, "curriculum.args.explore must be a number above 0 and below 1; got 0.0"),
        ({"explore": "much"}, "curriculum.args.explore must be a number; got 'much'"),
        ({"half_life": math.nan}, "curriculum.args.half_life must be a number above 0; got nan"),
        (
            {"halflife": 2.0},
            "curriculum.args.halflife is not an argument of curriculum.kind=difficulty, .*; did you mean half_life",
        ),
    ],
)
def test_options_out_of_range(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sampler(make_tasks(3), "difficulty", **args)


# -- a class of the user's

OWN = """
from rlflow.curriculum.base import Curriculum

class Last(Curriculum):
    def __init__(self, tasks, seed, *, last):
        self.tasks, self.last, self.told = tasks, last, []
    def next(self):
        return self.tasks[-self.last]
    def on_result(self, task_id, rewards):
        self.told.append([task_id, *rewards])
    def metrics(self):
        return {"told": float(len(self.told))}
    def state(self):
        return {"told": self.told}
    def restore(self, state):
        self.told = state["told"]

class Stranger(Last):
    def next(self):
        return "t0"

class Unsaved(Last):
    def state(self):
        return {"tasks": {1, 2}}

class Unready(Last):
    def state(self):
        return {"drawn": self.drawn}

class Short(Curriculum):
    def __init__(self, tasks, seed):
        pass

def function():
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_class_of_the_users(own: str) -> None:
    sampler = make_sampler(make_tasks(5), f"{own}:Last", last=2)
    assert drawn(sampler, 2) == ["t3", "t3"]
    sampler.on_result("t3", [1.0, 0.0])
    assert sampler.metrics() == {"curriculum/told": 1.0}
    assert sampler.state.curriculum == {"told": [["t3", 1.0, 0.0]]}


@pytest.fixture
def stages(tmp_path: Path) -> str:
    """The class that docs/curricula.md shows."""
    (tmp_path / "stages.py").write_text(files((ROOT / "docs" / "curricula.md").read_text())["stages.py"])
    return f"{tmp_path / 'stages.py'}:Stages"


def test_the_documented_curriculum_goes_from_kind_to_kind(stages: str) -> None:
    sampler = make_sampler(make_kinds(2, 3), stages, window=2, enough=0.75)
    assert sorted(drawn(sampler, 2)) == ["0/0", "0/1"]
    for rewards in ([1.0, 0.0], [], [1.0, 1.0]):  # 0.5, no verdict, 1: the mean of two is 0.75
        assert sampler.metrics() == {"curriculum/stage": 0.0}
        sampler.on_result("0/0", rewards)
    assert sampler.metrics() == {"curriculum/stage": 1.0}
    sampler.on_result("0/1", [1.0])  # drawn before, and so of no stage that is under way
    assert sampler.state.curriculum["recent"] == []
    restored = make_sampler(make_kinds(2, 3), stages, window=2, enough=0.75)
    restored.restore(through_json(sampler.state))
    assert sorted(drawn(restored, 3)) == ["1/0", "1/1", "1/2"]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Lost", {}, "curriculum.kind: .*did you mean Last"),
        ("function", {}, "must be a class below rlflow.curriculum.base.Curriculum; got <function"),
        ("Last", {}, "curriculum.args.last is required by curriculum.kind="),
        ("Short", {}, "cannot be built as Class.*: Can't instantiate abstract class Short"),
    ],
)
def test_a_class_that_cannot_be_used(own: str, name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sampler(make_tasks(5), f"{own}:{name}", **args)


def test_a_class_that_does_what_it_must_not(own: str) -> None:
    with pytest.raises(ConfigError, match=r"Stranger must return one of the tasks; got 't0'"):
        make_sampler(make_tasks(5), f"{own}:Stranger", last=1).next()
    with pytest.raises(ConfigError, match=r"state\(\) of curriculum.kind=.*Unsaved must return JSON values: .*set"):
        make_sampler(make_tasks(5), f"{own}:Unsaved", last=1)
    with pytest.raises(ConfigError, match=r"Unready must return JSON values: AttributeError: .* no attribute 'drawn'"):
        make_sampler(make_tasks(5), f"{own}:Unready", last=1)


# -- in a run


def test_the_ledger_counts_how_often_a_task_was_drawn() -> None:
    ledger = Ledger()
    first, other, again, retried = (
        ledger.admit("a", version=0),
        ledger.admit("b", version=0),
        ledger.admit("a", version=0),
        ledger.admit("a", task_pass=0, version=0),
    )
    fresh = ledger.admit("a", version=0)
    assert [ledger.task_of(group)[1] for group in (first, other, again, retried, fresh)] == [0, 0, 1, 0, 2]


def make_curriculum_world(folder: Path, kind: str, steps: int, **arguments: Any) -> World:
    config = Config()
    config.curriculum.kind = kind
    config.curriculum.args = arguments.pop("args", {})
    world = make_world(folder, steps=steps, num_tasks=12, config=config, **arguments)
    world.runners.duration_s = lambda rng: 1.0
    return world


def test_each_scored_group_is_told_once(tmp_path: Path, own: str) -> None:
    world = make_curriculum_world(tmp_path, f"{own}:Last", 4, args={"last": 1})
    world.config.algorithm.dynamic_sampling = True

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        if order.group_id == 2:  # nothing to compare
            return 1.0, EpisodeEnd.COMPLETED
        if order.group_id == 4 or (order.group_id == 5 and index == 0):
            return None, EpisodeEnd.REWARD_ERROR
        return float(index % 2), EpisodeEnd.COMPLETED

    world.runners.outcome = outcome
    run_virtually(world.driver.run())
    told = world.driver._intake.sampler.state.curriculum["told"]
    usual = ["t11", 0.0, 1.0, 0.0, 1.0]
    assert sorted(told) == sorted([*[usual] * 11, ["t11", 1.0, 1.0, 1.0, 1.0], ["t11"], ["t11", 1.0, 0.0, 1.0]])
    assert [report.curriculum for report in world.observer.reports][-1] == {"curriculum/told": 14.0}
    assert world.ledger.num_trained == 12


def test_the_greedy_episode_is_no_result(tmp_path: Path, own: str) -> None:
    world = make_curriculum_world(tmp_path, f"{own}:Last", 1, args={"last": 1})
    world.config.algorithm.advantage = "remax"
    world.driver._intake.grader = type(world.driver._intake.grader)(world.config)
    world.runners.outcome = lambda order, index: (float(index == order.num_episodes - 1), EpisodeEnd.COMPLETED)
    run_virtually(world.driver.run())
    assert world.driver._intake.sampler.state.curriculum["told"] == [["t11", 0.0, 0.0, 0.0, 0.0]] * 3


def test_a_curriculum_that_fails_ends_the_run(tmp_path: Path, own: str) -> None:
    world = make_curriculum_world(tmp_path, f"{own}:Stranger", 1, args={"last": 1})
    with pytest.raises(ConfigError, match="must return one of the tasks"):
        run_virtually(world.driver.run())


@pytest.mark.parametrize("kind", ["uniform", "difficulty"])
def test_a_resumed_run_draws_what_the_first_would_have(kind: str, tmp_path: Path) -> None:
    whole = make_curriculum_world(tmp_path / "whole", kind, 8)
    run_virtually(whole.driver.run())
    first = make_curriculum_world(tmp_path / "parts", kind, 3)
    run_virtually(first.driver.run())
    latest = first.checkpoints.path(3)
    shutil.copy(latest / "ledger.db", tmp_path / "ledger.db")
    second = make_curriculum_world(tmp_path / "parts", kind, 8, ledger=tmp_path / "ledger.db")

    async def resume() -> None:
        await second.driver.restore(latest, read_state(latest))
        await second.driver.run()

    run_virtually(resume())
    parts = [*first.runners.orders, *second.runners.orders]
    assert [order.task.id for order in parts] == [order.task.id for order in whole.runners.orders]
    assert len(parts) == 24
    assert second.driver._intake.sampler.state == whole.driver._intake.sampler.state
