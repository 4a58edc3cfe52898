"""What the local backend does beyond the contract: the host's share, its directories, its ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from termrsi import sandbox
from termrsi.errors import ConfigError, SandboxError
from termrsi.ports import Sandbox
from termrsi.records import Snapshot
from termrsi.sandbox import cgroups, check, host, local
from termrsi.sandbox.image import Image
from tests.contract.backends import Kit, Make, local_kit


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return local_kit(tmp_path)


async def out(box: Sandbox, command: str, timeout_s: float | None = 20.0) -> str:
    return (await box.run(command, timeout_s)).output


async def test_only_listed_parts_of_the_host(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "host_file").write_text("x")
    names = set((await out(box, "ls -A /")).split())
    fresh = {"app", "boot", "dev", "home", "logs", "media", "mnt", "proc", "root", "run", "srv", "sys", "tmp", "var"}
    assert names - {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt"} == fresh
    assert await out(box, "ls -A /root /home /tmp /run/lock /sys /app /var/log /var/tmp /var/spool | grep -v : | xargs") == "\n"
    assert await out(box, f"ls {tmp_path} 2>&1 | grep -c 'No such'") == "1\n"
    assert "$" not in await out(box, "cat /etc/shadow")
    assert (
        await out(box, "ls /etc/ssh /etc/ssl/private /etc/pip.conf /etc/gshadow /var/lib/docker 2>&1 | grep -vc 'No such'") == "0\n"
    )


async def test_a_damaged_snapshot_is_refused(make: Make, tmp_path: Path) -> None:
    box = await make()
    await box.run("echo good > /app/f")
    snapshot = await box.snapshot()
    next((tmp_path / "state/layers").glob("*/tree/root/app/f")).write_text("evil")
    with pytest.raises(SandboxError, match="digest"):
        await make(snapshot=snapshot)
    with pytest.raises(SandboxError):
        await make(snapshot=Snapshot("none", "local", str(tmp_path / "none"), ""))


def processes_of(word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in text and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def parent_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("PPid")))


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Other processes' deeds raise no event here: looked at until they show."""
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def left_overs(owner: str, state: Path) -> list[str]:
    left = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line]
    left += [str(group) for parent in cgroups.parents() for group in parent.glob(f"{owner}-*")]
    return left + [str(path) for path in state.glob("layers/*")] + [str(path) for path in state.glob("mount/*")]


async def test_close_leaves_nothing(make: Make, tmp_path: Path) -> None:
    box = await make(owner="leaves")
    await box.run("sleep 4711 & setsid sleep 4712 & echo x > /tmp/f")
    await until(lambda: len(processes_of("sleep 471")) == 2)
    assert len(processes_of("sleep 471")) == 2
    await box.close()
    await box.close()
    assert processes_of("sleep 471") == []
    assert left_overs("leaves", tmp_path / "state") == []
    with pytest.raises(SandboxError):
        await box.run("true")


async def test_a_lost_sandbox_is_an_error(make: Make) -> None:
    box = await make()
    running = asyncio.create_task(box.run("echo $$; sleep 4713", 20.0))
    await until(lambda: processes_of("sleep 4713"))
    found = processes_of("sleep 4713")
    os.kill(parent_of(parent_of(found[0])), signal.SIGKILL)  # sleep, the shell, process 1
    with pytest.raises(SandboxError, match="lost"):
        await asyncio.wait_for(running, 5.0)
    with pytest.raises(SandboxError):
        await box.run("true")


OWNER_PROGRAM = """
import asyncio, sys
from termrsi import sandbox
async def main():
    box = sandbox.make("local", state_dir=sys.argv[1], owner="killed")
    await box.start()
    await box.run("sleep 4715 & setsid sleep 4716 & echo x > /tmp/f")
    await box.snapshot()
    await box.run("sleep 4715 & setsid sleep 4716 &")
    print("ready", flush=True)
    await box.run("sleep 4717")
asyncio.run(main())
"""


async def test_the_owners_death_ends_everything(tmp_path: Path) -> None:
    state = tmp_path / "state"
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER_PROGRAM, str(state), stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    await until(lambda: len(processes_of("sleep 471")) >= 2)
    assert len(processes_of("sleep 471")) >= 2
    assert local.reap("killed", state, snapshots=True) == []  # it lives
    owner.kill()
    await owner.wait()
    await until(lambda: not processes_of("sleep 471"))
    assert processes_of("sleep 471") == []
    local.reap("other", state, snapshots=True)
    assert len(list(state.glob("snapshots/*"))) == 1
    local.reap("killed", state)
    assert len(list(state.glob("snapshots/*"))) == 1
    local.reap("killed", state, snapshots=True)
    assert list(state.glob("snapshots/*")) == []
    assert left_overs("killed", state) == []


async def test_a_start_that_fails_leaves_nothing(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="layer"):
        await make(owner="failed", image=Image(layers=(str(tmp_path / "gone"),)))
    monkeypatch.setattr(host, "parts", lambda _base: [host.Part("root", "", ("/no/such/lower",))])
    with pytest.raises(SandboxError, match="No such file"):
        await make(owner="failed")
    assert left_overs("failed", tmp_path / "state") == []


async def test_a_start_that_is_cancelled_leaves_nothing(make: Make, tmp_path: Path) -> None:
    for delay_s in (0.0, 0.002, 0.004, 0.006, 0.008, 0.01, 0.012, 0.016):
        starting = asyncio.ensure_future(make(owner="cancelled"))
        await asyncio.sleep(delay_s)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if not starting.cancelled():
            await starting.result().close()
    assert left_overs("cancelled", tmp_path / "state") == []


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean memory_mb"):
        sandbox.make("local", memory_mbb=1)
    with pytest.raises(ConfigError, match="at least 1"):
        sandbox.make("local", pids=0)
    with pytest.raises(ConfigError, match="not known"):
        sandbox.make("podman")
    with pytest.raises(ConfigError, match="an image or a snapshot"):
        sandbox.make("docker")


def test_the_probe_runs_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.why_not() == []

    async def fail(_self: object) -> None:
        raise SandboxError("refused")

    monkeypatch.setattr(local.LocalSandbox, "start", fail)
    assert check.why_not()[-1] == "a trivial sandbox did not run: refused"


def test_the_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse = tmp_path / "unshare"
    refuse.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
    refuse.chmod(0o755)
    monkeypatch.setattr(check.shutil, "which", lambda _name: str(refuse))
    monkeypatch.setattr(check.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(check, "KERNEL_SWITCHES", (("kernel/ostype", "Linux", "the switch is off"),))
    reasons = check._missing()
    assert reasons[0] == "the switch is off"
    assert reasons[1] == "no mount namespace: unshare failed: Operation not permitted"
    assert len(reasons) == 6


async def test_an_environment_that_is_too_large(make: Make) -> None:
    with pytest.raises(SandboxError, match="environment"):
        await make(env={"X": "x" * 200_000})


async def test_every_caller_of_close_waits_for_the_end(make: Make) -> None:
    """Also one that comes later, and after one that was cancelled: descriptors and groups are given back all the same."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    box = await make()
    assert isinstance(box, local.LocalSandbox)
    first = asyncio.ensure_future(box.close())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.gather(box.close(), box.close())
    assert [group for parent in cgroups.parents() for group in parent.glob(f"{box.id}*")] == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1  # the socket to the helper, if this was the first sandbox


async def test_a_process_1_that_dies_slowly_is_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine it takes longer than the first limit: then it is killed, and waited for again."""
    monkeypatch.setattr(local, "CLOSE_S", 0.0)
    for _ in range(3):
        box = await make()
        await asyncio.wait_for(box.close(), 20.0)
        assert isinstance(box, local.LocalSandbox)
        assert [group for parent in cgroups.parents() for group in parent.glob(f"{box.id}*")] == []
