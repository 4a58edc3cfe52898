"""What an engine says of its experts becomes a record, or an error: by vLLM's own capture, and by the worker extension."""

import numpy as np
import pytest

from termrsi.actors.expert_capture import RoutingSource
from termrsi.actors.generator import EngineOptions, engine_arguments
from termrsi.errors import CaptureError, EngineError
from termrsi.records import Routing

# Layers 1 and 3 of four have experts; three tokens.
ROWS = np.array([[[0, 1], [5, 4]], [[2, 1], [0, 7]], [[7, 6], [3, 2]]])


class Choice:
    def __init__(self, experts: np.ndarray | None = None) -> None:
        self.routed_experts = experts


class Worker:
    """Answers as `RoutingProbe` does through vLLM's collective_rpc."""

    def __init__(
        self, rows: np.ndarray | None = None, num_experts: int = 8, layers: tuple[int, ...] = (1, 3), reason: str = ""
    ) -> None:
        self.rows, self.num_experts, self.layers, self.reason = rows, num_experts, layers, reason
        self.asked: list[tuple[str, tuple]] = []

    async def __call__(self, method: str, args: tuple = ()) -> list:
        self.asked.append((method, args))
        if method == "routing_shape":
            return [{"layers": list(self.layers), "num_experts": self.num_experts, "top_k": 2}]
        if method == "capture_routing":
            return [self.reason]
        if method == "take_routing" and self.rows is not None:
            return [self.rows.astype(np.uint8 if self.num_experts < 256 else np.uint16).tobytes()]
        return [None]


async def of_worker(rows: np.ndarray | None, tokens: int = 3, num_experts: int = 8) -> Routing:
    worker = Worker(rows, num_experts)
    source = RoutingSource(worker, by_extension=True)
    await source.begin()
    await source.begin()
    found = await source.of(Choice(), "r7", tokens)
    assert worker.asked == [("routing_shape", ()), ("capture_routing", ()), ("take_routing", ("r7",))]
    return found


async def of_vllm(rows: np.ndarray | None, tokens: int = 3) -> Routing:
    source = RoutingSource(Worker(), by_extension=False)
    await source.begin()
    whole = None
    if rows is not None:
        whole = np.zeros((len(rows), 4, 2), np.uint8)  # dense layers are zeros
        whole[:, [1, 3]] = rows
    return await source.of(Choice(whole), "r7", tokens)


@pytest.mark.parametrize("of", [of_worker, of_vllm])
async def test_layers_with_experts_become_the_record(of) -> None:
    want = Routing(bytes(ROWS.reshape(-1).tolist()), layers=2, top_k=2)
    assert await of(ROWS) == want
    assert await of(np.concatenate([ROWS, ROWS[:1]])) == want  # what was computed ahead is left out


@pytest.mark.parametrize("of", [of_worker, of_vllm])
@pytest.mark.parametrize("row", [[0, 0], [255, 255], [5, 5]])
async def test_a_missing_capture_is_an_error(of, row: list[int]) -> None:
    spoilt = ROWS.copy()
    spoilt[1, 1] = row
    with pytest.raises(CaptureError, match="no routing of token 1 in layer 1"):
        await of(spoilt)


@pytest.mark.parametrize("of", [of_worker, of_vllm])
async def test_too_few_tokens_are_an_error(of) -> None:
    with pytest.raises(CaptureError, match="routing of 2 tokens came with 3"):
        await of(ROWS[:2])
    with pytest.raises(CaptureError, match="routing of 0 tokens came with 3"):
        await of(None)


@pytest.mark.parametrize(("num_experts", "width"), [(255, 1), (256, 1), (257, 2), (400, 2)])
async def test_many_experts(num_experts: int, width: int) -> None:
    rows = ROWS.copy()
    rows[2, 1] = [num_experts - 1, 0]
    found = await of_worker(rows, num_experts=num_experts)
    assert found.width == width
    assert np.frombuffer(found.data, f"<u{width}").reshape(rows.shape).tolist() == rows.tolist()


async def test_an_engine_that_cannot_capture_is_refused_each_time() -> None:
    with pytest.raises(EngineError, match="the model has no experts"):
        await RoutingSource(Worker(layers=()), by_extension=True).begin()
    source = RoutingSource(Worker(reason="2 kinds of KV cache"), by_extension=True)
    for _ in range(2):
        with pytest.raises(EngineError, match="cannot be captured: 2 kinds of KV cache"):
            await source.begin()


@pytest.mark.parametrize(("on_cpu", "key"), [(True, "enforce_eager"), (False, "enable_return_routed_experts")])
def test_what_the_engine_is_started_with(on_cpu: bool, key: str) -> None:
    plain = engine_arguments("m", EngineOptions(), on_cpu=on_cpu)
    asked = engine_arguments("m", EngineOptions(routing_replay=True), on_cpu=on_cpu)
    assert {name: value for name, value in asked.items() if plain.get(name) != value} == {key: True}
