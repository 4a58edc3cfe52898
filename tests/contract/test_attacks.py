"""What an agent might try against its host, its verifier's files or its own limits: each must do no harm on every backend.

After each the sandbox still works, or is told to be lost where a limit ends it as a whole ("life at its limits" in the backend's
CANNOT); the host and a fresh sandbox always work.
"""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from termrsi.errors import SandboxError, SandboxSpoiled
from termrsi.ports import Sandbox
from tests.contract.backends import Kit, Make

SECRET = "planted-7f3a9c"


@pytest.fixture
async def agent(make: Make) -> AsyncIterator[Sandbox]:
    """A sandbox in which the attack runs; one more works afterwards."""
    yield await make(memory_mb=128, disk_mb=64, pids=96)
    after = await make()
    assert (await after.run("echo fine", 20.0)).output == "fine\n"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the host that must neither be seen nor end."""
    argv = [sys.executable, "-c", "import time; time.sleep(300)", SECRET]
    process = subprocess.Popen(argv, env=os.environ | {"TOKEN": SECRET})
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


async def script(box: Sandbox, text: str, tmp_path: Path, timeout_s: float = 30.0) -> str:
    """Runs a Python program inside; its output."""
    (tmp_path / "attack.py").write_text(text)
    await box.put(tmp_path / "attack.py", "/attack.py")
    return (await box.run("/usr/bin/python3 /attack.py 2>&1", timeout_s)).output


async def works(box: Sandbox, kit: Kit, *, may_be_lost: bool = False) -> None:
    try:
        await box.kill_processes()
        assert (await box.run("echo fine", 20.0)).output == "fine\n"
    except SandboxError:
        if not (may_be_lost and "life at its limits" in kit.cannot):
            raise


# --- the host's secrets, processes, kernel and network ----------------------------------------------------------------


async def test_a_secret_of_the_host_is_not_read(
    agent: Sandbox, kit: Kit, tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMRSI_TEST_TOKEN", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    said = await agent.run(
        f"cat {tmp_path}/secret /proc/*/root{tmp_path}/secret /proc/*/cwd/../../..{tmp_path}/secret;"
        " cat /proc/*/environ /proc/*/cmdline"
        f" | tr '\\0' '\\n'; grep -r {SECRET[:7]} /etc /root /home /run /tmp /var 2>/dev/null; env",
        60.0,
    )
    inside = said.output.replace(f"grep -r {SECRET[:7]}", "")
    assert SECRET not in inside
    await works(agent, kit)


async def test_processes_of_the_host_are_neither_seen_nor_signalled(
    agent: Sandbox, kit: Kit, bystander: subprocess.Popen[bytes]
) -> None:
    pid = bystander.pid
    await agent.run(f"kill -9 {pid}; kill -9 -{os.getpgid(pid)}; renice 19 {pid}; echo 1000 > /proc/{pid}/oom_score_adj", 10.0)
    assert SECRET not in (await agent.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", 10.0)).output
    assert bystander.poll() is None
    await works(agent, kit)


PTRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()] + list(range(1, 400)):
    for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        if pid not in (os.getpid(), os.getppid()) and libc.ptrace(request, pid, 0, 0) == 0:
            if pid == 1:
                print("traced process 1")
            libc.ptrace(17, pid, 0, 0)
    for name in ("mem", "maps"):
        try:
            if pid == 1 and name == "mem":
                os.pwrite(os.open("/proc/1/mem", os.O_RDWR), b"x", 4096); print("wrote to process 1")
        except OSError:
            pass
"""


async def test_process_1_is_not_traced(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    said = await script(agent, PTRACE, tmp_path)
    assert said == "" or ("hidden process 1" in kit.cannot and "Error" not in said)
    await works(agent, kit)


KERNEL = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/swappiness", "/proc/sys/fs/file-max")


async def test_the_kernel_is_not_written_to(agent: Sandbox, kit: Kit) -> None:
    before = [Path(path).read_text() for path in KERNEL]
    writes = "; ".join(f"echo 1 > {path}" for path in (*KERNEL, "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity"))
    sys_writes = (
        "find /sys /proc/sys -type f 2>/dev/null | head -2000 | while read f; do (echo 1 > $f) 2>/dev/null && echo wrote $f; done"
    )
    said = await agent.run(f"{writes}; {sys_writes}", 60.0)
    if "read-only switches" not in kit.cannot:
        assert [line for line in said.output.splitlines() if line.startswith("wrote")] == []
    assert [Path(path).read_text() for path in KERNEL] == before
    await works(agent, kit)


MOUNTS = (
    "mount -t proc proc /mnt; mount --bind / /mnt; mount -o remount,rw /; mount -o remount,rw /usr; mount -t tmpfs x /proc;"
    "umount -l /proc; umount -l /dev; unshare -Urm mount -t tmpfs x /mnt; mknod /tmp/d b 8 0; mknod /tmp/m c 1 1;"
    "for d in /tmp/d /tmp/m; do head -c 1 $d > /tmp/read && echo opened $d; done; pivot_root / /mnt; chroot / true && echo chrooted"
)


async def test_nothing_is_mounted_and_no_device_made(agent: Sandbox, kit: Kit) -> None:
    await agent.run("mount > /tmp/before", 10.0)
    said = await agent.run(MOUNTS, 30.0)
    assert "opened" not in said.output
    assert "chrooted" not in said.output
    assert (await agent.run("mount | diff /tmp/before - && echo same", 10.0)).output == "same\n"
    await works(agent, kit)


DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


async def test_the_hosts_devices_stay_as_they_are(agent: Sandbox, kit: Kit) -> None:
    def look() -> list[tuple[int, int, int, int]]:
        found = [Path("/dev", name).stat() for name in DEVICES]
        return [(info.st_mode, info.st_uid, info.st_gid, info.st_ctime_ns) for info in found]

    before = look()
    await agent.run("for f in /dev/* /proc/kcore /proc/keys /proc/timer_list; do chmod 000 $f; chown 1234:1234 $f; done", 10.0)
    await agent.run("chmod 666 /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty; chown 0:0 /dev/*", 10.0)
    await works(agent, kit)
    assert look() == before


# What brings capabilities or keys of the host's: each says "got" if it came through.
PRIVILEGES = """
unshare -U true && echo got a user namespace
unshare -Urm true && echo got mounts
/usr/bin/python3 - <<'END'
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
new_user, sigchld = 0x10000000, 17
clone, add_key, bpf = {"x86_64": (56, 248, 321), "aarch64": (220, 217, 280)}[platform.machine()]
pid = libc.syscall(clone, ctypes.c_ulong(new_user | sigchld), None, None, None, None)
if pid >= 0:
    print("got a user namespace by clone")
if libc.syscall(435, (ctypes.c_uint64 * 11)(new_user, 0, 0, 0, sigchld), 88) >= 0:
    print("got one by clone3")
if libc.syscall(add_key, b"user", b"name", b"value", 5, -4) >= 0:
    print("got a key")
END
"""


async def test_no_capability_and_no_key_comes_back(agent: Sandbox, kit: Kit) -> None:
    said = await agent.run(PRIVILEGES, 30.0)
    if "filter of calls" not in kit.cannot:
        assert "got" not in said.output, said.output
    honest = "import os, subprocess; subprocess.run(['true'], check=True); os.wait() if os.fork() else print('forked', flush=True)"
    assert (await agent.run(f'/usr/bin/python3 -c "{honest}"', 10.0)).output == "forked\n"
    await works(agent, kit)


async def test_it_cannot_spare_itself_where_memory_is_short(agent: Sandbox, kit: Kit) -> None:
    said = await agent.run("echo -1000 > /proc/self/oom_score_adj && cat /proc/self/oom_score_adj", 10.0)
    if "filter of calls" not in kit.cannot:  # gVisor's is a number of its own
        assert "-1000" not in said.output.splitlines()
    await works(agent, kit)


async def test_a_tree_deeper_than_names_can_go(make: Make, agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    """It cannot be copied or named whole: no copy of it, and no removal, may take the owner with it."""
    await script(agent, "import os\nfor _ in range(2500):\n    os.mkdir('d')\n    os.chdir('d')\n", tmp_path)
    with contextlib.suppress(SandboxError):
        await agent.get("/app", tmp_path / "got")
    with contextlib.suppress(SandboxError):
        for copy in await agent.fork(1):
            await copy.close()
    await works(agent, kit, may_be_lost=True)


async def test_the_hosts_sockets_are_out_of_reach(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("0.0.0.0", 0))  # every address of the host, so that none is left untried
        server.listen()
        named.bind(str(tmp_path / "s"))
        named.listen()
        abstract.bind(f"\0{SECRET}")
        abstract.listen()
        addresses = {"127.0.0.1", socket.gethostbyname(socket.gethostname()), "172.17.0.1", "10.0.0.1"}
        attack = f"""
import socket
for kind, address in [(socket.AF_INET, (a, {server.getsockname()[1]})) for a in {sorted(addresses)!r}] + [
    (socket.AF_UNIX, {str(tmp_path / "s")!r}), (socket.AF_UNIX, "\\0{SECRET}")]:
    s = socket.socket(kind)
    s.settimeout(1)
    try:
        s.connect(address); print("connected", address)
    except OSError:
        pass
"""
        assert await script(agent, attack, tmp_path) == ""
        for kind, address in ((socket.AF_INET, ("127.0.0.1", server.getsockname()[1])), (socket.AF_UNIX, f"\0{SECRET}")):
            with socket.socket(kind) as outside:
                outside.connect(address)  # there, for those who may
    await works(agent, kit)


# --- limits -----------------------------------------------------------------------------------------------------------


async def test_a_fork_bomb(agent: Sandbox, kit: Kit) -> None:
    before = len(list(Path("/proc").glob("[0-9]*")))
    started = time.monotonic()
    with contextlib.suppress(SandboxError):
        await agent.run(":(){ :|:& };:; sleep 3", 1.0)
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 2000
    assert time.monotonic() - started < 60.0
    await works(agent, kit, may_be_lost=True)


MEMORY = "b = []\nwhile True:\n    b.append(bytearray(16 << 20))\n"


async def test_a_memory_hog(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    with contextlib.suppress(SandboxError):
        assert (await agent.run("true")).exit_code == 0
        await script(agent, MEMORY, tmp_path)
    await works(agent, kit, may_be_lost=True)


async def test_many_memory_hogs(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    fork = "import os\nfor _ in range(4):\n    os.fork()\n"
    with contextlib.suppress(SandboxError):
        await script(agent, fork + MEMORY, tmp_path)
    await works(agent, kit, may_be_lost=True)


@pytest.mark.parametrize("where", ["/tmp", "/app", "/dev/shm"])
async def test_a_full_disk(make: Make, agent: Sandbox, kit: Kit, where: str) -> None:
    if "disk limit" in kit.cannot and where != "/dev/shm":
        return  # it is not the sandbox's own disk, and the test must not fill the host's
    with contextlib.suppress(SandboxError):
        await agent.run(f"head -c 900M /dev/zero > {where}/fill", 60.0)
        if "disk limit" not in kit.cannot:
            assert int((await agent.run(f"stat -c %s {where}/fill", 10.0)).output) < 100 << 20
        await agent.run(f"rm -f {where}/fill", 10.0)
    await works(agent, kit, may_be_lost=True)


async def test_no_room_for_what_is_put(make: Make, kit: Kit, tmp_path: Path) -> None:
    """The agent's doing, not the machine's: told so by `put`, though no command runs."""
    if "disk limit" in kit.cannot and "life at its limits" not in kit.cannot:
        return  # it is not the sandbox's own disk, and the test must not fill the host's
    box = await make(memory_mb=128, disk_mb=64, pids=96)
    await box.run(f"head -c {300 if 'disk limit' in kit.cannot else 100}M /dev/zero > /tmp/fill", 60.0)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(SandboxSpoiled):
        await box.put(tmp_path / "large", "/tmp/large")


async def test_very_many_files(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    attack = "for i in range(200000):\n    open(f'/tmp/f{i}', 'w').close()\n"
    with contextlib.suppress(SandboxError):
        await script(agent, attack, tmp_path, 5.0)
        await agent.run("find /tmp -name 'f*' -delete", 60.0)
    await works(agent, kit, may_be_lost=True)


async def test_very_many_descriptors(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    attack = """
import os
fds, children = [], []
for _ in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        children = []
        break
try:
    while True:
        fds += os.pipe()
except OSError:
    print(len(fds) < 100000)
for child in children:
    os.waitpid(child, 0)
"""
    assert set((await script(agent, attack, tmp_path)).split()) == {"True"}
    await works(agent, kit)


async def test_output_for_ever_is_cut_off_and_costs_the_owner_little(agent: Sandbox, kit: Kit) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await agent.run("yes attack", 2.0)
    assert result.timed_out
    assert len(result.output) < 2 << 20
    assert result.omitted_bytes > 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    await works(agent, kit)


STORM = """
import os, signal, time
for name in (signal.SIGUSR1, signal.SIGALRM, signal.SIGWINCH, signal.SIGCONT):
    signal.signal(name, lambda *a: None)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
end = time.monotonic() + 1.0
while time.monotonic() < end:
    for pid in (1, os.getppid(), 0):
        for s in (signal.SIGUSR1, signal.SIGWINCH, signal.SIGCONT, signal.SIGALRM):
            if pid != 0 or s != signal.SIGALRM:
                try:
                    os.kill(pid, s) if pid != os.getppid() or s in (signal.SIGWINCH, signal.SIGCONT) else None
                except OSError:
                    pass
print("done")
"""


async def test_storms_of_signals_and_timers(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    await script(agent, STORM, tmp_path, 3.0)  # a storm of signals may well leave no time to come to its end
    assert (await agent.run("echo fine", 20.0)).output == "fine\n"
    await works(agent, kit)


async def test_the_clock_is_not_set(agent: Sandbox, kit: Kit) -> None:
    before = time.time() - time.monotonic()
    assert (await agent.run("date -s '2001-01-01'; hwclock --set --date 2001-01-01", 10.0)).exit_code != 0
    assert abs(time.time() - time.monotonic() - before) < 60.0
    await works(agent, kit)


# --- files that the owner copies ----------------------------------------------------------------------------------------


async def test_names_that_an_archive_would_leave_by(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    """Odd names, loops of links, a directory that becomes a link between two copies: all stays below the target."""
    out = tmp_path / "a" / "b" / "out"
    await agent.run(
        "mkdir -p /d/sub; cd /d; echo x > '..x'; echo x > '\\..\\y'; echo x > $'a\\nb'; echo x > '-rf'; ln -s . loop;"
        "ln -s loop/loop l2; ln -s /etc sub/etc; ln -s ../../../../../../../../tmp up; mkfifo p; echo data > real; ln real hard",
        10.0,
    )
    await asyncio.wait_for(agent.get("/d", out), 30.0)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]
    assert (out / "loop").is_symlink()
    assert (out / "hard").read_text() == "data\n"
    await agent.run("cd /d; rm -rf sub real; ln -s /root/stolen real; ln -s /tmp sub", 10.0)
    await asyncio.wait_for(agent.get("/d", out), 30.0)
    assert (out / "real").is_symlink()
    await works(agent, kit)


async def test_what_is_put_lands_inside(agent: Sandbox, kit: Kit, tmp_path: Path) -> None:
    """Targets that the agent made links of, or keeps open: the host's files of the same names are as before."""
    victim = tmp_path / "victim"
    victim.write_text("host")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "test.sh").write_text("trusted\n")
    await agent.run(
        f"mkdir -p {tmp_path}; ln -s {tmp_path} /tests; mkfifo /pipe; touch /app/open; exec 7<>/app/open; ln /app/open /app/also",
        10.0,
    )
    await agent.put(tmp_path / "new", "/tests")
    await agent.put(tmp_path / "new" / "test.sh", "/app/open")
    await asyncio.wait_for(agent.put(tmp_path / "new" / "test.sh", "/pipe"), 20.0)
    await agent.run("echo forged >&7; echo forged > /app/also", 10.0)
    assert (await agent.run("cat /app/open /tests/test.sh /pipe", 10.0)).output == "trusted\n" * 3
    assert victim.read_text() == "host"
    assert not (tmp_path / "test.sh").exists()
    await works(agent, kit)
