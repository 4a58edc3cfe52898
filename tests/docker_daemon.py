"""A Docker Engine for tests: the environment's, or a daemon of our own; and an image made without a registry."""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

IMAGE = "termrsi-test:2"
PACKAGES = "procps,python3,git"
START_S = 60.0


def why_not() -> str:
    """Why no engine can be had; "" if one can."""
    return "" if _given() else why_not_own()


def why_not_own() -> str:
    """Why no daemon can be started; "" if one can."""
    if os.geteuid() != 0:
        return "no Docker Engine answers, and only root can start one"
    missing = [name for name in ("dockerd", "debootstrap") if shutil.which(name) is None]
    return f"no Docker Engine answers, and {' and '.join(missing)} to start one is not installed" if missing else ""


def _given() -> bool:
    return subprocess.run(["docker", "version"], capture_output=True).returncode == 0 if shutil.which("docker") else False


class Daemon:
    """A dockerd of our own in `folder`, its containers and its data with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self._folder
        options = ["--iptables=false", "--ip6tables=false", "--bridge=none", f"--host={self.address}", f"--data-root={folder}/data"]
        options += [f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(["dockerd", *options], stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while subprocess.run(["docker", "-H", self.address, "version"], capture_output=True).returncode != 0:
            # A daemon raises no event when it begins to listen.
            assert self._process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """As the kernel would, out of memory. Its containers live on; its containerd ends with it, and their numbers are stale."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for stale in ("pid", "exec/containerd/containerd.pid"):
            (self._folder / stale).unlink(missing_ok=True)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60.0)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if str(self._folder) in line:
                subprocess.run(["umount", "-l", line.split()[4]], capture_output=True)


@contextlib.contextmanager
def own(folder: Path) -> Iterator[Daemon]:
    folder.mkdir(exist_ok=True)
    daemon = Daemon(folder)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """The engine's address: the environment's, or that of a daemon of our own, which ends with the context."""
    if _given():
        yield os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        return
    with own(folder) as daemon:
        yield daemon.address


def image(address: str, cache: Path) -> str:
    """A small Debian with bash, made once by debootstrap and kept as an archive."""
    docker = ["docker", "-H", address]
    if subprocess.run([*docker, "image", "inspect", IMAGE], capture_output=True).returncode != 0:
        archive = cache / "docker" / f"minbase-{PACKAGES.replace(',', '+')}.tar"
        archive.parent.mkdir(parents=True, exist_ok=True)
        with archive.with_suffix(".lock").open("w") as lock:  # two suites may want it at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not archive.is_file():
                _bootstrap(archive)
        subprocess.run([*docker, "import", str(archive), IMAGE], check=True, capture_output=True)
    return IMAGE


def _bootstrap(archive: Path) -> None:
    root = archive.with_suffix(".root")
    _remove(root)
    try:
        suite, mirror = _source()
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root), mirror]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
        part = archive.with_suffix(".part")
        subprocess.run(["tar", "-C", str(root), "-cf", str(part), "."], check=True)
        part.rename(archive)
    finally:
        _remove(root)


def _remove(root: Path) -> None:
    """A root file system, and first what a debootstrap that failed left mounted in it."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if (place := Path(line.split()[4])).is_relative_to(root):
            subprocess.run(["umount", "-l", str(place)], capture_output=True, check=True)
    shutil.rmtree(root, ignore_errors=True)


def _source() -> tuple[str, str]:
    """Suite and mirror of the machine's own apt: what it can reach, debootstrap can."""
    said = subprocess.run(["apt-cache", "policy"], capture_output=True, text=True, env={**os.environ, "LANG": "C"}).stdout
    for line in said.splitlines():
        fields = line.split()  # "500 http://deb.debian.org/debian bookworm/main amd64 Packages"
        if len(fields) == 5 and fields[1].startswith("http") and re.fullmatch(r"[a-z]+/main", fields[2]):
            return fields[2].partition("/")[0], fields[1]
    return "stable", "http://deb.debian.org/debian"
