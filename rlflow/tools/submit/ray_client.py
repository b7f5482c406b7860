"""Ray's job API over HTTP, with a deadline for each request and errors that a person can act on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import aiohttp
import requests
from ray.dashboard.modules import dashboard_sdk
from ray.dashboard.modules.job import sdk
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from rlflow.errors import ConfigError, RunError, first_line
from rlflow.runtime.environment import variables
from rlflow.tools.submit.command_words import MaybeStarted

CONNECT_S = 10.0
ANSWER_S = 120.0
"""An upload of some hundred megabytes is answered when it is stored."""
UNREACHABLE = (ConnectionError, requests.RequestException, aiohttp.ClientError, TimeoutError)
"""Errors that say nothing about a job."""
_OTHER_ADDRESSES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Ray's client prefers what the environment says to the address that it is given."""


class UnknownJob(RunError):
    """The cluster has no job of that name."""


class JobClient(JobSubmissionClient):
    """Ray's own waits for an answer for as long as it takes."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        starts_job = (method, endpoint) == ("POST", "/api/jobs/")
        try:
            response = super()._do_request(method, endpoint, timeout=(CONNECT_S, ANSWER_S), **options)
        except UNREACHABLE as error:
            if starts_job:
                raise MaybeStarted(f"the cluster at {self._address} did not answer: {first_line(error)}") from error
            raise
        if starts_job and response.status_code >= 500:
            raise MaybeStarted(f"the cluster at {self._address} answers {response.status_code}: {_reason(response)}")
        if response.status_code == 404 and endpoint.startswith("/api/jobs/"):
            raise UnknownJob(f"the cluster at {self._address} has no job {endpoint.split('/')[3]}")
        return response

    def _raise_error(self, r: requests.Response) -> NoReturn:
        if r.status_code >= 500:  # such as no agent that answers yet, or any more
            raise ConnectionError(f"the cluster at {self._address} answers {r.status_code}: {_reason(r)}")
        raise RunError(f"the cluster at {self._address} refuses: {_reason(r)}")


def _reason(response: requests.Response) -> str:
    return (response.text.strip().splitlines()[-1:] or [response.reason])[0]


def open_client(address: str) -> JobClient:
    """Raises ConfigError when no Ray dashboard answers at http(s)://host:port, or none that lets us in."""
    for chatty in (sdk, dashboard_sdk):
        chatty.logger.setLevel(logging.WARNING)
    with understood(address), variables(dict.fromkeys(_OTHER_ADDRESSES)):
        try:
            return JobClient(address)
        except RuntimeError as error:  # something answers, and has no job API
            raise ConnectionError(str(error)) from error


@contextmanager
def understood(address: str) -> Iterator[None]:
    """Make ConfigErrors of what is wrong between here and the cluster."""
    try:
        yield
    except AuthenticationError as error:
        none_sent = str(error).startswith("Authentication required")
        found = "none was sent" if none_sent else "it does not take the one that was found here"
        raise ConfigError(
            f"the cluster at {address} asks for a token, and {found}; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN (or "
            "~/.ray/auth_token) to what `ray get-auth-token` prints on its head"
        ) from error
    except UNREACHABLE as error:
        raise ConfigError(
            f"cluster.address is {address}, but no Ray dashboard answers there: {error}; give the address that "
            "`ray start --head` prints for its dashboard, or forward its port: ssh -L 8265:127.0.0.1:8265 HEAD"
        ) from error
