"""Algorithms by name, with options, from a user's file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rlflow.algorithms.advantage.base import Scope, Scored, ScoredTurn
from rlflow.algorithms.registry import CATALOGS, Kind, advantage_of, objective_of, resolve, try_options
from rlflow.algorithms.tokens import Tokens
from rlflow.config import AlgorithmConfig
from rlflow.errors import ConfigError
from rlflow.plugins.options import bind

USER_FILE = """
def best_only(groups, *, bonus: float):
    return [[[bonus if e.reward == max(o.reward for o in group) else 0.0] for e in group] for group in groups]

best_only.scope = "batch"
best_only.is_per_turn = True

def keep(tokens, target):
    return target

keep.is_mask = True

def wrong(groups):
    return []

wrong.scope = "world"
number = 3
"""


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in Kind for name in CATALOGS[kind].shipped])
def test_every_name_is_a_function_that_takes_its_defaults(kind: Kind, name: str) -> None:
    function = resolve(kind, name).function
    assert function.__name__ == name
    try_options(kind, bind(function, {}, f"algorithm.{kind}_args", name))


def test_what_a_caller_must_know() -> None:
    batch = {
        name for name in CATALOGS[Kind.advantage].shipped if resolve(Kind.advantage, name).traits.scope is Scope.batch
    }
    assert batch == {"gdpo", "reinforce_pp", "reinforce_pp_baseline", "grpo_batch_std", "grpo_task_std", "dpo", "ipo"}
    assert {name for name in CATALOGS[Kind.correction].shipped if resolve(Kind.correction, name).traits.is_mask} == {
        "geometric",
        "veto",
        "opsm",
        "divergence",
        "uncertain_negatives",
        "low_entropy",
    }
    assert {name for name in CATALOGS[Kind.loss].shipped if resolve(Kind.loss, name).traits.is_corrected} == {
        "aipo",
        "dppo_tv",
        "dppo_kl",
        "vespo",
    }


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(Kind.loss, "gsop")
    assert str(error.value) == (
        "algorithm.loss=gsop is not a loss; did you mean gspo? There are aipo, cispo, dppo_kl, dppo_tv, gmpo, gspo, "
        "ppo_clip, reinforce, sapo, vespo; your own is package.module:Name or file.py:Name"
    )


@pytest.mark.parametrize(
    ("loss", "args", "message"),
    [
        (
            "gspo",
            {"cliplow": 3e-4},
            "loss_args.cliplow is not an argument of the loss gspo, which takes clip_low, clip_",
        ),
        ("reinforce", {"cap": 2.0}, "loss_args.cap is not an argument of the loss reinforce, which takes none"),
        ("gspo", {"clip_low": "3e-4"}, "loss_args.clip_low must be a number or null; got '3e-4'"),
        ("aipo", {"cap": True}, "loss_args.cap must be a number; got True"),
        ("aipo", {"cap": None}, "loss_args.cap must be a number; got None"),
    ],
)
def test_wrong_options(loss: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        bind(resolve(Kind.loss, loss).function, args, "loss_args", f"the loss {loss}")


def test_options_of_other_types() -> None:
    with pytest.raises(ConfigError, match="args.normalise must be true or false; got 1"):
        bind(resolve(Kind.advantage, "passk").function, {"normalise": 1}, "args", "it")
    gdpo = resolve(Kind.advantage, "gdpo").function
    bind(gdpo, {"weights": OmegaConf.create({"a": 1.0})}, "args", "gdpo")
    with pytest.raises(ConfigError, match="args.weights must be .* or null; got 2.0"):
        bind(gdpo, {"weights": 2.0}, "args", "gdpo")
    bind(resolve(Kind.loss, "aipo").function, {"cap": 2}, "args", "it")


@pytest.mark.parametrize(
    ("kind", "name", "args"),
    [
        (Kind.loss, "ppo_clip", {"clip_low": 3.0}),
        (Kind.correction, "tis", {"cap": -1.0}),
        (Kind.advantage, "gigpo", {"discount": 1.5}),
    ],
)
def test_an_option_out_of_range_is_found_without_data(kind: Kind, name: str, args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        try_options(kind, bind(resolve(kind, name).function, args, "args", name))


def test_a_users_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    found = resolve(Kind.advantage, f"{file}:best_only")
    assert found.traits.scope is Scope.batch
    assert found.traits.is_per_turn
    assert resolve(Kind.correction, f"{file}:keep").traits.is_mask
    with pytest.raises(ConfigError, match="args.bonus is required by it"):
        bind(found.function, {}, "args", "it")
    group = [Scored(reward=1.0, num_loss_tokens=1), Scored(reward=0.0, num_loss_tokens=1)]
    assert bind(found.function, {"bonus": 2.0}, "args", "it")([group]) == [[[2.0], [0.0]]]
    with pytest.raises(ConfigError, match="must be a function; got int"):
        resolve(Kind.advantage, f"{file}:number")
    with pytest.raises(ConfigError, match="the scope of .* must be one of group, batch"):
        resolve(Kind.advantage, f"{file}:wrong")
    with pytest.raises(ConfigError, match="did you mean keep"):
        resolve(Kind.correction, f"{file}:keeps")


def test_an_advantage_needs_no_torch() -> None:
    code = (
        "import sys; from rlflow.algorithms.registry import CATALOGS, Kind, resolve, try_options\n"
        "for name in CATALOGS[Kind.advantage].shipped:\n"
        "    try_options(Kind.advantage, resolve(Kind.advantage, name).function)\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


RETURNS = """
import numpy, torch
from rlflow.algorithms.loss.base import TokenLoss

def nothing(groups):
    return None

def too_few_groups(groups):
    return []

def flat(groups):
    return [[1.0 for e in group] for group in groups]

def too_few(groups):
    return [[[1.0]] for group in groups]

def text(groups):
    return [["a" for e in group] for group in groups]

def infinite(groups):
    return [[[float("inf")] for e in group] for group in groups]

def two_values(groups):
    return [[[1.0, 2.0] for e in group] for group in groups]

def arrays(groups):
    return [numpy.ones((len(group), 1), numpy.float32) for group in groups]

def tensors(groups):
    return [torch.ones(len(group), 1) for group in groups]

def mean(tokens):
    return TokenLoss(loss=tokens.logprobs.mean(), is_clipped=tokens.logprobs > 0)

def bare(tokens):
    return tokens.logprobs

def one_more(tokens):
    return TokenLoss(loss=tokens.logprobs, is_clipped=torch.zeros(len(tokens.logprobs) + 1))

def weigh_all(tokens, target):
    return 1.0
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nothing", "None for 1 groups"),
        ("too_few_groups", "[] for 1 groups"),
        ("flat", "1.0 for an episode of 3 turns"),
        ("too_few", "[[1.0]] for a group of 2 episodes"),
        ("text", "'a' for an episode of 3 turns"),
        ("infinite", "[inf] for an episode of 3 turns"),
        ("two_values", "[1.0, 2.0] for an episode of 3 turns"),
    ],
)
def test_an_advantage_of_a_wrong_shape_is_told_to_its_author(tmp_path: Path, name: str, found: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RETURNS)
    chosen = advantage_of(AlgorithmConfig(advantage=f"{file}:{name}"))
    message = f"algorithm.advantage={file}:{name} returned {found}; it must return a list with an entry for each group"
    with pytest.raises(ConfigError, match=re.escape(message)):
        chosen.function([group_of_turns(3)])


def group_of_turns(num_turns: int) -> list[Scored]:
    turns = [ScoredTurn(anchor="", reward=0.0, num_loss_tokens=1)] * num_turns
    return [Scored(reward=reward, num_loss_tokens=3, turns=turns) for reward in (1.0, 0.0)]


def test_an_advantage_may_return_arrays_and_turns(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RETURNS)
    for name in ("arrays", "tensors"):
        found = advantage_of(AlgorithmConfig(advantage=f"{file}:{name}")).function([group_of_turns(3)])
        assert found == [[[1.0], [1.0]]]
        assert type(found[0][0][0]) is float
    two = advantage_of(AlgorithmConfig(advantage=f"{file}:two_values")).function([group_of_turns(2)])
    assert two == [[[1.0, 2.0], [1.0, 2.0]]]


EACH_TOKEN = "must be a tensor with one value for each loss token, here [4]; got"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "mean"}, f"the loss of algorithm.loss={{}} {EACH_TOKEN} a tensor of shape []"),
        ({"loss": "bare"}, "algorithm.loss={} must return a TokenLoss, of rlflow.algorithms.loss.base; got Tensor"),
        ({"loss": "one_more"}, f"is_clipped of algorithm.loss={{}} {EACH_TOKEN} a tensor of shape [5]"),
        ({"correction": "weigh_all"}, f"the weights of algorithm.corrections.{{}} {EACH_TOKEN} 1.0"),
    ],
)
def test_a_loss_or_correction_of_a_wrong_shape_is_told_to_its_author(
    tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RETURNS)
    ((kind, name),) = settings.items()
    path = f"{file}:{name}"
    algorithm = AlgorithmConfig(loss=path) if kind == "loss" else AlgorithmConfig(corrections={path: {}})
    chosen = objective_of(algorithm)
    values = torch.zeros(4)
    tokens = Tokens(
        logprobs=values,
        proximal=values,
        behaviour=values,
        advantages=values,
        entropies=values,
        sequence_of=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
    )
    with pytest.raises(ConfigError, match=re.escape(message.format(path))):
        chosen.loss(tokens) if kind == "loss" else chosen.corrections[0](tokens, values)
