"""What a test of sandboxes must know of each backend."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from termrsi.ports import Sandbox
from termrsi.records import Snapshot
from termrsi.sandbox import cgroups, docker, local

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


def docker_kit(engine: str, image: str) -> Kit:
    api = docker.client(engine)

    def left() -> list[str]:
        found = [c["Labels"][docker.LABEL] for c in api.containers(all=True, filters={"label": docker.LABEL})]
        found += [i["Labels"][docker.LABEL] for i in api.images(filters={"label": docker.LABEL})]
        return [name for name in found if name.startswith(OWNER) and name not in before]

    before: list[str] = []
    before = left()
    return Kit("docker", {"engine": engine, "image": image}, docker.CANNOT, lambda s: docker.discard(s, engine), left)
