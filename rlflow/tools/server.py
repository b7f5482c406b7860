"""vLLM's own OpenAI server in a process of its own, for `rlflow chat` and `rlflow serve`.

RUN|CHECKPOINT|MODEL -> a folder (exported below the scratch folder of this process) -> vLLM -> a socket or a port

The server and the folder end with this process. It leads a session of its own, so that Ctrl-C does not reach it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import DeadlineError, RunError
from rlflow.processes.sandbox import linux
from rlflow.runtime import scratch
from rlflow.tools.target import Target
from rlflow.workers.engine.setup import CPU_BLOCK_TOKENS, set_environment

if TYPE_CHECKING:
    import httpx

LOOK_S, STOP_S = 0.2, 20.0
"""Seconds between two looks whether a starting server answers, and those that it may take to end."""
_LOG_CHARACTERS = 1500


@dataclass(kw_only=True, slots=True, frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    name: str
    """The name by which the server knows the model."""
    model: str
    """Its folder, which exists as long as the server does."""
    context: int
    """Tokens that a conversation may have."""
    key: str
    """What the server asks for; random unless VLLM_API_KEY is set."""
    http: httpx.Client


@contextmanager
def serving(target: Target, port: int | None) -> Iterator[Server]:
    """A server that answers, on a port of loopback, or without one on a socket that only this user can reach.

    Raises RunError when it does not start. SIGTERM and SIGHUP end the block as SystemExit.
    """
    import httpx

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with scratch.opened() as folder, target.model(folder) as model:
        key = os.environ.get("VLLM_API_KEY") or secrets.token_urlsafe(24)
        place, log = folder / "socket", folder / "server.log"
        words = ["--model", model, "--served-model-name", target.name, *_arguments(target, model)]
        words += ["--uds", str(place)] if port is None else ["--host", "127.0.0.1", "--port", str(port)]
        environment = os.environ | {"VLLM_API_KEY": key, "TMPDIR": str(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=partial(linux.prctl, "PDEATHSIG", linux.PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        transport = httpx.HTTPTransport(uds=str(place)) if port is None else None
        address = f"http://127.0.0.1:{port or 80}"
        try:
            with httpx.Client(base_url=address, transport=transport, timeout=None, trust_env=False) as http:
                http.headers["Authorization"] = f"Bearer {key}"
                _wait(process, http, log, target.config.deadlines.start_s)
                context = http.get("/v1/models").json()["data"][0]["max_model_len"]
                yield Server(process=process, name=target.name, model=model, context=context, key=key, http=http)
        finally:
            _end(process)


def _arguments(target: Target, model: str) -> list[str]:
    from rlflow.rollout.render import open_renderer
    from rlflow.runtime.gpus import has_gpu

    on_gpu = has_gpu()
    set_environment(target.config, os.cpu_count() or 1, on_gpu)
    words = ["--max-model-len", "auto", "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]
    if target.config.rollout.template_args:
        open_renderer(target.config, model)  # refuses what the template does not read
        words += ["--default-chat-template-kwargs", json.dumps(target.config.rollout.template_args)]
    if target.config.model.trust_remote_code:
        words.append("--trust-remote-code")
    if on_gpu:
        return [*words, "--tensor-parallel-size", str(target.config.rollout.tensor_parallel)]
    return [*words, "--enforce-eager", "--block-size", str(CPU_BLOCK_TOKENS), "--kv-cache-memory-bytes", str(1 << 30)]


def _wait(process: subprocess.Popen[bytes], http: httpx.Client, log: Path, timeout_s: float) -> None:
    import httpx

    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        with suppress(httpx.TransportError):
            if http.get("/health", timeout=5.0).status_code == httpx.codes.OK:
                return
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_S)
            end = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
            raise RunError(f"vLLM's server did not start (exit code {code}); it ended with:\n{end}")
    raise DeadlineError("starting vLLM's server", timeout_s, "raise deadlines.start_s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server and all of its session, which it leads."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
