"""The rollout engine: one vLLM AsyncLLM that samples, and takes new weights while requests run.

GenerateRequest -> gate -> vLLM -> Completion;  StagedWeights -> prepare -> pause -> load -> compare -> resume

It samples under complete versions only: an update that fails stops it until a complete one. A plain class; a run wraps
it in a Ray actor with many concurrent calls, a test calls it directly.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlflow.config import Config, Placement, Verify
from rlflow.errors import EngineLost, RunError, WeightsOvertaken
from rlflow.roles import StagedWeights
from rlflow.rollout.requests import Completion, FinishReason, GenerateRequest
from rlflow.runtime.deadlines import within
from rlflow.runtime.derived import keeps_cache, sends_adapters
from rlflow.runtime.disk import TEMPORARY
from rlflow.runtime.environment import variables
from rlflow.runtime.gpus import has_gpu
from rlflow.weights.engine.messages import ADAPTER_ID, WeightReport
from rlflow.workers.engine.admission import Gate, RunningLimit, pressure_gauge
from rlflow.workers.engine.loading import Loading
from rlflow.workers.engine.setup import cache_shape, check_engine, engine_arguments, set_environment, stop_token_ids

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineStats:
    running: int
    """Requests that were accepted and are not answered yet."""
    tokens: int
    """Tokens sampled since the start, in answered requests."""
    busy_s: float
    """Seconds since the start in which at least one request ran."""
    limit: int
    """Requests that vLLM is given at the same time; falls when its cache is too small for `rollout.max_running`."""


class RolloutEngine:
    """Samples only under a complete version of the weights; refuses before the first."""

    def __init__(self, config: Config, model_path: str, index: int, threads: int) -> None:
        """`threads` are the OpenMP threads on a machine without a GPU. Sets this process's environment for vLLM."""
        self._config = config
        self._model_path = model_path
        self._index = index
        self._on_gpu = has_gpu()
        self._version: int | None = None
        self._cache_version = 0
        """Nothing older computes the cache of a request that vLLM is given now."""
        self._llm: AsyncLLM | None = None
        self._has_adapters = sends_adapters(config)
        self._stop_token_ids: list[int] = []
        self._loading = asyncio.Lock()
        self._is_asleep = False
        self._load = _Load()
        self._gate = Gate(RunningLimit(config.rollout.max_running))
        self._has_answered = asyncio.Event()
        set_environment(config, threads, self._on_gpu)

    async def start(self) -> None:
        """Start vLLM.

        Raises ConfigError for a model or setting that cannot work, RunError when vLLM does not come up, DeadlineError
        after deadlines.start_s.
        """
        if self._llm is not None:
            raise RunError(f"rollout engine {self._index} was started already; start a fresh process")
        shape = await asyncio.to_thread(cache_shape, self._model_path)
        check_engine(self._config, shape, self._model_path, self._on_gpu)
        self._stop_token_ids = stop_token_ids(self._model_path)
        await self._within("engine start", self._config.deadlines.start_s, asyncio.to_thread(self._build))

    def _build(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # vLLM leaves the files of its sockets behind. Once it has started, nobody else will connect to them.
        folder = tempfile.TemporaryDirectory(prefix="rlflow-vllm-", dir=TEMPORARY)
        with folder as sockets, variables({"VLLM_RPC_BASE_PATH": sockets}):
            try:
                self._llm = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(**self._arguments()), stat_loggers=[pressure_gauge(self._gate)]
                )
            except RuntimeError as error:
                raise RunError(f"vLLM did not start in rollout engine {self._index}; {log_hint()}: {error}") from error

    def _arguments(self) -> dict[str, Any]:
        return engine_arguments(self._config, self._model_path, self._index, self._on_gpu)

    async def watch(self) -> None:
        """Wait until vLLM's process ends, which nothing but `shutdown` should make it do; then raise EngineLost."""
        from vllm.v1.engine.utils import CoreEngineProcManager

        manager = self._engine.engine_core.resources.engine_manager
        assert isinstance(manager, CoreEngineProcManager), "vLLM runs in a process of its own"
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        sentinels = manager.sentinels()
        for sentinel in sentinels:
            loop.add_reader(sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)
        raise self._lost(f"vLLM's process ended; {log_hint()}")

    async def wait_until_answered(self) -> None:
        """Wait until a request has been answered since the start."""
        await self._has_answered.wait()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one reply, or one slice of it. Cancelling the call aborts the request.

        Raises EngineLost before the first complete version or when vLLM has died, RunError when vLLM fails, ValueError
        for a prompt that leaves no room within model.max_length, DeadlineError after env.episode_timeout_s.
        """
        if self._version is None:
            raise self._lost("it has no complete weights yet; load a version before sampling")
        if len(request.prompt_ids) >= self._config.model.max_length:
            raise ValueError(
                f"the prompt must be shorter than model.max_length ({self._config.model.max_length}); "
                f"got {len(request.prompt_ids)} tokens"
            )
        with self._load.one_more():
            completion = await self._within("reply", self._config.env.episode_timeout_s, self._sample(request))
        self._load.tokens += len(completion.ids)
        self._has_answered.set()
        return completion

    async def _sample(self, request: GenerateRequest) -> Completion:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        sampling = SamplingParams(
            temperature=0.0 if request.is_greedy else self._config.rollout.temperature,
            max_tokens=request.max_new_tokens,
            seed=request.seed if self._config.rollout.seeded else None,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # vLLM would read the path only if it had no such adapter, which cannot be.
        adapter = LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="sent by the trainer")
        last: CompletionOutput | None = None
        async with self._gate.admitted():
            # Requests of a group share their prompt: vLLM finds cached blocks even of a request in the same step.
            cache_version = self._cache_version
            prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
            if keeps_cache(self._config):  # requests share blocks of one salt only
                prompt["cache_salt"] = str(cache_version)
            stream = self._engine.generate(
                prompt,
                sampling,
                uuid.uuid4().hex,
                lora_request=adapter if self._has_adapters else None,
            )
            try:
                async for output in stream:
                    last = output.outputs[0]
            except EngineDeadError as error:
                raise self._lost(f"vLLM died; {log_hint()}") from error
            except EngineGenerateError as error:
                raise RunError(f"vLLM failed in rollout engine {self._index}; {log_hint()}: {error!r}") from error
        assert last is not None, "vLLM ended a request without an output"
        return _completion_of(last, cache_version if keeps_cache(self._config) else None)

    async def load_weights(self, staged: StagedWeights) -> float:
        """Put a complete version in, and return the seconds in which nothing was sampled.

        Running requests are kept and go on under the new version, with their cache or after it is computed again
        (rollout.keep_cache); with rollout.drain they are finished first. When the update fails it is undone as far as
        the next one needs, and the engine stays paused: it samples again only after a complete update. Raises
        WeightsOvertaken when the trainer rewrote the weights meanwhile, EngineLost when vLLM died, RunError for other
        failures.
        """
        async with self._loading:
            loading = Loading(self._engine, self._config, self._index, staged)
            try:
                replacing = self._replace_weights(loading, staged)
                paused_at_s = await self._within("weight update", self._config.deadlines.weights_s, replacing)
            except BaseException as error:
                self._version = None
                await self._give_up(loading, staged, error)
                raise
            self._version, self._is_asleep = staged.version, False
            await self._engine.resume_generation()
            return time.perf_counter() - paused_at_s

    async def _give_up(self, loading: Loading, staged: StagedWeights, error: BaseException) -> None:
        """Undo what a failed update left behind. Raises what the failure means, if `error` does not say it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            raise self._lost(f"vLLM died while it loaded weights; {log_hint()}") from error
        subject = f"rollout engine {self._index} could not load weights of version {staged.version}"
        is_answer = isinstance(error, Exception) and not isinstance(error, RunError)
        if is_answer and self._config.rollout.tensor_parallel > 1:
            # vLLM takes the first worker's error for the answer and leaves the others' to be the next call's, so that
            # the engine must be ended by the caller.
            raise RunError(f"{subject}: {error}") from error
        giving_up = self._within("abort of a weight update", self._config.deadlines.weights_s, loading.give_up())
        is_overtaken = await asyncio.shield(giving_up)
        if not isinstance(error, Exception):
            return
        if is_overtaken or isinstance(error, WeightsOvertaken):
            raise WeightsOvertaken(f"{subject}, which the trainer has replaced: {error}") from error
        if not isinstance(error, RunError):
            raise RunError(f"{subject}: {error}") from error

    async def _replace_weights(self, loading: Loading, staged: StagedWeights) -> float:
        """When sampling stopped, by `time.perf_counter`. It is still paused on return."""
        await loading.prepare()
        paused_at_s = await self._pause(staged.version)
        self._cache_version = staged.version
        if self._frees_memory and self._is_asleep:
            await self._engine.wake_up(tags=["weights"])
        await loading.load()
        if loading.is_comparable:
            await self._verify(staged)
        if hasattr(self._engine, "update_weight_version"):  # vLLM 0.32; 0.26 tags no tokens
            await self._engine.update_weight_version(str(staged.version))
        if self._frees_memory and self._is_asleep:
            await self._engine.wake_up(tags=["kv_cache"])
        return paused_at_s

    async def _pause(self, version: int) -> float:
        """Stop sampling, and forget the cache of the old weights unless it is kept.

        Returns when sampling stopped, by `time.perf_counter`. After a failed update nothing is kept.
        """
        asked_at_s = time.perf_counter()
        if self._is_asleep:
            return asked_at_s
        if self._config.rollout.drain:
            await self._engine.pause_generation(mode="wait", clear_cache=True)
            return time.perf_counter()
        keeps = keeps_cache(self._config) and self._version is not None and version > self._version
        if not keeps:
            self._gate.forgive()
        await self._engine.pause_generation(mode="keep", clear_cache=not keeps)
        return asked_at_s

    async def sleep(self) -> None:
        """Sample nothing until the next `load_weights`; requests under way are kept and go on then.

        On a GPU the weights and the cache are given back: every sleep ends with a complete version, so that the weights
        need not be kept. If adapters are all that is sent, the rest is kept in the memory of the CPU.
        """
        async with self._loading:
            self._gate.forgive()
            work = (
                self._engine.sleep(level=1 if self._has_adapters else 2, mode="keep")
                if self._frees_memory
                else self._engine.pause_generation(mode="keep", clear_cache=True)
            )
            await self._within("sleep", self._config.deadlines.weights_s, work)
            self._is_asleep = True

    async def _verify(self, staged: StagedWeights) -> None:
        """Raises RunError when the workers do not compute with what was staged, as far as weights.verify looks."""
        if self._config.weights.verify is Verify.off:
            return
        report = await self.compare_weights(staged, self._config.weights.verify)
        if different := report["different"]:
            raise RunError(
                f"rollout engine {self._index} does not compute with version {staged.version} as it was staged: "
                f"{len(different)} of the parameters that were compared differ, such as {different[0]!r}"
            )

    async def compare_weights(self, staged: StagedWeights, verify: Verify = Verify.full) -> WeightReport:
        """Compare what the engine computes with, to `staged`, bit for bit."""
        comparing = Loading(self._engine, self._config, self._index, staged).compare(verify)
        return await self._within("weight check", self._config.deadlines.weights_s, comparing)

    async def profile(self, is_on: bool) -> None:
        """Begin vLLM's profile, or end it and write it; needs run.profile_steps. Does nothing before `start`."""
        if self._llm is not None:
            profiling = self._llm.start_profile() if is_on else self._llm.stop_profile()
            await self._within("profile", self._config.deadlines.train_s, profiling)

    async def stats(self) -> EngineStats:
        return EngineStats(
            running=self._load.running,
            tokens=self._load.tokens,
            busy_s=self._load.busy_s(),
            limit=self._gate.limit.value,
        )

    async def shutdown(self) -> None:
        """Stop vLLM and its processes. Safe to call twice."""
        engine, self._llm, self._version = self._llm, None, None
        if engine is not None:
            engine.shutdown()

    @property
    def _frees_memory(self) -> bool:
        """Whether a sleeping engine gives its memory to the trainer."""
        return self._on_gpu and self._config.cluster.placement is Placement.colocated

    def _lost(self, why: str) -> EngineLost:
        return EngineLost(f"rollout engine {self._index} cannot answer: {why}")

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


def _completion_of(output: CompletionOutput, cache_version: int | None) -> Completion:
    """Translate vLLM's final output; `cache_version` is the oldest of its cache, None if it is every token's own.

    Raises RunError when vLLM failed on the request.
    """
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if output.finish_reason not in reasons:
        raise RunError(f"vLLM ended a request with {output.finish_reason!r} instead of a reply")
    ids = list(output.token_ids)
    logprobs: Any = output.logprobs
    versions = [int(span.version) for span in output.weight_versions or () for _ in range(span.start, span.end)]
    assert len(logprobs.logprobs) == len(ids) == len(versions), "vLLM must tag every token"
    return Completion(
        ids=ids,
        logprobs=list(logprobs.logprobs),
        versions=versions,
        cache_versions=[version if cache_version is None else min(cache_version, version) for version in versions],
        finish_reason=reasons[output.finish_reason],
    )


def log_hint() -> str:
    """Where vLLM says what went wrong: the file that this process's standard error goes to, if it is one."""
    target = Path("/proc/self/fd/2").resolve()
    return f"the cause is in {target}" if target.is_file() else "the cause is on its standard error"
