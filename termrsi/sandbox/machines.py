"""What a pool makes its sandboxes with: one class per backend, from a task's environment to a sandbox that is not yet started.

Memory and disk bound what a task's environment may ask for. A task gets the network only where `network` is set.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from termrsi.errors import ConfigError
from termrsi.ports import Sandbox
from termrsi.records import EnvironmentSpec, Snapshot, TaskSpec
from termrsi.sandbox import docker, image, layers, local

BACKENDS = ("local", "docker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one sandbox. `cpus`: None is no limit."""

    memory_mb: int = 2048
    disk_mb: int = 1024
    pids: int = 256
    cpus: float | None = None
    network: bool = False
    output_limit_bytes: int = 1 << 20


class Machines(Protocol):
    """A backend as the pool sees it."""

    async def make(self, task: TaskSpec, snapshot: Snapshot | None) -> Sandbox:
        """Not yet started; the image is built first if need be. Raises TaskError for what the task asks, SandboxError."""
        ...

    async def discard(self, snapshot: Snapshot) -> None:
        """A second time does nothing."""
        ...


def of(backend: str, limits: Limits, *, owner: str, cache_dir: Path | str, state_dir: Path | str | None) -> Machines:
    """Raises ConfigError for a backend that is not there."""
    if backend == "local":
        return LocalMachines(limits, owner, cache_dir, state_dir)
    if backend == "docker":
        return DockerMachines(limits, owner)
    raise ConfigError(f"unknown backend {backend!r}", "sandbox.backend", f"valid: {', '.join(BACKENDS)}")


@dataclass(frozen=True, slots=True)
class LocalMachines:
    """`cache_dir` for images, `state_dir` for snapshots."""

    limits: Limits
    owner: str
    cache_dir: Path | str
    state_dir: Path | str | None

    async def make(self, task: TaskSpec, snapshot: Snapshot | None) -> Sandbox:
        """See `Machines`."""
        environment, limits = task.environment, self.limits
        built = None if snapshot else await image.build(environment, self.cache_dir, state_dir=self.state_dir)
        options = local.LocalOptions(
            image=built,
            snapshot=snapshot,
            env=environment.env,
            workdir=environment.workdir,
            memory_mb=min(environment.memory_mb or limits.memory_mb, limits.memory_mb),
            disk_mb=min(environment.storage_mb or limits.disk_mb, limits.disk_mb),
            pids=limits.pids,
            cpus=environment.cpus or limits.cpus,
            network=environment.network and limits.network,
            state_dir=layers.state_dir(self.state_dir),
            output_limit_bytes=limits.output_limit_bytes,
            owner=self.owner,
        )
        return local.LocalSandbox(options)

    async def discard(self, snapshot: Snapshot) -> None:
        """See `Machines`."""
        await asyncio.to_thread(local.discard, snapshot, self.state_dir)


@dataclass(frozen=True, slots=True)
class DockerMachines:
    """Images are the engine's: a task's `docker_image`, or its Dockerfile built once per content."""

    limits: Limits
    owner: str
    engine: str = ""

    async def make(self, task: TaskSpec, snapshot: Snapshot | None) -> Sandbox:
        """See `Machines`."""
        environment, limits = task.environment, self.limits
        options = docker.DockerOptions(
            image="" if snapshot else await self._image(environment),
            snapshot=snapshot,
            env=environment.env,
            workdir=environment.workdir,
            memory_mb=min(environment.memory_mb or limits.memory_mb, limits.memory_mb),
            disk_mb=min(environment.storage_mb or limits.disk_mb, limits.disk_mb),
            pids=limits.pids,
            cpus=environment.cpus or limits.cpus,
            network=environment.network and limits.network,
            output_limit_bytes=limits.output_limit_bytes,
            owner=self.owner,
            engine=self.engine,
        )
        return docker.DockerSandbox(options)

    async def discard(self, snapshot: Snapshot) -> None:
        """See `Machines`."""
        await asyncio.to_thread(docker.discard, snapshot, self.engine)

    async def _image(self, environment: EnvironmentSpec) -> str:
        """Raises TaskError for a Dockerfile that does not build, or a task without an image."""
        context = Path(environment.context)
        if environment.context and (context / "Dockerfile").is_file():
            key = await asyncio.to_thread(image.key_of, context / "Dockerfile", context)
            return await asyncio.to_thread(docker.build, context, "Dockerfile", key, environment.build_timeout_s, self.engine)
        return environment.docker_image or docker.DEFAULT_IMAGE
