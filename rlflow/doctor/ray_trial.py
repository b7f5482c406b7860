"""The process that starts Ray as a run would, or joins it: `python -m rlflow.doctor.ray_trial SOCKET_FD LIFE_FD`.

Messages are those of `answering`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlflow.supervisor import supervise

if TYPE_CHECKING:
    from rlflow.config import Config
    from rlflow.doctor.facts import RayFacts


def main(socket_fd: int, life_fd: int) -> None:
    """Answer one question and end."""
    supervise(life_fd, [socket_fd])
    from functools import partial

    from rlflow.doctor.answering import config_of, serve

    serve(socket_fd, lambda question: [("ray", partial(_ray, config_of(question), is_run=question["is_run"]))])


def _ray(config: Config, *, is_run: bool) -> RayFacts:
    import ray

    from rlflow.cluster.start import ray_cluster
    from rlflow.doctor.nodes import read_cluster

    with ray_cluster(config):
        ray.get(ray.remote(_nothing).options(num_cpus=0).remote())
        return read_cluster(config, is_run=is_run)


def _nothing() -> None:
    """What a worker does to show that it can be started."""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
