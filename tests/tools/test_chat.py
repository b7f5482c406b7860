"""`rlflow chat` with an environment's tools: the conversation, with replies that a function makes up."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, cast

import httpx
import pytest
from letters import LetterRenderer
from playing import call, calling, say

from rlflow.cli import main
from rlflow.config import EnvConfig
from rlflow.envs.base import Environment, Prompt, Step, ToolSchema
from rlflow.envs.calculator.env import Calculator
from rlflow.envs.tools import ToolEnvironment
from rlflow.errors import RunError
from rlflow.tools.chat import Reply, Tools, _reply, converse, tools_of
from rlflow.tools.server import Server
from rlflow.types import Message, Task

TASK = Task(
    id="0", prompt=({"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}), answer="0"
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def replies(*said: Message | tuple[Message, bool]) -> Reply:
    """Gives these replies one after the other; (reply, False) is one that was cut off."""
    waiting = iter(said)

    def reply(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[Message, bool]:
        one = next(waiting)
        return one if isinstance(one, tuple) else (one, True)

    return reply


class Counter(Environment):
    """Counts its steps; the third one ends it."""

    num_built = 0

    def __init__(self) -> None:
        type(self).num_built += 1
        self.count = 0
        self.is_closed = False

    async def reset(self, task: Task) -> Prompt:
        return Prompt(messages=list(task.prompt), tools=[{"type": "function", "function": {"name": "count"}}])

    async def step(self, reply: Message) -> Step:
        self.count += 1
        if reply["content"] == "interrupt":
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        if reply["content"] == "wait":
            await asyncio.Event().wait()
        said = Message(role="tool", content=f"{self.count} of 3", tool_call_id="call_0", name="count")
        return Step(messages=[said], done=self.count == 3)

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as opened:
        yield opened


def tools_in(runner: asyncio.Runner, world: type[Environment], **limits: float) -> Tools:
    async def build(seed: int, task: Task) -> Environment:
        return world()

    return Tools(limits=EnvConfig(name="mine", **limits), task=TASK, build=build, runner=runner)  # pyright: ignore


def counting(text: str = "") -> Message:
    return Message(role="assistant", content=text, tool_calls=[call("count", {})])


def test_tools_answer_until_the_model_does(runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]) -> None:
    tools = tools_in(runner, Calculator)
    before = tools.begin()
    assert [each["role"] for each in before] == ["system"] + 3 * ["user", "assistant", "tool", "assistant"]
    question, asked = user("What is 12 * 12?"), calling(call("calculator", {"expression": "12 * 12"}))
    messages = [*before, question]
    converse(messages, replies(asked, say("144")), tools)
    answer = Message(role="tool", content="144", tool_call_id="call_0", name="calculator")
    assert messages == [*before, question, asked, answer, say("144")]
    assert capsys.readouterr().out == "tools of mine: calculator\n[calculator] 144\n"


def streamed(*parts: str, end: str | None = "stop", context: int = 64) -> tuple[Server, list[dict[str, Any]]]:
    """A server that streams the same reply again and again, and what it is sent."""
    asked: list[dict[str, Any]] = []
    choices = [{"text": part, "finish_reason": None} for part in parts] + [{"text": "", "finish_reason": end}]
    lines = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))

    http = httpx.Client(base_url="http://127.0.0.1", transport=httpx.MockTransport(answer))
    process = cast("subprocess.Popen[bytes]", None)
    return Server(process=process, name="tiny", model="", context=context, key="", http=http), asked


OPTIONS = argparse.Namespace(temperature=0.5, max_tokens=None)


@pytest.mark.parametrize(("end", "has_tools", "num_calls"), [("stop", 1, 1), ("length", 1, 0), ("stop", 0, 0)])
def test_calls_are_found_in_a_whole_reply_as_in_rollouts(end: str, has_tools: int, num_calls: int) -> None:
    server, asked = streamed("well <tool", '_call>{"name": "f"}</tool_call>', end=end)
    message, is_whole = _reply(server, LetterRenderer(), OPTIONS, [user("hi")], [{}] * has_tools)
    assert message["content"] == 'well <tool_call>{"name": "f"}</tool_call>'
    assert is_whole == (end == "stop")
    assert [each["function"] for each in message.get("tool_calls", [])] == [
        {"name": "f", "arguments": "{}"}
    ] * num_calls
    prompt = [ord(letter) for letter in has_tools * "T" + "hi.>"]
    sent = {"model": "tiny", "prompt": prompt, "stream": True, "temperature": 0.5, "max_tokens": 64 - len(prompt)}
    assert asked == [sent]


def test_a_conversation_that_fills_the_context_is_refused() -> None:
    server, asked = streamed("never", context=4)
    with pytest.raises(RunError, match="fills the model's context of 4 tokens"):
        _reply(server, LetterRenderer(), OPTIONS, [user("hi")], [])
    assert asked == []


def test_what_a_tool_holds_outlives_a_question_and_ends_with_the_environment(
    runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    Counter.num_built = 0
    tools = tools_in(runner, Counter)
    messages = [*tools.begin(), user("Count")]
    assert messages[0] == {"role": "system", "content": "Count."}
    converse(messages, replies(counting(), say("one")), tools)
    first = tools.world
    messages.append(user("Count twice"))
    converse(messages, replies(counting(), counting(), say("never asked")), tools)
    assert (Counter.num_built, messages[-1]["content"]) == (1, "3 of 3")
    assert isinstance(first, Counter)
    assert first.is_closed
    messages.append(user("Count"))
    converse(messages, replies(counting(), say("one again")), tools)
    assert (Counter.num_built, messages[-2]["content"]) == (2, "1 of 3")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("[count]")] == [
        *("[count] 1 of 3", "[count] 2 of 3", "[count] 3 of 3", "[count] 1 of 3")
    ]


def test_no_more_replies_to_a_question_than_an_episode_may_have(
    runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tools_in(runner, Counter, max_turns=2)
    messages = [user("Count")]
    converse(messages, replies(counting(), counting(), say("never asked")), tools)
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert "[env.max_turns: no more than 2 replies to a question]" in capsys.readouterr().out


def test_a_reply_that_is_not_whole_is_not_acted_on(runner: asyncio.Runner) -> None:
    tools = tools_in(runner, Counter)
    messages = [user("Count")]
    converse(messages, replies((counting("cut"), False)), tools)
    assert messages == [user("Count"), counting("cut")]
    assert isinstance(tools.world, Counter)
    assert tools.world.count == 0


@pytest.mark.parametrize(
    ("said", "told"),
    [("interrupt", "[ended; "), ("wait", "[a call did not finish within its deadline of 0.05 s; ")],
)
def test_ctrl_c_and_the_deadline_end_a_call_and_not_the_chat(
    runner: asyncio.Runner, capsys: pytest.CaptureFixture[str], said: str, told: str
) -> None:
    Counter.num_built = 0
    tools = tools_in(runner, Counter, step_timeout_s=0.05 if said == "wait" else 60.0)
    messages = [user("Count")]
    converse(messages, replies(counting(said)), tools)
    assert f"{told}the next question begins the environment anew]" in capsys.readouterr().out
    messages.append(user("Again"))
    converse(messages, replies(counting(), say("one")), tools)
    assert (Counter.num_built, messages[-2]["content"]) == (2, "1 of 3")


def test_a_long_answer_of_a_tool_loses_its_middle(runner: asyncio.Runner) -> None:
    def letters() -> str:
        """Say letters."""
        return "abcdefgh"

    class Letters(ToolEnvironment):
        tools = (letters,)

    tools = tools_in(runner, Letters, max_observation_chars=4)
    messages = [user("Letters")]
    converse(messages, replies(calling(call("letters", {})), say("done")), tools)
    assert messages[2]["content"] == "ab\n[... 4 characters left out ...]\ngh"


def test_an_environment_that_does_not_exist_is_named_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "tiny", "env.name=calculatorr"]) == 2
    said = capsys.readouterr()
    assert "calculator" in said.err
    assert "loading" not in said.out


def test_the_tools_run_in_a_process_of_the_environment() -> None:
    with tools_of(EnvConfig(name="calculator")) as tools:
        messages = [*tools.begin(), user("2 + 2?")]
        assert messages[0]["role"] == "system"
        converse(messages, replies(calling(call("calculator", {"expression": "2 + 2"})), say("4")), tools)
        assert messages[-2]["content"] == "4"
