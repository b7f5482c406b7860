"""vLLM's own server in a process of its own, as somebody starts it who knows nothing of rlflow."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from children import TIMEOUT_S, ended_after

KEY = "a-key-of-the-test"
_ENVIRONMENT = {
    "VLLM_API_KEY": KEY,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
}


@contextmanager
def vllm_server(folder: str, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL and the process of a server of this model, in float32, that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 26)]
    command += ["--served-model-name", "teacher", "--block-size", "32", "--uvicorn-log-level", "warning", *words]
    log = Path(folder, "server.log")
    with log.open("w") as output:
        options: dict[str, Any] = {"stdout": output, "stderr": output, "text": True, "env": os.environ | _ENVIRONMENT}
        process = subprocess.Popen(command, start_new_session=True, **options)
    with _group_ended_after(process), ended_after(process):
        ends_at = time.monotonic() + TIMEOUT_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(0.2)
                raise AssertionError(f"vLLM's server ended with {code}: {log.read_text()[-2000:]}")
            assert time.monotonic() < ends_at, log.read_text()[-2000:]
        yield f"http://127.0.0.1:{port}/v1", process


@contextmanager
def _group_ended_after(process: subprocess.Popen[str]) -> Iterator[None]:
    """A server that is killed leaves its engine behind, which is a process of its own."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
