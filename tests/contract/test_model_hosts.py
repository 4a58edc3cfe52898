"""`ports.Policy` and `ports.Critic` as Ray actors on a tiny model: learning, weights out, a hand-off that outlives its host.

What a critic's refit promises is asked of the fake too.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from termrsi import weights
from termrsi.config.schema import ModelConfig
from termrsi.errors import EngineError, WeightsError
from termrsi.fakes import FakeCritic
from termrsi.ports import Critic
from termrsi.records import Sample, WeightsVersion

ray = pytest.mark.ray


CONFIG = ModelConfig(threads=1, critic_layers=1, micro_tokens=64)


def batch(n: int = 3) -> list[Sample]:
    mask = (0, 0, 1, 1, 1, 0, 1)
    column = tuple(0.5 * m for m in mask)
    base = Sample(tuple(range(40, 47)), mask, (0, 0, 0, 0, 0, 1, 1), advantages=column, returns=column, old_values=(0.0,) * 7)
    return [replace(base, rollout_id=f"r{i}", group_id="g", ids=tuple(40 + i + k for k in range(7))) for i in range(n)]


@pytest.fixture(params=["fake", pytest.param("ray", marks=ray)])
def make_critic(request: pytest.FixtureRequest) -> Iterator[Callable[[], Critic]]:
    """New critics, all alike; their hosts end with the test."""
    if request.param == "fake":
        yield FakeCritic
        return
    here, tiny = request.getfixturevalue("ray_here"), request.getfixturevalue("tiny")
    from termrsi.actors.model_host import CriticActor, RayCritic

    made: list[Any] = []

    def make() -> Critic:
        made.append(RayCritic(CriticActor.options(num_cpus=0.1).remote(tiny, CONFIG)))
        return made[-1]

    yield make
    for critic in made:
        here.kill(critic.actor)


async def test_a_refit_is_an_affine_map_of_every_value(make_critic: Callable[[], Critic], tmp_path: Path) -> None:
    """It stays with the weights, published or saved, and a later update goes on from it."""
    critic = make_critic()
    for _ in range(3):
        await critic.update(batch(), 1e-5, 0.0)
    before, start = await critic.values(batch()), await critic.checksum()
    await critic.refit(-2.0, 0.5)
    refitted = await critic.values(batch())
    for row, old, sample in zip(refitted, before, batch(), strict=True):
        assert row == pytest.approx([(-2.0 * v + 0.5) * m for v, m in zip(old, sample.mask, strict=True)], abs=1e-5)
    assert await critic.checksum() != start
    other = make_critic()
    await other.pull(await critic.publish())
    assert await other.values(batch()) == refitted
    await critic.save(str(tmp_path / "critic"))
    await other.load(str(tmp_path / "critic"))
    for row, kept in zip(await other.values(batch()), refitted, strict=True):
        assert row == pytest.approx(kept, abs=1e-2)  # the body is saved in bf16
    await critic.update(batch(), 1e-5, 0.0)
    assert await critic.values(batch()) != refitted


@ray
async def test_the_policy_learns_and_publishes(ray_here: Any, tiny: str, tmp_path: Path) -> None:
    from termrsi.actors.model_host import PolicyActor, RayPolicy

    policy = RayPolicy(PolicyActor.options(num_cpus=0.1).remote(tiny, CONFIG))
    start = await policy.checksum()
    before = await policy.logp(batch())
    metrics = await policy.update(batch(), {"kind": "ppo", "anchor": "current"}, 1e-3)
    assert metrics.tokens == 12
    assert sum(map(sum, await policy.logp(batch()))) > sum(map(sum, before))  # what had an advantage became likelier
    assert (await policy.fit(batch(), 1e-3)).loss > 0
    published = await policy.publish()
    assert published.checksum != start
    assert await policy.checksum() == published.checksum
    assert weights.checksum(weights.facts_of(await everything(published))) == published.checksum
    assert await policy.save(str(tmp_path / "saved")) == await policy.checksum()
    await policy.load(tiny)
    assert await policy.checksum() == start
    assert await policy.load(str(tmp_path / "saved")) != start
    ray_here.kill(policy.actor)


async def everything(published: WeightsVersion) -> weights.PackedState:
    from termrsi.actors.engine_weights import Fetcher

    assert isinstance(published.handle, weights.Stored)
    return await Fetcher(published.handle)(list(published.handle.facts))


@ray
async def test_what_did_not_change_is_not_put_again(ray_here: Any, tiny: str) -> None:
    """A second publication without an update puts nothing; one after an update what changed; each is whole to who takes it."""
    from termrsi.actors.model_host import PolicyActor, RayPolicy

    policy = RayPolicy(PolicyActor.options(num_cpus=0.1).remote(tiny, CONFIG), bucket_bytes=40_000)
    first, again = await policy.publish(), await policy.publish()
    assert isinstance(first.handle, weights.Stored)
    assert isinstance(again.handle, weights.Stored)
    assert len(first.handle.parts) > 2
    assert [part.reference for part in again.handle.parts] == [part.reference for part in first.handle.parts]
    assert (again.version, again.checksum) == (first.version + 1, first.checksum)
    versions = [again]
    for _ in range(4):
        await policy.update(batch(), {"kind": "ppo", "anchor": "current"}, 1e-7)
        versions.append(await policy.publish())
        stored = versions[-1].handle
        assert isinstance(stored, weights.Stored)
        assert stored.put_bytes <= 3 * stored.size_bytes  # what nobody needs is given up in time
    assert len({version.checksum for version in versions}) > 1
    for version in (first, *versions):
        assert weights.checksum(weights.facts_of(await everything(version))) == version.checksum
    ray_here.kill(policy.actor)


@ray
async def test_a_critic_is_handed_on_after_its_host_has_ended(ray_here: Any, tiny: str) -> None:
    """The driver owns the object in the store: the next phase's host pulls it, weights only, with a fresh optimizer."""
    from termrsi.actors.model_host import CriticActor, RayCritic

    first = RayCritic(CriticActor.options(num_cpus=0.1).remote(tiny, CONFIG))
    for _ in range(3):
        await first.update(batch(), 1e-3, 0.0)
    wanted, published = await first.values(batch()), await first.publish()
    ray_here.kill(first.actor)
    second = RayCritic(CriticActor.options(num_cpus=0.1).remote(tiny, CONFIG))
    assert await second.values(batch()) != wanted
    await second.pull(published)
    assert await second.values(batch()) == wanted
    with pytest.raises(WeightsError, match="after a pull of 0000"):
        await second.pull(replace(published, checksum="0000"))
    ray_here.kill(second.actor)


@ray
async def test_a_dead_host_is_one_line(ray_here: Any, tiny: str) -> None:
    from termrsi.actors.model_host import CriticActor, RayCritic

    critic = RayCritic(CriticActor.options(num_cpus=0.1).remote(tiny, CONFIG))
    await critic.checksum()
    ray_here.kill(critic.actor)
    with pytest.raises(EngineError, match="critic: its process died"):
        await critic.values(batch())
