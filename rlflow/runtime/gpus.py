"""Whether a process computes on a GPU, and why it cannot if the machine has some. Imports torch only when asked."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rlflow.errors import ConfigError

LEAST_DRIVER = {"12": 525, "13": 580}
"""Major version of CUDA -> the oldest branch of the driver that runs it (NVIDIA's table of minor version
compatibility)."""
GPU_BUILD = "pip install 'rlflow[gpu]' in a fresh virtual environment, without the index of torch's CPU builds"


def has_gpu() -> bool:
    """Whether torch computes on a GPU here.

    Raises ConfigError if this process is given GPUs and torch cannot use them: computing on the CPU instead would look
    like a run that hangs.
    """
    import torch

    if torch.cuda.is_available():
        return True
    if count_gpus() and not hides_gpus(os.environ):
        raise ConfigError(unusable(torch.__version__, torch.version.cuda or "", driver_version()))
    return False


def count_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that the system shows, whether torch can use them or not."""
    return sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def hides_gpus(environment: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves a process without GPUs, as Ray sets it for those that take none."""
    return environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Such as "580.65.06"; "" without a driver."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", file.read_text() if file.is_file() else "")
    return found[1] if found else ""


def driver_problem(cuda: str, driver: str) -> str:
    """Why this driver cannot run a torch that is built for this version of CUDA; "" if it can, or nothing is known."""
    least = LEAST_DRIVER.get(cuda.partition(".")[0])
    branch = driver.partition(".")[0]
    if least is None or not branch.isdecimal() or int(branch) >= least:
        return ""
    return f"CUDA {cuda} needs driver R{least} or later, and the driver here is {driver}"


def unusable(torch: str, cuda: str, driver: str) -> str:
    """What is wrong and what to do when there are GPUs, but torch sees none."""
    on_cpu = "to compute on the CPU all the same, set CUDA_VISIBLE_DEVICES= (empty)"
    if not cuda:
        return f"there are GPUs here, but torch {torch} is built for the CPU; {GPU_BUILD}; {on_cpu}"
    if problem := driver_problem(cuda, driver):
        return f"there are GPUs here, but {problem}; update the driver; {on_cpu}"
    return (
        f"there are GPUs here, but torch {torch} (CUDA {cuda}) cannot use them (driver {driver or 'not found'}); "
        f"`rlflow doctor` says why; {on_cpu}"
    )
