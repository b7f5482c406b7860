"""The rollout engine: one vLLM AsyncLLM that samples, and takes new weights while requests run.

GenerateRequest -> vLLM -> Completion;  StagedWeights -> pause -> one update a bucket -> finish -> resume

A plain class; a run wraps it in a Ray actor with many concurrent calls, a test calls it directly.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rlflow.config import Config
from rlflow.deadlines import within
from rlflow.errors import RunError
from rlflow.roles import StagedWeights
from rlflow.rollout.engine_setup import (
    cache_shape,
    check_engine,
    engine_arguments,
    set_environment,
    stop_token_ids,
)
from rlflow.rollout.requests import Completion, GenerateRequest
from rlflow.weights.messages import update_message

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from rlflow.weights.verify import WeightReport

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineStats:
    running: int
    """Requests that were accepted and are not answered yet."""
    tokens: int
    """Sampled since the start, in answered requests."""
    busy_s: float
    """Seconds since the start in which at least one request ran."""


class RolloutEngine:
    """Samples only under a complete version of the weights; refuses before the first."""

    def __init__(self, config: Config, model_path: str, index: int, threads: int) -> None:
        """`threads` are the OpenMP threads on a machine without a GPU. Sets this process's environment for vLLM."""
        import torch  # its users are workers; importing this module must stay cheap

        self._config = config
        self._model_path = model_path
        self._index = index
        self._on_gpu = torch.cuda.is_available()
        self._version: int | None = None
        self._llm: AsyncLLM | None = None
        self._stop_token_ids: list[int] = []
        self._loading = asyncio.Lock()
        self._load = _Load()
        set_environment(config, threads, self._on_gpu)

    async def start(self) -> None:
        """Start vLLM.

        Raises ConfigError for a model or setting that cannot work, RunError when vLLM does not come up, DeadlineError
        after deadlines.start_s.
        """
        shape = await asyncio.to_thread(cache_shape, self._model_path)
        check_engine(self._config, shape, self._model_path, self._on_gpu)
        self._stop_token_ids = stop_token_ids(self._model_path)
        await self._within("engine start", self._config.deadlines.start_s, asyncio.to_thread(self._build))

    def _build(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(self._config, self._model_path, self._index, self._on_gpu)
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except RuntimeError as error:
            raise RunError(
                f"vLLM did not start in rollout engine {self._index}; its log has the cause: {error}"
            ) from error

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one reply. Cancelling the call aborts the request.

        Raises RunError before the first complete version or when vLLM fails, ValueError for a prompt that leaves no
        room within model.max_length, DeadlineError after rollout.episode_timeout_s.
        """
        if self._version is None:
            raise RunError(f"rollout engine {self._index} has no complete weights yet; load a version before sampling")
        if len(request.prompt_ids) >= self._config.model.max_length:
            raise ValueError(
                f"the prompt must be shorter than model.max_length ({self._config.model.max_length}); "
                f"got {len(request.prompt_ids)} tokens"
            )
        with self._load.one_more():
            completion = await self._within("reply", self._config.rollout.episode_timeout_s, self._sample(request))
        self._load.tokens += len(completion.ids)
        return completion

    async def _sample(self, request: GenerateRequest) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        # Requests of a group share their prompt: vLLM finds cached blocks even of a request that is in the same step.
        stream = self._engine.generate(
            {"prompt_token_ids": request.prompt_ids}, self._sampling(request), uuid.uuid4().hex
        )
        last: CompletionOutput | None = None
        try:
            async for output in stream:
                last = output.outputs[0]
        except (EngineDeadError, EngineGenerateError) as error:
            raise RunError(f"vLLM failed in rollout engine {self._index}; its log has the cause: {error!r}") from error
        assert last is not None, "vLLM ended a request without an output"
        return _completion_of(last)

    def _sampling(self, request: GenerateRequest) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=self._config.rollout.temperature,
            max_tokens=request.max_new_tokens,
            seed=request.seed if self._config.rollout.seeded else None,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def load_weights(self, staged: StagedWeights) -> float:
        """Put a complete version in, and return the seconds in which nothing was sampled.

        Running requests are kept, their cache is recomputed, and they go on under the new version. When the update
        fails it is undone as far as the next one needs, RunError is raised, and the engine stays paused: it samples
        again only after a complete update.
        """
        async with self._loading:
            started = time.perf_counter()
            try:
                loading = self._replace_weights(staged)
                await self._within("weight update", self._config.deadlines.weights_s, loading)
            except BaseException as error:
                self._version = None
                await asyncio.shield(self._abort_update())
                if isinstance(error, Exception) and not isinstance(error, RunError):
                    raise RunError(
                        f"rollout engine {self._index} could not load weights of version {staged.version}: {error}"
                    ) from error
                raise
            self._version = staged.version
            await self._engine.resume_generation()
            return time.perf_counter() - started

    async def _abort_update(self) -> None:
        aborting = self._engine.collective_rpc("rlflow_abort_update")
        await self._within("abort of a weight update", self._config.deadlines.weights_s, aborting)

    async def _replace_weights(self, staged: StagedWeights) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        await engine.pause_generation(mode="keep", clear_cache=True)
        await engine.start_weight_update()
        for bucket in staged.buckets:
            await engine.update_weights(WeightTransferUpdateRequest(update_info=update_message(staged, bucket)))
        await engine.finish_weight_update(weight_version=str(staged.version))

    async def compare_weights(self, staged: StagedWeights) -> WeightReport:
        """Compare what the engine computes with, to `staged`, bit for bit. Takes seconds on a large model."""
        message = update_message(staged, (0, len(staged.slots)))
        checking = self._engine.collective_rpc("rlflow_compare_weights", kwargs=message)
        return (await self._within("weight check", self._config.deadlines.weights_s, checking))[0]

    async def stats(self) -> EngineStats:
        return EngineStats(running=self._load.running, tokens=self._load.tokens, busy_s=self._load.busy_s())

    async def shutdown(self) -> None:
        """Stop vLLM and its processes. Safe to call twice."""
        engine, self._llm, self._version = self._llm, None, None
        if engine is not None:
            engine.shutdown()

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise RunError(f"rollout engine {self._index} is not running; start it first")
        return self._llm

    async def _within(self, stage: str, seconds: float, work: Awaitable[T]) -> T:
        return await within(f"{stage} of rollout engine {self._index}", seconds, work)


class _Load:
    """How busy an engine is."""

    def __init__(self) -> None:
        self.running = 0
        self.tokens = 0
        self._busy_before_s = 0.0
        self._busy_since = 0.0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        if self.running == 0:
            self._busy_since = time.perf_counter()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if self.running == 0:
                self._busy_before_s += time.perf_counter() - self._busy_since

    def busy_s(self) -> float:
        return self._busy_before_s + (time.perf_counter() - self._busy_since if self.running else 0.0)


def _completion_of(output: CompletionOutput) -> Completion:
    """Translate vLLM's final output. Raises RunError when vLLM gave the request up."""
    if output.finish_reason not in ("stop", "length"):
        raise RunError(f"vLLM ended a request with {output.finish_reason!r} instead of a reply")
    ids = list(output.token_ids)
    logprobs: Any = output.logprobs
    versions = [int(span.version) for span in output.weight_versions or () for _ in range(span.start, span.end)]
    assert len(logprobs.logprobs) == len(ids) == len(versions), "vLLM must tag every token"
    return Completion(
        ids=ids,
        logprobs=list(logprobs.logprobs),
        versions=versions,
        finish_reason="stop" if output.finish_reason == "stop" else "length",
    )
