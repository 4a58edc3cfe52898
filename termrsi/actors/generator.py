"""The generator: one vLLM engine per actor. Token ids in, ids and log-probabilities out; weights are pulled at a version.

Requests arrive concurrently and are batched by the engine. `pull` has requests in flight end by themselves (each is bounded by its
`max_tokens`) or stand still where they are, loads what differs from what the engine has (`engine_weights`; by NCCL everything,
`nccl_channel`), proves that the engine's weights are the learner's, and lets generation go on: of a request that stood still from
the tokens it has, with their keys and values computed anew, so that what follows is of the new weights alone.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from termrsi import processor
from termrsi.actors.busy import Busy
from termrsi.actors.calls import NO_ROOM, PATIENCE_S, alive, bounded, no_room
from termrsi.actors.expert_capture import KEY, RoutingSource
from termrsi.actors.gate import Gate
from termrsi.actors.metrics import RayMeter
from termrsi.errors import EngineError, RequestRefused, WeightsError
from termrsi.records import Completion, SamplingParams, WeightsVersion

if TYPE_CHECKING:  # rollout workers import this, and need no torch
    from termrsi.actors.engine_weights import Fetch
    from termrsi.weights import Facts, Stored

BACK_AFTER_S = 600.0  # at the latest an engine is there again: its pause, its start, its weights
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0  # of a caller meanwhile: doubled each time
_PROBE = "termrsi.actors.engine_probe.WeightProbe"
_ROUTING_PROBE = "termrsi.actors.expert_capture.RoutingProbe"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine is started with. `extra` goes to vLLM's AsyncEngineArgs as it is.

    `routing_replay`: completions carry the experts that a mixture-of-experts model used (see `expert_capture`).
    """

    max_model_len: int = 2048
    max_num_seqs: int = 32
    dtype: str = "auto"  # bfloat16 on GPUs, and on a processor that has it; else float32. vLLM's own names are taken too
    kv_cache_gib: int = 2  # CPU only; on a GPU vLLM takes `gpu_memory_utilization`
    enforce_eager: bool = False
    threads: int = 2  # CPU only
    routing_replay: bool = False
    weight_channel: str = "object_store"
    bucket_bytes: int = 256 * 2**20  # of weights, that are written, mapped and loaded at once
    pause: bool = False  # for new weights, in the middle of completions; else those end first
    restart_pause_s: float = 5.0  # before an engine is started again: what ended it, such as a want of memory, may pass
    extra: dict[str, object] = field(default_factory=dict)
    run: str = ""  # as metrics name it


def engine_environment(options: EngineOptions) -> dict[str, str]:
    """Environment of the engine's process: CPU threads and cache, nothing fetched, nothing reported."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(options.threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # a waiting thread sleeps: spinning ones take the sandboxes' cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or vLLM turns "uni" back into "mp" on CPU; the engine keeps its process
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }


def engine_arguments(model: str, options: EngineOptions, *, on_cpu: bool) -> dict[str, Any]:  # Any: free keys of the user's
    """Of vLLM's EngineArgs, for an engine in a process of its own or a server."""
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": _dtype(on_cpu=on_cpu) if options.dtype == "auto" else options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
    }
    if on_cpu:
        # A prompt cut in two draws a token that is thrown away, and a seeded request then rewinds its random generator, which
        # torch's CPU one cannot: vLLM's engine dies of it. So prompts go in whole, one engine step holding the longest.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(options.max_model_len, 4096)
        # Only whole blocks of a prefix are cached. vLLM's 128 on CPU is longer than most first prompts here, and 32 is the
        # least that its kernels like: a step of 64 short rollouts took 7.0 s instead of 16.0 s, with 77 % of prompt tokens
        # cached instead of 5 % (two cores).
        arguments["block_size"] = 32
    if options.routing_replay:
        # A compiled model would not call the capture back on a CPU.
        arguments |= {"enforce_eager": True} if on_cpu else {"enable_return_routed_experts": True}
    if options.weight_channel == "nccl":
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    return arguments | options.extra


def _dtype(*, on_cpu: bool) -> str:
    return "bfloat16" if not on_cpu or processor.has_bf16() else "float32"


class Engine:
    """The engine without Ray: what the actor hosts, and what a test can hold directly."""

    def __init__(self, model: str, options: EngineOptions) -> None:
        """Starts the engine; raises EngineError with vLLM's reason if it cannot."""
        os.environ.update(engine_environment(options))
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from termrsi.actors import buckets
        from termrsi.actors.engine_weights import Loader

        buckets.reap()  # of an engine that was killed on this machine: the driver's is another one, perhaps
        on_cpu = current_platform.is_cpu()
        arguments = {"worker_extension_cls": _ROUTING_PROBE if options.routing_replay else _PROBE, "disable_log_stats": True}
        if on_cpu:
            # Two processes would talk by polling, which takes a core from the one that computes.
            arguments["distributed_executor_backend"] = "uni"
        arguments |= engine_arguments(model, options, on_cpu=on_cpu)
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"vLLM did not start: {error}", model, "see the log of the engine process above") from error
        self._routing = RoutingSource(self._llm.collective_rpc, by_extension=on_cpu) if options.routing_replay else None
        self._loader = Loader(self._call, options.bucket_bytes)
        self.version = 0
        self.pauses = options.pause
        self.dead = False  # the engine's own process: nothing more comes from here
        self._requests = 0
        self._running = 0
        self._gate = Gate()  # shut while weights are loaded
        self._as_started = True  # with its first weights, whole
        self._idle = asyncio.Event()
        self._idle.set()
        self._loading = asyncio.Lock()
        self.stats = {"requests": 0.0, "prompt_tokens": 0.0, "cached_tokens": 0.0, "completion_tokens": 0.0}
        self.busy = Busy()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        """One completion.

        Raises EngineError if the engine is dead, RequestRefused if the prompt is too long, CaptureError if routing is missing.
        """
        shut_s = self._gate.shut_s
        await self._gate.passed()
        away_s = self._gate.shut_s - shut_s
        self._requests += 1
        request_id = f"r{self._requests}"
        self._enter()
        said, routing = _Said(), None
        try:
            if self._routing is not None:
                await self._routing.begin()
            with self.busy:
                output = await self._generate(list(prompt_ids), params, request_id, said)
            if self._routing is not None:
                routing = await self._routing.of(output.outputs[0], request_id, len(prompt_ids) + len(said.ids) - 1)
        finally:
            self._leave()
        if self.pauses:  # else what was in flight went on while the gate was shut
            away_s = self._gate.shut_s - shut_s
        cached = output.num_cached_tokens or 0
        for key, amount in (("requests", 1), ("prompt_tokens", len(prompt_ids)), ("cached_tokens", cached)):
            self.stats[key] += amount
        self.stats["completion_tokens"] += len(said.ids)
        finish = "length" if output.outputs[0].finish_reason == "length" else "stop"
        spans = tuple((version, tokens) for version, tokens in said.weights)
        low, high = (spans[0][0], spans[-1][0]) if spans else (self.version, self.version)
        return Completion(tuple(said.ids), tuple(said.logprobs), finish, low, high, cached, routing, weights=spans, away_s=away_s)

    async def _generate(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, said: "_Said"
    ) -> Any:  # Any: vLLM's last RequestOutput
        """Fills `said`: whole at the end or, where an engine pauses, token by token, so that each is known by its weights."""
        from vllm import SamplingParams as EngineSampling
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        sampling = EngineSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop_token_ids=list(params.stop_ids) or None,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self.pauses else RequestOutputKind.FINAL_ONLY,
            extra_args=None if self._routing is None else {KEY: request_id},
        )
        last = None
        try:
            async for output in self._llm.generate(TokensPrompt(prompt_token_ids=prompt_ids), sampling, request_id):
                last = output
                said.add(output.outputs[0], self.version)
        except (EngineDeadError, EngineGenerateError) as error:
            self.dead = isinstance(error, EngineDeadError)
            raise EngineError(f"{type(error).__name__}: {error}", "generator") from error
        except (VLLMValidationError, ValueError) as error:
            raise refusal(error, len(prompt_ids), self._llm.model_config.max_model_len) from error
        if last is None:
            raise EngineError("the engine returned nothing", "generator")
        return last

    def _enter(self) -> None:
        self._idle.clear()
        self._running += 1

    def _leave(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._idle.set()

    async def load(self, facts: "Facts", fetch: "Fetch", version: int) -> dict[str, float]:
        """Serve this state; how long it took. Raises WeightsError if the engine's differs, and serves nothing more then."""
        async with self._loading:
            start_s = time.monotonic()
            packed = await fetch(self._loader.missing(facts))  # while requests go on: it may come from another node
            fetched_s = time.monotonic()
            if packed:
                await self._stop_generation()
            stopped_s = time.monotonic()
            took = await self._loader.load(facts, packed, version)
            await self._serve(version, changed=bool(packed))
            return {"fetch_s": fetched_s - start_s, "stop_s": stopped_s - fetched_s, **took}

    async def _serve(self, version: int, *, changed: bool = True) -> None:
        """Not in a `finally` of a load: what could not be proved is not served."""
        # Requests that stand still give up their keys and values too, which old weights have made.
        if changed and not await self._guarded(self._llm.reset_prefix_cache(reset_running_requests=self.pauses)):
            self._loader.forget()
            raise WeightsError("the engine kept keys and values that older weights have made", "generator")
        self.version = version  # what was sampled before has arrived: it left the engine's process before the answers since
        if self.pauses:
            await self._guarded(self._llm.resume_generation())
        self._gate.open()

    # By NCCL: begin, receive while the learner sends, end. See `nccl_channel`, which calls these on all engines.

    async def join_transfer(self, info: dict[str, object]) -> None:
        """Meet the learner and the other engines; returns once all are there."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._guarded(self._llm.shutdown_weight_transfer_engine())
        await self._guarded(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))

    async def begin_transfer(self) -> None:
        await self._stop_generation()
        await self._guarded(self._llm.start_weight_update())

    async def receive(self, info: dict[str, object]) -> None:
        """Returns once everything that `info` names has come."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._guarded(self._llm.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def end_transfer(self, version: int, expected: dict[str, str]) -> None:
        """Serve what came. `expected`: `weights.sample_digest` by name. Raises WeightsError if the engine's differ."""
        await self._guarded(self._llm.finish_weight_update(str(version)))
        self._loader.forget()
        await self._loader.prove(expected, version)
        await self._serve(version)

    async def load_directory(self, directory: str, version: int) -> None:
        """Serve the weights of a Hugging Face directory. Raises WeightsError."""
        await self._stop_generation()
        self._loader.forget()
        await self._call("reload_weights", weights_path=directory)
        await self._call("repack_tied")
        await self._serve(version)

    def hold(self) -> None:
        """New requests wait until weights have been loaded, or `go_on`."""
        self._gate.shut()

    async def go_on(self) -> None:
        """With its first weights, unless others have come or are on their way."""
        async with self._loading:
            if self._as_started:
                self._gate.open()

    async def _stop_generation(self) -> None:
        """New requests wait at the gate, those in flight end by themselves or stand still."""
        self._gate.shut()
        self._as_started = False
        if self.pauses:
            await self._guarded(self._llm.pause_generation(mode="keep", clear_cache=False))
        else:
            await self._idle.wait()

    async def _call(self, method: str, *arguments: object, **named: object) -> list[Any]:  # Any: what each worker answers
        return await self._guarded(self._llm.collective_rpc(method, args=arguments, kwargs=named))

    async def _guarded(self, call: Awaitable[Any]) -> Any:  # Any: see _call
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError as error:
            self.dead = True
            raise EngineError(f"{type(error).__name__}: {error}", "generator") from error
        except Exception as error:
            if type(error) is not Exception:  # vLLM hands on what failed in the engine's process as that
                raise
            raise WeightsError(f"the engine could not load weights: {error}", "generator") from error

    async def weight_digests(self) -> list[dict[str, str]]:
        """Per worker, the digest of each tensor that the engine computes with (see `engine_probe`)."""
        return await self._call("weight_digests")

    @property
    def workers(self) -> int:
        """Processes that hold a part of the model each."""
        return self._llm.vllm_config.parallel_config.world_size

    def close(self) -> None:
        self._llm.shutdown()
        self._loader.close()


@dataclass(slots=True)
class _Said:
    """What one request has brought so far. `weights`: as `records.Spans`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights: list[list[int]] = field(default_factory=list)

    def add(self, piece: Any, version: int) -> None:  # Any: vLLM's CompletionOutput
        self.ids += piece.token_ids
        self.logprobs += [step[token].logprob for token, step in zip(piece.token_ids, piece.logprobs, strict=True)]
        if self.weights and self.weights[-1][0] == version:
            self.weights[-1][1] += len(piece.token_ids)
        elif piece.token_ids:
            self.weights.append([version, len(piece.token_ids)])


def refusal(error: Exception, length: int, longest: int) -> EngineError:
    """Of a request that vLLM does not take: for its `length` in tokens, where the prompt and one more do not fit; else a fault of
    ours, which the next request would have as well."""
    kind = RequestRefused if length >= longest else EngineError
    return kind(f"{type(error).__name__}: {error}", "generator")


@ray.remote
class GeneratorActor:
    """Hosts one Engine. Consumes `generate` calls and `pull`s; ends with `close`, with its engine, or with the actor.

    Started again after a death it serves nothing until its owner has it `pull` the newest weights, or `go_on` with its first ones.
    """

    def __init__(self, model: str, options: EngineOptions, make: Callable[[str, EngineOptions], Engine] = Engine) -> None:
        again = ray.get_runtime_context().was_current_actor_reconstructed
        if again:
            time.sleep(options.restart_pause_s)
        self._engine = make(model, options)
        self._meter = RayMeter(options.run)
        if again:
            self._engine.hold()

    async def ready(self) -> bool:
        return True

    async def life(self) -> None:
        """Waits for nothing: a caller learns from its end that this process has died."""
        await asyncio.Event().wait()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str) -> Completion:
        try:
            said = await self._engine.generate(prompt_ids, params, prefix_key)
        finally:
            self._end_if_dead()
        for kind, amount in (("prompt", len(prompt_ids)), ("cached", said.cached_tokens), ("generated", len(said.ids))):
            self._meter("tokens", amount, kind=kind)
        return said

    async def pull(self, weights: WeightsVersion) -> dict[str, float]:
        """From the object store; how long it took."""
        from termrsi.actors.engine_weights import Fetcher

        stored = cast("Stored", weights.handle)  # made by actors.model_host
        try:
            return await self._engine.load(stored.facts, Fetcher(stored), weights.version)
        finally:
            self._end_if_dead()

    async def transfer(self, step: str, *arguments: object) -> Any:  # Any: what the step gives
        """A step of the engine's by NCCL: `join_transfer`, `begin_transfer`, `receive` or `end_transfer`."""
        try:
            return await getattr(self._engine, step)(*arguments)
        finally:
            self._end_if_dead()

    async def workers(self) -> int:
        return self._engine.workers

    async def go_on(self) -> None:
        await self._engine.go_on()

    async def stats(self) -> dict[str, float]:
        return {**self._engine.stats, "busy_s": self._engine.busy.seconds, "version": float(self._engine.version)}

    async def close(self) -> None:
        self._engine.close()

    def _end_if_dead(self) -> None:
        """A process whose engine is gone can only be started again: Ray does that for one that ends so."""
        if self._engine.dead:
            _LOG.error("the engine's process is dead: this one ends, too")
            os._exit(1)


class RayGenerator:
    """`ports.Generator` over one GeneratorActor.

    What was asked of one that died is asked again, of its next life: a completion depends on its prompt, seed and weights alone.
    """

    def __init__(self, actor: Any) -> None:  # Any: Ray's actor handles are untyped
        self.actor = actor

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        """Raises EngineError once the engine has died for good, RequestRefused, CaptureError."""
        said, away_s = await self._ask("generate", prompt_ids, params, prefix_key)
        return replace(said, away_s=said.away_s + away_s) if away_s else said

    async def pull(self, weights: WeightsVersion) -> None:
        """Raises EngineError, WeightsError."""
        await self._ask("pull", weights)

    async def go_on(self) -> None:
        """Of one that came back before any pull. Raises EngineError."""
        await self._ask("go_on")

    async def workers(self) -> int:
        return (await self._ask("workers"))[0]

    async def transfer(self, step: str, *arguments: object) -> None:
        """Not asked again of a next life, which would know nothing of the steps before. Raises EngineError, WeightsError."""
        await alive("generator", self.actor.transfer.remote(step, *arguments), step)

    async def _ask(self, method: str, *arguments: object) -> tuple[Any, float]:  # Any: what the method returns
        """The answer, and the seconds before it was asked of a life that gave it."""
        begun_s = asked_s = time.monotonic()
        backoff_s, late_s = BACKOFF_S, begun_s + BACK_AFTER_S
        while True:
            try:
                return await bounded("generator", getattr(self.actor, method).remote(*arguments), method), asked_s - begun_s
            except ActorUnavailableError as error:  # while Ray starts it again: it takes a call, or says this at once
                if time.monotonic() > late_s:
                    late = f"the generator actor died, and was not back after {BACK_AFTER_S:.0f} s"
                    raise EngineError(late, "generator") from error
                await asyncio.sleep(backoff_s)
                backoff_s, asked_s = min(2 * backoff_s, LONGEST_BACKOFF_S), time.monotonic()
            except NO_ROOM as error:
                raise no_room("generator", method, error) from error
            except RayActorError as error:
                raise EngineError(f"the generator actor died: {error}", "generator") from error
            except TimeoutError as error:
                raise EngineError(f"{method} was not done after {PATIENCE_S:.0f} s", "generator") from error
