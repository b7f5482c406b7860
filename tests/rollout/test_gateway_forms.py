"""What a program may ask of a reply's form: calls, formats, stop strings, several replies."""

import json
from typing import Any

import pytest
from letters import ids_of
from visiting import ADD, CALL, USER, Visit, visiting

from rlflow.rollout.samples import chains_of, sample_of

MUST_CALL = "hi\n\nYour next reply must call a tool."


async def again(visit: Visit, message: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Send a reply back, with a question."""
    _, answer = await visit.post(messages=[USER, message, {"role": "user", "content": "on"}], **fields)
    return answer


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tools": [ADD], "tool_choice": "required"}, f"T{MUST_CALL}.>"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            "Thi\n\nYour next reply must call the tool add..>",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "hi\n\nYour next reply must be nothing but one JSON object.>",
        ),
        (
            {
                "tools": [ADD],
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            },
            'Thi\n\nYour next reply, unless it calls a tool, must be nothing but JSON of this schema: {"type": '
            '"object"}.>',
        ),
    ],
)
async def test_the_policy_is_told_what_is_wanted_and_replies_as_it_likes(fields: dict[str, Any], told: str) -> None:
    async with visiting("no.") as visit:
        status, answer = await visit.post(**fields)
    assert visit.engine.requests[0].prompt_ids == ids_of(told)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "no")
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_what_the_policy_was_told_stays_where_it_was() -> None:
    """Though the program sends back its own messages, which do not hold it."""
    async with visiting(f"{CALL}.", "3.", "4.") as visit:
        _, first = await visit.post(tools=[ADD], tool_choice="required")
        message = first["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        _, second = await visit.post(messages=[USER, message, answer], tools=[ADD])
        messages = [USER, message, answer, second["choices"][0]["message"], {"role": "user", "content": "on"}]
        await visit.post(messages=messages, tools=[ADD], tool_choice="required")
    held = f"T{MUST_CALL}.>{CALL}.3.>3."
    assert visit.engine.requests[1].prompt_ids == ids_of(held)[: -len("3.")]
    assert visit.engine.requests[2].prompt_ids == ids_of(f"{held}on\n\nYour next reply must call a tool..>")
    assert len(chains_of(visit.chat.turns)) == 1


async def test_what_the_policy_was_told_does_not_go_into_other_messages() -> None:
    """Replies are recognised by their text and place; here another question, and a reply, come before the same text."""
    form = {"response_format": {"type": "json_object"}}
    other = [{"role": "user", "content": "ho"}, {"role": "assistant", "content": "x"}]
    async with visiting("no.", "no.", "a.", "b.", "c.") as visit:
        _, plain = await visit.post(messages=other[:1])
        await visit.post(**form)
        message = plain["choices"][0]["message"]
        await visit.post(messages=[other[0], message, USER])
        await visit.post(messages=[USER, message, USER])
        status, _ = await visit.post(messages=[other[1], message, USER])
    told = "hi\n\nYour next reply must be nothing but one JSON object"
    assert visit.engine.requests[2].prompt_ids == ids_of("ho.>no.hi.>")
    assert visit.engine.requests[3].prompt_ids == ids_of(f"{told}.>no.hi.>")
    assert (status, visit.engine.requests[4].prompt_ids) == (200, ids_of("x.no.hi.>"))


async def test_a_form_for_a_conversation_that_ends_with_a_reply_is_refused() -> None:
    async with visiting() as visit:
        messages = [USER, {"role": "assistant", "content": "x"}]
        status, answer = await visit.post(messages=messages, response_format={"type": "json_object"})
    assert (status, answer["error"]["message"]) == (
        400,
        "`tool_choice` and formats are for conversations that do not end with a reply",
    )


async def test_a_stop_string_ends_the_reply_and_is_trained_on_as_it_was_sampled() -> None:
    async with visiting("so Observe: it rains.", "x.", finish_reason="length") as visit:
        _, first = await visit.post(stop=["\n", "Observe:"], logprobs=True)
        choice = first["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("so ", "stop")
        assert first["usage"]["completion_tokens"] == len("so Observe:")
        assert len(choice["logprobs"]["content"]) == len("so Observe:")
        await again(visit, {"role": "assistant", "content": "so"})
    assert visit.engine.requests[1].prompt_ids == ids_of("hi.>so Observe:on.>")
    (chain,) = chains_of(visit.chat.turns)
    sample = sample_of(chain)
    assert sample.completion_ids[sample.loss_mask].tolist() == ids_of("so Observe:x.")
    assert chain[0].finish_reason == "stop"


async def test_a_stop_string_behind_a_call_leaves_the_call_and_within_it_the_text() -> None:
    async with visiting(f"so: {CALL} and more.", f"so: {CALL}.") as visit:
        _, first = await visit.post(tools=[ADD], stop="</tool_call>")
        _, second = await visit.post(tools=[ADD], stop='"b"')
    message = first["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == ("so:", 1)
    assert visit.chat.turns[0].output_ids == ids_of(f"so: {CALL}")
    assert second["choices"][0]["message"]["content"] == 'so: <tool_call>{"name": "add",  "arguments": {'


async def test_n_replies_are_samples_of_their_own() -> None:
    async with visiting("a.", "b.", "c.", "d.") as visit:
        _, answer = await visit.post(n=3)
        choices = answer["choices"]
        assert [(each["index"], each["message"]["content"]) for each in choices] == [(0, "a"), (1, "b"), (2, "c")]
        assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
        await again(visit, choices[1]["message"])
    assert len({request.seed for request in visit.engine.requests}) == 4
    assert [len(chain) for chain in chains_of(visit.chat.turns)] == [1, 2, 1]
    assert visit.engine.requests[3].prompt_ids == ids_of("hi.>b.on.>")


async def test_n_replies_stream_each_under_its_index() -> None:
    async with visiting("a.", "b.") as visit:
        lines = await visit.events(n=2)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"].get("content")) for chunk in chunks]
    assert deltas == [(0, "a"), (0, None), (1, "b"), (1, None)]


async def test_more_replies_than_the_episode_has_left_are_none() -> None:
    async with visiting("a.", "b.", max_turns=2) as visit:
        status, answer = await visit.post(n=3)
        assert (status, answer["error"]["param"]) == (400, "n")
        assert (visit.chat.turns, visit.chat.end) == ([], None)
        status, answer = await visit.post(n=2)
        assert (status, len(answer["choices"])) == (200, 2)


async def test_template_args_of_the_run_itself_are_accepted() -> None:
    async with visiting("a.") as visit:
        visit.chat.template_args = {"enable_thinking": False, "level": [1]}
        status, _ = await visit.post(chat_template_kwargs={"level": [1]})
        refused, _ = await visit.post(chat_template_kwargs={"level": [2]})
    assert (status, refused) == (200, 400)
