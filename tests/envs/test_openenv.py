"""Against a real server of openenv-core, which may live in another interpreter: RLFLOW_TEST_OPENENV_PYTHON."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from playing import Episode, call, calling, play

from rlflow.config import EnvConfig, RewardConfig
from rlflow.environments.find import load_environment
from rlflow.envs.base import Environment, EnvironmentSpec
from rlflow.envs.openenv.env import ActionForm, form_of, observation_text
from rlflow.envs.openenv.session import OpenEnvError, ServerFull, ServerLost, ServerSlow
from rlflow.errors import ConfigError

PYTHON = os.environ.get("RLFLOW_TEST_OPENENV_PYTHON") or sys.executable


@contextmanager
def server() -> Iterator[str]:
    if subprocess.run([PYTHON, "-c", "import openenv.core"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("openenv-core is not installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    file = str(Path(__file__).parents[1] / "support" / "openenv_server.py")
    process = subprocess.Popen([PYTHON, file, str(port)], stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health", process)
        yield url
    finally:
        process.kill()
        process.wait(10)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended"
        try:
            build_opener(ProxyHandler({})).open(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail("the server did not start")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as address:
        yield address


def openenv(url: str, **arguments: Any) -> EnvironmentSpec:
    spec = load_environment(EnvConfig(name="openenv", args={"url": url, **arguments}), RewardConfig())
    return pickle.loads(pickle.dumps(spec))


async def with_lease(spec: EnvironmentSpec, number: int, policy: Any, **options: Any) -> Episode:
    return await play(spec, spec.tasks()[number], policy, lease=spec.leases[number % len(spec.leases)], **options)


@pytest.mark.slow
async def test_twenty_episodes_four_at_a_time(url: str) -> None:
    spec = openenv(url, sessions=4, size=20, variants=[{}, {"extra": 2}])
    assert spec.leases == tuple(f"{url}#{number}" for number in range(4))
    episodes: list[Episode] = []
    for first in range(0, 20, 4):
        numbers = range(first, first + 4)
        episodes += await asyncio.gather(
            *(with_lease(spec, number, lambda _: "<think>hm</think>go") for number in numbers)
        )
    steps = [3 + number % 3 + 2 * (number % 2) for number in range(20)]
    assert [episode.reward for episode in episodes] == [0.25 * count for count in steps]
    assert [episode.metrics["openenv/actions"] for episode in episodes] == steps
    assert episodes[0].messages[0]["content"] == "Reply with your action.\n\n3 left."
    assert episodes[0].messages[2] == {"role": "user", "content": "2 left."} or episodes[0].messages[2][
        "content"
    ].startswith('{"text": "2 left."')


@pytest.mark.slow
async def test_a_full_server_says_so_and_a_closed_session_makes_room(url: str) -> None:
    spec = openenv(url, sessions=4)
    opened = [spec.build(lease) for lease in spec.leases]
    for environment in opened:
        assert isinstance(environment, Environment)
        await environment.reset(spec.tasks()[0])
    with pytest.raises(ServerFull, match="env.args.sessions must not exceed the server's max_concurrent_envs"):
        await with_lease(spec, 0, lambda _: "go")
    await opened[0].close()
    assert (await with_lease(spec, 0, lambda _: "go")).is_done
    for environment in opened[1:]:
        await environment.close()


@pytest.mark.slow
async def test_failures_are_errors_and_not_rewards() -> None:
    with server() as url:
        spec = openenv(url, message_timeout_s=1.0)
        with pytest.raises(OpenEnvError, match="failed in a step: EXECUTION_ERROR: the world broke"):
            await with_lease(spec, 0, lambda _: "fail")
        with pytest.raises(ServerSlow, match=r"did not answer a step within 1 s \(env.args.message_timeout_s\)"):
            await with_lease(spec, 0, lambda _: "sleep")
        with pytest.raises(ServerLost, match="closed the connection in a step|broke in a step"):
            await with_lease(spec, 0, lambda _: "die")
        with pytest.raises(ServerLost, match="no connection to http"):
            await with_lease(spec, 0, lambda _: "go")
        with pytest.raises(ConfigError, match="no OpenEnv server answers at .*; start it before the run"):
            openenv(url)


@pytest.mark.slow
async def test_actions_of_several_fields_are_tool_calls(url: str) -> None:
    spec = openenv(f"{url}/fields")
    replies = iter(
        [
            "I count by two",
            calling(call("act", {"by": "many"})),
            calling(call("fly", {})),
            calling(call("act", "{")),
            calling(call("act", {"by": 1}, 1), call("act", {"by": 1, "loudly": True}, 2)),
            calling(call("act", {"by": 1}, 3), call("act", {"by": 1}, 4)),
        ]
    )
    episode = await with_lease(spec, 0, lambda _: next(replies))
    (tool,) = episode.prompt.tools
    assert tool["function"]["parameters"]["properties"].keys() == {"by", "loudly", "why"}  # pyright: ignore
    texts = [message["content"] for message in episode.messages if message["role"] in ("user", "tool")][1:]
    assert texts[0] == "Your reply has no action. Call the tool act."
    assert texts[1].startswith('{"error": "by: Input should be a valid integer')
    assert texts[2] == '{"error": "there is no tool fly; there are: act"}'
    assert texts[3].startswith('{"error": "not valid JSON: ')
    assert [message.get("tool_call_id") for message in episode.messages[-3:]] == ["call_1", "call_2", None]
    assert (episode.is_done, episode.reward) == (True, 0.75)
    assert episode.metrics == {"openenv/not_an_action": 4.0, "openenv/actions": 3.0}


@pytest.mark.slow
async def test_tools_of_the_server(url: str) -> None:
    replies = iter([calling(call("look_up", {"word": "owl"}, 1)), "An owl is a word."])
    episode = await with_lease(openenv(f"{url}/tools"), 0, lambda _: next(replies))
    (tool,) = episode.prompt.tools
    function: Any = tool["function"]
    assert (function["name"], function["description"]) == ("look_up", "Look a word up.")
    assert function["parameters"]["properties"]["word"]["type"] == "string"
    answer = episode.messages[-2]
    assert (answer["role"], answer.get("tool_call_id"), answer.get("name")) == ("tool", "call_1", "look_up")
    assert answer["content"] == "owl is a word"
    assert (episode.is_done, episode.reward) == (True, None)


def test_the_form_of_an_action() -> None:
    text = {"type": "string"}
    metadata = {"type": "object"}
    assert form_of({"properties": {"message": text, "metadata": metadata}}) == ActionForm(text_field="message")
    assert form_of({"properties": {"code": text, "limit": metadata}, "required": ["code"]}).text_field == "code"
    assert form_of({"properties": {"metadata": metadata}}) == ActionForm()
    assert form_of({"properties": {"tool_name": text, "arguments": metadata, "type": text}}) == ActionForm()
    assert form_of({"properties": {"x": {"type": "integer"}, "metadata": metadata}, "required": ["x"]}) == ActionForm(
        parameters={"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
    )


def test_the_text_of_an_observation() -> None:
    assert observation_text({"text": "A cave.", "image": None, "list": []}) == "A cave."
    assert (
        observation_text({"tool_name": "a", "result": None, "error": {"message": "no"}})
        == '{"error": {"message": "no"}}'
    )
    assert observation_text({"tool_name": "a", "result": {"content": [{"text": "x"}, {"text": "y"}]}}) == "x\ny"
    assert observation_text({"text": "A cave.", "left": 2}) == '{"text": "A cave.", "left": 2}'


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="must be such as http://127.0.0.1:8000; got localhost:8000"):
        openenv("localhost:8000")
    with pytest.raises(ConfigError, match="positive sessions"):
        openenv("http://127.0.0.1:9", sessions=0)
