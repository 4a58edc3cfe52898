"""Learner and critic as several actors behind the ports that one has: the same answers, and a lost process told in one line."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from termrsi import weights
from termrsi.actors.engine_weights import Fetcher
from termrsi.config.schema import ModelConfig
from termrsi.errors import EngineError, WeightsError
from termrsi.records import Sample

pytestmark = pytest.mark.ray
CONFIG = ModelConfig(threads=1, compute="fp32", micro_tokens=32)
LOSS: dict[str, object] = {"kind": "grpo", "anchor": "current"}


def batch(n: int = 5) -> list[Sample]:
    samples = []
    for i in range(n):
        mask = (0, 0, *(1 for _ in range(4 + i)))
        column = tuple((0.5 - i) * m for m in mask)
        ids = tuple(40 + i + k for k in range(len(mask)))
        sample = Sample(ids, mask, (0,) * len(mask), rollout_id=f"r{i}", group_id="g", advantages=column)
        samples.append(replace(sample, returns=column, old_values=(0.0,) * len(mask)))
    return samples


async def opened(kind: Any, tiny: str, processes: int, limit_s: float = 60.0) -> list[Any]:  # Any: Ray's
    from termrsi.actors.model_host import make_actors, meet

    actors = make_actors(kind, [{"num_cpus": 0.1}] * processes, tiny, CONFIG, limit_s)
    async with asyncio.timeout(300):
        await meet(actors)
    return actors


@contextlib.contextmanager
def ended(*hosts: Any) -> Iterator[None]:  # Any: RayPolicy or RayCritic
    try:
        yield
    finally:
        for host in hosts:
            host.end()


async def test_two_processes_are_one_policy_and_one_critic(ray_here: Any, tiny: str, tmp_path: Path) -> None:
    from termrsi.actors.model_host import CriticActor, PolicyActor, RayCritic, RayPolicy

    one, two = RayPolicy(*await opened(PolicyActor, tiny, 1)), RayPolicy(*await opened(PolicyActor, tiny, 2))
    with ended(one, two):
        assert await one.checksum() == await two.checksum()
        for step in range(2):
            alone, shared = await one.update(batch(), LOSS, 1e-3), await two.update(batch(), LOSS, 1e-3)
            assert shared.loss == pytest.approx(alone.loss, abs=1e-6), step
            assert shared.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
            assert (shared.tokens, shared.extra.keys()) == (alone.tokens, alone.extra.keys())
        for ours, theirs in zip(await two.logp(batch()), await one.logp(batch()), strict=True):
            assert ours == pytest.approx(theirs, abs=2e-3)
        published = await two.publish()
        assert isinstance(published.handle, weights.Stored)
        packed = await Fetcher(published.handle)(list(published.handle.facts))
        assert weights.checksum(weights.facts_of(packed)) == published.checksum == await two.checksum()
        assert {dtype for dtype, _, _ in packed.values()} == {"bfloat16"}
        saved = await two.save(str(tmp_path / "saved"))
        assert await two.save_training(str(tmp_path / "training")) == saved
        assert saved == await two.checksum() == await one.load(str(tmp_path / "saved"))
        assert await one.load_training(str(tmp_path / "training"), 5) == saved
        with pytest.raises(ValueError, match="old_logp holds 0"):  # an error that all have alike leaves the group as it was
            await two.update(batch(), {"kind": "grpo"}, 1e-3)
        assert await two.checksum() == saved
    critic, other = RayCritic(*await opened(CriticActor, tiny, 2)), RayCritic(*await opened(CriticActor, tiny, 1))
    with ended(critic, other):
        await critic.update(batch(), 1e-3, 0.2)
        await critic.refit(2.0, 0.25)
        handed = await critic.publish()
        await other.pull(handed)
        for ours, theirs in zip(await critic.values(batch()), await other.values(batch()), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
        await critic.pull(await other.publish())
        with pytest.raises(WeightsError, match="after a pull of 0000"):
            await critic.pull(replace(handed, checksum="0000"))
        assert (await critic.update(batch(), 1e-3, 0.2)).tokens > 0


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_a_lost_process_is_named_and_none_waits_for_it(ray_here: Any, tiny: str, fault: str) -> None:
    """Killed: known at once. Stopped, as a machine that hangs: known after the limit. Either way all are ended."""
    from termrsi.actors.model_host import PolicyActor, RayPolicy

    actors = await opened(PolicyActor, tiny, 2, limit_s=60.0 if fault == "killed" else 10.0)
    policy = RayPolicy(*actors, limit_s=60.0 if fault == "killed" else 10.0)
    with ended(policy):
        await policy.update(batch(), LOSS, 1e-3)
        pid = await actors[1].__ray_call__.remote(lambda _: os.getpid())
        os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        line = "process 1 of 2 died in update" if fault == "killed" else "process 1 of 2 did not come to the end of update"
        async with asyncio.timeout(100):
            with pytest.raises(EngineError, match=line):
                await policy.update(batch(), LOSS, 1e-3)
            with pytest.raises(EngineError, match=line):  # from then on, of every call
                await policy.checksum()
