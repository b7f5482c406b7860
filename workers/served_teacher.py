"""A teacher behind a URL as a Ray actor: it asks the server what a `FrozenWorker` would compute.

    payloads -> token ids of each sample -> server -> [L] for each sample -> a handle for each payload

Groups are asked about side by side, each on a thread of the actor; one event loop has all connections.
"""

import asyncio
import threading
import time

import numpy as np
import ray

from rlflow.algorithms.distillation import teacher_options
from rlflow.config import Config
from rlflow.errors import TeacherLost
from rlflow.runtime.asking import NoAnswer
from rlflow.runtime.concurrency import all_or_none
from rlflow.types import EpisodePayload, FloatArray, PayloadRef, Sample
from rlflow.workers.served import ServedModel

GROUPS_AT_ONCE = 64
"""Calls that the actor takes at once; further ones wait."""
SHARE_OF_TIME = 0.9
"""The share of deadlines.train_s in which the server is asked; the rest is for saying what went wrong."""


class ServedTeacher:
    """Wrapped by `ray.remote`, with `GROUPS_AT_ONCE` threads; called like a `FrozenWorker` that is the only rank."""

    def __init__(self, config: Config, url: str, setting: str) -> None:
        self._config, self._url, self._setting = config, url, setting
        self._loop = asyncio.new_event_loop()

    def rendezvous(self) -> str:
        """Nobody is met."""
        return ""

    def start(self, rendezvous: str) -> str:
        """Returns where the teacher is. Raises ConfigError without the key, TeacherLost if the server is away."""
        del rendezvous
        threading.Thread(target=self._loop.run_forever, name="server", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> str:
        self._model = await ServedModel(self._url, teacher_options(self._config.teacher)).__aenter__()
        try:
            return f"{await self._model.find_name(self._config.deadlines.start_s * SHARE_OF_TIME)} at {self._url}"
        except NoAnswer as error:
            raise self._lost(error) from error

    def logprobs(self, handles: list[PayloadRef]) -> tuple[object, ...]:
        """As `FrozenWorker.logprobs`. Raises TeacherLost if the server does not answer before deadlines.train_s."""
        ends_at = time.monotonic() + self._config.deadlines.train_s * SHARE_OF_TIME
        payloads: list[EpisodePayload] = ray.get(handles)  # type: ignore[arg-type]
        rows = asyncio.run_coroutine_threadsafe(self._say(payloads, ends_at), self._loop).result()
        return (True, *rows)

    async def _say(self, payloads: list[EpisodePayload], ends_at: float) -> list[list[FloatArray]]:
        samples = [sample for payload in payloads for sample in payload.samples]
        try:
            rows = iter(await all_or_none([self._say_one(sample, ends_at) for sample in samples]))
        except NoAnswer as error:
            raise self._lost(error) from error
        return [[next(rows) for _ in payload.samples] for payload in payloads]

    async def _say_one(self, sample: Sample, ends_at: float) -> FloatArray:
        places = np.flatnonzero(sample.loss_mask)
        said = np.zeros(len(sample.loss_mask), np.float32)
        if len(places):
            prompt, last = sample.prompt_ids.tolist(), int(places[-1]) + 1
            tokens = prompt + sample.completion_ids[:last].tolist()
            said[places] = (await self._model.logprobs(tokens, ends_at))[len(prompt) + places]
        return said

    def _lost(self, error: NoAnswer) -> TeacherLost:
        return TeacherLost(
            f"{self._setting}={self._url} is lost: {error}; start its server again, and then the run, which goes on "
            "from its last checkpoint; raise deadlines.train_s if the server only takes long"
        )
