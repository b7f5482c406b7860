"""An environment behind an OpenEnv server; each episode has a session of its own.

The server's schema of actions decides what a reply becomes: one text, the arguments of a tool `act`, or a call of one
of the server's own (MCP) tools.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlflow.envs.base import Environment, EnvironmentSpec, Prompt, Step, ToolSchema
from rlflow.envs.callables import load_callable
from rlflow.envs.openenv.session import ActionRefused, Answer, OpenEnvError, Session, action_schema
from rlflow.envs.seeds import seeded_tasks, variant_tasks
from rlflow.envs.texts import answer_part, json_object, prompt_of, text_of, with_observation
from rlflow.errors import ConfigError
from rlflow.types import Json, Message, Task, ToolCall

ACT = "act"


@dataclass(kw_only=True, slots=True, frozen=True)
class ActionForm:
    """What an action consists of. If both are None, an action is a call of one of the server's own tools."""

    text_field: str | None = None
    """The reply is this field."""
    parameters: dict[str, Json] | None = None
    """JSON schema of the tool `act`, whose arguments are the action."""


def load(
    url: str | Sequence[str],
    sessions: int = 1,
    variants: Sequence[Mapping[str, Json]] = (),
    instructions: str = "Reply with your action.",
    system_prompt: str = "",
    observation_to_text: str | None = None,
    message_timeout_s: float = 60.0,
    size: int = 1000,
    seed: int = 0,
    evaluation_size: int = 64,
) -> EnvironmentSpec:
    """An OpenEnv environment; a task is a seed of it.

    url: of the server, such as http://127.0.0.1:8000, or of several that serve the same environment.
    sessions: at the same time at each server; at most its max_concurrent_envs. Further episodes wait for one.
    variants: further arguments of `reset`, that tasks take in turn.
    instructions: shown before the first observation.
    observation_to_text: path of a function from an observation, a dict, to a text; None: its only text, else JSON.
    message_timeout_s: for the answer to one message.
    size, seed: how many tasks, and which; evaluation_size: number of tasks for `eval.every`, from other seeds.
    """
    urls = [each.rstrip("/") for each in ([url] if isinstance(url, str) else url)]
    if not urls or sessions < 1 or message_timeout_s <= 0:
        raise ConfigError("env.args of openenv need a url, and positive sessions and message_timeout_s")
    forms = [form_of(action_schema(each)) for each in urls]
    if any(form != forms[0] for form in forms):
        raise ConfigError(f"the servers of env.args.url take different actions; give one environment; got {urls}")
    if observation_to_text is not None:
        load_callable("observation_to_text", observation_to_text)
    prompt = prompt_of(system_prompt, instructions)
    make = partial(variant_tasks, "openenv", prompt, "reset", [dict(each) for each in variants])
    tasks, evaluation_tasks = seeded_tasks(make, size, seed, evaluation_size)
    build: Any = partial(OpenEnv, form=forms[0], to_text=observation_to_text, timeout_s=message_timeout_s)
    return EnvironmentSpec(
        tasks=tasks,
        build=build,
        evaluation_tasks=evaluation_tasks,
        leases=tuple(f"{each}#{number}" for number in range(sessions) for each in urls),
    )


def form_of(schema: Mapping[str, Any]) -> ActionForm:
    """The form of the actions that a JSON schema describes.

    Example: properties {"message": {"type": "string"}} -> ActionForm(text_field="message")
    """
    fields = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    if not fields or {"tool_name", "arguments"} <= set(fields):
        return ActionForm()
    required = [name for name in schema.get("required", fields) if name in fields]
    if len(required) == 1 and fields[required[0]].get("type") == "string":
        return ActionForm(text_field=required[0])
    parameters = {name: value for name, value in schema.items() if name in ("type", "required", "$defs")}
    return ActionForm(parameters={"type": "object", **parameters, "properties": fields})


class OpenEnv(Environment):
    """One session. `lease` is "<url>#<number of the session>"."""

    def __init__(self, lease: str, *, form: ActionForm, to_text: str | None, timeout_s: float) -> None:
        self._session = Session(lease.rpartition("#")[0], timeout_s)
        self._form = form
        self._to_text = observation_text if to_text is None else load_callable("observation_to_text", to_text)
        self._tool_names: set[str] = set()

    async def reset(self, task: Task) -> Prompt:
        seed, data = task.data["seed"], task.data["reset"]
        assert isinstance(data, dict)
        answer = await self._session.reset({"seed": seed, **data})
        if answer.done:
            raise OpenEnvError("the episode was over before the policy's first action")
        tools: list[ToolSchema] = []
        if self._form.parameters is not None:
            tools = [_tool(ACT, "Act in the environment.", self._form.parameters)]
            self._tool_names = {ACT}
        elif self._form.text_field is None:
            listed = (await self._session.step({"type": "list_tools"})).observation.get("tools") or []
            self._tool_names = {each["name"] for each in listed}
            empty: dict[str, Json] = {"type": "object", "properties": {}}
            for each in listed:
                schema = each.get("input_schema") or empty
                tools.append(_tool(each["name"], each.get("description") or "", schema))
        return Prompt(messages=with_observation(task.prompt, await self._text(answer)), tools=tools)

    async def step(self, reply: Message) -> Step:
        calls = reply.get("tool_calls")
        if self._form.text_field is not None:
            return await self._act({self._form.text_field: answer_part(reply)}, None)
        if calls:
            return await self._answer_calls(calls)
        if self._form.parameters is None:
            return Step(done=True)
        problem = Message(role="user", content=f"Your reply has no action. Call the tool {ACT}.")
        return Step(messages=[problem], metrics={"openenv/not_an_action": 1.0})

    async def close(self) -> None:
        await self._session.close()

    async def _answer_calls(self, calls: Sequence[ToolCall]) -> Step:
        """The calls in their order, as far as the first that ends the episode."""
        total = Step()
        for call in calls:
            step = await self._answer_call(call)
            total.messages += step.messages
            total.done = step.done
            if step.reward is not None:
                total.reward = (total.reward or 0.0) + step.reward
            for name, value in step.metrics.items():
                total.metrics[name] = total.metrics.get(name, 0.0) + value
            if step.done:
                total.messages = []
                break
        return total

    async def _answer_call(self, call: ToolCall) -> Step:
        name = call["function"]["name"]
        try:
            if name not in self._tool_names:
                raise ActionRefused(f"there is no tool {name}; there are: {', '.join(sorted(self._tool_names))}")
            arguments = json_object(call["function"]["arguments"] or "{}")
        except ValueError as error:
            return _refused(str(error), call)
        if self._form.parameters is not None:
            return await self._act(arguments, call)
        return await self._act({"type": "call_tool", "tool_name": name, "arguments": arguments}, call)

    async def _act(self, action: Mapping[str, Json], call: ToolCall | None) -> Step:
        try:
            answer = await self._session.step(action)
        except ActionRefused as error:
            return _refused(str(error), call)
        messages = [] if answer.done else [_message(await self._text(answer), call)]
        return Step(messages=messages, done=answer.done, reward=answer.reward, metrics={"openenv/actions": 1.0})

    async def _text(self, answer: Answer) -> str:
        return str(await asyncio.to_thread(self._to_text, answer.observation))


def observation_text(observation: Mapping[str, Any]) -> str:
    """The only text of an observation, else its fields as JSON; fields that are null or empty do not count.

    For a tool of the server: the error, or what the tool returned.

    Example: observation_text({"text": "You are in a cave.", "image": None}) == "You are in a cave."
    """
    if not {"tool_name", "result"} <= observation.keys():
        fields = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
        values = list(fields.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else text_of(fields)
    error, result = observation.get("error"), observation["result"]
    if error:
        return text_of({"error": error})
    if not isinstance(result, Mapping):
        return text_of(result)
    if result.get("data") is not None:
        return text_of(result["data"])
    texts = [part["text"] for part in result.get("content") or () if isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else text_of(dict(result))


def _refused(problem: str, call: ToolCall | None) -> Step:
    message = _message(text_of({"error": problem}), call)
    return Step(messages=[message], metrics={"openenv/not_an_action": 1.0})


def _message(text: str, call: ToolCall | None) -> Message:
    if call is None:
        return Message(role="user", content=text)
    return Message(role="tool", content=text, tool_call_id=call["id"], name=call["function"]["name"])


def _tool(name: str, description: str, parameters: dict[str, Json]) -> ToolSchema:
    function: dict[str, Json] = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
