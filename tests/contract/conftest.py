"""Sandboxes of every backend; a Ray of a module's own, and a model for its actors."""

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from termrsi import sandbox
from termrsi.ports import Sandbox
from termrsi.sandbox import check
from tests.contract.backends import OWNER, Kit, Make, docker_kit, gvisor_kit, local_kit


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:  # Any: the module
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    from termrsi.model.checkpoint import tiny_model

    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(params=["local", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("docker", "gvisor"))])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Kit:
    if request.param == "local":
        return local_kit(tmp_path)
    if request.param == "gvisor":
        if reasons := check.missing("gvisor"):
            pytest.skip("; ".join(reasons))
        return gvisor_kit(tmp_path)
    return docker_kit(*request.getfixturevalue("docker_engine"))


@pytest.fixture(autouse=True)
def nothing_unclosed(request: pytest.FixtureRequest) -> Iterator[None]:
    """A connection that a test with an engine left open is told of in that test, not in whichever collects it."""
    yield
    if "docker_engine" in request.fixturenames:
        gc.collect()


@pytest.fixture
async def make(kit: Kit) -> AsyncIterator[Make]:
    """Started sandboxes of the backend, closed at the end."""
    made: list[Sandbox] = []

    async def start(**options: object) -> Sandbox:
        own = {key: value for key, value in kit.options.items() if key != "image" or "snapshot" not in options}
        box = sandbox.make(kit.name, **(own | {"owner": OWNER} | options))
        made.append(box)
        await box.start()
        return box

    yield start
    for box in made:
        await box.close()


@pytest.fixture
async def box(make: Make) -> Sandbox:
    return await make()
