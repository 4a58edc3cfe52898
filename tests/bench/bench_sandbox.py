"""Sandboxes against their peers, in one run: a trivial command, a start, a fork of many from one failure, what an idle one costs.

`python -m tests.bench.bench_sandbox`. Where root may start a Docker daemon, or one answers, the Docker backend, `docker exec` for
each command, and commit + `docker run` stand beside `local`; where runsc is, so does `gvisor`; with SWE-ReX installed
(`pip install swe-rex`), so does its local runtime. Times are in milliseconds, memory and disk in MiB per idle sandbox.
"""

import asyncio
import contextlib
import importlib.util
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from termrsi import sandbox
from termrsi.places import cache_dir
from termrsi.ports import Sandbox
from termrsi.sandbox import check
from tests import docker_daemon

TRIVIAL = "echo $x"
FAILED = "x=5; cd /tmp; echo broken > state"
ANSWER = "echo $x; cat state"


@dataclass(frozen=True, slots=True)
class Action:
    """What is timed, and what is not: the end of what it made."""

    do: Callable[[], Awaitable[None]]
    undo: Callable[[], Awaitable[None]]


async def times_ms(action: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        await action()
        found.append((time.perf_counter() - start) * 1000)
    return found


def spread(found: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(found), "p95": sorted(found)[max(int(len(found) * 0.95) - 1, 0)]}


async def backend(make: Callable[[], Sandbox], *, commands: int, starts: int, forks: int) -> dict[str, float]:
    """Figures of one backend, save its forks'."""
    box = make()
    await box.start()
    try:
        await box.run(TRIVIAL)
        command = spread(await times_ms(lambda: box.run(TRIVIAL), commands))
    finally:
        await box.close()

    async def start() -> None:
        other = make()
        ends.append(other)
        await other.start()
        await other.run("true")

    ends: list[Sandbox] = []
    started = spread(await times_ms(start, starts))
    await asyncio.gather(*(other.close() for other in ends))
    memory, disk = await idle(make, forks)
    times = {"command_p50": command["p50"], "command_p95": command["p95"], "start_p50": started["p50"]}
    return times | {"idle_memory": memory, "idle_disk": disk}


@contextlib.asynccontextmanager
async def forking(make: Callable[[], Sandbox], forks: int) -> AsyncIterator[Action]:
    """A failed sandbox, and what forks it; done when each copy has answered with the failed shell's state."""
    copies: list[Sandbox] = []

    async def fork() -> None:
        copies.extend(await box.fork(forks))
        answers = await asyncio.gather(*(copy.run(ANSWER, 60.0) for copy in copies))
        assert [answer.output for answer in answers] == ["5\nbroken\n"] * forks

    async def undo() -> None:
        await asyncio.gather(*(copy.close() for copy in copies))
        copies.clear()

    box = make()
    await box.start()
    try:
        await box.run(FAILED)
        yield Action(fork, undo)
    finally:
        await undo()
        await box.close()


async def idle(make: Callable[[], Sandbox], count: int) -> tuple[float, float]:
    """Memory and disk of one idle sandbox: the proportional share of every process that is there for it, and what the disk took."""

    def processes() -> set[str]:
        return {path.name for path in Path("/proc").iterdir() if path.name.isdigit()}

    before, disk = processes(), shutil.disk_usage("/").used
    boxes = [make() for _ in range(count)]
    try:
        for box in boxes:
            await box.start()
        kib = 0
        for pid in processes() - before:
            with contextlib.suppress(OSError):  # one that has ended meanwhile
                kib += int(Path("/proc", pid, "smaps_rollup").read_text().partition("Pss:")[2].split()[0])
        return kib / 1024 / count, (shutil.disk_usage("/").used - disk) / 2**20 / count
    finally:
        await asyncio.gather(*(box.close() for box in boxes))


async def docker_exec(engine: str, image: str, commands: int) -> dict[str, float]:
    """`docker exec` for each command."""
    async with container(engine, image) as name:
        found = spread(await times_ms(lambda: docker(engine, "exec", name, "bash", "-c", "echo"), commands))
    return {"command_p50": found["p50"], "command_p95": found["p95"]}


@contextlib.asynccontextmanager
async def committing(engine: str, image: str, forks: int) -> AsyncIterator[Action]:
    """A failed container, and what copies it by hand: commit, then that many `docker run` at once."""

    async def fork() -> None:
        await docker(engine, "commit", name, f"{name}:1")
        run = ("run", "--rm", "--network=none", f"{name}:1", "cat", "/tmp/state")
        assert await asyncio.gather(*(docker(engine, *run) for _ in range(forks))) == ["broken"] * forks

    async def undo() -> None:
        await docker(engine, "rmi", "-f", f"{name}:1")

    async with container(engine, image) as name:
        await docker(engine, "exec", name, "bash", "-c", "echo broken > /tmp/state")
        yield Action(fork, undo)


@contextlib.asynccontextmanager
async def container(engine: str, image: str) -> AsyncIterator[str]:
    name = f"termrsi-bench-{time.time_ns()}"
    await docker(engine, "run", "-d", "--network=none", "--name", name, image, "bash", "-c", "exec 9<> <(:); read -u 9")
    try:
        yield name
    finally:
        await docker(engine, "rm", "-f", name)


async def docker(engine: str, *arguments: str) -> str:
    program = ["docker", "-H", engine, *arguments]
    process = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return (await process.communicate())[0].decode().strip()


async def swe_rex(commands: int) -> dict[str, float]:
    """SWE-ReX's local runtime: a bash of this machine, not isolated."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest  # pyright: ignore[reportMissingImports]
    from swerex.runtime.local import LocalRuntime  # pyright: ignore[reportMissingImports]

    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest())
    try:
        found = spread(await times_ms(lambda: runtime.run_in_session(BashAction(command=TRIVIAL)), commands))
    finally:
        await runtime.close()
    return {"command_p50": found["p50"], "command_p95": found["p95"]}


async def measure(
    engine: str = "", image: str = "", *, commands: int = 200, starts: int = 10, forks: int = 16, rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Figures by name. What is not there is left out. Forks are taken in turns, one of each kind in a round."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as state:
        makers: dict[str, Callable[[], Sandbox]] = {"local": lambda: sandbox.make("local", state_dir=Path(state), owner="bench")}
        if not check.missing("gvisor"):
            makers["gvisor"] = lambda: sandbox.make("gvisor", state_dir=Path(state), owner="bench")
        if engine:
            makers["docker"] = lambda: sandbox.make("docker", engine=engine, image=image, owner="bench")
        for name, make in makers.items():
            found[name] = await backend(make, commands=commands, starts=starts, forks=forks)
        if engine:
            found["docker by hand"] = await docker_exec(engine, image, max(commands // 10, 1))
        async with contextlib.AsyncExitStack() as stack:
            actions = {name: await stack.enter_async_context(forking(make, forks)) for name, make in makers.items()}
            if engine:
                actions["docker by hand"] = await stack.enter_async_context(committing(engine, image, forks))
            times: dict[str, list[float]] = {name: [] for name in actions}
            for _ in range(rounds):
                for name, action in actions.items():
                    times[name] += await times_ms(action.do, 1)
                    await action.undo()
        for name, each in times.items():
            found[name] |= {"fork_min": min(each), "fork_p50": statistics.median(each), "fork_max": max(each)}
    if importlib.util.find_spec("swerex"):
        found["SWE-ReX local"] = await swe_rex(max(commands // 10, 1))
    return found


def main() -> None:
    if docker_daemon.why_not():
        results = asyncio.run(measure())
    else:
        with (
            tempfile.TemporaryDirectory(prefix="termrsi-dk-", ignore_cleanup_errors=True) as home,
            docker_daemon.running(Path(home)) as engine,
        ):
            results = asyncio.run(measure(engine, docker_daemon.image(engine, cache_dir())))
    columns = ("command_p50", "command_p95", "start_p50", "fork_min", "fork_p50", "fork_max", "idle_memory", "idle_disk")
    sys.stdout.write(f"{'ms':16}" + "".join(f"{column:>14}" for column in columns) + "\n")
    for name, figures in results.items():
        sys.stdout.write(f"{name:16}" + "".join(f"{figures[c]:14.2f}" if c in figures else f"{'':14}" for c in columns) + "\n")


if __name__ == "__main__":
    main()
