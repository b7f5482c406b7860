"""The Responses API and Anthropic's Messages: over real HTTP, and through the official packages."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from letters import ids_of
from pydantic import BaseModel
from visiting import ADD, CALL, USER, Visit, visiting

from rlflow.rollout.samples import chains_of

FUNCTION: dict[str, Any] = {"type": "function", **ADD["function"]}
TOOL: dict[str, Any] = {"name": "add", "input_schema": ADD["function"]["parameters"]}
BOTH = f"so: {CALL}{CALL}."


class Sum(BaseModel):
    total: int


def named(lines: list[str]) -> list[str]:
    """The names of a stream's events; each stands in its data too."""
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
    return names


def is_one_sample(visit: Visit) -> bool:
    return [len(chains_of(visit.chat.turns)), visit.chat.num_forks, visit.chat.num_branches] == [1, 0, 0]


async def test_a_response_is_a_message_and_its_calls() -> None:
    async with visiting(BOTH, "3.") as visit:
        _, first = await visit.send("responses", model="m", input="hi", instructions="be", tools=[FUNCTION])
        message, *calls = first["output"]
        assert message["content"] == [{"type": "output_text", "text": "so:", "annotations": [], "logprobs": []}]
        assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("function_call", "add", {"a": 1, "b": 2})
        ] * 2
        assert (first["status"], first["usage"]["output_tokens"]) == ("completed", len(BOTH))
        answers = [
            {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": [{"type": "input_text", "text": "3"}],
            }
            for call in calls
        ]
        thought = {"type": "reasoning", "id": "rs_1", "summary": []}
        said = [USER, thought, *first["output"], *answers]
        _, second = await visit.send("responses", input=said, instructions="be", tools=[FUNCTION], temperature=0)
        assert second["output"][0]["content"][0]["text"] == "3"
        assert is_one_sample(visit)
    assert visit.engine.requests[1].prompt_ids == ids_of(f"Tbe.hi.>{BOTH}3.3.>")


async def test_a_response_goes_on_from_the_id_of_an_earlier_one() -> None:
    async with visiting(f"{CALL}.", "3.", "4.") as visit:
        _, first = await visit.send("responses", input="hi", tools=[FUNCTION], tool_choice="required")
        answer = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "3"}
        _, second = await visit.send(
            "responses", input=[answer], tools=[FUNCTION], previous_response_id=first["id"], store=True
        )
        await visit.send("responses", input="on", tools=[FUNCTION], previous_response_id=second["id"])
        status, refused = await visit.send("responses", input="on", previous_response_id="resp_9")
        assert is_one_sample(visit)
    told = "hi\n\nYour next reply must call a tool."
    assert visit.engine.requests[2].prompt_ids == ids_of(f"T{told}.>{CALL}.3.>3.on.>")
    assert (status, refused["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_response_that_was_cut_off_is_incomplete() -> None:
    async with visiting("abc", finish_reason="length") as visit:
        _, answer = await visit.send(
            "responses", input="hi", max_output_tokens=2, include=["message.output_text.logprobs"]
        )
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (part,) = answer["output"][0]["content"]
    assert [(each["token"], each["logprob"]) for each in part["logprobs"]] == [
        ("token_id:97", -0.5),
        ("token_id:98", -0.5),
    ]


async def test_a_response_streams_the_events_of_its_items() -> None:
    async with visiting(f"so: {CALL}.") as visit:
        lines = await visit.events("responses", input="hi", tools=[FUNCTION])
    assert named(lines) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_message_has_blocks_of_text_and_of_calls() -> None:
    async with visiting(BOTH, "3.") as visit:
        system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
        fields: dict[str, Any] = {"model": "m", "max_tokens": 999, "system": system, "tools": [TOOL]}
        _, first = await visit.send("messages", messages=[USER], **fields)
        text, *calls = first["content"]
        assert (text, first["stop_reason"]) == ({"type": "text", "text": "so:"}, "tool_use")
        assert [(call["name"], call["input"]) for call in calls] == [("add", {"a": 1, "b": 2})] * 2
        assert (first["usage"]["input_tokens"], first["usage"]["output_tokens"]) == (len("Tbe.hi.>"), len(BOTH))
        answers = [
            {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": [{"type": "text", "text": "3"}]},
            {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": "no", "is_error": True},
            {"type": "text", "text": "on"},
        ]
        thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
        said = [
            USER,
            {"role": "assistant", "content": [thought, *first["content"]]},
            {"role": "user", "content": answers},
        ]
        _, second = await visit.send("messages", messages=said, **fields)
        _, counted = await visit.send("messages/count_tokens", messages=said, **fields)
        assert second["content"] == [{"type": "text", "text": "3"}]
        assert second["stop_reason"] == "end_turn"
        assert is_one_sample(visit)
    prompt = f"Tbe.hi.>{BOTH}3.Error: no.on.>"
    assert visit.engine.requests[1].prompt_ids == ids_of(prompt)
    assert counted == {"input_tokens": len(prompt.replace(">so", "so"))}


@pytest.mark.parametrize("arguments", ["a=1", '{"a": NaN}', '{"a": 1e999}', "[1]"])
async def test_a_call_that_a_message_cannot_say_is_text(arguments: str) -> None:
    bad = f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"
    async with visiting(f"{bad}.", f"{bad}.") as visit:
        _, message = await visit.send("messages", messages=[USER], tools=[TOOL])
        _, completion = await visit.post(tools=[ADD])
    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": bad}], "end_turn")
    assert completion["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == arguments


async def test_a_message_says_why_it_stopped() -> None:
    async with visiting("so: more.") as visit:
        _, message = await visit.send("messages", messages=[USER], stop_sequences=[":"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ":")
    assert message["content"] == [{"type": "text", "text": "so"}]
    async with visiting("so", finish_reason="length") as visit:
        _, message = await visit.send("messages", messages=[USER], max_tokens=2)
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)


async def test_a_message_streams_the_events_of_its_blocks() -> None:
    async with visiting(f"so: {CALL}.", is_open=False, keep_alive_s=0.01) as visit:
        streaming = asyncio.create_task(visit.events("messages", tools=[TOOL]))
        await visit.asked(1)
        await asyncio.sleep(0.05)
        visit.engine.is_open.set()
        lines = await streaming
    assert lines[0] == ": the reply is being sampled"
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert named(lines) == ["message_start", *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("responses", {"input": "x", "background": True}, "`background` = true is not served: a reply is awaited"),
        ("responses", {"input": "x", "truncation": "auto"}, "a conversation that is too long is refused"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "must be functions, which the program runs"),
        ("responses", {"input": []}, "`input` must be a list of at least one; got []"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, 'input[0] has the type "item_reference"'),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content has a part of the type 'input_image'; only text is served",
        ),
        (
            "messages",
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "must have a `name` and an `input_schema`",
        ),
        ("messages", {"messages": [USER, {"role": "assistant", "content": "{"}]}, "a reply begins anew"),
        ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_1"}]}}, "is never shortened"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text is served"),
        ("messages", {"tool_choice": {"type": "any"}}, "`tool_choice` requires a call, and `tools` has none"),
        ("v1/messages", {}, "leave /v1 out of the base URL of a package that adds it"),
    ],
)
async def test_what_an_api_cannot_be_served_is_refused(path: str, fields: dict[str, Any], message: str) -> None:
    async with visiting() as visit:
        status, answer = await visit.send(path, **{"messages": [USER], **fields})
    assert status == (404 if path == "v1/messages" else 400)
    assert message in answer["error"]["message"]
    assert visit.engine.requests == []


async def test_the_openai_package_speaks_responses() -> None:
    openai = pytest.importorskip("openai")
    async with (
        visiting(
            f"so: {CALL}.",
            '{"total": 3}.',
            "a.",
            "b.",
            '{"total": 4}.',
            "cut",
            RuntimeError("broken"),
            keep_alive_s=0.01,
        ) as visit,
        openai.AsyncOpenAI(base_url=visit.endpoint.base_url, api_key="x", max_retries=0) as client,
    ):
        async with client.responses.stream(model="m", input="hi", tools=[FUNCTION]) as stream:
            first = await stream.get_final_response()
        assert first.output_text == "so:"
        call = first.output[1]
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        second = await client.responses.parse(
            model="m", input=[USER, *first.output, answer], tools=[FUNCTION], text_format=Sum
        )
        assert second.output_parsed == Sum(total=3)
        assert is_one_sample(visit)
        both = await asyncio.gather(*(client.responses.create(model="m", input=text) for text in ("x", "y")))
        assert sorted(each.output_text for each in both) == ["a", "b"]
        third = await client.chat.completions.parse(model="m", messages=[USER], response_format=Sum)
        assert third.choices[0].message.parsed == Sum(total=4)
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
        assert (events[-1].type, events[-1].response.output_text) == ("response.completed", "cut")
        visit.engine.is_open.clear()
        with pytest.raises(openai.APIError, match="the policy cannot reply: broken"):
            async with client.responses.stream(model="m", input="hi") as stream:
                async for _ in opened(visit, stream):
                    pass


async def opened(visit: Visit, stream: Any) -> AsyncIterator[Any]:
    visit.engine.is_open.set()
    async for event in stream:
        yield event


async def test_the_anthropic_package_speaks_messages() -> None:
    anthropic = pytest.importorskip("anthropic")
    async with (
        visiting(f"so: {CALL}.", "3.", "a.", "b.", '{"total": 4}.', RuntimeError("broken"), keep_alive_s=0.01) as visit,
        anthropic.AsyncAnthropic(base_url=visit.endpoint.root_url, api_key="x", max_retries=0) as client,
    ):
        fields: dict[str, Any] = {"model": "m", "max_tokens": 99, "tools": [TOOL]}
        async with client.messages.stream(messages=[USER], tool_choice={"type": "any"}, **fields) as stream:
            first = await stream.get_final_message()
        text, call = first.content
        assert (text.text, call.name, call.input, first.stop_reason) == ("so:", "add", {"a": 1, "b": 2}, "tool_use")
        assert first.usage.output_tokens == len(f"so: {CALL}.")
        answer = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        said: list[Any] = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [answer]}]
        assert (await client.messages.count_tokens(model="m", messages=said, tools=[TOOL])).input_tokens > 0
        second = await client.messages.create(messages=said, **fields)
        assert second.content[0].text == "3"
        assert is_one_sample(visit)
        asking = (
            client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": text}])
            for text in "xy"
        )
        assert sorted(each.content[0].text for each in await asyncio.gather(*asking)) == ["a", "b"]
        with pytest.raises(anthropic.BadRequestError, match="only text is served"):
            await client.messages.create(messages=[{"role": "user", "content": [{"type": "image"}]}], **fields)
        third = await client.messages.parse(model="m", max_tokens=99, messages=[USER], output_format=Sum)
        assert third.parsed_output == Sum(total=4)
        visit.engine.is_open.clear()
        with pytest.raises(anthropic.APIStatusError, match="the policy cannot reply: broken"):
            async with client.messages.stream(messages=[USER], **fields) as stream:
                async for _ in opened(visit, stream):
                    pass
