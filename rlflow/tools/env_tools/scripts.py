"""Policies that follow a script, for trials of environments: no engine, but the real renderer and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlflow.envs.base import POLICY, EnvironmentSpec, ToolSchema
from rlflow.rollout.chat import Chat, Reply
from rlflow.rollout.limits import EpisodeLimits
from rlflow.rollout.render import Renderer
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.types import Message, Task

Script = Callable[[Task, Sequence[Message]], str]
"""(task, the conversation so far) -> the text of the next reply."""

NONSENSE = "I do not know."
BROKEN_CALL = '<tool_call>\n{"name": "no_such_tool", "arguments": {"x": \n</tool_call>'


def scripts_of(spec: EnvironmentSpec, tasks: Sequence[Task]) -> dict[str, Script]:
    """Name -> script: `expert` where there is one or tasks have answers, and two that should earn little."""
    scripts: dict[str, Script] = {
        "nonsense": lambda task, messages: NONSENSE,
        "broken call": lambda task, messages: BROKEN_CALL,
    }
    if spec.expert is not None:
        return {"expert": spec.expert, **scripts}
    if all(task.answer is not None for task in tasks):
        return {"expert": answer, **scripts}
    return scripts


def answer(task: Task, messages: Sequence[Message]) -> str:
    """The task's answer, all by itself."""
    assert task.answer is not None
    return task.answer


class ScriptedChat(Chat):
    """The policy says what the script says; other agents say `NONSENSE`."""

    def __init__(self, task: Task, script: Script, renderer: Renderer, limits: EpisodeLimits) -> None:
        super().__init__(self._complete, renderer, limits)
        self._task = task
        self._script = script
        self._scripted_renderer = renderer
        self._text = NONSENSE

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        agent: str = POLICY,
        trainable: bool = True,
        max_new_tokens: int | None = None,
    ) -> Reply:
        self._text = self._script(self._task, messages) if agent == POLICY else NONSENSE
        return await super().reply(messages, tools, agent=agent, trainable=trainable, max_new_tokens=max_new_tokens)

    async def _complete(self, request: GenerateRequest, /) -> Completion:
        ids = self._scripted_renderer.as_sampled(self._text)
        kept = ids[: request.max_new_tokens]
        return Completion(
            ids=kept,
            logprobs=[0.0] * len(kept),
            versions=[0] * len(kept),
            finish_reason="stop" if len(kept) == len(ids) else "length",
        )
