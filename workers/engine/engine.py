"""The rollout engine: one vLLM AsyncLLM that samples, and takes new weights while requests run.

GenerateRequest -> vLLM -> Reply -> parts;  StagedWeights -> prepare -> pause -> load -> compare -> resume

It samples under complete versions only: an update that fails stops it until a complete one. A plain class; a run wraps
it in a Ray actor with many concurrent calls, a test calls it directly.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rlflow.config import Config, Placement, Verify
from rlflow.errors import EngineLost, RunError, WeightsOvertaken
from rlflow.models.images import open_images
from rlflow.roles import StagedWeights
from rlflow.rollout.requests import Completion, FinishReason, GenerateRequest
from rlflow.runtime.deadlines import within
from rlflow.runtime.derived import keeps_cache, max_running, sends_adapters
from rlflow.runtime.environment import variables
from rlflow.runtime.gpus import has_gpu
from rlflow.weights.engine.messages import ADAPTER_ID, WeightReport
from rlflow.workers.engine.load import Load, Pressure, pressure_gauge
from rlflow.workers.engine.loading import Loading
from rlflow.workers.engine.prompts import Prompts, check_ids
from rlflow.workers.engine.replies import Replies, Reply
from rlflow.workers.engine.routes import num_replayed, routes_of
from rlflow.workers.engine.setup import (
    cache_shape,
    check_engine,
    engine_arguments,
    log_hint,
    sampling_arguments,
    set_environment,
    stop_token_ids,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineStats:
    running: int
    """Replies under way, or waiting to begin."""
    tokens: int
    """Tokens sampled since the start, in the parts that were returned."""
    busy_s: float
    """Seconds since the start in which at least one request ran."""
    taken_back: int
    """Requests that vLLM has preempted since the start, because the cache was full or for an update of the weights."""


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
        self._num_experts = 0
        """Experts of a layer, if vLLM says which it chose."""
        self._loading = asyncio.Lock()
        self._is_asleep = False
        self._load = Load()
        self._replies = Replies()
        self._is_draining = False
        self._places = asyncio.Semaphore(max_running(config))
        self._prompts = Prompts(None)
        self._pressure = Pressure()
        self._has_answered = asyncio.Event()
        set_environment(config, threads, self._on_gpu)

    async def start(self) -> None:
        """Start vLLM.

        Raises ConfigError for a model or setting that cannot work, RunError when vLLM does not come up, DeadlineError
        after deadlines.start_s.
        """
        if self._llm is not None:
            raise RunError(f"rollout engine {self._index} was started already; start a fresh process")
        shape = await asyncio.to_thread(cache_shape, self._config, self._model_path)
        check_engine(self._config, shape, self._model_path, self._on_gpu)
        self._stop_token_ids = stop_token_ids(self._model_path)
        self._prompts = Prompts(open_images(self._model_path, trust=self._config.model.trust_remote_code))
        self._num_experts = num_replayed(self._config, self._model_path, self._on_gpu)
        await self._within("engine start", self._config.deadlines.start_s, self._build())

    async def _build(self) -> None:
        # vLLM leaves the files of its sockets behind. Its process says that it is ready before it has connected to all
        # of them; once it has answered a call, nobody else will.
        folder = tempfile.TemporaryDirectory(prefix="vllm-")
        with folder as sockets, variables({"VLLM_RPC_BASE_PATH": sockets}):
            self._llm = await asyncio.to_thread(self._start_vllm)
            await self._llm.is_sleeping()

    def _start_vllm(self) -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(**self._arguments()), stat_loggers=[pressure_gauge(self._pressure)]
            )
        except RuntimeError as error:
            raise RunError(f"vLLM did not start in rollout engine {self._index}; {log_hint()}: {error}") from error

    def _arguments(self) -> dict[str, Any]:
        found = engine_arguments(self._config, self._model_path, self._index, self._on_gpu, self._num_experts > 0)
        # The texts of images are written by a processor.
        return found if self._prompts.bad_words is None else found | {"skip_tokenizer_init": False}

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
        """Sample a reply, and return its first part; `go_on` returns the next one. Cancelling the call ends the reply.

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
        reply = Reply(request, self._config.model.max_length)
        reply.steps_before = self._pressure.counts
        self._replies.add(reply)
        reply.start(asyncio.create_task(self._sample(reply)))
        return await self._next_part(reply)

    async def go_on(self, name: str) -> Completion:
        """The next part of the reply that has this name. Cancelling the call ends the reply.

        Raises what `generate` does. A reply that was given up, because nobody asked for this part in time, ends with
        `abort` and no token.
        """
        reply = self._replies.take(name)
        if reply is None:
            return Completion(ids=[], logprobs=[], versions=[], cache_versions=[], finish_reason="abort")
        return await self._next_part(reply)

    async def _next_part(self, reply: Reply) -> Completion:
        try:
            part = await self._within("reply", self._config.env.episode_timeout_s, reply.take_part())
        except BaseException:
            self._replies.remove(reply)
            await reply.stop()
            raise
        part.is_crowded = self._places.locked() or self._pressure.was_full_since(*reply.steps_before)
        reply.steps_before = self._pressure.counts
        if part.reply:
            self._replies.leave(reply)
        else:
            self._replies.remove(reply)
        self._load.tokens += len(part.ids)
        self._has_answered.set()
        return part

    async def _sample(self, reply: Reply) -> FinishReason:
        """Let vLLM sample a whole reply. Returns why no more tokens come; `abort` if the engine is being drained."""
        with self._load.one_more():
            # A reply keeps its place, also from one request of a seeded reply to the next.
            async with self._places:
                while True:
                    reply.begin(self._version, self._cache_version if keeps_cache(self._config) else None)
                    finish_reason = await self._run(reply, self._sampling(reply))
                    if finish_reason != "length" or reply.num_left == 0:
                        return finish_reason
                    if self._is_draining:
                        return "abort"

    def _sampling(self, reply: Reply) -> SamplingParams:
        """How vLLM goes on with a reply."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop = self._config.rollout.stop
        routed: dict[str, Any] = {"routed_experts_prompt_start": reply.num_routed} if self._num_experts else {}
        return SamplingParams(
            **sampling_arguments(self._config, is_greedy=reply.request.is_greedy),
            # vLLM looks for a text in one request only.
            max_tokens=reply.num_left if reply.seed is None or stop else reply.num_left_of_part,
            seed=reply.seed,
            stop_token_ids=self._stop_token_ids,
            stop=stop,
            # Without it the tokens of the text would stay and the text would go.
            include_stop_str_in_output=True,
            detokenize=bool(stop),
            bad_words=self._prompts.bad_words,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            **routed,
        )

    async def _run(self, reply: Reply, sampling: SamplingParams) -> FinishReason:
        """One request to vLLM, which goes on with the reply."""
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        ids = reply.request.prompt_ids + reply.ids
        prompt = await self._prompts.prompt(reply.request, ids, reply.cache_version)
        # vLLM would read the path only if it had no such adapter, which cannot be.
        adapter = LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="sent by the trainer")
        # Requests of a group share their prompt: vLLM finds cached blocks even of a request in the same step.
        stream = self._engine.generate(
            prompt,
            sampling,
            reply.vllm_name,
            lora_request=adapter if self._has_adapters else None,
        )
        output: CompletionOutput | None = None
        try:
            async for delivered in stream:
                output = delivered.outputs[0]
                if reply.request.images:
                    check_ids(delivered.prompt_token_ids, ids)
                logprobs: Any = output.logprobs
                support: Sequence[list[int]] = ()
                if self._config.rollout.top_k is not None:
                    assert output.sampling_mask is not None, "vLLM must say what it chose among"
                    support = output.sampling_mask.token_ids
                reply.add(output.token_ids, logprobs.logprobs, support)
                if self._is_draining and not delivered.finished:
                    await self._engine.abort(reply.vllm_name)  # what was sampled still comes
        except EngineDeadError as error:
            raise self._lost(f"vLLM died; {log_hint()}") from error
        except EngineGenerateError as error:
            raise RunError(f"vLLM failed in rollout engine {self._index}; {log_hint()}: {error!r}") from error
        assert output is not None, "vLLM ended a request without an output"
        if self._num_experts and reply.versions_of_request:
            reply.add_routes(routes_of(output.routed_experts, self._num_experts, reply.num_unrouted))
        return _finish_reason_of(output, reply)

    async def load_weights(self, staged: StagedWeights) -> float:
        """Put a complete version in, and return the seconds in which nothing was sampled.

        Replies under way are kept and go on under the new version, with their cache or after it is computed again
        (rollout.keep_cache); with rollout.drain they are given back at the end of their part. When the update fails it
        is undone as far as the next one needs, and the engine stays paused: it samples again only after a complete
        update. Raises WeightsOvertaken when the trainer rewrote the weights meanwhile, EngineLost when vLLM died,
        RunError for other failures.
        """
        if not self._config.trainer.ranks:
            await self._tag(staged.version)
            self._version = staged.version  # vLLM has read it from the model's files
            return 0.0
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
            # Nothing is sampled now, and all that was has been delivered.
            self._replies.mark(staged.version, self._num_sampled())
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
        # After a failed update nothing is kept: `_version` is None.
        keeps = keeps_cache(self._config) and self._version is not None and staged.version > self._version
        paused_at_s = await self._pause(keeps)
        self._cache_version = staged.version
        if self._frees_memory and self._is_asleep:
            await self._engine.wake_up(tags=["weights"])
        await loading.load()
        if loading.is_comparable:
            await self._verify(staged)
        await self._tag(staged.version)
        if self._frees_memory and self._is_asleep:
            await self._engine.wake_up(tags=["kv_cache"])
        return paused_at_s

    async def _tag(self, version: int) -> None:
        """Have vLLM say of each token from now on that this version sampled it."""
        if hasattr(self._engine, "update_weight_version"):  # vLLM 0.32; 0.26 tags no tokens
            await self._engine.update_weight_version(str(version))

    async def _pause(self, keeps: bool = False) -> float:
        """Stop sampling, and forget the cache of the old weights if it is not kept; when, by `time.perf_counter`."""
        asked_at_s = time.perf_counter()
        if self._is_asleep:
            return asked_at_s
        if self._config.rollout.drain:
            self._is_draining = True
            try:
                await self._engine.pause_generation(mode="wait", clear_cache=True)
            finally:
                self._is_draining = False
            # vLLM does not wait for those that it has preempted.
            begun = [name for name, num_tokens in self._num_sampled().items() if num_tokens]
            await self._engine.abort(begun)
            return time.perf_counter()
        await self._engine.pause_generation(mode="keep", clear_cache=not keeps)
        return asked_at_s

    def _num_sampled(self) -> dict[str, int]:
        """How many tokens vLLM has sampled for each of its requests, by the name that we gave it."""
        states = self._engine.output_processor.request_states.values()
        return {each.external_req_id: each.detokenizer.num_output_tokens() for each in states if each.detokenizer}

    async def sleep(self) -> None:
        """Sample nothing until the next `load_weights`; requests under way are kept and go on then.

        On a GPU the weights and the cache are given back: every sleep ends with a complete version, so that the weights
        need not be kept. If adapters are all that is sent, the rest is kept in the memory of the CPU.
        """
        async with self._loading:
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
            taken_back=self._pressure.num_taken_back,
        )

    async def shutdown(self) -> None:
        """Stop vLLM and its processes. Safe to call twice."""
        engine, self._llm, self._version = self._llm, None, None
        if engine is not None:
            engine.shutdown(timeout=0.0)  # its process has nothing to save, and would take seconds to end by itself
            await self._replies.stop()

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


def _finish_reason_of(output: CompletionOutput, reply: Reply) -> FinishReason:
    """Why vLLM ended a request, of which `output` is the last. Raises RunError when vLLM failed on the request."""
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if output.finish_reason not in reasons:
        raise RunError(f"vLLM ended a request with {output.finish_reason!r} instead of a reply")
    tagged = getattr(output, "weight_versions", None)  # vLLM 0.32; 0.26 tags no tokens
    if tagged is not None:
        spans = [int(span.version) for span in tagged for _ in range(span.start, span.end)]
        assert spans == reply.versions_of_request, "vLLM says that other versions sampled these tokens"
    return reasons[output.finish_reason]
