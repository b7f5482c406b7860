"""Whether a cluster has the GPUs that a run asks for."""

import pytest

from rlflow.cluster.gpus import check_gpus
from rlflow.config import Config, Placement
from rlflow.errors import ConfigError


def config(engines: int, ranks: int, *, tensor_parallel: int = 1, kl: float = 0.0, colocated: bool = False) -> Config:
    config = Config()
    config.rollout.engines, config.rollout.tensor_parallel = engines, tensor_parallel
    config.trainer.ranks, config.algorithm.kl_coefficient = ranks, kl
    config.cluster.placement = Placement.colocated if colocated else Placement.separate
    return config


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (config(4, 4), 0),
        (config(1, 1), 2),
        (config(2, 1, tensor_parallel=2, kl=0.1), 6),
        (config(1, 1, colocated=True), 1),
        (config(4, 4, kl=0.1, colocated=True), 5),
    ],
)
def test_enough(asked: Config, found: int) -> None:
    check_gpus(asked, found)


@pytest.mark.parametrize(
    ("asked", "found", "message"),
    [
        (
            config(1, 1),
            1,
            r"needs 2 GPUs .* = 1 of their own, trainer.ranks = 1, critic = 0, reference = 0\); the cluster has 1",
        ),
        (config(2, 1, tensor_parallel=2, kl=0.1), 5, "needs 6 GPUs .* = 4 of their own, .* reference = 1"),
        (config(4, 4, kl=0.1, colocated=True), 4, "needs 5 GPUs .* = 0 of their own, trainer.ranks = 4"),
        (config(2, 1, colocated=True), 8, "equal to trainer.ranks; got 1, 2 and 1; change them"),
        (config(1, 1, tensor_parallel=2, colocated=True), 8, "got 2, 1 and 1"),
    ],
)
def test_too_few(asked: Config, found: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gpus(asked, found)
