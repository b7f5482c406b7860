"""An OpenAI-compatible endpoint through which any program speaks to the policy, and is trained.

    program -> POST <base_url>/chat/completions -> Chat.reply -> engines        one secret base URL for each episode

The chat records every token that was sampled. The gateway keeps only the replies that it sent, to recognise them when
the program sends them back (`wire.SentReplies`). It listens on loopback only, in the event loop of its runner.

Served: `messages` of text, `tools`, `tool_choice` auto or none, `stream`, `max_tokens`, `logprobs`. A stream sends
comments while the reply is being sampled, then the whole reply. Sampling settings such as `temperature` are accepted
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

from aiohttp import web

from rlflow.envs.base import Endpoint
from rlflow.errors import EnvironmentFailure, NoReply, TemplateRefused, first_line
from rlflow.rollout.chat import Chat, Reply
from rlflow.rollout.gateway.wire import (
    ChatRequest,
    JsonObject,
    Refused,
    SentReplies,
    answer_of,
    read_request,
    shown_message,
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

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True, slots=True, eq=False)
class _Visit:
    """One episode's program at the gateway."""

    chat: Chat
    endpoint: Endpoint
    sent: SentReplies = field(default_factory=SentReplies)
    replies: set[asyncio.Task[Reply]] = field(default_factory=set)
    """Replies under way."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("gateway/requests", "gateway/refused", "gateway/abandoned", "gateway/sampling_ignored"), 0.0
        )
    )

    def count(self, name: str) -> None:
        self.metrics[f"gateway/{name}"] += 1

    def note_end(self, reply: asyncio.Task[Reply]) -> None:
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
        self._num_replies = 0
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        app.router.add_post("/{secret}/v1/chat/completions", self._complete)
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
        raise Refused(
            f"{request.method} {request.match_info['rest']} is not served; there are POST v1/chat/completions and "
            "GET v1/models",
            status=404,
            code="not_found",
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        visit = self._visit_of(request)
        visit.count("requests")
        try:
            asked = read_request(await request.read())
            if asked.ignored:
                visit.count("sampling_ignored")
            async with _reply_of(visit, asked) as reply:
                if asked.is_stream:
                    return await self._stream(request, visit, asked, reply)
                shown = await _shown_reply(visit, asked, reply)
            return web.json_response(answer_of(shown, reply.result().turn, asked, head=self._head())[0])
        except (Refused, web.HTTPException):
            visit.count("refused")
            raise
        except (asyncio.CancelledError, ConnectionError):
            visit.count("abandoned")
            raise

    async def _stream(
        self, request: web.Request, visit: _Visit, asked: ChatRequest, reply: asyncio.Task[Reply]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        # The status is sent with the first comment, so a reply that fails at once still gets a status of its own.
        while not (await asyncio.wait((reply,), timeout=self._keep_alive_s))[0]:
            await _write(request, response, ": the reply is being sampled\n\n")
        try:
            shown = await _shown_reply(visit, asked, reply)
        except Refused as refusal:
            if not response.prepared:
                raise
            visit.count("refused")
            await _write(request, response, _event(refusal.body()))
            return response
        chunks = answer_of(shown, reply.result().turn, asked, head=self._head())
        await _write(request, response, "".join(map(_event, chunks)) + "data: [DONE]\n\n")
        return response

    def _head(self) -> JsonObject:
        self._num_replies += 1
        return {"id": f"chatcmpl-{self._num_replies}", "created": int(time.time()), "model": MODEL}


@asynccontextmanager
async def _reply_of(visit: _Visit, asked: ChatRequest) -> AsyncIterator[asyncio.Task[Reply]]:
    """The task of the reply, which is cancelled at the end of the block."""
    if visit.chat.failure is not None:
        raise _refusal_of(visit.chat.failure, visit)
    if len(visit.replies) >= MAX_OPEN_REQUESTS:
        raise Refused(
            f"{MAX_OPEN_REQUESTS} requests of this episode are under way; wait for one of them",
            status=429,
            code="rate_limit_exceeded",
        )
    messages = visit.sent.resolve(asked.messages)
    reply = asyncio.create_task(
        visit.chat.reply(
            messages,
            asked.tools,
            agent=asked.agent,
            trainable=asked.is_trainable,
            max_new_tokens=asked.max_new_tokens,
        )
    )
    visit.replies.add(reply)
    reply.add_done_callback(visit.note_end)
    try:
        yield reply
    finally:
        reply.cancel()


async def _shown_reply(visit: _Visit, asked: ChatRequest, reply: asyncio.Task[Reply]) -> Message:
    """The message that the program is sent. Raises Refused if there is no reply."""
    await asyncio.wait((reply,))
    if reply.cancelled():
        raise Refused("the episode ended before the reply did", status=410, code="episode_ended")
    error = reply.exception()
    if error is not None:
        raise _refusal_of(error, visit) from error
    result = reply.result()
    shown = shown_message(result.message, result.turn)
    visit.sent.add(shown, result.message, len(asked.messages))
    return shown


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


def _event(body: JsonObject) -> str:
    return f"data: {json.dumps(body)}\n\n"
