"""Versions through the object store: none after one that followed it, however long an engine took to come back."""

import asyncio
from typing import Any, cast

import pytest

from termrsi.actors.channels import ObjectStoreChannel
from termrsi.records import WeightsVersion


class Engine:
    """Takes a version once it is there."""

    def __init__(self) -> None:
        self.there, self.had = asyncio.Event(), []

    async def pull(self, weights: WeightsVersion) -> None:
        await self.there.wait()
        self.had.append(weights.version)


@pytest.mark.parametrize("restored_first", [True, False])
async def test_an_engine_that_comes_back_ends_with_the_newest_whoever_asked_first(restored_first: bool) -> None:
    engine, newest = Engine(), [WeightsVersion("policy", 1, "a")]
    channel = ObjectStoreChannel(cast("Any", [engine]))

    async def restore() -> None:
        await channel.restore(0, lambda: newest[-1])

    async def deliver() -> None:
        newest.append(WeightsVersion("policy", 2, "b"))
        await channel.deliver(newest[-1])

    under_way = []
    for call in (restore, deliver) if restored_first else (deliver, restore):
        under_way.append(asyncio.ensure_future(call()))
        await asyncio.sleep(0)
    engine.there.set()
    await asyncio.gather(*under_way)
    assert engine.had == ([1, 2] if restored_first else [2, 2])
