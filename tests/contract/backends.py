"""What a test of sandboxes must know of each backend."""

import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from termrsi.ports import Sandbox
from termrsi.records import Snapshot
from termrsi.sandbox import cgroups, docker, docker_engine, gvisor, local

Make = Callable[..., Awaitable[Sandbox]]
OWNER = f"test{os.getpid()}"


@dataclass(frozen=True)
class Kit:
    """One backend: how it makes a plain sandbox, what it says it cannot do, and how its left-overs are seen."""

    name: str
    options: dict[str, object]
    cannot: dict[str, str]
    discard: Callable[[Snapshot], None]
    left: Callable[[], list[str]]


def local_kit(tmp_path: Path) -> Kit:
    state = tmp_path / "state"

    def left() -> list[str]:
        found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line]
        found += [str(group) for parent in cgroups.parents() for group in parent.glob(f"{OWNER}-*")]
        return found + [str(path) for name in ("layers", "mount", "snapshots") for path in state.glob(f"{name}/*")]

    return Kit("local", {"state_dir": state}, local.CANNOT, lambda s: local.discard(s, state), left)


def gvisor_kit(tmp_path: Path) -> Kit:
    state = tmp_path / "state"

    def left() -> list[str]:
        found = [str(path) for kind in ("live", "snapshots") for path in (state / "gvisor").glob(f"{kind}/*")]
        found += [str(group) for parent in cgroups.parents() for group in parent.glob(f"{OWNER}-*")]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(state) in (line := path.read_text().replace("\0", " ")):
                    found.append(line)
        return found

    return Kit("gvisor", {"state_dir": state}, gvisor.CANNOT, gvisor.discard, left)


def docker_kit(engine: str, image: str) -> Kit:
    api = docker_engine.client(engine)

    def left() -> list[str]:
        found = [c["Labels"][docker_engine.LABEL] for c in api.containers(all=True, filters={"label": docker_engine.LABEL})]
        found += [i["Labels"][docker_engine.LABEL] for i in api.images(filters={"label": docker_engine.LABEL})]
        return [name for name in found if name.startswith(OWNER) and name not in before]

    before: list[str] = []
    before = left()
    return Kit("docker", {"engine": engine, "image": image}, docker.CANNOT, lambda s: docker_engine.discard(s, engine), left)
