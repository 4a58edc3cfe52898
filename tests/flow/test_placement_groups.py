"""Placement groups on a local Ray with GPUs that are only counted: what is reserved, who stands there, and what is refused."""

import asyncio
from typing import Any

import pytest
import ray

from termrsi.actors.placement import Placement
from termrsi.config.load import load
from termrsi.errors import ConfigError

pytestmark = pytest.mark.ray
SOON_S = 60.0
SHAPE = (
    "experiment=terminal_rsi", "cluster.nodes=1", "cluster.cpus=8", "cluster.gpus_per_node=8", "cluster.gpu_memory_gib=80",
    "cluster.gpus_generator=1", "cluster.gpus_learner=1", "cluster.generators=2",
)  # fmt: skip


@pytest.fixture
def eight_gpus(own_ray: None) -> None:
    ray.init(address="local", num_cpus=16, num_gpus=8, include_dashboard=False, object_store_memory=80 * 2**20)


@ray.remote
class Idle:
    def gpus(self) -> list[int]:
        return [int(gpu) for gpu in ray.get_gpu_ids()]


def start(made: Placement, role: str, process: int, gpus: float) -> Any:  # Any: Ray's actor handles are untyped
    return Idle.options(num_cpus=1, num_gpus=gpus, **made.options(role, process)).remote()  # type: ignore[attr-defined]


async def test_roles_get_devices_of_their_own_and_keep_them_free(eight_gpus: None) -> None:
    made = Placement(load((*SHAPE, "cluster.learner_processes=2")))
    await made.reserve()
    async with asyncio.timeout(SOON_S):  # 2 engines, 2 processes of the policy and 2 of the critic are kept free
        while ray.available_resources()["GPU"] != 2.0:  # noqa: ASYNC110  # Ray's count is some moments old, and it tells nobody
            await asyncio.sleep(0.05)
    seats = [("generator", 0), ("generator", 1), ("policy", 0), ("policy", 1), ("critic", 0), ("critic", 1)]
    actors = [start(made, role, k, 1) for role, k in seats]
    devices = [await actor.gpus.remote() for actor in actors]
    assert len({device for one in devices for device in one}) == 6
    made.release()
    made.release()


async def test_colocated_roles_stand_on_one_device(eight_gpus: None) -> None:
    shared = ("cluster.colocated=true", "cluster.gpus_generator=0.5", "cluster.gpus_learner=0.25")
    made = Placement(load((*SHAPE, *shared, "cluster.learner_processes=2", "+model.engine.gpu_memory_utilization=0.5")))
    await made.reserve()
    for k in range(2):
        actors = [start(made, role, k, gpus) for role, gpus in (("generator", 0.5), ("policy", 0.25), ("critic", 0.25))]
        engine, policy, critic = [await actor.gpus.remote() for actor in actors]
        assert engine == policy == critic
    made.release()


async def test_a_cluster_that_is_smaller_than_described_is_refused(eight_gpus: None) -> None:
    words = (*SHAPE[:3], "cluster.gpus_per_node=16", *SHAPE[4:], "cluster.generators=10")
    with pytest.raises(ConfigError, match=r"asks for 12 GPU \(policy 1 \+ critic 1 \+ generator 10\), and the cluster has 8"):
        await Placement(load(words)).reserve()
