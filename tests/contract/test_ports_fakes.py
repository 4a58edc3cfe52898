"""What the ports promise, on the fakes and, for sandbox and pool, on the real local backend with the same tests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrsi import fakes, ports
from termrsi.errors import SandboxError
from termrsi.records import EnvironmentSpec, Snapshot, TaskSpec
from termrsi.sandbox.check import why_not
from termrsi.sandbox.host_pool import HostPool

TASK = TaskSpec("t", "f", "do", "", EnvironmentSpec(env={"GIVEN": "yes"}))


@pytest.fixture(params=["fake", "local"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "local" and (missing := why_not()):
        pytest.skip("; ".join(missing))
    return request.param


@pytest.fixture
async def pool(backend: str, tmp_path: Path) -> AsyncIterator[ports.SandboxPool]:
    """Four places; what a test leased and did not release is closed at its end."""
    if backend == "fake":
        yield fakes.FakePool(size=4)
        return
    made = HostPool(size=4, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state", owner="portstest")
    yield made
    await made.close()


@pytest.fixture
async def box(pool: ports.SandboxPool) -> ports.Sandbox:
    return await pool.lease(TASK)


async def out(box: ports.Sandbox, command: str) -> str:
    return (await box.run(command, 20.0)).output


def test_every_fake_is_its_port() -> None:
    """Checked by pyright; here, that each can be made without an event loop."""
    made = fakes.dry_parts()
    tokenizer: ports.Tokenizer = fakes.FakeTokenizer()
    sandbox: ports.Sandbox = fakes.FakeSandbox(fakes.FakeWorld())
    pool: ports.SandboxPool = made.pool
    verifier: ports.Verifier = made.verifier
    generator: ports.Generator = made.generator
    rollouts: ports.Rollouts = made.rollouts
    policy: ports.Policy = made.policy
    critic: ports.Critic = made.critic
    queue: ports.RecoveryStore = made.queue
    scan: ports.Scan = made.scan
    assert None not in (tokenizer, sandbox, pool, verifier, generator, rollouts, policy, critic, queue, scan)


# --- one sandbox ---------------------------------------------------------------------------------------------------


async def test_files_variables_and_directory_persist(box: ports.Sandbox) -> None:
    await box.run("export X=1")
    await box.run("cd /tmp; echo one > f")
    assert await out(box, "echo $X; pwd; cat f; cat /tmp/f") == "1\n/tmp\none\none\n"


async def test_failure_is_a_value(box: ports.Sandbox) -> None:
    assert (await box.run("false")).exit_code == 1
    assert await out(box, "echo $?") == "1\n"
    assert (await box.run("no_such_program_here")).exit_code == 127
    missing = await box.run("cat none")
    assert missing.exit_code == 1
    assert "No such file" in missing.output
    assert await out(box, "false && echo no; echo yes") == "yes\n"


async def test_a_time_out_is_a_value_and_the_shell_lives(box: ports.Sandbox) -> None:
    await box.run("export X=1")
    result = await box.run("echo part; sleep 60; echo never", 0.3)
    assert (result.exit_code, result.timed_out, result.output) == (124, True, "part\n")
    assert await out(box, "echo $X") == "1\n"


async def test_kill_processes_counts_and_leaves_a_fresh_shell(box: ports.Sandbox) -> None:
    await box.run("export X=1")
    await box.run("sleep 99 &")
    await box.run("echo kept > /app/f")
    assert await box.kill_processes() >= 1
    assert await out(box, "echo -$X-; cat /app/f") == "--\nkept\n"


async def test_put_and_get(box: ports.Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_text("a\n")
    (source / "sub" / "b").write_bytes(b"\x00\xffb\n")
    await box.put(source, "/tests")
    await box.put(source / "a", "/tests/sub/")
    await box.put(source / "a", "/deep/er/name")
    assert await out(box, "ls /tests/sub; cat /tests/a; cat /deep/er/name") == "a\nb\na\na\n"
    await box.get("/tests", tmp_path / "back")
    assert (tmp_path / "back/sub/b").read_bytes() == b"\x00\xffb\n"
    await box.get("/tests/a", tmp_path / "one")
    assert (tmp_path / "one").read_text() == "a\n"
    with pytest.raises(SandboxError, match="none"):
        await box.get("/none", tmp_path / "x")
    with pytest.raises(SandboxError, match="none"):
        await box.put(tmp_path / "none", "/x")


async def test_forks_are_isolated_copies(box: ports.Sandbox) -> None:
    await box.run("export X=1; cd /tmp; echo base > f")
    first, second = await box.fork(2)
    try:
        assert await out(first, "echo $X; pwd; cat f") == "1\n/tmp\nbase\n"
        await first.run("export X=2; echo first > f; echo new > g")
        assert await out(second, "echo $X; cat f; cat g") == "1\nbase\ncat: g: No such file or directory\n"
        await box.run("rm f")
        assert await out(second, "cat f") == "base\n"
    finally:
        await first.close()
        await second.close()
    assert await out(box, "echo $X") == "1\n"


async def test_a_snapshot_is_a_state_at_rest(pool: ports.SandboxPool, box: ports.Sandbox) -> None:
    await box.run("export X=1; cd /tmp; echo base > f")
    await box.run("sleep 98 &")
    await box.run("sleep 0.1")  # a real one has its name by then
    snapshot = await box.snapshot()
    assert [line for line in snapshot.lost_processes if "sleep 98" in line]
    await box.run("export X=2; echo later > f")
    first = await pool.lease(TASK, snapshot)
    assert await out(first, "echo $X; pwd; cat f") == "1\n/tmp\nbase\n"
    await first.run("export X=3; echo first > f")
    second = await pool.lease(TASK, snapshot)
    assert await out(second, "echo $X; cat f") == "1\nbase\n"
    assert await out(box, "echo $X; cat f") == "2\nlater\n"
    for one in (box, first, second):
        await pool.release(one)
    third = await pool.lease(TASK, snapshot)
    assert await out(third, "cat f") == "base\n"


async def test_a_sandbox_whose_command_was_cancelled_is_lost(box: ports.Sandbox, backend: str) -> None:
    running = asyncio.create_task(box.run("sleep 60"))
    await asyncio.sleep(0.0 if backend == "fake" else 0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SandboxError):
        await box.run("true")


async def test_nothing_can_be_done_with_a_closed_one(box: ports.Sandbox) -> None:
    await box.close()
    await box.close()
    for use in (box.run("true"), box.snapshot(), box.fork(1), box.kill_processes(), box.put(__file__, "/x")):
        with pytest.raises(SandboxError):
            await use


# --- the pool ------------------------------------------------------------------------------------------------------


async def test_a_lease_is_the_tasks_own_fresh_machine(pool: ports.SandboxPool) -> None:
    first = await pool.lease(TASK)
    assert await out(first, "echo $GIVEN; pwd") == "yes\n/app\n"
    await first.run("echo x > /app/f")
    await pool.release(first)
    await pool.release(first)
    second = await pool.lease(TASK)
    assert second.id != first.id
    assert (await second.run("cat /app/f")).exit_code == 1
    with pytest.raises(SandboxError):
        await first.run("true")


async def test_a_lease_too_many_waits_for_a_release(pool: ports.SandboxPool) -> None:
    held = [await pool.lease(TASK) for _ in range(4)]
    fifth, given_up = asyncio.create_task(pool.lease(TASK)), asyncio.create_task(pool.lease(TASK))
    await asyncio.sleep(0.02)
    assert not fifth.done()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await pool.release(held[0])
    assert (await asyncio.wait_for(fifth, 10.0)).id not in {box.id for box in held}
    await pool.release(held[1])
    await asyncio.wait_for(pool.lease(TASK), 10.0)  # the place of the one that gave up is not lost


async def test_a_discarded_or_unknown_snapshot_is_an_error_and_costs_no_place(pool: ports.SandboxPool, box: ports.Sandbox) -> None:
    snapshot = await box.snapshot()
    assert await pool.kept(snapshot)
    await pool.discard(snapshot)
    await pool.discard(snapshot)
    assert not await pool.kept(snapshot)
    for _ in range(5):
        with pytest.raises(SandboxError):
            await pool.lease(TASK, snapshot)
    with pytest.raises(SandboxError):
        await pool.lease(TASK, Snapshot("none", "none", "/no/such/handle", ""))
    await asyncio.wait_for(pool.lease(TASK), 10.0)


# --- what only the fake can be told --------------------------------------------------------------------------------


async def test_a_fake_can_be_told_to_get_lost() -> None:
    pool = fakes.FakePool(fakes.FakeWorld(lost_at={2: 3}))
    for expected in (4, 2, 4):
        box = await pool.lease(TASK)
        for _ in range(expected):
            await box.run("true")
        if expected < 4:
            for use in (box.run("true"), box.run("true"), box.snapshot()):
                with pytest.raises(SandboxError, match="lost"):
                    await use
        await pool.release(box)
    assert (pool.world.leases, pool.world.releases, pool.world.open) == (3, 3, set())


async def test_a_damaged_snapshot_of_the_fake_is_refused() -> None:
    pool = fakes.FakePool()
    box = await pool.lease(TASK)
    snapshot = await box.snapshot()
    pool.world.snapshots[snapshot.handle].files["/app/f"] = b"evil"
    with pytest.raises(SandboxError, match="digest"):
        await pool.lease(TASK, snapshot)
