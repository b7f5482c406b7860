"""verifiers plays against a small endpoint; it may live in another interpreter: RLFLOW_TEST_VERIFIERS_PYTHON."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.base import Endpoint, EnvironmentSpec, Program, Result
from rlflow.envs.verifiers.host import VerifiersError, close_hosts, host_of
from rlflow.errors import ConfigError
from rlflow.types import Task

PYTHON = os.environ.get("RLFLOW_TEST_VERIFIERS_PYTHON", sys.executable)

SEEN: web.AppKey[list[dict[str, Any]]] = web.AppKey("seen", list)
WAITING = web.AppKey("waiting", asyncio.Event)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    probe = subprocess.run([PYTHON, "-c", "import verifiers.legacy"], capture_output=True, timeout=120, check=False)
    if probe.returncode:
        pytest.skip("verifiers 0.3 is not installed")
    folder = tmp_path_factory.mktemp("packages")
    shutil.copy(Path(__file__).parents[1] / "support" / "verifiers_environment.py", folder / "sums_env.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


def sums(**arguments: Any) -> EnvironmentSpec:
    arguments = {"id": "sums-env", "python": PYTHON, **arguments}
    spec = load_environment(EnvConfig(name="verifiers", args=arguments), RewardConfig())
    return pickle.loads(pickle.dumps(spec))


async def complete(request: web.Request) -> web.Response:
    """Answers sums; but those with 7 wrongly, and with 5 it waits for good."""
    asked = await request.json()
    number = int(re.findall(r"What is (\d+)", asked["messages"][1]["content"])[0])
    if number == 5:
        request.app[WAITING].set()
        await asyncio.sleep(600)
    request.app[SEEN].append(asked)
    message = {"role": "assistant", "content": str(number if number == 7 else number + 1)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": asked["model"], "usage": usage}
    return web.json_response({**body, "choices": [choice]})


@asynccontextmanager
async def endpoint() -> AsyncIterator[tuple[Endpoint, web.Application]]:
    app = web.Application()
    app[SEEN], app[WAITING] = [], asyncio.Event()
    app.router.add_post("/secret/v1/chat/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address: Any = runner.addresses[0]
    try:
        yield Endpoint(base_url=f"http://127.0.0.1:{address[1]}/secret/v1", api_key="any", model="policy"), app
    finally:
        await close_hosts()
        await runner.cleanup()


async def run(spec: EnvironmentSpec, task: Task, where: Endpoint) -> Result:
    program = spec.build()
    assert isinstance(program, Program)
    try:
        return await program.run(task, where)
    finally:
        await program.close()


async def test_twenty_rollouts(installed: None) -> None:
    spec = sums()
    tasks = spec.tasks()
    assert tasks[3].id == "sums-env/train/3"
    assert [message["content"] for message in tasks[3].prompt] == ["Add.", "What is 3 + 1?"]
    assert tasks[3].answer == "4"
    assert spec.evaluation_tasks is None
    async with endpoint() as (where, app):
        chosen = [task for number, task in enumerate(tasks) if number not in (5, 18, 19)]
        chosen += chosen[:3]
        results = await asyncio.gather(*(run(spec, task, where) for task in chosen))
        assert [result.reward for result in results] == [float(task.answer != "8") for task in chosen]
        assert {(tuple(result.metrics), result.metrics["verifiers/length"]) for result in results} == {
            (("verifiers/is_right", "verifiers/length", "verifiers/num_turns"), 3.0)
        }
        assert len(app[SEEN]) == 40, "two replies each"
        assert {asked["model"] for asked in app[SEEN]} == {"policy"}
        assert app[SEEN][-1]["messages"][-1] == {"role": "user", "content": "Are you sure?"}
        await failures(spec, where, app)


async def failures(spec: EnvironmentSpec, where: Endpoint, app: web.Application) -> None:
    """In the process that has played: starting another takes seconds."""
    tasks = spec.tasks()
    with pytest.raises(VerifiersError, match="the rubric failed: is_right: KeyError: 'the judge is away'"):
        await run(spec, tasks[18], where)
    nowhere = Endpoint(base_url="http://127.0.0.1:9/v1", api_key="any", model="policy")
    with pytest.raises(VerifiersError, match="the rollout failed: .*Connection"):
        await run(spec, tasks[0], nowhere)
    hanging = asyncio.create_task(run(spec, tasks[5], where))
    await asyncio.wait_for(app[WAITING].wait(), 30)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    first = await host_of(spec.build()._source)  # pyright: ignore
    with pytest.raises(VerifiersError, match="the process of the verifiers environment sums-env died"):
        await run(spec, tasks[19], where)
    assert (await run(spec, tasks[1], where)).reward == 1.0, "in another process"
    assert await host_of(spec.build()._source) is not first  # pyright: ignore


def test_what_cannot_be_loaded(installed: None) -> None:
    with pytest.raises(ConfigError, match="env.args.id=no-such: .*Could not import 'no-such' environment"):
        sums(id="no-such")
    with pytest.raises(ConfigError, match="scores whole groups at once"):
        sums(args={"is_grouped": True})


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be started"):
        sums(python=str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="env.args.python is required by env.name=verifiers"):
        load_environment(EnvConfig(name="verifiers", args={"id": "sums-env"}), RewardConfig())
    (tmp_path / "bare").symlink_to(sys.executable)  # without the packages beside the original
    with pytest.raises(ConfigError, match=r"\(env.args.python\) has no verifiers; pip install"):
        sums(python=str(tmp_path / "bare"))
    with pytest.raises(ConfigError, match="must be positive; got 0 and 64"):
        sums(size=0)
