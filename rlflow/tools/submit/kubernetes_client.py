"""Requests to a Kubernetes API server, with the address and the credentials of the user's kubeconfig."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlflow.errors import ConfigError, RunError

_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 60
_TRIES = 8
"""Of a request that reads: with the pauses between them about two minutes in all."""
_PAUSE_SECONDS = 30
"""The longest."""
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

Answer = dict[str, Any]


class Refused(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"the API server said {self.status}: {self.message}"


class Unreachable(RunError):
    """No answer of the API server, or its end came too early."""


class Client:
    """Raises Refused for what the API server refuses, Unreachable when it cannot be reached."""

    def __init__(self) -> None:
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise ConfigError(
                "cluster=kuberay needs the package kubernetes; pip install rlflow[kubernetes], or hand kubectl what "
                "--dry-run prints"
            ) from error
        from urllib3.util import Retry

        path = os.environ.get("KUBECONFIG") or "~/.kube/config"
        settings = client.Configuration()
        settings.retries = Retry(
            _TRIES, allowed_methods=["GET"], status_forcelist=(429, 502, 503, 504), backoff_factor=1,
            backoff_max=_PAUSE_SECONDS, raise_on_status=False,
        )  # fmt: skip
        try:
            config.load_kube_config(config_file=path, client_configuration=settings)
            _, context = config.list_kube_config_contexts(path)
        except config.ConfigException as error:
            raise ConfigError(
                f"the kubeconfig {path} does not say how to reach a cluster: {error}; set KUBECONFIG, or try kubectl "
                "get pods"
            ) from error
        self.namespace: str = context["context"].get("namespace") or "default"
        self._api = client.ApiClient(settings)

    def get(self, path: str, query: Mapping[str, str] | None = None, *, only_metadata: bool = False) -> Answer:
        return self._json("GET", path, query, accept=_METADATA_ONLY if only_metadata else "application/json")

    def post(self, path: str, body: Answer, query: Mapping[str, str]) -> Answer:
        return self._json("POST", path, query, body, "application/json")

    def patch(self, path: str, body: Answer) -> Answer:
        """Merge `body` into the object there."""
        return self._json("PATCH", path, None, body, "application/merge-patch+json")

    @contextmanager
    def stream(self, path: str, query: Mapping[str, str], *, silent_s: float) -> Iterator[Iterator[str]]:
        """Lines as they come; Unreachable when none comes for `silent_s`."""
        with _reachable():
            response = self._request("GET", path, query, None, {"Accept": "*/*"}, silent_s)
            try:
                _check(response)
                yield _lines(response)
            finally:
                response.close()

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Answer | None = None,
        content: str | None = None,
        accept: str = "application/json",
    ) -> Answer:
        headers = {"Accept": accept} | ({"Content-Type": content} if content else {})
        with _reachable():
            response = self._request(method, path, query, body, headers, _ANSWER_SECONDS)
            _check(response)
            return json.loads(response.data)

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Answer | None,
        headers: dict[str, str],
        answer_s: float,
    ) -> Any:
        request = self._api.param_serialize(
            method, path, query_params=list((query or {}).items()), header_params=headers, body=body,
            auth_settings=["BearerToken"],
        )  # fmt: skip
        answer = self._api.call_api(*request, _request_timeout=(_CONNECT_SECONDS, answer_s))
        return answer.response  # urllib3's; nothing of it is read yet


@contextmanager
def _reachable() -> Iterator[None]:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except HTTPError as error:
        raise Unreachable(f"the API server cannot be reached: {error}") from error
    except ApiException as error:  # it stands for a certificate that does not fit
        raise Unreachable(f"the API server cannot be reached: {error.reason}") from error


def _check(response: Any) -> None:
    if response.status < 400:
        return
    text = response.data.decode(errors="replace")
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):  # not the API server itself but something before it
        message = text[:500]
    raise Refused(response.status, message)


def _lines(response: Any) -> Iterator[str]:
    """Whole lines, without their ends; what a broken connection leaves of one is left out."""
    rest = b""
    for part in response.stream(None, decode_content=False):
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
