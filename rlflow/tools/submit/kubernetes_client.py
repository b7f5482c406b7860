"""Requests to a Kubernetes API server, with the address and the credentials of the user's kubeconfig.

The official client makes the requests; answers stay plain JSON, because a server may be older or newer than its models.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlflow.errors import ConfigError, RunError

_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 60
_TRIES = 8
"""How often a request that reads is tried: with the pauses in between, for about two minutes."""
_PAUSE_SECONDS = 30
"""The longest pause between two tries."""

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
    """The API server did not answer, or its answer broke off."""


class Client:
    """Raises Refused for what the API server refuses, Unreachable when it cannot be reached.

    The methods of `core` (pods, claims, secrets) and `objects` (RayJobs, Workloads) are called through `ask`.
    """

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
        self.core, self.objects = client.CoreV1Api(self._api), client.CustomObjectsApi(self._api)

    def ask(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Answer:
        """The answer to a method of `core` or `objects`."""
        timeouts = (_CONNECT_SECONDS, _ANSWER_SECONDS)
        with _reachable():
            response = method(*arguments, _preload_content=False, _request_timeout=timeouts, **options)
            return json.loads(_checked(response).data)

    def get(self, path: str) -> Answer:
        """The answer at a path that no method of `core` or `objects` asks for."""
        with _reachable():
            return json.loads(_checked(self._request(path, {}, "application/json", _ANSWER_SECONDS)).data)

    @contextmanager
    def lines(self, path: str, query: Mapping[str, str], *, silent_s: float) -> Iterator[Iterator[str]]:
        """Whole lines as they come, without their ends; Unreachable when none comes for `silent_s`.

        Not `read_namespaced_pod_log`, which does not know sinceTime: a log could not go on where it broke off.
        """
        from kubernetes.watch.watch import iter_resp_lines

        with _reachable():
            response = self._request(path, query, "*/*", silent_s)
            try:
                yield iter_resp_lines(_checked(response))
            finally:
                response.close()

    def wait_for_change(self, kind: tuple[str, str, str, str], name: str, version: str, seconds: int) -> None:
        """Return when the custom object differs from its resource version, or after `seconds`."""
        from kubernetes.watch import Watch

        with _reachable():
            events = Watch().stream(
                self.objects.list_namespaced_custom_object, *kind, field_selector=f"metadata.name={name}",
                resource_version=version, timeout_seconds=seconds, _request_timeout=(_CONNECT_SECONDS, seconds + 10),
            )  # fmt: skip
            try:
                next(events, None)
            finally:
                events.close()

    def _request(self, path: str, query: Mapping[str, str], accept: str, answer_s: float) -> Any:
        request = self._api.param_serialize(
            "GET", path, query_params=list(query.items()), header_params={"Accept": accept},
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
    except ApiException as error:
        if not error.status:  # a certificate that does not fit
            raise Unreachable(f"the API server cannot be reached: {error.reason}") from error
        raise Refused(error.status, _message(error)) from error


def _checked(response: Any) -> Any:
    from kubernetes.client.exceptions import ApiException

    if response.status >= 400:
        raise ApiException(http_resp=response)
    return response


def _message(error: Any) -> str:
    text = error.body or str(error.reason)
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):  # not from the API server itself but from something before it
        return text[:500]
