"""Random kills of commands, sandboxes and owners on every backend leave no process, mount, group, container, image or directory."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.sandboxes import SandboxActor, SandboxOptions
from termrsi.errors import SandboxError
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.sandbox import cgroups, docker_engine, reap
from tests import docker_daemon
from tests.contract.backends import OWNER, Kit

KILLS = {"local": 160, "docker": 15, "gvisor": 18}  # with those of actors, and one of the daemon: 200
ACTORS = {"local": 4, "docker": 1, "gvisor": 1}


class Owner:
    """A `leaky_owner` that is killed, and begun again, as often as the test likes."""

    def __init__(self, kit: Kit, scratch: Path, seed: int) -> None:
        self._options = {key: str(value) for key, value in kit.options.items()} | {"owner": OWNER, "scratch": str(scratch)}
        self._kit = kit
        self._seed = seed
        self.begin()

    def begin(self) -> None:
        self._seed += 1
        argv = [sys.executable, "-m", "tests.leaky_owner", self._kit.name, json.dumps(self._options), str(self._seed)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def hear(self, word: str) -> None:
        """Reads on until a line begins so; the process must not have ended by itself."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return
        assert self.process.stderr is not None
        pytest.fail(f"the owner ended: {self.process.stderr.read()[-3000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def processes(kit: Kit) -> list[int]:
    """Of every sandbox of the owner, as this host numbers them, process 1 of a sandbox first."""
    found: list[int] = []
    if kit.name == "docker":
        api = docker_engine.client(str(kit.options["engine"]))
        for container in api.containers(filters={"label": docker_engine.LABEL}):
            with contextlib.suppress(Exception):  # it may be gone in between: of whatever kind the engine calls that
                if container["Labels"][docker_engine.LABEL].startswith(OWNER):
                    found += sorted(int(row[1]) for row in api.top(container["Id"])["Processes"])
        return found
    for parent in cgroups.parents():
        for group in parent.glob(f"{OWNER}-*"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    return sorted(set(found))


def gone(kit: Kit) -> list[str]:
    """What is left once dead owners have been reaped. Their processes end a moment after them."""
    end = time.monotonic() + 30.0
    while True:
        if kit.name == "docker":
            docker_engine.reap(OWNER, str(kit.options["engine"]), snapshots=True)
        else:
            reap.everything(Path(str(kit.options["state_dir"])), owner=OWNER, docker=False)
        left = [*kit.left(), *(f"process {pid}" for pid in processes(kit))]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)  # the end of another process's child raises no event here


def test_random_kills_leave_nothing(kit: Kit, tmp_path: Path) -> None:
    rng = random.Random(11)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    owner = Owner(kit, scratch, 100)
    killed = dict.fromkeys(["command", "sandbox", "owner"], 0)  # "command": on gVisor, any process of its own
    try:
        while sum(killed.values()) < KILLS[kit.name]:
            owner.hear("started")
            time.sleep(rng.random() * 0.2)  # at a random moment: that is the test
            what = rng.choice(list(killed))
            found = processes(kit)
            if what == "owner":
                owner.kill()
                owner.begin()
            elif found:
                victim = found[0] if what == "sandbox" else rng.choice(found[1:] or found)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            else:
                continue
            killed[what] += 1
    except BaseException:
        owner.kill()
        gone(kit)  # what this leaves would be held against every test that follows
        raise
    owner.kill()
    assert min(killed.values()) > 0, killed
    assert gone(kit) == []
    assert [path for path in Path(str(kit.options.get("state_dir", tmp_path))).rglob("*") if OWNER in path.name] == []


@pytest.mark.ray
async def test_killed_actors_leave_nothing(kit: Kit, tmp_path: Path, own_ray: None) -> None:
    """The pool's actor, in the middle of its sandboxes' commands, snapshots and forks."""
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    rng = random.Random(12)
    image, engine = (str(kit.options.get(key, "")) for key in ("image", "engine"))
    task = TaskSpec("t", "f", "", "", EnvironmentSpec(docker_image=image or None))
    state = str(kit.options.get("state_dir", tmp_path))
    options = SandboxOptions(kit.name, 4, 256, 64, 64, network=False, cache_dir=str(tmp_path / "c"), state_dir=state, owner=OWNER)
    for _ in range(ACTORS[kit.name]):
        actor: Any = SandboxActor.options(  # Any: Ray's handles are untyped
            num_cpus=0.1, max_concurrency=100, runtime_env={"env_vars": {"DOCKER_HOST": engine} if engine else {}}
        ).remote(options)
        pool = RemotePool([actor])
        leases = await asyncio.gather(*(pool.lease(task) for _ in range(4)))
        doing = [asyncio.ensure_future(lease.run("sleep 60 & setsid sleep 61 & sleep 62", 90.0)) for lease in leases[:2]]
        doing += [asyncio.ensure_future(leases[2].snapshot()), asyncio.ensure_future(leases[3].fork(2))]
        await asyncio.sleep(rng.random() * 0.2)  # at a random moment: that is the test
        ray.kill(actor)
        told = await asyncio.gather(*doing, return_exceptions=True)
        assert all(isinstance(one, SandboxError) for one in told[:2])
    assert gone(kit) == []


@pytest.mark.docker
def test_a_killed_daemon_leaves_nothing_once_it_is_back(cache: Path, tmp_path: Path) -> None:
    if reason := docker_daemon.why_not_own():
        pytest.skip(reason)
    options = {"owner": "daemon", "scratch": str(tmp_path)}
    # A socket's path is short: not below pytest's own directory.
    with (
        tempfile.TemporaryDirectory(prefix="termrsi-dk-", ignore_cleanup_errors=True) as home,
        docker_daemon.own(Path(home)) as daemon,
    ):
        image = docker_daemon.image(daemon.address, cache)
        argv = [
            sys.executable,
            "-m",
            "tests.leaky_owner",
            "docker",
            json.dumps({**options, "engine": daemon.address, "image": image}),
            "1",
        ]
        owner = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert owner.stdout is not None
            for line in owner.stdout:
                if line.startswith("started"):
                    break
            daemon.kill()
        finally:
            owner.kill()
            owner.communicate()
        daemon.start()
        docker_engine.client.cache_clear()
        docker_engine.reap("daemon", daemon.address, snapshots=True)
        api = docker_engine.client(daemon.address)
        assert api.containers(all=True, filters={"label": docker_engine.LABEL}) == []
        assert api.images(filters={"label": docker_engine.LABEL}) == []
    docker_engine.client.cache_clear()
