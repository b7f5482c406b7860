"""A GPU that torch cannot use is an error with its cure; a machine without one computes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow.errors import ConfigError
from rlflow.runtime import gpus
from rlflow.workers.trainer.process_group import choose_device


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus.count_gpus(tmp_path) == 2
    assert gpus.count_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.06  Wed Jun 26\nGCC version: 12.3.0", "535.183.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("", ""),
    ],
)
def test_the_version_of_the_driver_is_read(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert gpus.driver_version(tmp_path / "version") == version
    assert gpus.driver_version(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("cuda", "driver", "problem"),
    [
        ("13.0", "535.183.06", "CUDA 13.0 needs driver R580 or later, and the driver here is 535.183.06"),
        ("13.0", "579.99", "CUDA 13.0 needs driver R580 or later, and the driver here is 579.99"),
        ("13.2", "580.65.06", ""),
        ("12.8", "535.183.06", ""),
        ("13.0", "", ""),
        ("14.0", "535.183.06", ""),
    ],
)
def test_a_driver_that_is_too_old_is_named(cuda: str, driver: str, problem: str) -> None:
    assert gpus.driver_problem(cuda, driver) == problem


@pytest.mark.parametrize(
    ("cuda", "driver", "told"),
    [
        ("", "580.65.06", ("torch 2.13.0 is built for the CPU", "pip install 'rlflow[gpu]'")),
        ("13.0", "535.183.06", ("needs driver R580", "update the driver")),
        ("13.0", "580.65.06", ("cannot use them (driver 580.65.06)", "rlflow doctor")),
        ("13.0", "", ("driver not found", "rlflow doctor")),
    ],
)
def test_what_is_wrong_comes_with_its_cure(cuda: str, driver: str, told: tuple[str, ...]) -> None:
    text = gpus.unusable("2.13.0", cuda, driver)
    assert all(part in text for part in (*told, "CUDA_VISIBLE_DEVICES= (empty)"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
@pytest.mark.parametrize(("variable", "is_refused"), [(None, True), ("0,1", True), ("", False), ("-1", False)])
def test_a_trainer_does_not_fall_back_to_the_cpu_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, is_refused: bool
) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    if is_refused:
        with pytest.raises(ConfigError, match="there are GPUs here, but"):
            choose_device(0)
    else:
        assert choose_device(0) == torch.device("cpu")
