"""Teachers: which group asks which, what is refused before anything starts, and how a driver with some goes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import World, make_ready, make_tasks, make_world, run_virtually
from training import save_model, tiny_config, tiny_groups, tiny_llama

from rlflow.algorithms.registry import check_functions
from rlflow.cluster.gpus import gpu_plan
from rlflow.cluster.placement import fit
from rlflow.cluster.rewards import scorer_of
from rlflow.cluster.slots import Machine
from rlflow.config import Config, EnvConfig, ModelPlacement, ProcessKind, RewardConfig, TeacherConfig
from rlflow.driver import StepReport
from rlflow.environments.find import held_out_tasks, is_silent, load_environment
from rlflow.envs.base import SingleTurn
from rlflow.errors import ConfigError
from rlflow.groups.ledger import DropReason
from rlflow.groups.sampler import TaskSampler
from rlflow.groups.silent import has_no_gradient
from rlflow.models.resolve import resolve_model
from rlflow.roles import REFERENCE, TEACHER
from rlflow.runtime.derived import frozen_models, learns_from_rewards, teachers, without_training
from rlflow.settings.checks import check
from rlflow.settings.teacher_checks import check_kinds
from rlflow.telemetry.record import step_record
from rlflow.types import EpisodeEnd, GroupOrder, PayloadRef, Transcript
from rlflow.workers.teachers import check_teachers, with_folders
from rlflow.workers.trainer.fsdp import FsdpTrainer

TWO = {"sums": "a", "products": "b", "default": "a"}


def taught(models: dict[str, str], **settings: object) -> Config:
    config = Config()
    config.teacher = TeacherConfig(models=models, **settings)  # pyright: ignore[reportArgumentType]
    return config


# -- which group asks which


def test_a_group_asks_the_teacher_of_its_kind() -> None:
    config = taught(TWO)
    assert teachers(config) == {"teacher sums": "a", "teacher products": "b"}
    found = [frozen_models(config, kind) for kind in ("sums", "products", "words")]
    assert found == [{TEACHER: "teacher sums"}, {TEACHER: "teacher products"}, {TEACHER: "teacher sums"}]
    config.algorithm.kl_coefficient = 0.1
    assert frozen_models(config, "products") == {REFERENCE: REFERENCE, TEACHER: "teacher products"}
    config.lora.rank = 4  # the policy is its own reference
    assert frozen_models(config, "products") == {TEACHER: "teacher products"}
    assert frozen_models(Config(), "products") == {}
    assert teachers(without_training(config)) == {}


def test_teachers_take_gpus_of_their_own_or_those_of_the_trainer() -> None:
    config = taught(TWO, ranks=2)
    config.trainer.ranks = 4
    assert gpu_plan(config).counts == {ProcessKind.engine: 1, ProcessKind.trainer: 4, ProcessKind.teacher: 4}
    assert gpu_plan(config).total == 9
    config.teacher.ranks, config.cluster.roles = 1, ModelPlacement.shared
    plan = gpu_plan(config)
    assert (plan.counts[ProcessKind.teacher], plan.total, plan.on_a_gpu(ProcessKind.teacher)) == (8, 5, 2)
    placed = fit(config, [Machine(name="m", cpus=64, gpus=5)])
    second = next(slot for slot in placed.slots if (ProcessKind.trainer, 1) in slot.processes)
    assert second.processes == ((ProcessKind.trainer, 1), (ProcessKind.teacher, 1), (ProcessKind.teacher, 5))


# -- what is refused


@pytest.mark.parametrize(
    ("kinds", "models", "message"),
    [
        (
            {"sums", "words"},
            {"sums": "a"},
            "teacher.models has no teacher for tasks of the kind 'words'; it has sums; add one, or one for `default`, "
            "which is for all other kinds",
        ),
        (
            {"sums"},
            {"sum": "b", "default": "a"},
            "teacher.models.sum has no effect, because no task is of that kind; did you mean sums?; kinds of tasks are "
            "'sums'; leave it out, or correct its name",
        ),
        (
            {"sums"},
            {"sums": "b", "default": "a"},
            "teacher.models.default has no effect, because each kind of task ('sums') has its own teacher; leave it "
            "out",
        ),
    ],
)
def test_each_kind_has_a_teacher_and_each_teacher_tasks(kinds: set[str], models: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_kinds(taught(models), kinds)
    assert str(refused.value) == message


def test_a_kind_below_another_has_its_teacher_unless_it_has_one_of_its_own() -> None:
    config = taught({"sums": "a", "sums/hard": "b", "default": "c"})
    asked = {kind: frozen_models(config, kind)[TEACHER] for kind in ("sums", "sums/easy", "sums/hard", "other")}
    paths = {kind: teachers(config)[name] for kind, name in asked.items()}
    assert paths == {"sums": "a", "sums/easy": "a", "sums/hard": "b", "other": "c"}


def test_kinds_that_fit_pass() -> None:
    check_kinds(taught(TWO), {"sums", "products", "words"})
    check_kinds(taught({"default": "a"}), {""})
    check_kinds(taught({"sums": "a", "default": "b"}), {"sums/easy", "sums/hard", "words"})
    check_kinds(Config(), {"sums"})


def amend(folder: Path, name: str, **changes: object) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_teacher_needs_the_vocabulary_of_the_policy_and_no_template(tmp_path: Path) -> None:
    tiny = resolve_model("tiny")
    folder = shutil.copytree(tiny, tmp_path / "teacher")
    (folder / "chat_template.jinja").unlink()
    config = with_folders(taught({"default": str(folder), "sums": "tiny"}))
    assert config.teacher.models == {"default": str(folder), "sums": tiny}
    check_teachers(config, tiny)
    check_teachers(Config(), tiny)
    amend(folder, "config.json", vocab_size=300)  # padded: more than there are tokens
    check_teachers(config, tiny)
    amend(folder, "config.json", vocab_size=200)
    with pytest.raises(ConfigError, match="teacher.models.default: the embedding of .* has 200 rows .* policy .* 259"):
        check_teachers(config, tiny)
    other = taught({"default": resolve_model("smollm2-135m")})
    with pytest.raises(ConfigError, match=r"teacher.models.default: the vocabulary of .* token 3 is .*, and not in"):
        check_teachers(other, tiny)
    with pytest.raises(ConfigError, match="teacher.models.sums=/nowhere is not a folder; give a folder, a hub id or"):
        with_folders(taught({"sums": "/nowhere"}))


@pytest.mark.parametrize(
    ("settings", "algorithm", "message"),
    [
        ({"weight": 0.0}, {}, "teacher.weight must be positive; got 0.0"),
        ({"reward_weight": -1.0}, {}, "teacher.reward_weight must not be negative; got -1.0"),
        ({"reward_weight": 0.0}, {"advantage": "rloo"}, "algorithm.advantage=rloo has no effect with teacher.reward_"),
        ({"reward_weight": 0.0}, {"advantage": "gae"}, "algorithm.advantage=gae has no effect with teacher.reward_w"),
        ({"reward_weight": 0.0}, {"dynamic_sampling": True}, "algorithm.dynamic_sampling has no effect with teacher."),
        ({"reward_weight": 0.0}, {"overlong_tokens": 4}, "algorithm.overlong_tokens=4 has no effect with teacher."),
        ({"models": {}, "weight": 2.0}, {}, "teacher.weight=2.0 has no effect without a teacher; name one in"),
        ({"models": {}, "args": {"clamp": 1.0}}, {}, "teacher.args={'clamp': 1.0} has no effect without a teacher"),
    ],
)
def test_settings_that_do_not_go_together(
    settings: dict[str, object], algorithm: dict[str, object], message: str
) -> None:
    config = taught({"default": "a"})
    config.teacher = replace(config.teacher, **settings)  # pyright: ignore[reportArgumentType]
    config.algorithm = replace(config.algorithm, **algorithm)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert str(refused.value).startswith(message)


def test_one_episode_is_enough_where_a_teacher_alone_decides() -> None:
    config = taught({"default": "a"}, reward_weight=0.0)
    config.algorithm.group_size = 1
    check(config)
    check_functions(config)
    config.teacher.reward_weight = 1.0
    with pytest.raises(ConfigError, match="group_size must be at least 2 with algorithm.advantage=grpo"):
        check_functions(config)
    config.teacher.args = {"clamp": -1}
    with pytest.raises(ConfigError, match="clamp must be above 0"):
        check_functions(config)


# -- without a reward


def said(end: EpisodeEnd, reward: float | None = None) -> Transcript:
    (task,) = make_tasks(1)
    return Transcript(task=task, prompt=task.prompt, completion=(), environment_reward=reward, end=end, num_sampled=1)


async def test_an_environment_without_a_reward_is_enough(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2 ="}\n{"prompt": "3 + 3 ="}\n')
    env = EnvConfig(name="dataset", args={"path": str(rows), "evaluation_path": str(rows)})
    config = replace(taught({"default": "a"}, reward_weight=0.0), env=env)
    with pytest.raises(ConfigError, match="reward.function is required"):
        load_environment(env, RewardConfig())
    spec = load_environment(env, RewardConfig(), needs_reward=learns_from_rewards(config))
    assert is_silent(spec.build)
    config.eval.every = 5
    with pytest.raises(ConfigError, match="has no reward of its own to evaluate with; give a reward.function"):
        held_out_tasks(config, spec)
    scorer = scorer_of(config, [], is_silent=True)
    for end in (EpisodeEnd.COMPLETED, EpisodeEnd.TRUNCATED_LENGTH):
        verdict = await scorer.score(said(end))
        assert (verdict.reward, verdict.end) == (None, end)


async def test_a_reward_that_an_environment_gives_is_shown() -> None:
    assert is_silent(SingleTurn) and not is_silent(lambda: SingleTurn())
    config = taught({"default": "a"}, reward_weight=0.0)
    scorer = scorer_of(config, [])
    assert (await scorer.score(said(EpisodeEnd.COMPLETED, 0.5))).reward == 0.5
    assert (await scorer.score(said(EpisodeEnd.TRUNCATED_LENGTH))).reward == 0.0
    unscored = await scorer.score(said(EpisodeEnd.COMPLETED))
    assert (unscored.reward, unscored.end) == (None, EpisodeEnd.COMPLETED)
    config.teacher.reward_weight = 1.0
    for is_known in (True, False):
        verdict = await scorer_of(config, [], is_silent=is_known).score(said(EpisodeEnd.COMPLETED))
        assert verdict.end is EpisodeEnd.NO_VERDICT


# -- the driver


class FakeTeacher:
    """Its handles say who answered."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def logprobs(self, payloads: Sequence[PayloadRef]) -> list[object]:
        return [f"{self.name} of {payload}" for payload in payloads]


def driver_with_teachers(folder: Path, config: Config) -> World:
    world = make_world(folder, steps=4, config=config, max_versions=1)
    tasks = [replace(task, kind=("sums", "products")[number % 2]) for number, task in enumerate(make_tasks(50))]
    sampler = TaskSampler(tasks, 0, config.curriculum)
    world.driver._intake.sampler = sampler
    names = [*teachers(config), REFERENCE]
    world.driver._workers.frozen = {name: FakeTeacher(name) for name in names}
    return world


def test_each_group_is_trained_with_what_its_teacher_said(tmp_path: Path) -> None:
    config = taught({"sums": "a", "products": "b"}, reward_weight=0.0)
    config.algorithm.kl_coefficient = 0.1
    world = driver_with_teachers(tmp_path, config)
    world.runners.outcome = lambda order, index: (1.0, EpisodeEnd.COMPLETED)  # all equal
    reports: list[StepReport] = []
    world.observer.on_step = reports.append
    run_virtually(world.driver.run())
    groups = [group for report in reports for group in report.groups]
    assert len(groups) == 12 and {group.task_kind for group in groups} == {"sums", "products"}
    for group in groups:
        assert group.frozen[TEACHER] == [f"teacher {group.task_kind} of {payload}" for payload in group.payloads]
        assert group.frozen[REFERENCE] == [f"reference of {payload}" for payload in group.payloads]
        assert group.advantages == [[0.0]] * 4


def test_episodes_without_a_reward_are_trained_and_failed_ones_are_not(tmp_path: Path) -> None:
    config = taught({"default": "a"}, reward_weight=0.0)
    world = driver_with_teachers(tmp_path, config)

    def outcome(order: GroupOrder, index: int) -> tuple[float | None, EpisodeEnd]:
        ends = (EpisodeEnd.COMPLETED, EpisodeEnd.TRUNCATED_LENGTH, EpisodeEnd.SETUP_ERROR, EpisodeEnd.NO_VERDICT)
        return None, ends[index % 4]

    world.runners.outcome = outcome
    run_virtually(world.driver.run())
    assert world.trainer.version == 4
    assert not [drop for drop in world.observer.drops if drop[1] is DropReason.NO_VERDICT]
    report = world.observer.reports[0]
    assert [len(group.episodes) for group in report.groups] == [3, 3, 3]
    record = step_record(report, since_s=0.0, num_tokens_before=0)
    assert [record[name] for name in ("reward", "reward_std", "frac_reward_zero_std")] == [None, None, None]
    assert record["completions/clipped_ratio"] == pytest.approx(1 / 3)


def test_rewards_count_beside_a_teacher(tmp_path: Path) -> None:
    world = driver_with_teachers(tmp_path, taught({"default": "a"}))
    run_virtually(world.driver.run())
    groups = [group for report in world.observer.reports for group in report.groups]
    found = [value for group in groups for values in group.advantages for value in values or ()]
    assert [round(value, 2) for value in found] == [-0.87, 0.87] * 24


# -- the trainer


def test_groups_of_equal_reward_go_through_the_model_if_there_is_a_teacher() -> None:
    group = make_ready(0, 0, 0)
    group.advantages = [[0.0], [0.0]]
    for config, is_silent_group in ((Config(), True), (taught({"default": "a"}), False)):
        assert has_no_gradient(config, group) is is_silent_group


def test_the_gradient_is_that_of_the_mixed_advantages(tmp_path: Path) -> None:
    """A back end that mixes, against one that is given the mixed advantages; and the figures against NumPy."""
    folder, random = save_model(tiny_llama(), tmp_path), np.random.default_rng(0)
    samples = [
        replace(
            sample,
            frozen_logprobs={TEACHER: random.normal(-4, 2, len(sample.sample.logprobs)).astype(np.float32)},
        )
        for group in tiny_groups()
        for sample in group
    ]
    config = tiny_config()
    config.teacher = TeacherConfig(models={"default": "a"}, weight=0.5, reward_weight=2.0, args={"clamp": 2.0})
    mixing, plain = (FsdpTrainer(each, folder, 0, 1, "") for each in (config, tiny_config()))
    gaps = [one.frozen_logprobs[TEACHER] - one.sample.logprobs for one in samples]
    mixed = [
        replace(one, advantage=(0.5 * gap.clip(-2, 2) + 2.0 * one.advantage).astype(np.float32), frozen_logprobs={})
        for one, gap in zip(samples, gaps, strict=True)
    ]
    mixing.accumulate([[samples]])
    plain.accumulate([[mixed]])
    found, expected = mixing.step(), plain.step()
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    of_loss = np.concatenate([gap[one.sample.loss_mask] for one, gap in zip(samples, gaps, strict=True)])
    assert found.metrics["distil/kl"].value == pytest.approx(-of_loss.mean(), rel=1e-5)
    assert found.metrics["distil/clamped"].value == pytest.approx((np.abs(of_loss) > 2).mean())
    assert 0 < (np.abs(of_loss) > 2).mean() < 1
    assert "distil/kl" not in expected.metrics
    with pytest.raises(ValueError, match="carry no teacher log-probabilities"):
        mixing.accumulate([[mixed]])
