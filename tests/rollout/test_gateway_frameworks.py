"""Agent frameworks as they come, through the gateway: plain replies, streams, tools, formats, runs side by side.

None of them is a dependency of rlflow; each test needs its package.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from letters import ids_of
from pydantic import BaseModel
from visiting import Visit, visiting

from rlflow.rollout.samples import chains_of


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ADDS = f"{call('add', a=1, b=2)}{call('add', a=3, b=4)}."
"""Two calls in one reply."""


class Sum(BaseModel):
    """The result of a sum."""

    total: int


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def trained_on(visit: Visit) -> list[list[int]]:
    """The sampled tokens of each sample."""
    return [[token for turn in chain for token in turn.output_ids] for chain in chains_of(visit.chat.turns)]


def joined(*replies: str) -> list[list[int]]:
    """Of one sample."""
    return [ids_of("".join(replies))]


def each_told(visit: Visit, text: str, count: int) -> bool:
    """Whether the policy was told this in so many requests."""
    return [text in "".join(map(chr, request.prompt_ids)) for request in visit.engine.requests].count(True) == count


def run_config(agents: Any, visit: Visit) -> Any:
    from openai import AsyncOpenAI

    # A client of its own, because the default one is bound to the event loop of the first test.
    client = AsyncOpenAI(base_url=visit.endpoint.base_url, api_key="x")
    provider = agents.OpenAIProvider(openai_client=client)
    return agents.RunConfig(model_provider=provider, tracing_disabled=True)


async def test_openai_agents() -> None:
    """Its default model class speaks the Responses API."""
    agents = pytest.importorskip("agents")
    agent = agents.Agent(name="a", instructions="be", tools=[agents.function_tool(add)])
    async with visiting(ADDS, "10.") as visit:
        result = await agents.Runner.run(agent, "hi", run_config=run_config(agents, visit))
        assert result.final_output == "10"
        assert trained_on(visit) == joined(ADDS, "10.")
    async with visiting(f"so: {ADDS}", "10.", "on.") as visit:
        config = run_config(agents, visit)
        streamed = agents.Runner.run_streamed(agent, "hi", run_config=config)
        kinds = {event.type async for event in streamed.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        assert streamed.final_output == "10"
        more = [*streamed.to_input_list(), {"role": "user", "content": "more"}]
        assert (await agents.Runner.run(agent, more, run_config=config)).final_output == "on"
        assert trained_on(visit) == joined(f"so: {ADDS}", "10.", "on.")


async def test_openai_agents_with_a_type_and_a_forced_call() -> None:
    agents = pytest.importorskip("agents")
    settings = agents.ModelSettings(tool_choice="required")
    agent = agents.Agent(name="a", tools=[agents.function_tool(add)], output_type=Sum, model_settings=settings)
    async with visiting(ADDS, '{"total": 10}.') as visit:
        result = await agents.Runner.run(agent, "hi", run_config=run_config(agents, visit))
        assert result.final_output == Sum(total=10)
        assert each_told(visit, "must be nothing but JSON of this schema: ", 2)
        assert trained_on(visit) == joined(ADDS, '{"total": 10}.')
    async with visiting("ten.") as visit:
        with pytest.raises(agents.ModelBehaviorError):
            await agents.Runner.run(agent, "hi", run_config=run_config(agents, visit))
    async with visiting("1.", "2.", "3.", "4.") as visit:
        config = run_config(agents, visit)
        plain = agents.Agent(name="a")
        results = await asyncio.gather(*(agents.Runner.run(plain, f"q{n}", run_config=config) for n in range(4)))
        assert sorted(result.final_output for result in results) == ["1", "2", "3", "4"]
        assert len(trained_on(visit)) == 4


async def test_openai_agents_go_on_by_the_id_of_a_response() -> None:
    agents = pytest.importorskip("agents")
    agent = agents.Agent(name="a", instructions="be", tools=[agents.function_tool(add)])
    async with visiting(ADDS, "10.", "on.") as visit:
        config = run_config(agents, visit)
        first = await agents.Runner.run(agent, "hi", run_config=config, auto_previous_response_id=True)
        await agents.Runner.run(agent, "more", run_config=config, previous_response_id=first.last_response_id)
        assert trained_on(visit) == joined(ADDS, "10.", "on.")


def pydantic_models(visit: Visit) -> dict[str, Any]:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.anthropic import AnthropicModel  # pyright: ignore[reportMissingImports]
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # pyright: ignore[reportMissingImports]
    from pydantic_ai.providers.anthropic import AnthropicProvider  # pyright: ignore[reportMissingImports]
    from pydantic_ai.providers.openai import OpenAIProvider  # pyright: ignore[reportMissingImports]

    openai = OpenAIProvider(base_url=visit.endpoint.base_url, api_key="x")
    anthropic = AnthropicProvider(base_url=visit.endpoint.root_url, api_key="x")
    return {
        "chat": OpenAIChatModel("policy", provider=openai),
        "responses": OpenAIResponsesModel("policy", provider=openai),
        "messages": AnthropicModel("claude-sonnet-4-5", provider=anthropic),  # formats need a name that it knows
    }


APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])


@APIS
async def test_pydantic_ai(api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    async with visiting(ADDS, "10.", "on.") as visit:
        agent = pydantic_ai.Agent(pydantic_models(visit)[api], system_prompt="be", tools=[add])
        first = await agent.run("hi")
        assert first.output == "10"
        async with agent.run_stream("more", message_history=first.all_messages()) as stream:
            assert await stream.get_output() == "on"
        assert trained_on(visit) == joined(ADDS, "10.", "on.")
    async with visiting("1.", "2.", "3.", "4.") as visit:
        agent = pydantic_ai.Agent(pydantic_models(visit)[api])
        results = await asyncio.gather(*(agent.run(f"q{n}") for n in range(4)))
        assert sorted(result.output for result in results) == ["1", "2", "3", "4"]


@APIS
async def test_pydantic_ai_with_a_type_that_is_a_tool(api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    replies = [ADDS, "ten.", f"{call('final_result', total=10)}."]
    async with visiting(*replies) as visit:
        agent = pydantic_ai.Agent(pydantic_models(visit)[api], output_type=Sum, tools=[add])
        assert (await agent.run("hi")).output == Sum(total=10)
        assert each_told(visit, "Your next reply must call a tool.", 3)
        assert trained_on(visit) == joined(*replies)


@APIS
async def test_pydantic_ai_with_a_type_that_is_a_format(api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    replies = ["ten.", '{"total": 10}.']
    async with visiting(*replies) as visit:
        model = pydantic_models(visit)[api]
        agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Sum))
        assert (await agent.run("hi")).output == Sum(total=10)
        assert each_told(visit, "Your next reply must be nothing but JSON of this schema: ", 2)
        assert trained_on(visit) == joined(*replies)


def langchain_models(visit: Visit) -> dict[str, Any]:
    openai = pytest.importorskip("langchain_openai")
    anthropic = pytest.importorskip("langchain_anthropic")
    url: dict[str, Any] = {"base_url": visit.endpoint.base_url, "api_key": "x", "model": "policy", "max_retries": 0}
    return {
        "chat": openai.ChatOpenAI(**url),
        "responses": openai.ChatOpenAI(**url, use_responses_api=True),
        "messages": anthropic.ChatAnthropic(**{**url, "base_url": visit.endpoint.root_url}),
    }


@APIS
async def test_langchain(api: str) -> None:
    langchain_agents = pytest.importorskip("langchain.agents")
    async with visiting(f"so: {ADDS}", "10.", "on.") as visit:
        model = langchain_models(visit)[api]
        agent = langchain_agents.create_agent(model, tools=[add], system_prompt="be")
        first = await agent.ainvoke({"messages": [("user", "hi")]})
        assert first["messages"][-1].text == "10"
        said: Sequence[Any] = [*first["messages"], ("user", "more")]
        parts = [part async for part in agent.astream({"messages": said}, stream_mode="messages")]
        assert "".join(message.text for message, _ in parts) == "on"
        assert trained_on(visit) == joined(f"so: {ADDS}", "10.", "on.")
    async with visiting("1.", "2.", "3.", "4.") as visit:
        results = await langchain_models(visit)[api].abatch([f"q{n}" for n in range(4)])
        assert sorted(result.text for result in results) == ["1", "2", "3", "4"]


METHODS = [(api, method) for api in ("chat", "responses", "messages") for method in ("json_schema", "function_calling")]


@pytest.mark.parametrize(("api", "method"), [*METHODS, ("chat", "json_mode"), ("responses", "json_mode")])
async def test_langchain_with_a_type(api: str, method: str) -> None:
    pytest.importorskip("langchain")
    reply = f"{call('Sum', total=10)}." if method == "function_calling" else '{"total": 10}.'
    told = {
        "json_schema": "JSON of this schema: ",
        "function_calling": "must call the tool Sum.",
        "json_mode": "one JSON",
    }
    async with visiting(reply) as visit:
        structured = langchain_models(visit)[api].with_structured_output(Sum, method=method)
        assert await structured.ainvoke("hi") == Sum(total=10)
        assert each_told(visit, told[method], 1)


async def test_langgraph() -> None:
    graph = pytest.importorskip("langgraph.graph")
    pytest.importorskip("langchain_openai")
    async with visiting("ab.", "on.") as visit:
        model = langchain_models(visit)["chat"]

        async def reply(state: Any) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        built = graph.StateGraph(graph.MessagesState).add_node("reply", reply).add_edge(graph.START, "reply").compile()
        first = await built.ainvoke({"messages": [("user", "hi")]})
        await built.ainvoke({"messages": [*first["messages"], ("user", "more")]})
        assert trained_on(visit) == joined("ab.", "on.")
