"""Make the virtual environment: Python 3.11 -> venv -> uv -> exact pins of a lock file -> the project, editable.

Needs the standard library only. pip's settings (environment and configuration files) decide where packages come from;
uv does not read them, so they are handed over. A stamp in the virtual environment makes a second call a no-op.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
UV = "uv==0.13.8"
NEEDED_GB = 6
STAMP = ".installed"

# Most specific first: the order in which pip itself looks.
_PIP_SECTIONS = (":env:", "install", "global")
_NO_PACKAGES = "check the network, or point pip at an index (PIP_INDEX_URL) or a folder of wheels (PIP_FIND_LINKS)"


def stop(message: str) -> NoReturn:
    print(f"setup: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_machine(where: Path) -> None:
    """Stop when an install cannot succeed, before anything is downloaded."""
    if sys.version_info[:2] != (3, 11):
        found = platform.python_version()
        stop(f"Python 3.11 is needed, this is {found}; install it, or name it: make PYTHON=/path/to/python3.11")
    if sys.platform != "linux":
        stop(f"vLLM has builds for Linux only, this is {sys.platform}; use a Linux machine, a container or WSL")
    has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    if not (shutil.which("cc") or shutil.which("gcc")) or not has_headers:
        stop("one dependency (pycosat) has to be compiled; install a C compiler and the headers of Python 3.11")
    free_gb = shutil.disk_usage(where).free / 1e9
    if free_gb < NEEDED_GB:
        stop(f"{where} has {free_gb:.1f} GB free and the packages need {NEEDED_GB} GB; free some disk space")


def run(step: str, command: list[str], cure: str, environment: dict[str, str] | None = None) -> None:
    """Run one step with its output shown; stop with the step's name and the cure when it fails."""
    print(f"setup: {step}", flush=True)
    finished = subprocess.run(command, check=False, cwd=ROOT, env=environment)
    if finished.returncode != 0:
        stop(f"{step} failed (exit status {finished.returncode}); the reason is above; {cure}")


def parse_pip_settings(listing: str) -> dict[str, list[str]]:
    """What `pip config list` prints -> the words of each setting, the most specific section winning."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        section, dot, name = key.rpartition(".")
        if separator and dot:
            found.setdefault(name, {})[section] = str(ast.literal_eval(value)).split()
    settings = {}
    for name, by_section in found.items():
        sections = [section for section in _PIP_SECTIONS if section in by_section]
        if sections:
            settings[name] = by_section[sections[0]]
    return settings


def package_options(settings: dict[str, list[str]]) -> list[str]:
    """pip's words for where packages come from -> uv's options; as with pip, the best version of all indexes wins."""
    options = []
    for name, option in (
        ("find-links", "--find-links"),
        ("index-url", "--default-index"),
        ("extra-index-url", "--index"),
    ):
        for word in settings.get(name, []):
            options += [option, word]
    if "extra-index-url" in settings:
        options += ["--index-strategy", "unsafe-best-match"]
    if settings.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return options


def has_torch_wheel(settings: dict[str, list[str]]) -> bool:
    """Whether a folder given with find-links offers a build of torch; a web page counts as offering one."""
    words = settings.get("find-links", [])
    return any("://" in word or any(Path(word).expanduser().glob("torch-*.whl")) for word in words)


def uv_environment(settings: dict[str, list[str]]) -> dict[str, str]:
    """The environment in which uv finds pip's certificate and time limit, and a CPU build of torch."""
    environment = dict(os.environ)
    if "cert" in settings:
        environment.setdefault("SSL_CERT_FILE", settings["cert"][0])
    if "default-timeout" in settings:
        environment.setdefault("UV_HTTP_TIMEOUT", settings["default-timeout"][0])
    if not has_torch_wheel(settings) and "no-index" not in settings:
        environment.setdefault("UV_TORCH_BACKEND", "cpu")
    return environment


def fingerprint(lock: Path, venv: Path, editable: bool) -> str:
    """Changes when anything that the install depends on changes."""
    digest = hashlib.sha256(f"{venv}\n{ROOT}\n{editable}\n".encode())
    for path in (Path(__file__), lock, ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def unmet_requirements(report: str, excluded: set[str]) -> list[str]:
    """The lines of `uv pip check` about a requirement that is not met, but for the packages left out on purpose."""
    complaints = [(line, re.search(r" requires `([\w.-]+)", line)) for line in report.splitlines()]
    return [line for line, required in complaints if required and required[1] not in excluded]


def check_install(python: Path, uv: list[str], lock: Path) -> None:
    """Stop when a requirement is missing, or when the installed torch (and transformers, if any) does not load."""
    lines = (ROOT / "requirements" / "excluded.txt").read_text().splitlines()
    excluded = {line for line in lines if line and not line.startswith("#")}
    check = [*uv, "pip", "check", "--python", str(python)]
    checked = subprocess.run(check, check=False, capture_output=True, text=True)
    unmet = unmet_requirements(checked.stderr + checked.stdout, excluded)
    if unmet:
        stop("the lock file does not hold all that is needed:\n" + "\n".join(unmet) + "\nrefresh it: make lock")
    modules = "torch, transformers" if "\ntransformers==" in lock.read_text() else "torch"
    program = f"import {modules}; assert torch.version.cuda is None, torch.__version__"
    run(
        f"checking {modules}",
        [str(python), "-c", program],
        "torch 2.13.0 must be a CPU build: put its wheel into a folder and set PIP_FIND_LINKS to that folder",
    )


def install(venv: Path, lock: Path, editable: bool) -> None:
    """Fill `venv` with exactly what `lock` names, and the project itself if `editable`."""
    python = venv / "bin" / "python"
    check_machine(venv.parent)
    if not python.exists():
        cure = "a Debian or Ubuntu machine needs the package python3.11-venv"
        run(f"making {venv}", [sys.executable, "-m", "venv", str(venv)], cure)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    run(f"installing {UV}", [*pip, "install", "--quiet", UV], _NO_PACKAGES)
    listing = subprocess.run([*pip, "config", "list"], check=True, capture_output=True, text=True).stdout
    settings = parse_pip_settings(listing)
    environment = uv_environment(settings)
    uv = [str(venv / "bin" / "uv")]
    into = [*uv, "pip", "install", "--python", str(python), "--no-deps", *package_options(settings)]
    step = f"installing the packages of {lock.name}, which may take some minutes the first time"
    # Compiled now, once, and not by each of the processes that a run starts at the same time.
    run(step, [*into, "--compile-bytecode", "-r", str(lock)], _NO_PACKAGES, environment)
    if editable:
        local = [*into, "--no-build-isolation", "--editable", str(ROOT)]
        run("installing rlflow", local, "check pyproject.toml", environment)
    check_install(python, uv, lock)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the virtual environment of this project.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--lock", type=Path, default=ROOT / "requirements" / "cpu.lock")
    parser.add_argument("--packages-only", action="store_true", help="leave the project itself out")
    arguments = parser.parse_args()
    venv, editable = arguments.venv.expanduser().absolute(), not arguments.packages_only
    venv.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(venv.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # two calls at once: the second waits for the first, then finds its stamp
    stamp, wanted = venv / STAMP, fingerprint(arguments.lock, venv, editable)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    install(venv, arguments.lock, editable)
    stamp.write_text(wanted)
    print("setup: ready", flush=True)


if __name__ == "__main__":
    main()
