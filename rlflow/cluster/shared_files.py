"""Checks, before anything is started, that each machine sees the files that it will read and write."""

import asyncio
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from rlflow.cluster.calls import answer, call_on
from rlflow.config import Config, ProcessKind, Transport
from rlflow.errors import ConfigError
from rlflow.runtime.deadlines import within
from rlflow.runtime.derived import held_teachers

LOOK_S = 120.0
"""Seconds for a machine to start a process that looks."""


async def check_shared_files(
    config: Config, machines: Mapping[ProcessKind, Mapping[str, str]], model_path: str, reward_models: Mapping[str, str]
) -> None:
    """Raise ConfigError for the first machine that needs run.dir or a model and does not see it.

    `machines`: for each kind of process, the machines that it is on, name -> Ray's id.
    """
    assert config.run.dir is not None, "a run has a directory before it has machines"
    run_dir = Path(config.run.dir)
    write = {ProcessKind.trainer, ProcessKind.critic, ProcessKind.runner}
    if config.weights.transport is Transport.disk:
        write.add(ProcessKind.engine)
    read = machines.keys() - {ProcessKind.reward, ProcessKind.reward_model, ProcessKind.teacher}
    token = run_dir / f".seen-{uuid.uuid4().hex}"
    looked_for = [
        (str(token), write, f"run.dir {run_dir}"),
        (model_path, read, f"{model_path}, the folder of model.path"),
    ]
    for path in reward_models.values():
        looked_for.append((path, {ProcessKind.reward_model}, f"{path}, the folder of reward.model"))
    for name, path in held_teachers(config).items():
        looked_for.append((path, {ProcessKind.teacher}, f"{path}, the folder of the {name}"))
    await asyncio.to_thread(token.write_text, "")
    try:
        for path, kinds, what in looked_for:
            nodes = {name: node for kind in sorted(kinds) for name, node in machines.get(kind, {}).items()}
            looks = [
                within(
                    f"looking for files on the machine {name}",
                    LOOK_S,
                    answer(f"machine {name}", call_on(node, os.path.exists, path)),
                )
                for name, node in nodes.items()
            ]
            for name, is_there in zip(nodes, await asyncio.gather(*looks), strict=True):
                if not is_there:
                    raise ConfigError(
                        f"the machine {name} does not see {what}; put it on a file system that all machines of the run "
                        "share, under the same path"
                    )
    finally:
        await asyncio.to_thread(token.unlink)
