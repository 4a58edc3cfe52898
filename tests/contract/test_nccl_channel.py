"""The protocol of weights by NCCL on fakes: who is told what, in which order, and that all arrives. Real GPUs: tests/gpu.

The wire is a broadcast in which each waits for all the others, as NCCL's: whoever sends before the engines are told hangs.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from termrsi import weights
from termrsi.actors.nccl_channel import Announced, NcclChannel
from termrsi.errors import ConfigError, EngineError, WeightsError
from termrsi.records import WeightsVersion

SOON_S = 2.0
BUCKET = 40


class Wire:
    """One broadcast after the other; each ends when all `world_size` are there."""

    def __init__(self, world_size: int) -> None:
        self.ranks: set[int] = set()
        self._barrier = asyncio.Barrier(world_size)
        self._sent: torch.Tensor | None = None

    async def join(self, rank: int) -> None:
        assert rank not in self.ranks
        self.ranks.add(rank)
        await self._barrier.wait()

    async def broadcast(self, tensor: torch.Tensor, *, source: bool) -> None:
        if source:
            self._sent = tensor
        await self._barrier.wait()
        assert self._sent is not None
        assert self._sent.numel() == tensor.numel(), "both cut the stream alike"
        tensor.copy_(self._sent)
        await self._barrier.wait()


class Net:
    """Where the ranks of a group find each other."""

    def __init__(self) -> None:
        self.wires: dict[int, Wire] = {}
        self.log: list[str] = []

    def at(self, port: int, world_size: int) -> Wire:
        return self.wires.setdefault(port, Wire(world_size))


def chunks(sizes: Iterable[tuple[str, int]], limit: int) -> Iterator[list[str]]:
    """vLLM's rule of packing: a chunk is sent once it has more than `limit` bytes."""
    names, total = [], 0
    for name, size in sizes:
        names.append(name)
        total += size
        if total > limit:
            yield names
            names, total = [], 0
    if names:
        yield names


class FakeLearner:
    def __init__(self, net: Net) -> None:
        self._net = net
        self._port = 100
        self.state = {f"w{i}": torch.full((4, 3), float(i), dtype=torch.bfloat16) for i in range(5)} | {"b": torch.arange(3.0)}
        self.version, self.changes, self._announced = 0, 0, (0, 0)
        self.problem = ""
        self.hangs = False

    def update(self) -> None:
        self.changes += 1
        self.state = {name: tensor + 1 for name, tensor in self.state.items()}

    def publish(self) -> WeightsVersion:
        self.version += 1
        self._announced = (self.version, self.changes)
        facts = weights.facts_of(weights.pack(self.state))
        samples = {name: weights.sample_digest(tensor, self.version) for name, tensor in self.state.items()}
        return WeightsVersion("policy", self.version, weights.checksum(facts), Announced(facts, samples))

    async def transfer_problem(self) -> str:
        return self.problem

    async def transfer_address(self) -> tuple[str, int]:
        self._port += 1
        return "host", self._port

    async def join_transfer(self, host: str, port: int, world_size: int) -> None:
        self._net.log.append("learner joins")
        self._wire = self._net.at(port, world_size)
        await self._wire.join(0)

    async def holds(self, version: int) -> bool:
        return self._announced == (version, self.changes)

    async def send(self, version: int) -> None:
        self._net.log.append("learner sends")
        for names in chunks(((name, tensor.nbytes) for name, tensor in self.state.items()), BUCKET):
            if self.hangs:
                await asyncio.Event().wait()
            packed = torch.cat([self.state[name].reshape(-1).view(torch.uint8) for name in names])
            self._net.log.append(f"chunk {'+'.join(names)}")
            await self._wire.broadcast(packed, source=True)


class FakeEngine:
    def __init__(self, net: Net, name: str, workers: int) -> None:
        self._net, self._name, self._workers = net, name, workers
        self.has: list[dict[str, torch.Tensor]] = []
        self.version = 0
        self.stopped = False
        self.loses = ""

    async def workers(self) -> int:
        return self._workers

    async def transfer(self, step: str, *arguments: Any) -> None:
        self._net.log.append(f"{self._name} {step}")
        await getattr(self, step)(*arguments)

    async def join_transfer(self, info: dict[str, Any]) -> None:
        assert info["packed"]
        assert info["packed_buffer_size_bytes"] == BUCKET
        self._wire = self._net.at(info["master_port"], info["world_size"])
        await asyncio.gather(*(self._wire.join(info["rank_offset"] + i) for i in range(self._workers)))

    async def begin_transfer(self) -> None:
        self.stopped = True

    async def receive(self, info: dict[str, Any]) -> None:
        assert self.stopped
        self.has = await asyncio.gather(*(self._worker(info) for _ in range(self._workers)))

    async def _worker(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        told = {n: (getattr(torch, d), s) for n, d, s in zip(info["names"], info["dtype_names"], info["shapes"], strict=True)}
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in told.items()}
        found = {}
        for names in chunks(sizes.items(), BUCKET):
            packed = torch.empty(sum(sizes[name] for name in names), dtype=torch.uint8)
            await self._wire.broadcast(packed, source=False)
            for name, part in zip(names, packed.split([sizes[name] for name in names]), strict=True):
                dtype, shape = told[name]
                found[name] = part.clone().view(dtype).view(shape)
        return found

    async def end_transfer(self, version: int, expected: dict[str, str]) -> None:
        for has in self.has:
            if self.loses:
                has[self.loses] = has[self.loses] * 2
            weights.compare(expected, {name: weights.sample_digest(tensor, version) for name, tensor in has.items()})
        self.version, self.stopped = version, False


class Fleet:
    def __init__(self, *workers: int, limit_s: float = SOON_S) -> None:
        self.net = Net()
        self.learner = FakeLearner(self.net)
        self.engines = [FakeEngine(self.net, f"engine {i}", n) for i, n in enumerate(workers)]
        self.channel = NcclChannel(self.learner, self.engines, BUCKET, limit_s)

    def served(self) -> list[int]:
        """Versions of the engines; that each worker of each has exactly the learner's state is asserted."""
        for engine in self.engines:
            for has in engine.has:
                assert list(has) == list(self.learner.state)
                for name, tensor in self.learner.state.items():
                    assert has[name].dtype == tensor.dtype
                    assert torch.equal(has[name], tensor)
        return [engine.version for engine in self.engines]


async def test_everything_arrives_at_every_worker() -> None:
    fleet = Fleet(1, 2)
    await fleet.channel.open()
    assert [wire.ranks for wire in fleet.net.wires.values()] == [{0, 1, 2, 3}]
    await fleet.channel.deliver(fleet.learner.publish())
    assert fleet.served() == [1, 1]
    assert [len(engine.has) for engine in fleet.engines] == [1, 2]
    fleet.learner.update()
    await fleet.channel.deliver(fleet.learner.publish())
    assert fleet.served() == [2, 2]
    assert len(fleet.net.wires) == 1  # all met once


async def test_engines_are_told_before_the_learner_and_all_stop_before_any_receives() -> None:
    fleet = Fleet(1, 1)
    await fleet.channel.open()
    assert fleet.net.log == ["engine 0 join_transfer", "engine 1 join_transfer", "learner joins"]
    fleet.net.log.clear()
    await fleet.channel.deliver(fleet.learner.publish())
    ends = ["engine 0 end_transfer", "engine 1 end_transfer"]
    begins = ["engine 0 begin_transfer", "engine 1 begin_transfer", "engine 0 receive", "engine 1 receive", "learner sends"]
    assert fleet.net.log == [*begins, "chunk w0+w1", "chunk w2+w3", "chunk w4+b", *ends]


async def test_a_learner_that_cannot_send_is_refused_at_the_start_in_one_line() -> None:
    fleet = Fleet(1)
    fleet.learner.problem = "the learner has no GPU"
    with pytest.raises(ConfigError, match=r"^cluster\.weight_channel: nccl: the learner has no GPU; object_store$"):
        await fleet.channel.open()
    assert fleet.net.log == []


async def test_a_version_that_the_learner_no_longer_has_disturbs_no_engine() -> None:
    fleet = Fleet(1)
    await fleet.channel.open()
    published = fleet.learner.publish()
    fleet.learner.update()
    with pytest.raises(WeightsError, match="the learner is past version 1"):
        await fleet.channel.deliver(published)
    assert not fleet.engines[0].stopped
    await fleet.channel.deliver(fleet.learner.publish())
    assert fleet.served() == [2]


async def test_what_differs_after_the_load_is_not_served() -> None:
    fleet = Fleet(1, 1)
    await fleet.channel.open()
    fleet.engines[1].loses = "w3"
    with pytest.raises(WeightsError, match="tensor w3 differs"):
        await fleet.channel.deliver(fleet.learner.publish())
    assert fleet.engines[1].stopped


async def test_one_that_came_back_meets_the_others_again_and_has_the_present_version() -> None:
    fleet = Fleet(1, 1)
    await fleet.channel.open()
    published = fleet.learner.publish()
    await fleet.channel.deliver(published)
    fleet.engines[1] = fleet.channel._engines[1] = FakeEngine(fleet.net, "next life", 1)  # type: ignore[index]  # a list here
    await fleet.channel.restore(1, lambda: published)
    assert fleet.served() == [1, 1]
    assert len(fleet.net.wires) == 2


async def test_one_that_came_back_too_late_for_its_version_waits_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(1, 1)
    await fleet.channel.open()
    published = fleet.learner.publish()
    await fleet.channel.deliver(published)
    fleet.learner.update()
    fleet.engines[0] = fleet.channel._engines[0] = FakeEngine(fleet.net, "next life", 1)  # type: ignore[index]  # a list here
    await fleet.channel.restore(0, lambda: published)
    assert "the learner is past version 1" in caplog.text
    await fleet.channel.deliver(fleet.learner.publish())
    assert fleet.served() == [2, 2]


async def test_a_fault_of_the_wires_own_is_told_in_a_line_and_all_meet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(1)
    await fleet.channel.open()

    async def broken(*_: object) -> None:
        raise RuntimeError("NCCL error 3\nin line 2")

    published = fleet.learner.publish()
    with monkeypatch.context() as patch:
        patch.setattr(fleet.learner, "send", broken)
        with pytest.raises(EngineError, match=r"^weights: version 1 was not across: NCCL error 3; the same command goes on$"):
            await fleet.channel.deliver(published)
    await fleet.channel.deliver(published)
    assert fleet.served() == [1]
    assert len(fleet.net.wires) == 2


async def test_a_transfer_that_hangs_ends_with_a_sentence() -> None:
    fleet = Fleet(1, limit_s=0.05)
    await fleet.channel.open()
    fleet.learner.hangs = True
    with pytest.raises(EngineError, match="version 1 was not across after 0 s"):
        await fleet.channel.deliver(fleet.learner.publish())
