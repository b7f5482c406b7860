"""The endpoint through which any program speaks to the policy, and is trained.

    program -> POST <base_url>/chat/completions -> Api.read -> Chat.reply -> Api.answer      one secret URL an episode
                              /responses
                              /messages

The chat records every token that was sampled. The gateway keeps only the replies that it sent, to recognise them when
the program sends them back (`sent.SentReplies`). It listens on loopback only, in the event loop of its runner.

Served: text, tools, and what the three APIs say of them. A stream sends comments while the reply is being sampled, then
the whole reply as events.

Replies are not constrained, because a constrained token has another distribution than the policy's, which is what is
trained. A forced call (`tool_choice`) or a format (`response_format`) becomes a sentence at the end of the last
message; a reply that does otherwise is the policy's mistake, and the program sees it. A stop string cuts a reply that
was sampled in whole. Each of `n` replies is a sample of its own. Sampling settings such as `temperature` are accepted
and counted without effect, because training needs the run's own. A model named `untrained/judge` is the policy as
another agent, which is not trained on. Anything else is refused with status 400 and the reason.
"""

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from rlflow.envs.base import Endpoint
from rlflow.errors import EnvironmentFailure, NoReply, TemplateRefused, first_line
from rlflow.rollout.chat import Chat, Reply
from rlflow.rollout.gateway.anthropic import MESSAGES
from rlflow.rollout.gateway.completions import COMPLETIONS
from rlflow.rollout.gateway.responses import RESPONSES
from rlflow.rollout.gateway.sent import SentReplies
from rlflow.rollout.gateway.wire import (
    Answered,
    Api,
    ChatRequest,
    JsonObject,
    Refused,
    event,
    excerpt,
    instructed,
    shown_reply,
)
from rlflow.runtime.deadlines import within
from rlflow.types import EpisodeEnd, Message

HOST = "127.0.0.1"
MODEL = "policy"
"""The name that the endpoint lists. Any other name means the same, unless it begins with `UNTRAINED`."""
MAX_BODY_BYTES = 8 * 2**20
MAX_OPEN_REQUESTS = 128
"""Requests of one episode at a time; further ones get status 429, after which clients try again."""
MAX_CLOSED = 4096
"""Ended episodes that are remembered, so that their programs are told that the episode has ended."""
KEEP_ALIVE_S = 10.0
"""Seconds between the comments of a stream that waits for its reply."""
STOP_TIMEOUT_S = 10.0

APIS = {"chat/completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
"""Path below the base URL -> what it speaks."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True, slots=True, eq=False)
class _Visit:
    """One episode's program at the gateway."""

    chat: Chat
    endpoint: Endpoint
    sent: SentReplies = field(default_factory=SentReplies)
    remembered: dict[str, list[Message]] = field(default_factory=dict)
    """The id of an answer -> its conversation. The limits of the episode bound both."""
    replies: set[asyncio.Task[list[Reply]]] = field(default_factory=set)
    """Replies under way, of each request."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("gateway/requests", "gateway/refused", "gateway/abandoned", "gateway/sampling_ignored"), 0.0
        )
    )

    def count(self, name: str) -> None:
        self.metrics[f"gateway/{name}"] += 1

    def note_end(self, reply: asyncio.Task[list[Reply]]) -> None:
        self.replies.discard(reply)
        error = None if reply.cancelled() else reply.exception()
        if error is not None and not isinstance(error, NoReply | TemplateRefused | EnvironmentFailure):
            self.failed.set()


class Gateway:
    """The endpoint of one episode runner; `start` it in the event loop that its chats run in."""

    def __init__(self, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._keep_alive_s = keep_alive_s
        self._visits: dict[str, _Visit] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._num_answers = 0
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        for path, api in APIS.items():
            app.router.add_post(f"/{{secret}}/v1/{path}", partial(self._serve, api))
        app.router.add_post("/{secret}/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/{secret}/v1/models", self._models)
        app.router.add_route("*", "/{secret}/{rest:.*}", self._unknown)
        # A client that hangs up cancels its handler and so the sampling. No access log, because URLs hold the secrets.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        self._starting = asyncio.Lock()
        self._address = ""

    async def start(self) -> None:
        """Listen on a free port of the loopback interface; does nothing the second time."""
        async with self._starting:
            if self._address:
                return
            await self._runner.setup()
            await web.TCPSite(self._runner, HOST, 0, backlog=1024).start()
            self._address = f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening, and cancel the replies under way."""
        for visit in list(self._visits.values()):
            self.close(visit.endpoint)
        await within("stop of the gateway", STOP_TIMEOUT_S, self._runner.cleanup())

    def open(self, chat: Chat) -> Endpoint:
        """A base URL through which one program speaks to `chat`, until `close`."""
        assert self._address, "start the gateway first"
        base_url = f"{self._address}/{secrets.token_urlsafe(24)}/v1"
        endpoint = Endpoint(base_url=base_url, api_key="unused", model=MODEL)
        self._visits[base_url] = _Visit(chat=chat, endpoint=endpoint)
        return endpoint

    def close(self, endpoint: Endpoint) -> dict[str, float]:
        """End the program's access: replies under way are cancelled, and no more are recorded.

        Returns metrics: the number of requests, and how many of them were refused, were abandoned by the program before
        they were answered, or asked for sampling settings of their own.
        """
        visit = self._visits.pop(endpoint.base_url, None)
        if visit is None:  # the gateway has stopped
            return {}
        self._closed[endpoint.base_url] = None
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        for reply in visit.replies:
            reply.cancel()
        return visit.metrics

    async def wait_until_failed(self, endpoint: Endpoint) -> None:
        """Returns when a reply failed for a reason that is not the program's; `chat.failure` holds it.

        Nothing that the program does from then on can make the episode whole.
        """
        await self._visits[endpoint.base_url].failed.wait()

    def _visit_of(self, request: web.Request) -> _Visit:
        base_url = f"{self._address}/{request.match_info['secret']}/v1"
        if base_url in self._visits:
            return self._visits[base_url]
        if base_url in self._closed:
            raise Refused("the episode of this URL has ended", status=410, code="episode_ended")
        raise Refused("no episode has this URL", status=404, code="not_found")

    async def _models(self, request: web.Request) -> web.Response:
        self._visit_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlflow"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown(self, request: web.Request) -> web.Response:
        self._visit_of(request)
        rest = request.match_info["rest"]
        cure = "; leave /v1 out of the base URL of a package that adds it" if rest.startswith("v1/v1/") else ""
        raise Refused(
            f"{request.method} {rest} is not served; there are GET v1/models and POST "
            f"{', '.join(f'v1/{path}' for path in APIS)}{cure}",
            status=404,
            code="not_found",
        )

    async def _count_tokens(self, request: web.Request) -> web.Response:
        visit = self._visit_of(request)
        asked = MESSAGES.read(await _fields_of(request), visit.remembered)
        try:
            count = await visit.chat.count(_resolved(visit, asked), asked.tools)
        except TemplateRefused as error:
            raise _refusal_of(error, visit) from error
        return web.json_response({"input_tokens": count})

    async def _serve(self, api: Api, request: web.Request) -> web.StreamResponse:
        visit = self._visit_of(request)
        visit.count("requests")
        try:
            asked = api.read(await _fields_of(request), visit.remembered)
            if asked.ignored:
                visit.count("sampling_ignored")
            async with _replies_to(visit, asked) as replies:
                if asked.is_stream:
                    return await self._stream(request, visit, api, asked, replies)
                await asyncio.wait((replies,))
            return web.json_response(self._answer(visit, api, asked, replies))
        except (Refused, web.HTTPException):
            visit.count("refused")
            raise
        except (asyncio.CancelledError, ConnectionError):
            visit.count("abandoned")
            raise

    async def _stream(
        self,
        request: web.Request,
        visit: _Visit,
        api: Api,
        asked: ChatRequest,
        replies: asyncio.Task[list[Reply]],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        # The status is sent with the first comment, so a reply that fails at once still gets a status of its own.
        while not (await asyncio.wait((replies,), timeout=self._keep_alive_s))[0]:
            await _write(request, response, ": the reply is being sampled\n\n")
        try:
            answer = self._answer(visit, api, asked, replies)
        except Refused as refusal:
            if not response.prepared:
                raise
            visit.count("refused")
            await _write(request, response, event(refusal.body(), "error"))
            return response
        await _write(request, response, api.stream(answer, asked))
        return response

    def _answer(self, visit: _Visit, api: Api, asked: ChatRequest, replies: asyncio.Task[list[Reply]]) -> JsonObject:
        """What the program is sent for replies that have ended. Raises Refused if there is none."""
        if replies.cancelled():
            raise Refused("the episode ended before the reply did", status=410, code="episode_ended")
        error = replies.exception()
        if error is not None:
            raise _refusal_of(error, visit) from error
        shown = [shown_reply(reply.message, reply.turn, asked) for reply in replies.result()]
        for each, reply in zip(shown, replies.result(), strict=True):
            visit.sent.add(each.message, reply.message, asked)
        self._num_answers += 1
        answer = api.answer(
            Answered(request=asked, shown=shown, number=self._num_answers, created_s=int(time.time()), model=MODEL)
        )
        if asked.kept is not None:
            visit.remembered[answer["id"]] = [*asked.kept, shown[0].message]
        return answer


async def _fields_of(request: web.Request) -> JsonObject:
    try:
        fields = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refused(f"the body must be a JSON object; got {excerpt(fields)}")
    return fields


def _resolved(visit: _Visit, asked: ChatRequest) -> list[Message]:
    """The conversation as the chat knows it."""
    return instructed(visit.sent.resolve(asked.messages), asked.instruction)


@asynccontextmanager
async def _replies_to(visit: _Visit, asked: ChatRequest) -> AsyncIterator[asyncio.Task[list[Reply]]]:
    """The task of the replies, which is cancelled at the end of the block."""
    if visit.chat.failure is not None:
        raise _refusal_of(visit.chat.failure, visit)
    if len(visit.replies) >= MAX_OPEN_REQUESTS:
        raise Refused(
            f"{MAX_OPEN_REQUESTS} requests of this episode are under way; wait for one of them",
            status=429,
            code="rate_limit_exceeded",
        )
    if not asked.template_args.items() <= visit.chat.template_args.items():
        raise Refused(
            f"`chat_template_kwargs` = {excerpt(asked.template_args)} is not what the run tells the template, "
            f"{excerpt(visit.chat.template_args)}; set rollout.template_args for the whole run",
            param="chat_template_kwargs",
        )
    if asked.num_replies > 1 and asked.is_trainable and not visit.chat.has_room_for(asked.num_replies):
        raise Refused(f"`n` = {asked.num_replies} is more than the replies that env.max_turns leaves", param="n")
    replies = asyncio.create_task(_sample(visit.chat, asked, _resolved(visit, asked)))
    visit.replies.add(replies)
    replies.add_done_callback(visit.note_end)
    try:
        yield replies
    finally:
        replies.cancel()


async def _sample(chat: Chat, asked: ChatRequest, messages: list[Message]) -> list[Reply]:
    """All replies; if one fails, the others are cancelled."""
    replies = [
        asyncio.create_task(
            chat.reply(
                messages,
                asked.tools,
                agent=asked.agent,
                trainable=asked.is_trainable,
                max_new_tokens=asked.max_new_tokens,
                stop=asked.stop,
            )
        )
        for _ in range(asked.num_replies)
    ]
    try:
        return await asyncio.gather(*replies)
    finally:
        for reply in replies:
            reply.cancel()


def _refusal_of(error: BaseException, visit: _Visit) -> Refused:
    if isinstance(error, TemplateRefused | EnvironmentFailure):  # the latter for a text that spells an image's token
        return Refused(str(error), code="template_refused", param="messages")
    if not isinstance(error, NoReply):
        return Refused(f"the policy cannot reply: {first_line(error)}", status=503, code="engine_failure")
    is_full = visit.chat.end in (EpisodeEnd.TRUNCATED_LENGTH, EpisodeEnd.PROMPT_TOO_LONG)
    code = "context_length_exceeded" if is_full else str(visit.chat.end)
    return Refused(f"the policy may not reply: {error}", code=code, param="messages")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refusal:
        # A client should try again only if the next attempt can succeed.
        retry = {"x-should-retry": "true" if refusal.status == 429 else "false"}
        return web.json_response(refusal.body(), status=refusal.status, headers=retry)
    except web.HTTPException as error:
        return web.json_response(Refused(error.text or error.reason, code="not_served").body(), status=error.status)


async def _write(request: web.Request, response: web.StreamResponse, text: str) -> None:
    if not response.prepared:
        await response.prepare(request)
    await response.write(text.encode())
