"""Shared by all suites: one cache, one converted model and one vLLM engine per session."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
settings.register_profile("termrsi", deadline=None)  # what else the machine does is no fault of the code
settings.load_profile("termrsi")


def pytest_configure() -> None:
    """Told to end, as by launch/test.sh, a session ends what it started: the daemon, the engine, Ray."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def cache() -> Path:
    """The user's cache: what an earlier session converted or built is used again."""
    from termrsi.places import cache_dir

    return cache_dir()


@pytest.fixture(scope="session")
def embedded(cache: Path) -> Path:
    """The embedded model as a Hugging Face directory."""
    from termrsi.model.checkpoint import embedded_model

    return embedded_model(cache / "models")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(embedded: Path) -> AsyncIterator:
    """A real vLLM engine on the embedded model; tests that use it run on the session's loop."""
    from termrsi.actors.generator import Engine, EngineOptions

    started = Engine(str(embedded), EngineOptions(max_model_len=1024, max_num_seqs=16, kv_cache_gib=1, enforce_eager=True))
    yield started
    started.close()


@pytest.fixture(scope="session")
def docker_engine(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and test image of a Docker Engine: the environment's, or one that is started for this session."""
    from tests import docker_daemon

    if reason := docker_daemon.why_not():
        pytest.skip(reason)
    with docker_daemon.running(tmp_path_factory.mktemp("docker")) as address:
        yield address, docker_daemon.image(address, cache)


@pytest.fixture
def own_ray() -> Iterator[None]:
    """A test that starts Ray leaves none behind."""
    import ray

    yield
    ray.shutdown()
