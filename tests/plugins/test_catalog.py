"""One way from a name to code, for everything that a setting can name; and packages that bring more of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packages import install
from transcripts import said

from rlflow.algorithms import loss as losses
from rlflow.algorithms.advantage.base import Scored
from rlflow.algorithms.registry import CATALOGS, Kind, advantage_of, check_functions, objective_of
from rlflow.algorithms.tokens import Tokens
from rlflow.cli import main
from rlflow.config import AlgorithmConfig, Config, CurriculumConfig, EnvConfig, Proximal, RewardConfig
from rlflow.curriculum.registry import CURRICULA, make_curriculum
from rlflow.environments.find import ENVIRONMENTS, load_environment
from rlflow.errors import ConfigError
from rlflow.plugins.catalog import Catalog, modules_of
from rlflow.rewards.call import Log, call
from rlflow.rewards.choose import REWARDS, choose_rewards, load
from rlflow.types import Task

SOURCE = '''
from rlflow.algorithms.base import Traits
from rlflow.curriculum.base import Curriculum
from rlflow.envs.base import EnvironmentSpec, SingleTurn
from rlflow.types import Task


def tasks(size):
    return [Task(id=f"theirs {number}", prompt=({"role": "user", "content": "hi"},)) for number in range(size)]


def their_world(size: int = 2):
    return EnvironmentSpec(tasks=lambda: tasks(size), build=SingleTurn, reward=their_reward)


def their_reward(completion, bonus: float = 1.0):
    return len(completion) + bonus


@Traits(needs_greedy=True)
def their_advantage(groups, *, bonus: float = 1.0):
    return [[[episode.reward + bonus] for episode in group] for group in groups]


@Traits(has_no_ratio=True)
def their_loss(tokens, *, strength: float = 1.0):
    """Minus the log-probability, times the advantage and a strength.

    More.
    """
    return -strength * tokens.advantages * tokens.logprobs, tokens.logprobs > 0


def their_correction(tokens, target, *, weight: float = 0.5):
    return weight + 0 * target


their_correction.is_mask = True


def their_kl(logprobs, reference_logprobs):
    return 2 * (logprobs - reference_logprobs)


class TheirCurriculum(Curriculum):
    def __init__(self, tasks, seed, *, last: int = 1):
        self.task = tasks[-last]

    def next(self):
        return self.task

    def state(self):
        return {}

    def restore(self, state):
        pass
'''


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One of the things that settings name, and what comes of it."""

    catalog: Catalog
    name: str
    """What SOURCE defines."""
    shipped: str
    use: Callable[..., Any]
    """(name, **options) -> what the thing gives."""
    gives: Any
    """What it gives when it is that of SOURCE."""
    option: str | None
    """The setting of its only option, without the option."""


def row() -> Tokens:
    values = torch.tensor([-1.0, -2.0])
    return Tokens(
        logprobs=values,
        proximal=values,
        behaviour=values,
        advantages=torch.tensor([1.0, -1.0]),
        entropies=values,
        sequence_of=torch.tensor([0, 0]),
        num_sequences=1,
    )


def use_environment(name: str, **options: Any) -> list[str]:
    return [task.id for task in load_environment(EnvConfig(name=name, args=options), RewardConfig()).tasks()]


def use_reward(name: str, **options: Any) -> Any:
    (chosen,) = choose_rewards(RewardConfig(function=name, args={name.rpartition(":")[2]: options}), None)
    return call(load(chosen), [said("4")], chosen.args, 1.0, Log(episodes=[{}]))


def use_advantage(name: str, **options: Any) -> list[list[list[float]]]:
    chosen = advantage_of(AlgorithmConfig(advantage=name, advantage_args=options))
    return chosen.function([[Scored(reward=reward, num_loss_tokens=1, baseline=0.0) for reward in (0.0, 1.0)]])


def use_loss(name: str, **options: Any) -> list[float]:
    return objective_of(AlgorithmConfig(loss=name, loss_args=options)).loss(row()).loss.tolist()


def use_correction(name: str, **options: Any) -> list[float]:
    (correction,) = objective_of(AlgorithmConfig(corrections={name: options})).corrections
    return correction(row(), row().logprobs).tolist()


def use_kl(name: str) -> list[float]:
    return objective_of(AlgorithmConfig(kl=name)).kl(row().logprobs, torch.zeros(2)).tolist()


def use_curriculum(name: str, **options: Any) -> str:
    tasks = [Task(id=str(number), prompt=()) for number in range(3)]
    return make_curriculum(CurriculumConfig(kind=name, args=options), tasks, 0).next().id


THINGS = {
    "environment": Thing(
        catalog=ENVIRONMENTS,
        name="their_world",
        shipped="arithmetic",
        use=use_environment,
        gives=["theirs 0", "theirs 1"],
        option="env.args",
    ),
    "reward": Thing(
        catalog=REWARDS,
        name="their_reward",
        shipped="exact_match",
        use=use_reward,
        gives=2.0,
        option="reward.args.their_reward",
    ),
    "advantage": Thing(
        catalog=CATALOGS[Kind.advantage],
        name="their_advantage",
        shipped="remax",
        use=use_advantage,
        gives=[[[1.0], [2.0]]],
        option="algorithm.advantage_args",
    ),
    "loss": Thing(
        catalog=CATALOGS[Kind.loss],
        name="their_loss",
        shipped="gspo",
        use=use_loss,
        gives=[1.0, -2.0],
        option="algorithm.loss_args",
    ),
    "correction": Thing(
        catalog=CATALOGS[Kind.correction],
        name="their_correction",
        shipped="veto",
        use=use_correction,
        gives=[0.5, 0.5],
        option="algorithm.corrections.NAME",
    ),
    "kl": Thing(catalog=CATALOGS[Kind.kl], name="their_kl", shipped="k2", use=use_kl, gives=[-2.0, -4.0], option=None),
    "curriculum": Thing(
        catalog=CURRICULA,
        name="TheirCurriculum",
        shipped="uniform",
        use=use_curriculum,
        gives="2",
        option="curriculum.args",
    ),
}
GROUPS = {thing.catalog.group: {thing.name: thing.name} for thing in THINGS.values() if thing.catalog.group}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sys.path, for packages."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("theirs", "others"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("way", ["shipped", "entry point", "module", "file"])
@pytest.mark.parametrize("kind", THINGS)
def test_each_thing_is_found_in_each_way(kind: str, way: str, packages: Path) -> None:
    thing = THINGS[kind]
    install(packages, "theirs", SOURCE, GROUPS)
    if way == "shipped":
        found: Any = thing.catalog.find(thing.shipped)
        assert found.__module__.startswith("rlflow.")
        assert thing.use(thing.shipped)
        return
    name = {"entry point": "", "module": "theirs:", "file": f"{packages}/theirs.py:"}[way] + thing.name
    assert thing.use(name) == thing.gives


def test_a_file_in_the_folder_is_all_that_a_new_loss_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fresh.py").write_text("def fresh(tokens):\n    return tokens.logprobs, tokens.logprobs > 0\n")
    monkeypatch.setattr(losses, "__path__", [*losses.__path__, str(tmp_path)])
    catalog = Catalog(setting="algorithm.loss", what="a loss", shipped=modules_of("rlflow.algorithms.loss"))
    assert {*catalog.shipped} == {*CATALOGS[Kind.loss].shipped, "fresh"}
    monkeypatch.setitem(CATALOGS, Kind.loss, catalog)
    assert use_loss("fresh") == [-1.0, -2.0]


@pytest.mark.parametrize("kind", THINGS)
def test_a_wrong_name_gets_the_nearest(kind: str, packages: Path) -> None:
    thing = THINGS[kind]
    install(packages, "theirs", SOURCE, GROUPS)
    for name in (thing.name, thing.shipped):
        with pytest.raises(ConfigError) as error:
            thing.use(f"{name}x")
        start = f"{thing.catalog.setting}={name}x is not {thing.catalog.what}; did you mean {name}? There are "
        assert str(error.value).startswith(start)
        assert str(error.value).endswith("; your own is package.module:Name or file.py:Name")
    with pytest.raises(ConfigError, match=f"{thing.catalog.setting}=9 is not {thing.catalog.what}. There are "):
        thing.use("9")
    with pytest.raises(
        ConfigError, match=rf"{thing.catalog.setting}: .*theirs.py has no attribute .* mean {thing.name}"
    ):
        thing.use(f"{packages}/theirs.py:{thing.name}x")


@pytest.mark.parametrize("kind", [kind for kind, thing in THINGS.items() if thing.option])
def test_wrong_options(kind: str, packages: Path) -> None:
    thing = THINGS[kind]
    install(packages, "theirs", SOURCE, GROUPS)
    name = {"environment": "size", "loss": "strength", "correction": "weight", "curriculum": "last"}.get(kind, "bonus")
    assert thing.option
    setting = re.escape(thing.option.replace("NAME", thing.name))
    with pytest.raises(ConfigError, match=rf"{setting}\.{name}s is not an argument of .*; did you mean {name}\?"):
        thing.use(thing.name, **{f"{name}s": 1})
    with pytest.raises(ConfigError, match=rf"{setting}\.{name} must be a .*number; got 'much'"):
        thing.use(thing.name, **{name: "much"})
    assert thing.use(thing.name, **{name: 1}) is not None


@pytest.mark.parametrize("kind", THINGS)
def test_a_name_with_two_meanings_is_refused_when_it_is_used(kind: str, packages: Path) -> None:
    thing = THINGS[kind]
    assert thing.catalog.group
    points = {"twice": thing.name, thing.shipped: thing.name, "once": thing.name}
    install(packages, "theirs", SOURCE, {thing.catalog.group: points})
    install(packages, "others", SOURCE, {thing.catalog.group: {"twice": thing.name}})
    message = (
        f"{thing.catalog.setting}=twice: two installed packages register 'twice' in {thing.catalog.group}: "
        f"others:{thing.name} and theirs:{thing.name}; name the one you mean by its path"
    )
    with pytest.raises(ConfigError, match=message):
        thing.use("twice")
    with pytest.raises(ConfigError, match=f"register '{thing.shipped}' in .*: rlflow.* and theirs:{thing.name};"):
        thing.use(thing.shipped)
    assert thing.use("once") == thing.use(f"others:{thing.name}") == thing.gives


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "algorithm.loss=their_loss: importing theirs failed: ZeroDivisionError: division by zero"),
        ("import no_such_package", "importing theirs failed: it needs the module 'no_such_package', which is not inst"),
        (
            "their_los = 3",
            "algorithm.loss=their_loss: theirs has no attribute 'their_loss' .*; did you mean their_los",
        ),
        ("their_loss = 3", "the loss 'their_loss' must be a function; got int"),
    ],
)
def test_an_entry_point_that_cannot_be_used(
    source: str, message: str, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(packages, "theirs", source, {"rlflow.losses": {"their_loss": "their_loss"}})
    with pytest.raises(ConfigError, match=message):
        use_loss("their_loss")
    assert main(["algorithms"]) == 0
    assert re.search(
        rf"their_loss   \[theirs:their_loss of theirs 1.0\]\n      cannot be used: .*{message}", out(capsys)
    )


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_algorithms_of_packages_are_listed(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(packages, "theirs", SOURCE, GROUPS)
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out
    assert (
        "  their_loss (strength=1.0)   [theirs:their_loss of theirs 1.0]\n"
        "      Minus the log-probability, times the advantage and a strength.\n"
    ) in lines
    for name in ("their_advantage (bonus=1.0)", "their_correction (weight=0.5)", "their_kl"):
        assert f"  {name}   [theirs:" in lines


def test_what_a_packages_function_says_of_itself_is_heard(packages: Path) -> None:
    install(packages, "theirs", SOURCE, GROUPS)
    config = Config()
    config.algorithm.advantage = "their_advantage"
    config.algorithm.corrections = {"their_correction": {}}  # a mask may stand beside the ratio of the loss
    check_functions(config)
    assert advantage_of(config.algorithm).traits.needs_greedy
    config.algorithm.loss = "their_loss"
    config.algorithm.proximal = Proximal.interpolated
    with pytest.raises(ConfigError, match="algorithm.loss=their_loss, which does not compare with the proximal policy"):
        check_functions(config)


def test_a_loss_of_a_package_is_found_in_another_process(packages: Path) -> None:
    """As the trainer's ranks find it, which get the settings alone."""
    install(packages, "theirs", SOURCE, GROUPS)
    script = (
        "from rlflow.algorithms.registry import objective_of; from rlflow.config import AlgorithmConfig\n"
        "from rlflow.algorithms.tokens import no_tokens\n"
        "print(objective_of(AlgorithmConfig(loss='their_loss', loss_args={'strength': 2})).loss(no_tokens()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert found.stdout == "TokenLoss(loss=tensor([]), is_clipped=tensor([], dtype=torch.bool))\n"


def test_a_package_that_is_installed_later_is_found(packages: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm.loss=their_loss is not a loss"):
        use_loss("their_loss")
    install(packages, "theirs", SOURCE, GROUPS)
    assert use_loss("their_loss") == [1.0, -2.0]


def test_types_that_yaml_does_not_have_are_left_to_the_function(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n\ndef brief(completion, folder: Path = Path(), size: 'int' = 1, **others):\n"
        "    return 1.0\n"
    )
    config = RewardConfig(function=f"{tmp_path}/own.py:brief", args={"brief": {"folder": "/tmp", "colour": "red"}})
    assert choose_rewards(config, None)[0].args == {"folder": "/tmp", "colour": "red"}
    config.args["brief"]["size"] = True
    with pytest.raises(ConfigError, match="reward.args.brief.size must be a whole number; got True"):
        choose_rewards(config, None)
