"""The few paths of a Kubernetes API server that `rlflow submit` asks for, on loopback, with what a test puts there."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from kubernetes_schemas import Tree, check_crd, crds

TOKEN = "from-the-kubeconfig"
NAMESPACE = "research"
_RAYJOBS = "/apis/ray.io/v1/namespaces/research/rayjobs"
_CORE = "/api/v1/namespaces/research"
_WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1/namespaces/research/workloads"


@dataclass(kw_only=True, slots=True)
class Server:
    """State of the cluster, and what was asked of it."""

    has_kuberay: bool = True
    claims: dict[str, list[str]] = field(default_factory=lambda: {"rlflow": ["ReadWriteMany"]})
    secrets: set[str] = field(default_factory=set)
    rayjobs: dict[str, Tree] = field(default_factory=dict)
    steps: list[Callable[[Server], None]] = field(default_factory=list)
    """What happens to the cluster, one step for each time that the RayJob is watched."""
    pods: list[Tree] = field(default_factory=list)
    logs: dict[str, list[list[str]]] = field(default_factory=dict)
    """Pod -> what each request for its log gets; the last one again and again. A line `CUT` breaks it off."""
    refuse: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """(method, end of the path) -> status and message."""
    workloads: dict[str, Tree] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path, query."""
    accepted: list[str] = field(default_factory=list)
    """The Accept headers of requests for secrets."""
    port: int = 0

    def move_on(self) -> None:
        if self.steps:
            self.steps.pop(0)(self)

    def kubeconfig(self, folder: Path, namespace: str | None = NAMESPACE) -> Path:
        context = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
        path = folder / "kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "contexts": [{"name": "x", "context": context}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path


_SERVER = web.AppKey("server", Server)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(_application(server))

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _application(server: Server) -> web.Application:
    application = web.Application(middlewares=[_middleware(server)])
    application[_SERVER] = server
    application.add_routes(
        [
            web.get("/apis/ray.io/v1", _discover),
            web.get("/apis/kueue.x-k8s.io", _discover_kueue),
            web.get(_RAYJOBS, _watch),
            web.post(_RAYJOBS, _create),
            web.get(_RAYJOBS + "/{name}", _read),
            web.patch(_RAYJOBS + "/{name}", _patch),
            web.get(_CORE + "/persistentvolumeclaims/{name}", _claim),
            web.get(_CORE + "/secrets/{name}", _secret),
            web.get(_CORE + "/pods", _pods),
            web.get(_CORE + "/pods/{name}/log", _log),
            web.get(_WORKLOADS, _list_workloads),
            web.patch(_WORKLOADS + "/{name}", _patch_workload),
        ]
    )
    return application


def _middleware(server: Server) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        server.asked.append((request.method, request.path, dict(request.query)))
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(401, "Unauthorized")
        for (method, path), (status, message) in server.refuse.items():
            if request.method == method and request.path.endswith(path):
                return _error(status, message)
        return await handler(request)

    return check


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": status, "message": message}, status=status)


def _missing(what: str) -> web.Response:
    return _error(404, f"{what} not found")


async def _discover(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    if not server.has_kuberay:
        return web.Response(status=404, text="404 page not found")
    return web.json_response({"kind": "APIResourceList", "groupVersion": "ray.io/v1"})


async def _discover_kueue(request: web.Request) -> web.Response:
    return web.json_response({"kind": "APIGroup", "preferredVersion": {"version": "v1beta1"}})


async def _create(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    assert request.query["fieldValidation"] == "Strict"
    rayjob = await request.json()
    if (file := crds()) is not None:
        check_crd(rayjob, file)
    name = rayjob["metadata"]["name"]
    if name in server.rayjobs:
        return _error(409, f'rayjobs.ray.io "{name}" already exists')
    rayjob["metadata"] |= {"uid": "job-1", "resourceVersion": "1"}
    server.rayjobs[name] = rayjob
    return web.json_response(rayjob, status=201)


async def _read(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    name = request.match_info["name"]
    return web.json_response(server.rayjobs[name]) if name in server.rayjobs else _missing(name)


async def _patch(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    assert request.content_type == "application/merge-patch+json"
    rayjob = server.rayjobs[request.match_info["name"]]
    rayjob["spec"] |= (await request.json())["spec"]
    return web.json_response(rayjob)


async def _watch(request: web.Request) -> web.StreamResponse:
    server = request.app[_SERVER]
    assert request.query["watch"] == "true" and int(request.query["timeoutSeconds"]) > 0
    [rayjob] = server.rayjobs.values()
    assert request.query["resourceVersion"] == rayjob["metadata"]["resourceVersion"]
    assert request.query["fieldSelector"] == f"metadata.name={rayjob['metadata']['name']}"
    server.move_on()
    return await _stream(request, [json.dumps({"type": "MODIFIED", "object": rayjob})])


async def _claim(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    name = request.match_info["name"]
    if name not in server.claims:
        return _missing(name)
    return web.json_response({"kind": "PersistentVolumeClaim", "spec": {"accessModes": server.claims[name]}})


async def _secret(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    server.accepted.append(request.headers["Accept"])
    name = request.match_info["name"]
    return web.json_response({"kind": "PartialObjectMetadata"}) if name in server.secrets else _missing(name)


async def _pods(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    wanted = dict(part.split("=") for part in request.query["labelSelector"].split(","))
    found = [pod for pod in server.pods if wanted.items() <= pod["metadata"]["labels"].items()]
    return web.json_response({"kind": "PodList", "items": found})


async def _log(request: web.Request) -> web.StreamResponse:
    server = request.app[_SERVER]
    assert (request.query["follow"], request.query["timestamps"]) == ("true", "true")
    assert request.query["container"] == "ray-job-submitter"
    answers = server.logs[request.match_info["name"]]
    lines = answers.pop(0) if len(answers) > 1 else answers[0]
    if lines[-1:] == ["CUT"]:
        return await _stream(request, lines[:-1], cut=True)
    return await _stream(request, lines)


async def _stream(request: web.Request, lines: list[str], *, cut: bool = False) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write("".join(f"{line}\n" for line in lines).encode())
    if cut:
        assert request.transport is not None
        await response.write(b"2026-01-31T12:09:59Z half a li")
        request.transport.abort()
    else:
        await response.write_eof()
    return response


async def _list_workloads(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    assert request.query["labelSelector"] == "kueue.x-k8s.io/job-uid=job-1"
    return web.json_response(
        {"items": [{"metadata": {"name": name}} | found for name, found in server.workloads.items()]}
    )


async def _patch_workload(request: web.Request) -> web.Response:
    server = request.app[_SERVER]
    server.workloads[request.match_info["name"]] |= await request.json()
    return web.json_response({})
