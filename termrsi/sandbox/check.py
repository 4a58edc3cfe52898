"""Whether this machine can run sandboxes of a backend: looked at, then tried. Used before any engine starts."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from termrsi import sandbox
from termrsi.errors import SandboxError
from termrsi.sandbox import cgroups, docker_engine, layers, runsc

KERNEL_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "unprivileged user namespaces are off (kernel.unprivileged_userns_clone=0)"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor restricts unprivileged user namespaces (kernel.apparmor_restrict_unprivileged_userns=1)",
    ),
    ("user/max_user_namespaces", "0", "user namespaces are off (user.max_user_namespaces=0)"),
)


def why_not(state_dir: Path | str | None = None, *, backend: str = "local") -> list[str]:
    """One sentence per thing that is missing; empty if sandboxes can be made. Not from inside an event loop.

    `local`, `gvisor`: a trivial sandbox really ran. `docker`: the engine answers; which images it has, each task says.
    """
    return asyncio.run(probe(state_dir, backend=backend))


async def probe(state_dir: Path | str | None = None, *, backend: str = "local") -> list[str]:
    """`why_not` inside an event loop."""
    if backend == "docker":
        try:
            await asyncio.to_thread(docker_engine.client)
        except SandboxError as error:
            return [str(error)]
        return []
    reasons = await asyncio.to_thread(missing, backend)
    if backend == "gvisor" and reasons:  # without runsc there is nothing to try
        return reasons
    try:
        await _try(backend, state_dir)
    except SandboxError as error:
        return [*reasons, f"a trivial sandbox did not run: {error}"]
    return []  # it ran: what looked like a reason was none


def missing(backend: str) -> list[str]:
    """What a look alone finds to be absent, `local` or `gvisor`; nothing is tried."""
    return _missing_for_gvisor() if backend == "gvisor" else _missing()


def weak_limits() -> list[str]:
    """One sentence for each limit of a local sandbox that no control group holds here. Makes a group to see, and removes it."""
    groups = cgroups.create(layers.label("check"), memory_mb=64, pids=64, cpus=None)
    try:
        held = cgroups.limited(groups)
    finally:
        cgroups.end(groups)
    root = "not limited: the kernel exempts root from RLIMIT_NPROC; an ordinary user is not exempt"
    processes = root if os.geteuid() == 0 else "limited for all of this user's together (RLIMIT_NPROC)"
    sentences = {
        "memory": "no writable memory control group: memory is limited for each process alone (RLIMIT_DATA)",
        "pids": f"no writable pids control group: the number of processes is {processes}",
    }
    return [sentence for name, sentence in sentences.items() if name not in held]


def _missing() -> list[str]:
    reasons = []
    if sys.platform != "linux":
        reasons.append(f"local sandboxes need Linux, this is {sys.platform}")
        return reasons
    if not Path("/bin/bash").exists():
        reasons.append("bash is missing at /bin/bash")
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        reasons.append("the kernel has no overlayfs (not in /proc/filesystems; try `modprobe overlay`)")
    if os.geteuid() != 0:
        for name, bad, sentence in KERNEL_SWITCHES:
            switch = Path("/proc/sys", name)
            if switch.exists() and switch.read_text().strip() == bad:
                reasons.append(sentence)
    reasons += _namespaces()
    return reasons


def _namespaces() -> list[str]:
    """Asks unshare(1), where it is installed: it names the kind that is refused."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    reasons = []
    for kind in ("mount", "pid", "net", "ipc", "uts"):
        fork = ["--fork"] if kind == "pid" else []
        result = subprocess.run([unshare, *user, f"--{kind}", *fork, "true"], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            reasons.append(f"no {kind} namespace: {result.stderr.strip() or f'exit code {result.returncode}'}")
    return reasons


def _missing_for_gvisor() -> list[str]:
    reasons = []
    if os.geteuid() != 0:
        reasons.append("runsc needs root")
    reasons += [
        f"{program} is not installed (apt-get install {package})"
        for program, package in (("runsc", "runsc"), ("busybox", "busybox-static"), ("nsenter", "util-linux"))
        if shutil.which(program) is None
    ]
    busybox = shutil.which("busybox")
    if busybox is not None and not runsc.is_static(Path(busybox)):
        reasons.append("busybox is not a static program (apt-get install busybox-static)")
    return reasons


async def _try(backend: str, state_dir: Path | str | None) -> None:
    with tempfile.TemporaryDirectory(prefix=f"termrsi-check-{os.getpid()}-") as scratch:
        box = sandbox.make(backend, state_dir=state_dir or scratch, owner="check")
        try:
            await box.start()
            result = await box.run("echo ready > /tmp/probe && cat /tmp/probe", 10.0)
            if result.output != "ready\n":
                raise SandboxError(f"a command answered {result.output!r}", "sandbox.check")
        finally:
            await box.close()
