"""The shipped rewards: literal values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from served import served

from rlflow.envs.answers import final_answer, normalise, token_f1
from rlflow.envs.calculator.env import right_by_tool
from rlflow.envs.rewards.exact_match import exact_match
from rlflow.envs.rewards.f1 import f1
from rlflow.envs.rewards.format import format
from rlflow.envs.rewards.judge import JudgeError, judge, score_in
from rlflow.envs.rewards.length import length
from rlflow.envs.rewards.math import math
from rlflow.envs.rewards.overlong import overlong
from rlflow.envs.rewards.search_f1 import search_f1
from rlflow.envs.rewards.tool_calls import tool_calls
from rlflow.errors import ConfigError
from rlflow.types import Message, Task


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 5\n", "5"),
        ("<think>2 + 3</think> 5", "5"),
        ("<think>a</think><answer> 4 </answer> or <answer>5</answer>.", "5"),
        ("no end <answer>5", "no end <answer>5"),
        ("[THINK]7[/THINK]12", "12"),
        ("<seed:think>7</seed:think>12", "12"),
        ("<|channel>thought\n7<channel|>12", "12"),
        ("<|channel|>analysis<|message|>7?<|end|><|start|>assistant<|channel|>final<|message|> 12", "12"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_normalise_as_squad_does() -> None:
    assert normalise("The  Eiffel-Tower, a tower!") == "eiffeltower tower"


@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        ("the Eiffel Tower", "Eiffel tower", 1.0),
        ("in Paris", "Paris", 2 / 3),
        ("Paris Paris", "Paris", 1.0),
        ("Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("a", "A", 1.0),
        ("the", "a", 0.0),
        ("", "A", 0.0),
        ("", "", 1.0),
    ],
)
def test_token_f1(text: str, reference: str, value: float) -> None:
    assert token_f1(text, reference) == pytest.approx(value)


def test_exact_match() -> None:
    assert exact_match("<think>?</think> Paris ", "Paris") == 1.0
    assert exact_match("paris.", "Paris") == 0.0
    assert exact_match("The paris.", "Paris", normalised=True) == 1.0
    assert exact_match("Rome", "Paris;Rome", separator=";") == 1.0
    assert exact_match("Rome", "Paris", ["Paris", "Rome"]) == 1.0
    assert exact_match("Rome", None) is None
    assert exact_match("a", "A", normalised=True) == 1.0
    assert [exact_match(text, "A", normalised=True) for text in ("", "the", "...", "an")] == [0.0] * 4
    assert exact_match("", "Paris|", separator="|") == 0.0


def test_f1() -> None:
    assert f1("<answer>in Rome</answer>", "Paris|Rome", separator="|") == pytest.approx(2 / 3)
    assert f1("Rome", "Paris", ["Rome"]) == 1.0
    assert f1("Rome", None) is None


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>\n", 1.0),
        ("<think>a</think> so <answer>5</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>5</answer>", 0.0),
        ("<think>a</think><answer>5</answer><answer>5</answer>", 0.0),
        ("<answer>5</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(reply: str, value: float) -> None:
    assert format(reply) == value


def test_format_with_a_pattern_of_its_own() -> None:
    assert format("Answer:\n5", pattern=r"Answer:.\d+") == 1.0
    assert format("Answer: 5 apples", pattern=r"Answer: \d+") == 0.0


def test_length() -> None:
    assert [length(tokens, target=100) for tokens in (0, 50, 100, 125, 500)] == [-1.0, -0.5, 0.0, -0.25, -1.0]
    assert [length(tokens, limit=100) for tokens in (0, 100, 150, 500)] == [0.0, 0.0, -0.5, -1.0]
    with pytest.raises(ConfigError, match="got target=5 and limit=5"):
        length(1, target=5, limit=5)


def test_overlong() -> None:
    assert [overlong(tokens, max_length=100, cache=20) for tokens in (80, 90, 100, 120)] == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("reply", "answer", "value"),
    [
        (r"So it is $\frac{2}{4}$.", "1/2", 1.0),
        (r"It is \boxed{0.5}.", r"\frac12", 1.0),
        (r"\boxed{1+x^2}", "x^2+1", 1.0),
        ("<answer>1+x^2</answer>", "x^2+1", 1.0),
        ("<answer>6</answer> because 5", "5", 0.0),
        (r"\boxed{1,2,3,4,5}", "5", 0.0),
        (r"\boxed{1}\boxed{5}\boxed{7}", "5", 0.0),
        (r"\boxed{5} or \boxed{6}", "5", 0.0),
        (r"\boxed{5=6}", "5", 0.0),
        (r"\boxed{\boxed{6}5}", "5", 0.0),
        (r"\boxed{[0,10]}", "5", 0.0),
        ("1 2 3 4 5 6", "5", 0.0),
        ("\u0665", "5", 0.0),
        ("nan", "5", 0.0),
        ("The answer is 2", "2x+3", 0.0),
        ("I do not know", "5", 0.0),
        ("", "5", 0.0),
        ("5", "", None),
        ("5", None, None),
    ],
)
def test_math(reply: str, answer: str | None, value: float | None) -> None:
    pytest.importorskip("math_verify")
    assert math(reply, answer) == value


def replies(*texts: str) -> list[Message]:
    return [Message(role="assistant", content=text) for text in texts]


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (["<think>a</think><tool_call>{}</tool_call>", "<answer>in Paris</answer>"], 2 / 3),
        (["<answer>Rome</answer>"], 1.0),
        (["<answer>Oslo</answer>"], 0.0),
        (["<think>a</think> Paris"], -1.0),
        (["<think>a", "<answer>Paris</answer>"], -1.0),
        (["</tool_call>", "<answer>Paris</answer>"], -1.0),
        (["<think><think>a</think></think><answer>Paris</answer>"], -1.0),
        (["<answer>Paris</answer>", "done"], -1.0),
    ],
)
def test_search_f1(texts: Sequence[str], value: float) -> None:
    found = search_f1(replies(*texts), texts[-1], "Paris<|>Rome", separator="<|>")
    assert found == pytest.approx(value)


def test_search_without_an_answer_has_no_verdict() -> None:
    assert search_f1(replies("<answer>Paris</answer>"), "<answer>Paris</answer>", None) is None


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}, "base": {}}}},
    },
    {"type": "function", "function": {"name": "sub", "parameters": {"properties": {"a": {}, "b": {}}}}},
]
GOAL = {"name": "add", "arguments": {"a": 1, "b": 2}}


def calls(*made: tuple[str, str]) -> list[Message]:
    """One reply with these calls, each a name and what was written for arguments."""
    messages: list[Any] = [{"role": "assistant", "content": "", "tool_calls": []}]
    for index, (name, arguments) in enumerate(made):
        function = {"name": name, "arguments": arguments}
        messages[0]["tool_calls"].append({"id": f"call_{index}", "type": "function", "function": function})
    return messages


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [
        ("add", '{"a": 1, "b": 2}', 1.0),
        ("add", '{"a": 1, "b": 3}', -0.25),
        ("add", '{"a": 1, "b": 2, "base": 8}', -0.5),
        ("add", '{"a": 1}', -0.5),
        ("add", '{"a": 1, "b": 2, "c": 3}', -0.8),
        ("add", '{"a": 1, "base": 8}', -1.0),
        ("add", '{"a": 1, "c": 3}', -1.3),
        ("add", '{"a": 1, "b": 2, "c": 3, "base": 8}', -1.3),
        ("add", '{"a": 1, "c": 3, "base": 8}', -1.8),
        ("sub", '{"a": 1, "b": 2}', -1.5),
        ("mul", '{"a": 1, "b": 2}', -2.0),
        ("add", '{"a": 1, "b": 2', -2.0),
        ("add", "[1, 2]", -2.0),
    ],
)
def test_one_tool_call(name: str, arguments: str, value: float) -> None:
    assert tool_calls(calls((name, arguments)), [GOAL], TOOLS) == value


def test_several_tool_calls() -> None:
    other = {"function": {"name": "add", "arguments": '{"a": 5, "b": 5}'}}
    swapped = calls(("add", '{"a": 5, "b": 5}'), ("add", '{"a": 1, "b": 2}'))
    assert tool_calls(swapped, [GOAL, other], TOOLS) == 2.0
    assert tool_calls(swapped[:1], [GOAL], TOOLS) == 1.0 - 1.5
    assert tool_calls(replies("5"), [GOAL, other], TOOLS) == -4.0
    assert tool_calls(replies("5"), [], TOOLS) == 1.0
    assert tool_calls(calls(*[("add", "{}")] * 9), [], TOOLS) == -5.0


def test_without_schemas_no_tool_is_unknown_and_no_argument_hallucinated() -> None:
    assert tool_calls(calls(("mul", "{}")), [GOAL]) == -1.5
    assert tool_calls(calls(("add", '{"a": 1, "b": 2, "c": 3}')), [GOAL]) == -0.5


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Good.\nScore: 0.5", 0.5),
        ("**Score: 1**\n\n", 1.0),
        ("0.25", 0.25),
        ("score = .75.", 0.75),
        ("Score: 0.2\nI mean:\nScore: 0", 0.0),
    ],
)
def test_the_score_is_the_last_line(reply: str, value: float) -> None:
    assert score_in(reply, 0.0, 1.0) == value


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("", "the judge's last line is not a score: nothing"),
        ("Score: 0.5\nthank you", "the judge's last line is not a score: thank you"),
        ("Score: 8/10", "the judge's last line is not a score"),
        ("Score: nan", "the judge's last line is not a score"),
        ("Score: -1", "the judge's score -1 is not from 0 to 1"),
        ("7", "the judge's score 7 is not from 0 to 1"),
    ],
)
def test_no_number_is_an_error_and_never_a_score(reply: str, message: str) -> None:
    with pytest.raises(JudgeError, match=message):
        score_in(reply, 0.0, 1.0)


class Server:
    """An endpoint that answers as told, one answer a request; the last one for ever."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[str | None, Any]] = []

    async def reply(self, request: web.Request) -> web.Response:
        self.seen.append((request.headers.get("Authorization"), await request.json()))
        status, text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.Response(status=status, text=text)

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        async with served(self.reply) as address:
            yield f"{address}/v1"


def says(text: str | None) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


PROMPT = [Message(role="user", content="Name a city.")]


async def ask(server: Server, timeout_s: float = 10.0, **options: Any) -> float:
    async with server.url() as url:
        return await judge(PROMPT, "{answer} Paris", "Rome", timeout_s, url=url, model="m", **options)


async def test_a_judge_is_asked_once_more_when_it_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.runtime.asking.FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server = Server((429, "slow down"), (503, ""), says("Fine.\nScore: 0.5"))
    template = "{prompt} | {completion} | {answer}"
    assert await ask(server, template=template, key_variable="JUDGE_KEY") == 0.5
    assert len(server.seen) == 3
    content = "user: Name a city. | {answer} Paris | Rome"
    expected = {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0.0}
    assert server.seen[-1] == ("Bearer secret", expected)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, "no such key"), "answered HTTP 401: no such key"),
        ((200, "<html>"), "the judge's answer is no chat completion: <html>"),
        ((200, '{"choices": []}'), "the judge's answer is no chat completion"),
        (says(None), "the judge's answer has no text"),
        (says("as an AI"), "the judge's last line is not a score: as an AI"),
        ((200, "x" * (1 << 21)), "answered with more than 1048576 bytes"),
    ],
)
async def test_what_a_judge_cannot_say_is_an_error_at_once(answer: tuple[int, str], message: str) -> None:
    server = Server(answer)
    with pytest.raises(JudgeError, match=message):
        await ask(server)
    assert len(server.seen) == 1


async def test_a_judge_that_stays_busy_or_silent_is_an_error_before_the_deadline() -> None:
    with pytest.raises(JudgeError, match="no answer from .* within 0.18 s: HTTP 503: overloaded"):
        await ask(Server((503, "overloaded")), timeout_s=0.2)

    class Silent(Server):
        async def reply(self, request: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(JudgeError, match="no answer from .* within 0.18 s: it did not answer"):
        await ask(Silent(), timeout_s=0.2)


async def test_a_dead_judge_is_an_error() -> None:
    async with Server(says("1")).url() as url:
        pass
    with pytest.raises(JudgeError, match="no answer from .* within 0.18 s: Cannot connect"):
        await judge(PROMPT, "", None, 0.2, url=url, model="m")


def test_a_judge_refuses_settings_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"template": "How good?"}, "must contain {completion}"),
        ({"lowest": 1.0}, "lowest must be below highest; got 1.0 and 1.0"),
        ({"key_variable": "JUDGE_KEY"}, "reward.args.judge.key_variable=JUDGE_KEY is not set in the environment"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            judge(PROMPT, "", None, 1.0, url="http://localhost/v1", model="m", **options)


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("12 + 30 = 42", "42", True),
        ("The answer is 42.", "42", True),
        ("41, 42, 43", "42", False),
        (" ".join(map(str, range(200))), "42", False),
        ("-42", "42", False),
        ("42.5", "42", False),
        ("1.42", "42", False),
        ("1,042", "42", False),
        ("x42", "42", False),
        ("\u0664\u0662", "42", False),
        ("42" * 10_000, "42", False),
        ("", "42", False),
    ],
)
def test_the_example_agent_reads_one_number(text: str, answer: str, value: bool) -> None:
    pytest.importorskip("openai")
    from rlflow.envs.agent.calculator import is_right

    assert is_right(text, answer) is value


def test_one_call_of_a_tool_earns_and_not_many() -> None:
    task = Task(id="a", prompt=(), answer="42", data={})

    def reward(reply: str, *results: str) -> float | None:
        return right_by_tool(task, reply, [*(Message(role="tool", content=each) for each in results)])

    assert [reward("42", "42"), reward("41", "42"), reward("42", "41"), reward("42")] == [1.0, 0.2, 0.0, 0.0]
    assert reward("41", *map(str, range(200))) == 0.0
    assert reward("20 21 42 43", "42") == 0.2
