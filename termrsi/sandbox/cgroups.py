"""Control groups of one sandbox: memory, processes, CPU; version 1 or 2, whichever this process may write.

Named `termrsi/<label>`, so that what a crashed owner left can be found (`reap`).
"""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from termrsi.errors import SandboxError

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
DELAYS_S = (0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 4.0)  # between looks at groups whose processes are ending


def parents() -> list[Path]:
    """Where groups are made: one directory (version 2), one per controller (version 1), none if not permitted."""
    if (MOUNT / "cgroup.controllers").exists():
        return _unified()
    found = []
    own = _own_paths()
    for controller in CONTROLLERS:
        inside = MOUNT / controller / own.get(controller, "").lstrip("/")
        top = inside if inside.is_dir() else MOUNT / controller  # a container may see its own group as the top
        if os.access(top, os.W_OK) and (top / "cgroup.procs").exists():
            found.append(top / "termrsi")
    return found


def create(label: str, *, memory_mb: int, pids: int, cpus: float | None) -> list[Path]:
    """The groups of one sandbox, limits set; empty if this process may not make any."""
    made: list[Path] = []
    for parent in parents():
        group = parent / label
        try:
            group.mkdir(parents=True)
            _limit(group, memory_mb, pids, cpus)
        except OSError:
            remove([group])
            continue
        made.append(group)
    return made


def limited(groups: list[Path]) -> set[str]:
    """Which of "memory" and "pids" these groups hold down: a hierarchy may lack a controller."""
    files = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}
    return {name for name, names in files.items() if any((group / file).exists() for group in groups for file in names)}


def exceeded(groups: list[Path]) -> set[str]:
    """Which of "memory" and "pids" what runs in these groups came to the end of, so that the kernel ended or refused a process."""
    found = set()
    for group in groups:
        # A kill alone may have been for the want of another: the group must have come to its own limit too.
        if _count(group / "memory.events", "oom_kill") and _count(group / "memory.events", "oom"):
            found.add("memory")
        if _count(group / "memory.oom_control", "oom_kill") and _count(group / "memory.failcnt"):
            found.add("memory")
        if _count(group / "pids.events", "max"):
            found.add("pids")
    return found


def _count(file: Path, field: str = "") -> int:
    """A number of a group's file: the one behind `field`, or all there is. 0 if there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    named = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines}
    return int(named.get(field, 0))


def remove(groups: list[Path]) -> bool:
    """Whether all are gone."""
    for group in groups:
        with contextlib.suppress(OSError):
            group.rmdir()
    return not any(group.exists() for group in groups)


def kill(group: Path) -> None:
    """Ends what still runs in a group left behind."""
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def end(groups: list[Path]) -> bool:
    """Ends what runs in these groups and removes them; whether all are gone.

    A killed process leaves its group a moment after its signal, and a group tells no one when it is empty.
    """
    for delay_s in DELAYS_S:
        if remove(groups):
            return True
        for group in groups:
            kill(group)
        time.sleep(delay_s)
    return remove(groups)


async def dissolve(groups: list[Path]) -> None:
    """`end` for an event loop. Raises SandboxError if that does not end."""
    for delay_s in DELAYS_S:
        if remove(groups):
            return
        for group in groups:
            kill(group)
        await asyncio.sleep(delay_s)
    if not remove(groups):
        raise SandboxError("its processes do not end", str(groups[0]))


def _unified() -> list[Path]:
    own = _own_paths().get("", "").lstrip("/")
    for top in dict.fromkeys((MOUNT / own, MOUNT)):
        parent = top / "termrsi"
        try:
            parent.mkdir(exist_ok=True)
            # A group that holds processes cannot hand controllers down (save the top one): then the next is tried.
            for directory in (top, parent):
                have = (directory / "cgroup.controllers").read_text().split()
                wanted = " ".join(f"+{name}" for name in CONTROLLERS if name in have)
                (directory / "cgroup.subtree_control").write_text(wanted)
        except OSError:
            with contextlib.suppress(OSError):
                parent.rmdir()
            continue
        return [parent]
    return []


def _own_paths() -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _limit(group: Path, memory_mb: int, pids: int, cpus: float | None) -> None:
    for name, value in (
        ("memory.max", memory_mb << 20),
        ("memory.swap.max", 0),
        ("memory.limit_in_bytes", memory_mb << 20),
        ("pids.max", pids),
        ("cpu.max", f"{int(cpus * 100_000)} 100000" if cpus else ""),
        ("cpu.cfs_quota_us", int(cpus * 100_000) if cpus else ""),
    ):
        file = group / name
        if value != "" and file.exists():
            file.write_text(str(value))
