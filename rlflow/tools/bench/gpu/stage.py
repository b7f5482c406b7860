"""One stage of the kit in a process of its own: `python -m rlflow.tools.bench.gpu.stage STAGE FOLDER`.

What it prints goes to the stage's log; what it measures goes to the stage's report.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rlflow.errors import ConfigError, RunError, first_line
from rlflow.runtime.environment import share_cpu
from rlflow.tools.bench.gpu.plan import Plan, Report, Skipped, file_name

_ROOM = "rlflow.tools.bench.gpu"
FUNCTIONS = {
    "machine": f"{_ROOM}.machine:machine",
    "model": f"{_ROOM}.machine:model",
    "tests/cuda": f"{_ROOM}.whole:cuda_tests",
    "trainer/kernels": f"{_ROOM}.kernels:kernels",
    "trainer/packed": f"{_ROOM}.trainer:packed",
    "trainer/copies": f"{_ROOM}.trainer:copies",
    "trainer/padded": f"{_ROOM}.trainer:padded",
    "engine/stream": f"{_ROOM}.engine:stream",
    "engine/plain": f"{_ROOM}.engine:plain",
    "weights/ipc": f"{_ROOM}.whole:ipc",
    "weights/shm": f"{_ROOM}.whole:shm",
    "weights/p2p": f"{_ROOM}.whole:p2p",
    "engine/sleep": f"{_ROOM}.engine:sleep",
    "trainer/offload-cpu": f"{_ROOM}.trainer:offload_cpu",
    "trainer/offload-nvme": f"{_ROOM}.trainer:offload_nvme",
    "run/grpo": f"{_ROOM}.whole:grpo",
    "run/trl": f"{_ROOM}.whole:trl",
}
"""Stage -> module and function, imported when the stage runs, in the order of running."""


def main(name: str, folder: Path) -> int:
    """The exit code of the process. An error that is no user's leaves its traceback in the log."""
    module, _, function = FUNCTIONS[name].partition(":")
    report = Report(path=folder / f"{file_name(name)}.json")
    plan = Plan.read(folder)
    if not plan.on_gpu:
        share_cpu(len(os.sched_getaffinity(0)))  # before torch is imported
    try:
        stage: Callable[[Plan, Report], None] = getattr(importlib.import_module(module), function)
        stage(plan, report)
    except Skipped as why:
        report.skipped = str(why)
    except (ConfigError, RunError) as error:
        report.failed = str(error)
    except ModuleNotFoundError as error:
        # A bare machine has torch and transformers only.
        report.skipped = f"{error.name} is not installed"
    except BaseException as error:
        report.failed = f"{type(error).__name__}: {first_line(error)}"
        report.write()
        raise
    report.write()
    if report.failed:
        print(f"rlflow: error: {report.failed}", file=sys.stderr)
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
