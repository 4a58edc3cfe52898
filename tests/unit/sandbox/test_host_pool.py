"""The local pool with real sandboxes: places, order, images, snapshots, failures, ends."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from termrsi.errors import SandboxError, TaskError
from termrsi.ports import Sandbox
from termrsi.records import EnvironmentSpec, Snapshot, TaskSpec
from termrsi.sandbox import cgroups
from termrsi.sandbox.host_pool import HostPool
from termrsi.sandbox.local import LocalSandbox
from termrsi.sandbox.machines import Limits, LocalMachines
from termrsi.sandbox.pool import Cost


def task(name: str = "t", context: Path | str = "", path: str = "", **fields: object) -> TaskSpec:
    environment = EnvironmentSpec(context=str(context), **fields)  # pyright: ignore[reportArgumentType]
    return TaskSpec(id=name, family="f", instruction="", path=path, environment=environment)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[HostPool]:
    made = HostPool(
        size=2, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state", owner="pooltest", tick_s=0.05, first_pause_s=0.001
    )
    yield made
    await made.close()
    assert [group for parent in cgroups.parents() for group in parent.glob("pooltest-*")] == []
    assert not list((tmp_path / "state").glob("layers/*"))


async def test_a_third_lease_waits_for_a_release(pool: HostPool) -> None:
    first, second = await pool.lease(task()), await pool.lease(task())
    third = asyncio.create_task(pool.lease(task("third")))
    await asyncio.sleep(0.1)
    assert not third.done()
    await pool.release(first)
    await pool.release(first)
    box = await asyncio.wait_for(third, 5.0)
    assert box.id not in (first.id, second.id)
    with pytest.raises(SandboxError):
        await first.run("true")


async def test_the_tasks_image_environment_and_a_snapshot(pool: HostPool, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM a\nWORKDIR /w\nRUN echo image > f\n")
    spec = task("one", context, env={"GIVEN": "yes"}, memory_mb=256)
    box = await pool.lease(spec)
    assert (await box.run("pwd; cat f; echo $GIVEN; echo more >> f; x=5")).output == "/w\nimage\nyes\n"
    snapshot = await box.snapshot()
    await pool.release(box)
    again = await pool.lease(spec, snapshot)
    assert (await again.run("pwd; cat f; echo $GIVEN $x")).output == "/w\nimage\nmore\nyes 5\n"
    await pool.release(again)
    await pool.discard(snapshot)
    await pool.discard(snapshot)
    with pytest.raises(SandboxError):
        await pool.lease(spec, snapshot)


async def test_a_failed_start_frees_its_place(pool: HostPool, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM a\nRUN exit 3\n")
    for _ in range(3):
        with pytest.raises(TaskError, match="exit code 3"):
            await pool.lease(task("bad", context))
    assert (await (await pool.lease(task())).run("echo ok")).output == "ok\n"


async def test_a_lease_that_is_given_up(pool: HostPool) -> None:
    held = [await pool.lease(task()), await pool.lease(task())]
    waiting = asyncio.create_task(pool.lease(task()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for box in held:
        await pool.release(box)
    for delay_s in (0.0, 0.005, 0.02, 0.05):
        starting = asyncio.create_task(pool.lease(task()))
        await asyncio.sleep(delay_s)
        starting.cancel()
        done = (await asyncio.gather(starting, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            await pool.release(done)
    boxes = await asyncio.wait_for(asyncio.gather(pool.lease(task()), pool.lease(task())), 10.0)
    assert len({box.id for box in boxes}) == 2


async def test_a_late_lease_is_named_and_closed(pool: HostPool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = HostPool(size=1, cache_dir=tmp_path / "c", state_dir=tmp_path / "state", lease_limit_s=0.1, tick_s=0.05)
    box = await short.lease(task("slow"))
    with pytest.raises(SandboxError):
        await asyncio.wait_for(box.run("sleep 30"), 10.0)
    assert "slow" in caplog.text
    assert (await (await asyncio.wait_for(short.lease(task("next")), 5.0)).run("echo ok")).output == "ok\n"
    await short.close()


async def test_close_ends_leases_and_waits(pool: HostPool) -> None:
    box = await pool.lease(task())
    await pool.lease(task())
    waiting = asyncio.create_task(pool.lease(task()))
    await asyncio.sleep(0.02)
    await pool.close()
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    with pytest.raises(SandboxError):
        await box.run("true")
    with pytest.raises(SandboxError, match="closed"):
        await pool.lease(task())
    await pool.close()


async def test_a_start_that_fails_for_any_reason_answers_and_frees_its_place(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(request: object) -> object:
        raise OSError(28, "No space left on device", "/cache")

    monkeypatch.setattr(LocalMachines, "make", lambda self, task, snapshot: broken(task))
    for _ in range(3):  # one more than there are places
        with pytest.raises(SandboxError, match=r"could not start: OSError.*No space left"):
            await asyncio.wait_for(pool.lease(task("t")), 5.0)
    monkeypatch.undo()
    assert (await (await pool.lease(task())).run("echo ok")).output == "ok\n"


async def test_a_start_that_the_machine_let_fail_is_tried_again(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = LocalSandbox.start, [SandboxError("busy", "x"), SandboxError("busy", "x")]

    async def sometimes(box: LocalSandbox) -> None:
        if failures:
            raise failures.pop()
        await start(box)

    monkeypatch.setattr(LocalSandbox, "start", sometimes)
    assert (await (await asyncio.wait_for(pool.lease(task()), 10.0)).run("echo ok")).output == "ok\n"
    failures += [SandboxError("busy", "x") for _ in range(3)]
    with pytest.raises(SandboxError, match="busy"):
        await asyncio.wait_for(pool.lease(task()), 10.0)


async def test_a_close_that_fails_is_done_again_before_its_place_is_free(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    box = await pool.lease(task())
    await pool.lease(task())
    close, broken = LocalSandbox.close, True

    async def fails(one: LocalSandbox) -> None:
        if broken:
            raise OSError("groups")
        await close(one)

    monkeypatch.setattr(LocalSandbox, "close", fails)
    with pytest.raises(OSError, match="groups"):
        await pool.release(box)
    waiting = asyncio.create_task(pool.lease(task()))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    broken = False
    await asyncio.wait_for(waiting, 5.0)


async def test_what_is_in_doubt_is_closed_once_more_at_the_end(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    box = await pool.lease(task())
    close, failures = LocalSandbox.close, [OSError("groups")]

    async def fails(one: LocalSandbox) -> None:
        if failures:
            raise failures.pop()
        await close(one)

    monkeypatch.setattr(LocalSandbox, "close", fails)
    with pytest.raises(OSError, match="groups"):
        await pool.release(box)
    await pool.close()
    with pytest.raises(SandboxError, match="lost"):
        await box.run("true")
    assert [group for parent in cgroups.parents() for group in parent.glob("pooltest-*")] == []


async def test_forks_take_places_and_give_them_back(pool: HostPool) -> None:
    box = await pool.lease(task())
    await box.run("x=5")
    forks = await pool.fork(box, 2)
    assert [(await fork.run("echo $x")).output for fork in forks] == ["5\n", "5\n"]
    waiting = asyncio.create_task(pool.lease(task()))
    await pool.release(box)
    await pool.release(forks[0])
    await asyncio.wait_for(waiting, 5.0)  # 2 places: one is the last fork's
    await pool.close()
    with pytest.raises(SandboxError, match="lost"):
        await forks[1].run("true")
    with pytest.raises(SandboxError, match="not leased"):
        await pool.fork(box, 1)


async def test_more_than_the_host_has_waits_or_is_refused(tmp_path: Path) -> None:
    pool = HostPool(
        size=4,
        cache_dir=tmp_path / "c",
        state_dir=tmp_path / "s",
        limits=Limits(memory_mb=100, disk_mb=20),
        capacity=Cost(250, 1000),
    )
    try:
        first, _ = await pool.lease(task()), await pool.lease(task())
        third = asyncio.create_task(pool.lease(task()))
        await asyncio.sleep(0.1)
        assert not third.done()
        await pool.release(first)
        await asyncio.wait_for(third, 5.0)
        with pytest.raises(TaskError, match="this host has"):
            await HostPool(size=1, cache_dir=tmp_path, state_dir=tmp_path / "s", capacity=Cost(10, 10)).lease(task())
    finally:
        await pool.close()


async def test_a_spare_is_never_one_that_was_used(tmp_path: Path) -> None:
    pool = HostPool(size=3, cache_dir=tmp_path / "c", state_dir=tmp_path / "s", spares=1)
    seen = set()
    try:
        for _ in range(4):
            box = await pool.lease(task("one", path="/tasks/one"))
            assert box.id not in seen
            seen.add(box.id)
            assert (await box.run("cat /app/mark; touch /app/mark; echo $x; x=1")).output.endswith("No such file or directory\n\n")
            await pool.release(box)
    finally:
        await pool.close()


class Fake:
    """A sandbox that starts and closes in a moment; counts how many live."""

    live = peak = 0

    def __init__(self, number: int) -> None:
        self.id = f"fake-{number}"

    async def start(self) -> None:
        await asyncio.sleep(0)
        Fake.live += 1
        Fake.peak = max(Fake.peak, Fake.live)

    async def close(self) -> None:
        await asyncio.sleep(0)
        Fake.live -= 1


class FakeMachines:
    def __init__(self) -> None:
        self.made = 0

    async def make(self, task: TaskSpec, snapshot: Snapshot | None) -> Sandbox:
        self.made += 1
        return cast(Sandbox, Fake(self.made))

    async def discard(self, snapshot: Snapshot) -> None:
        raise NotImplementedError

    async def kept(self, snapshot: Snapshot) -> bool:
        raise NotImplementedError

    def cost(self, task: TaskSpec) -> Cost:
        return Cost(1, 1)


async def test_a_thousand_leases_at_once(tmp_path: Path) -> None:
    """And three thousand more that wait their turn."""
    pool = HostPool(size=1000, cache_dir=tmp_path, machines=FakeMachines())
    order: list[int] = []

    async def use(number: int) -> None:
        box = await pool.lease(task(str(number)))
        order.append(number)
        await asyncio.sleep(0)
        await pool.release(box)

    await asyncio.gather(*(use(number) for number in range(4000)))
    assert order == sorted(order)
    assert (Fake.live, Fake.peak) == (0, 1000)
    await pool.close()


async def test_sixty_four_real_sandboxes_at_once(tmp_path: Path) -> None:
    pool = HostPool(
        size=64, cache_dir=tmp_path / "c", state_dir=tmp_path / "s", owner="many", limits=Limits(memory_mb=64, disk_mb=16)
    )
    try:
        boxes = await asyncio.gather(*(pool.lease(task(str(number))) for number in range(64)))
        results = await asyncio.gather(*(box.run(f"echo {i} > /app/f; sleep 0.1; cat /app/f") for i, box in enumerate(boxes)))
        assert [result.output for result in results] == [f"{i}\n" for i in range(64)]
        assert len({box.id for box in boxes}) == 64
    finally:
        await pool.close()
    assert [group for parent in cgroups.parents() for group in parent.glob("many-*")] == []


@pytest.mark.parametrize(("allowed", "devices"), [(False, "lo"), (True, "host")])
async def test_limits_and_network_are_the_pools_to_give(tmp_path: Path, allowed: bool, devices: str) -> None:
    """A task may ask for less memory and disk, not for more; for the host's network only where the user said so."""
    pool = HostPool(
        size=1, cache_dir=tmp_path / "c", state_dir=tmp_path / "s", limits=Limits(memory_mb=300, disk_mb=50, network=allowed)
    )
    try:
        box = await pool.lease(task("greedy", memory_mb=4096, storage_mb=10240, network=True))
        found = (await box.run("awk -F: 'NR > 2 {print $1}' /proc/net/dev | tr -d ' ' | sort")).output.split()
        own = sorted(line.partition(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:])
        assert found == (own if devices == "host" else ["lo"])
        assert (await box.run("df -m --output=size /app | tail -1")).output.strip() == "50"
    finally:
        await pool.close()


async def test_variables_of_this_machine_reach_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_HERE", "secret")
    env = {"A": "${TOKEN_OF_HERE}", "B": "${GONE:-b}", "C": "plain ${TOKEN_OF_HERE}"}
    pool = HostPool(size=1, cache_dir=tmp_path, state_dir=tmp_path / "state")
    try:
        sandbox = await pool.lease(task("t", env=env))
        assert (await sandbox.run('echo "$A|$B|$C"')).output == "secret|b|plain ${TOKEN_OF_HERE}\n"
        await pool.release(sandbox)
        with pytest.raises(TaskError, match=r"environment\.env\.D: needs a variable of this machine that is unset"):
            await pool.lease(task("u", env={"D": "${GONE}"}))
    finally:
        await pool.close()
