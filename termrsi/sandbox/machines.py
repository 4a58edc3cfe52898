"""What a pool makes its sandboxes with: one class per backend, from a task's environment to a sandbox that is not yet started.

Memory and disk bound what a task's environment may ask for. A task gets the network only where `network` is set.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from termrsi.errors import ConfigError, TaskError
from termrsi.places import from_host
from termrsi.ports import Sandbox
from termrsi.records import EnvironmentSpec, Snapshot, TaskSpec
from termrsi.sandbox import compose, docker, docker_engine, gvisor, image, layers, local
from termrsi.sandbox.pool import Cost

BACKENDS = ("local", "docker", "gvisor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one sandbox. `cpus`: None is no limit."""

    memory_mb: int = 2048
    disk_mb: int = 1024
    pids: int = 256
    cpus: float | None = None
    network: bool = False
    build_network: bool = False  # in the build of an image; Docker's engine has its own
    output_limit_bytes: int = 1 << 20


class Machines(Protocol):
    """A backend as the pool sees it."""

    async def make(self, task: TaskSpec, snapshot: Snapshot | None) -> Sandbox:
        """Not yet started; the image is built first if need be. Raises TaskError for what the task asks, SandboxError."""
        ...

    async def discard(self, snapshot: Snapshot) -> None:
        """A second time does nothing."""
        ...

    async def kept(self, snapshot: Snapshot) -> bool:
        """Whether it is still there; its digest is looked at when it is started from."""
        ...

    def cost(self, task: TaskSpec) -> Cost:
        """What a sandbox of this task may come to use of its host."""
        ...


def of(backend: str, limits: Limits, *, owner: str, cache_dir: Path | str, state_dir: Path | str | None) -> Machines:
    """Raises ConfigError for a backend that is not there."""
    if backend == "local":
        return LocalMachines(limits, owner, cache_dir, state_dir)
    if backend == "docker":
        return DockerMachines(limits, owner)
    if backend == "gvisor":
        return GvisorMachines(limits, owner, cache_dir, state_dir)
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
        environment = task.environment
        built = None if snapshot else await _built(environment, self.cache_dir, self.state_dir, self.limits)
        options = local.LocalOptions(
            image=built,
            snapshot=snapshot,
            state_dir=layers.state_dir(self.state_dir),
            **_common(environment, self.limits, self.owner),
        )
        return local.LocalSandbox(options)

    async def discard(self, snapshot: Snapshot) -> None:
        """See `Machines`."""
        await asyncio.to_thread(local.discard, snapshot, self.state_dir)

    async def kept(self, snapshot: Snapshot) -> bool:
        return (Path(snapshot.handle) / "manifest.json").is_file()

    def cost(self, task: TaskSpec) -> Cost:
        """What is written is memory; a snapshot of it is disk."""
        memory, disk = _bounded(task.environment, self.limits)
        return Cost(memory + disk, disk)


@dataclass(frozen=True, slots=True)
class GvisorMachines:
    """Images as `LocalMachines`; `state_dir` for checkpoints."""

    limits: Limits
    owner: str
    cache_dir: Path | str
    state_dir: Path | str | None

    async def make(self, task: TaskSpec, snapshot: Snapshot | None) -> Sandbox:
        """See `Machines`."""
        environment = task.environment
        built = None if snapshot else await _built(environment, self.cache_dir, self.state_dir, self.limits)
        return gvisor.GvisorSandbox(
            gvisor.GvisorOptions(
                image=built,
                snapshot=snapshot,
                state_dir=layers.state_dir(self.state_dir),
                **_common(environment, self.limits, self.owner),
            )
        )

    async def discard(self, snapshot: Snapshot) -> None:
        """See `Machines`."""
        await asyncio.to_thread(gvisor.discard, snapshot)

    async def kept(self, snapshot: Snapshot) -> bool:
        return (Path(snapshot.handle) / "manifest.json").is_file()

    def cost(self, task: TaskSpec) -> Cost:
        """As `LocalMachines`, and gVisor itself."""
        memory, disk = _bounded(task.environment, self.limits)
        return Cost(memory + disk + gvisor.OVERHEAD_MB, disk)


@dataclass(frozen=True, slots=True)
class DockerMachines:
    """Images are the engine's: a task's `docker_image`, or its Dockerfile built once per content."""

    limits: Limits
    owner: str
    engine: str = ""

    async def make(self, task: TaskSpec, snapshot: Snapshot | None) -> Sandbox:
        """See `Machines`."""
        environment = task.environment
        composed = Path(environment.context, compose.NAME) if environment.context else None
        has_services = composed is not None and composed.is_file()
        options = docker.DockerOptions(
            image="" if snapshot or has_services else await self._image(environment),
            compose=str(composed) if has_services else "",
            main_image=environment.docker_image or "" if has_services else "",
            snapshot=snapshot,
            engine=self.engine,
            **_common(environment, self.limits, self.owner),
        )
        if has_services:
            await asyncio.to_thread(docker.services, options)  # builds its images: a start has no time for that
        return docker.DockerSandbox(options)

    async def discard(self, snapshot: Snapshot) -> None:
        """See `Machines`."""
        await asyncio.to_thread(docker_engine.discard, snapshot, self.engine)

    async def kept(self, snapshot: Snapshot) -> bool:
        return await asyncio.to_thread(docker_engine.kept, snapshot, self.engine)

    def cost(self, task: TaskSpec) -> Cost:
        """The writable layer is the engine's disk."""
        memory, disk = _bounded(task.environment, self.limits)
        return Cost(memory, disk)

    async def _image(self, environment: EnvironmentSpec) -> str:
        """The ready one, as Harbor has it; where it cannot be had, the Dockerfile's.

        Raises TaskError for one that does not build, or a task without an image.
        """
        context = Path(environment.context)
        ready = environment.docker_image
        if ready and await asyncio.to_thread(docker_engine.has, ready, self.engine):
            return ready
        if environment.context and (context / "Dockerfile").is_file():
            key = await asyncio.to_thread(image.key_of, context / "Dockerfile", context)
            timeout_s = environment.build_timeout_s
            return await asyncio.to_thread(docker_engine.build, context, "Dockerfile", key, timeout_s, self.engine)
        return environment.docker_image or docker.DEFAULT_IMAGE


async def _built(environment: EnvironmentSpec, cache_dir: Path | str, state_dir: Path | str | None, limits: Limits) -> image.Image:
    file = Path(environment.context, compose.NAME)
    if environment.context and file.is_file() and (others := compose.others(file)):
        raise TaskError(
            f"needs the services {', '.join(others)}, which this backend cannot run", str(file), "sandbox.backend=docker can"
        )
    return await image.build(environment, cache_dir, state_dir=state_dir, network=limits.build_network)


def capacity(state_dir: Path | str | None, share: float) -> Cost:
    """This share of the memory that this process may use at all, and of the disk free where snapshots lie."""
    limits_mb = [int(Path("/proc/meminfo").read_text().split(maxsplit=2)[1]) / 1024]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # a container's, v2 and v1
        with contextlib.suppress(OSError, ValueError):
            limits_mb.append(int(Path(file).read_text()) / 2**20)
    return Cost(share * min(limits_mb), share * shutil.disk_usage(layers.state_dir(state_dir)).free / 2**20)


def _bounded(environment: EnvironmentSpec, limits: Limits) -> tuple[int, int]:
    """Memory and disk, in MiB."""
    memory = min(environment.memory_mb or limits.memory_mb, limits.memory_mb)
    return memory, min(environment.storage_mb or limits.disk_mb, limits.disk_mb)


def _variables(given: Mapping[str, str]) -> dict[str, str]:
    """Raises TaskError if a variable of this machine that a task needs is unset."""
    found: dict[str, str] = {}
    for key, value in given.items():
        known = from_host(value)
        if known is None:
            raise TaskError(f"needs a variable of this machine that is unset: {value}", f"environment.env.{key}")
        found[key] = known
    return found


def _common(environment: EnvironmentSpec, limits: Limits, owner: str) -> dict[str, Any]:  # Any: fields of `options.Options`
    """What a task's environment asks for, within the limits."""
    memory, disk = _bounded(environment, limits)
    return {
        "env": _variables(environment.env),
        "workdir": environment.workdir,
        "memory_mb": memory,
        "disk_mb": disk,
        "pids": limits.pids,
        "cpus": environment.cpus or limits.cpus,
        "network": environment.network and limits.network,
        "output_limit_bytes": limits.output_limit_bytes,
        "owner": owner,
    }
