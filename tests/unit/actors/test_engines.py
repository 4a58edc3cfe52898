"""Several engines behind one port: where a request goes, who gets weights, and what is told of them together."""

import asyncio
from typing import Any

from termrsi.actors.generator import RayGenerator, together
from termrsi.records import SamplingParams, WeightsVersion


class Method:
    """As a method of an actor's handle: `remote` gives something to wait for."""

    def __init__(self, answer: object) -> None:
        self.answer, self.calls = answer, 0

    def remote(self, *_: object) -> Any:  # Any: a coroutine of whatever is answered
        self.calls += 1
        return asyncio.sleep(0, self.answer)


class Actor:
    def __init__(self, name: str, **stats: float) -> None:
        self.generate, self.pull, self.stats = Method(name), Method(None), Method(stats)


async def test_what_begins_alike_goes_to_one_engine_and_weights_to_all() -> None:
    actors = [Actor(f"e{k}", requests=2.0, busy_s=4.0 * k, version=float(k)) for k in range(4)]
    engines = RayGenerator(*actors)
    asked = [[await engines.generate([1], SamplingParams(), key) for _ in range(3)] for key in map(str, range(40))]
    assert all(len(set(answers)) == 1 for answers in asked)
    assert {answers[0] for answers in asked} == {"e0", "e1", "e2", "e3"}
    await engines.pull(WeightsVersion("policy", 1, "", [], 0))
    assert [actor.pull.calls for actor in actors] == [1, 1, 1, 1]
    assert await engines.stats() == {"requests": 8.0, "busy_s": 6.0, "version": 0.0}


def test_one_engine_is_told_as_it_is() -> None:
    assert together([{"requests": 3.0, "busy_s": 2.0, "version": 5.0}]) == {"requests": 3.0, "busy_s": 2.0, "version": 5.0}
