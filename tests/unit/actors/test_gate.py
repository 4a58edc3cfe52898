"""For how long a gate was shut, by a clock that the test moves; and what an engine that was away costs an agent: nothing."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from termrsi.actors import generator
from termrsi.actors.gate import Gate
from termrsi.actors.generator import RayGenerator
from termrsi.records import Completion, SamplingParams


def test_the_time_in_which_it_is_shut_counts_once_and_until_now() -> None:
    now = [10.0]
    gate = Gate(lambda: now[0])
    gate.open()
    now[0] = 20.0
    assert gate.shut_s == 0.0
    gate.shut()
    now[0] = 22.0
    gate.shut()
    now[0] = 25.0
    assert gate.shut_s == 5.0
    gate.open()
    now[0] = 100.0
    gate.open()
    assert gate.shut_s == 5.0
    gate.shut()
    now[0] = 101.0
    assert gate.shut_s == 6.0


async def test_it_lets_pass_once_it_is_open() -> None:
    gate = Gate()
    await gate.passed()
    gate.shut()
    passing = asyncio.ensure_future(gate.passed())
    await asyncio.sleep(0)
    assert not passing.done()
    gate.open()
    async with asyncio.timeout(5.0):
        await passing


class Engine:
    """An actor's handle: away as often as `lost` says, then it answers with what its gate took."""

    def __init__(self, lost: int, shut_s: float) -> None:
        self._lost, self._shut_s = lost, shut_s

    def __getattr__(self, method: str) -> "Engine":
        return self

    def remote(self, prompt_ids: Sequence[int], *_: object) -> Any:  # Any: a future, as object references are awaited
        future = asyncio.get_running_loop().create_future()
        if self._lost:
            self._lost -= 1
            future.set_exception(ActorUnavailableError("it died", None))
        else:
            future.set_result(Completion((1,), (0.0,), "stop", away_s=self._shut_s))
        return future


@pytest.mark.parametrize(("lost", "shut_s"), [(0, 0.0), (0, 3.0), (2, 3.0)])
async def test_the_time_until_an_engine_is_there_again_is_told_with_what_it_says(
    lost: int, shut_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "BACKOFF_S", 0.01)
    said = await RayGenerator(Engine(lost, shut_s)).generate([1, 2], SamplingParams())
    assert said.away_s >= shut_s + (0.01 + 0.02 if lost else 0.0)
    assert lost or said.away_s == shut_s
