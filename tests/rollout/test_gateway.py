"""The gateway over real HTTP: a chat with a scripted engine, and a renderer whose tokens are letters."""

import asyncio
import json
import os
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
from letters import AB, LetterRenderer, ids_of, limits
from listening import listeners
from visiting import ADD, CALL, USER, visiting

from rlflow.errors import EngineLost, TemplateRefused
from rlflow.rollout.chat import Chat
from rlflow.rollout.client import EngineClient, RemoteCalls
from rlflow.rollout.gateway.server import MAX_BODY_BYTES
from rlflow.rollout.requests import Completion, FinishReason, GenerateRequest
from rlflow.rollout.samples import chains_of, sample_of
from rlflow.types import EpisodeEnd


async def test_a_conversation_goes_on_with_the_tokens_that_were_sampled() -> None:
    async with visiting("ab.", "cab.") as visit:
        status, first = await visit.post()
        assert status == 200
        assert first["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
        assert first["choices"][0]["finish_reason"] == "stop"
        assert first["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
        history = [USER, first["choices"][0]["message"], {"role": "user", "content": [{"type": "text", "text": "ab?"}]}]
        _, second = await visit.post(messages=history)
        assert second["choices"][0]["message"]["content"] == "cab"
    held = [*ids_of("hi.>"), *ids_of("ab.")]
    assert visit.engine.requests[1].prompt_ids == [*held, AB, *ids_of("?.>")]
    (chain,) = chains_of(visit.chat.turns)
    sample = sample_of(chain)
    assert sample.completion_ids.tolist() == [*ids_of("ab."), AB, *ids_of("?.>"), *ids_of("cab.")]
    assert sample.completion_ids[sample.loss_mask].tolist() == ids_of("ab.cab.")
    assert sample.versions[sample.loss_mask].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert (visit.chat.num_forks, visit.chat.num_branches) == (0, 0)


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _without_extras(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"type": "function", "function": call["function"]} for call in message["tool_calls"]]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _rewritten(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {"name": call["function"]["name"], "arguments": '{"a":1,"b":2}'}}
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": [], "tool_calls": calls, "annotations": None, "audio": None}


@pytest.mark.parametrize("send_back", [_as_sent, _without_extras, _rewritten])
async def test_a_tool_call_comes_back_as_it_was_sampled(send_back: Any) -> None:
    async with visiting(f"{CALL}.", "3.") as visit:
        _, first = await visit.post(tools=[ADD])
        message = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert message["content"] is None
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await visit.post(messages=[USER, send_back(message), answer], tools=[ADD])
    assert visit.engine.requests[1].prompt_ids == ids_of(f"Thi.>{CALL}.3.>")
    assert len(chains_of(visit.chat.turns)) == 1


async def test_text_beside_a_call_is_sent_without_the_call() -> None:
    async with visiting(f"so: {CALL}.") as visit:
        _, answer = await visit.post(tools=[ADD])
    assert answer["choices"][0]["message"]["content"] == "so:"


async def test_what_is_no_whole_call_is_text() -> None:
    async with visiting("<tool_call>add 1 2</tool_call>.") as visit:
        _, answer = await visit.post(tools=[ADD])
    assert answer["choices"][0]["message"]["content"] == "<tool_call>add 1 2</tool_call>"
    async with visiting(CALL, finish_reason="length") as visit:
        _, answer = await visit.post(tools=[ADD])
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_tool_choice_none_tells_the_model_of_no_tool() -> None:
    async with visiting("no.") as visit:
        await visit.post(tools=[ADD], tool_choice="none")
    assert visit.engine.requests[0].prompt_ids == ids_of("hi.>")


async def test_an_untrained_agent_replies_and_is_not_recorded() -> None:
    async with visiting("a.", "b.", "c.") as visit:
        _, first = await visit.post()
        _, judged = await visit.post(model="untrained/judge", messages=[{"role": "user", "content": "good?"}])
        await visit.post(messages=[USER, first["choices"][0]["message"], USER])
    assert judged["choices"][0]["message"]["content"] == "b"
    assert [turn.output_ids for turn in visit.chat.turns] == [ids_of("a."), ids_of("c.")]
    assert (len(chains_of(visit.chat.turns)), visit.chat.num_branches) == (1, 0)


async def test_a_reply_that_the_program_rewrote_is_its_own_message() -> None:
    async with visiting("no.", "x.") as visit:
        await visit.post()
        await visit.post(messages=[USER, {"role": "assistant", "content": "yes"}, USER])
    assert len(chains_of(visit.chat.turns)) == 2
    assert visit.chat.num_branches == 1


async def test_requests_at_once_are_replies_of_their_own() -> None:
    async with visiting("a.", "b.", "c.", is_open=False) as visit:
        asking = [asyncio.create_task(visit.post()) for _ in range(3)]
        await visit.asked(3)
        visit.engine.is_open.set()
        answers = [answer["choices"][0]["message"]["content"] for _, answer in await asyncio.gather(*asking)]
    assert sorted(answers) == ["a", "b", "c"]
    assert len(chains_of(visit.chat.turns)) == 3


async def test_a_stream_waits_with_comments_and_ends_with_the_usage() -> None:
    async with visiting(f"so: {CALL}.", is_open=False, keep_alive_s=0.01) as visit:
        streaming = asyncio.create_task(visit.events(tools=[ADD], stream_options={"include_usage": True}))
        await visit.asked(1)
        await asyncio.sleep(0.05)
        visit.engine.is_open.set()
        lines = await streaming
    assert lines[0] == ": the reply is being sampled"
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]
    delta = chunks[0]["choices"][0]["delta"]
    assert (delta["role"], delta["content"], delta["tool_calls"][0]["index"]) == ("assistant", "so:", 0)
    assert chunks[1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    assert chunks[2]["choices"] == []
    assert chunks[2]["usage"]["completion_tokens"] == len(f"so: {CALL}.")


async def test_logprobs_are_those_of_the_engine() -> None:
    async with visiting("a.") as visit:
        _, answer = await visit.post(logprobs=True)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["logprob"]) for token in tokens] == [("token_id:97", -0.5), ("token_id:46", -0.5)]


async def test_sampling_settings_are_the_runs() -> None:
    async with visiting("a.", "b.") as visit:
        await visit.post(temperature=0.0, seed=7)
        await visit.post()
        metrics = visit.gateway.close(visit.endpoint)
    assert visit.engine.requests[0].seed == 3
    assert not visit.engine.requests[0].is_greedy
    assert metrics == {
        "gateway/requests": 2.0,
        "gateway/refused": 0.0,
        "gateway/abandoned": 0.0,
        "gateway/sampling_ignored": 1.0,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 129}, "`n` = 129 is not served: one request has 128 replies at most"),
        ({"n": 0}, "`n` must be a positive number; got 0"),
        ({"stop": [1]}, "`stop` must be a text or a list of texts; got [1]"),
        ({"response_format": {"type": "regex"}}, "a reply's format must be text, json_object or json_schema with a "),
        ({"response_format": {"type": "json_schema"}}, 'json_schema with a schema; got "json_schema"'),
        ({"tool_choice": "required"}, "`tool_choice` requires a call, and `tools` has none"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            '`tool_choice` names the tool "sub"; there are ["add"]',
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "send auto, none, required or the name of one tool"),
        ({"guided_json": {"type": "object"}}, "replies are not constrained; ask for the form in the prompt"),
        ({"top_logprobs": 5}, "only the sampled tokens' log-probabilities are known"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "is not what the run tells the template, {}; set rollout.template_args for the whole run",
        ),
        ({"max_tokens": 0}, "`max_tokens` must be a positive number; got 0"),
        ({"messages": []}, "`messages` must be a list of at least one; got []"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0] must be an object whose `role` is one of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content has a part of the type 'image_url'; only text is served",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(fields: dict[str, Any], message: str) -> None:
    async with visiting() as visit:
        status, answer = await visit.post(**fields)
        assert visit.gateway.close(visit.endpoint)["gateway/refused"] == 1.0
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert message in answer["error"]["message"]
    assert visit.engine.requests == []


async def test_what_changes_nothing_is_accepted() -> None:
    async with visiting("abc.") as visit:
        status, _ = await visit.post(
            n=1, stop=None, response_format={"type": "text"}, tool_choice="auto", max_completion_tokens=2, user="me"
        )
    assert status == 200
    assert visit.engine.requests[0].max_new_tokens == 2


async def test_a_body_that_is_no_json_or_too_large_is_refused() -> None:
    async with visiting() as visit:
        url = f"{visit.endpoint.base_url}/chat/completions"
        async with visit.http.post(url, data=b"{") as answer:
            assert answer.status == 400
            assert "the body is not JSON" in (await answer.json())["error"]["message"]
        async with visit.http.post(url, data=b" " * (MAX_BODY_BYTES + 1)) as answer:
            assert answer.status == 413
            assert "error" in await answer.json()


async def test_a_conversation_without_room_is_refused_as_by_openai() -> None:
    async with visiting("a.", max_length=6) as visit:
        _, first = await visit.post()
        status, answer = await visit.post(messages=[USER, first["choices"][0]["message"], USER])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert visit.chat.end is EpisodeEnd.TRUNCATED_LENGTH


async def test_too_many_replies_are_refused() -> None:
    async with visiting("a.", max_turns=1) as visit:
        await visit.post()
        status, answer = await visit.post()
    assert (status, answer["error"]["code"]) == (400, "max_turns")


async def test_only_the_url_of_an_open_episode_is_served() -> None:
    async with visiting("a.") as visit:
        root = visit.endpoint.base_url.rsplit("/", 2)[0]
        [addresses] = listeners(os.getpid()).values()
        assert addresses == {"127.0.0.1"}
        async with visit.http.get(f"{root}/guess/v1/models") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["message"] == "no episode has this URL"
        async with visit.http.get(f"{visit.endpoint.base_url}/models", headers={"Authorization": "Bearer x"}) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == [visit.endpoint.model]
        async with visit.http.post(f"{visit.endpoint.base_url}/completions", json={}) as answer:
            assert answer.status == 404
            message = (await answer.json())["error"]["message"]
        assert message == (
            "POST v1/completions is not served; there are GET v1/models and POST v1/chat/completions, v1/responses, "
            "v1/messages"
        )
        visit.gateway.close(visit.endpoint)
        status, ended = await visit.post()
        assert (status, ended["error"]["message"]) == (410, "the episode of this URL has ended")


async def test_the_end_of_the_episode_cancels_its_replies() -> None:
    async with visiting("a.", is_open=False) as visit:
        asking = asyncio.create_task(visit.post())
        await visit.asked(1)
        visit.gateway.close(visit.endpoint)
        status, answer = await asking
    assert (status, answer["error"]["code"]) == (410, "episode_ended")
    assert visit.engine.cancelled == 1
    assert visit.chat.turns == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_hangs_up_cancels_the_sampling(is_stream: bool) -> None:
    async with visiting("a.", is_open=False, keep_alive_s=0.01) as visit:
        asking = asyncio.create_task(visit.events() if is_stream else visit.post())
        await visit.asked(1)
        asking.cancel()
        async with asyncio.timeout(5):
            while not visit.engine.cancelled:
                await asyncio.sleep(0.001)
        assert visit.gateway.close(visit.endpoint)["gateway/abandoned"] == 1.0
    assert visit.chat.turns == []
    assert visit.chat.failure is None


async def test_a_failure_of_the_engine_is_kept_whatever_the_program_does() -> None:
    failure = RuntimeError("the engine is broken")
    async with visiting("a.", failure, "b.") as visit:
        await visit.post()
        failed = asyncio.create_task(visit.gateway.wait_until_failed(visit.endpoint))
        status, answer = await visit.post()
        assert (status, answer["error"]["message"]) == (503, "the policy cannot reply: the engine is broken")
        async with asyncio.timeout(5):
            await failed
        status, _ = await visit.post()
        assert status == 503
    assert visit.chat.failure is failure
    assert len(visit.engine.requests) == 2


async def test_a_conversation_that_the_template_does_not_take_is_the_program_s_mistake() -> None:
    async with visiting("a.", TemplateRefused("the template wants users and assistants in turn"), "b.") as visit:
        await visit.post()
        status, answer = await visit.post()
        assert (status, answer["error"]["code"]) == (400, "template_refused")
        assert answer["error"]["message"] == "the template wants users and assistants in turn"
        assert (await visit.post())[0] == 200
    assert visit.chat.failure is None
    assert len(visit.chat.turns) == 2


async def test_a_stream_that_waited_ends_with_the_failure() -> None:
    async with visiting(RuntimeError("broken"), is_open=False, keep_alive_s=0.01) as visit:
        streaming = asyncio.create_task(visit.events())
        await visit.asked(1)
        await asyncio.sleep(0.05)
        visit.engine.is_open.set()
        lines = await streaming
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == "the policy cannot reply: broken"


@dataclass
class SlicingEngine:
    """Shaped like an actor handle; samples a part of its text under its version, then is lost or is updated."""

    parts: list[str | Exception]
    version: int
    requests: list[GenerateRequest] = field(default_factory=list)

    @property
    def generate(self) -> "SlicingEngine":
        return self

    def remote(self, request: GenerateRequest) -> Awaitable[Completion]:
        self.requests.append(request)
        return self._answer(self.parts[len(self.requests) - 1])

    @property
    def go_on(self) -> NoReturn:
        raise AssertionError("it goes on with no reply")

    async def _answer(self, part: str | Exception) -> Completion:
        if isinstance(part, Exception):
            raise part
        ids, version = ids_of(part), self.version
        self.version += 1
        finish: FinishReason = "stop" if part.endswith(".") else "abort"
        return Completion(
            ids=ids,
            logprobs=[-0.1] * len(ids),
            versions=[version] * len(ids),
            cache_versions=[version] * len(ids),
            finish_reason=finish,
        )


async def test_a_reply_survives_an_update_and_the_loss_of_its_engine() -> None:
    first, second = SlicingEngine(["he", "l", EngineLost("died")], 4), SlicingEngine(["lo."], 9)
    calls = RemoteCalls(cancel=lambda call: None, is_lost=lambda error: isinstance(error, EngineLost))
    client = EngineClient([first, second], calls, patience_s=1.0)
    async with visiting() as visit:
        chat = Chat(client.generate, LetterRenderer(), limits())
        visit.endpoint = visit.gateway.open(chat)
        status, answer = await visit.post()
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello")
    (turn,) = chat.turns
    assert turn.output_ids == ids_of("hello.")
    assert turn.versions == [4, 4, 5, 9, 9, 9]


async def test_the_openai_package_speaks_to_it() -> None:
    openai = pytest.importorskip("openai")
    async with (
        visiting("ab.", f"so: {CALL}.", "3.", max_turns=3) as visit,
        openai.AsyncOpenAI(base_url=visit.endpoint.base_url, api_key="x") as client,
    ):
        assert [model.id async for model in client.models.list()] == [visit.endpoint.model]
        messages: list[Any] = [USER]
        first = await client.chat.completions.create(model="m", messages=messages, temperature=0.2)
        messages += [first.choices[0].message, USER]
        async with client.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as stream:
            completion = await stream.get_final_completion()
        reply = completion.choices[0].message
        assert (reply.content, reply.tool_calls[0].function.name) == ("so:", "add")
        messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}]
        last = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert last.choices[0].message.content == "3"
        with pytest.raises(openai.BadRequestError, match="3 replies"):
            await client.chat.completions.create(model="m", messages=messages)
    # The tools were named in mid-conversation, which is another conversation to the model.
    assert [len(chain) for chain in chains_of(visit.chat.turns)] == [1, 2]
    assert visit.engine.requests[2].prompt_ids == ids_of(f"Thi.ab.hi.>so: {CALL}.3.>".replace("ab", chr(AB)))
