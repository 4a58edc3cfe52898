"""What dead processes left on this host, of every backend: removed before a run starts, but for snapshots of others, and by
`termrsi doctor --clean`."""

import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

from termrsi.sandbox import docker_engine, gvisor, image, layers, local, tree


def everything(
    state_dir: Path | str | None = None,
    *,
    owner: str | None = None,
    docker: bool = True,
    cache_dir: Path | str | None = None,
    keep: Collection[str] = frozenset(),
    snapshots: bool = True,
) -> list[str]:
    """Removes groups, layers, containers, checkpoints, snapshots and half-made images whose process is gone; what, by name.

    `owner`: only of that one. `docker`: False leaves the engine alone; an engine that does not answer has nothing of ours.
    `keep`: ids of snapshots that a run goes on from. `snapshots`: False leaves all of them, as one who is of the same run must.
    """
    removed = local.reap(owner, state_dir, snapshots=snapshots, keep=keep) + gvisor.reap(
        owner, state_dir, snapshots=snapshots, keep=keep
    )
    removed += _scratch(Path(tempfile.gettempdir())) + _scratch(layers.state_dir(state_dir) / "base")
    removed += image.reap(cache_dir) if cache_dir is not None else []
    if docker and docker_engine.answers():
        removed += docker_engine.reap(owner, snapshots=snapshots, keep=keep)
    return removed


def before(
    owner: str,
    state_dir: Path | str | None = None,
    *,
    docker: bool = True,
    cache_dir: Path | str | None = None,
    keep: Collection[str] = frozenset(),
    snapshots: bool = True,
) -> list[str]:
    """What `owner`, a run that starts, finds on this host: as `everything` of whichever owner, but of snapshots its own alone.

    Another run that was stopped may go on from its own; `everything` removes those too.
    """
    removed = everything(state_dir, docker=docker, cache_dir=cache_dir, snapshots=False)
    return removed + (everything(state_dir, owner=owner, docker=docker, keep=keep) if snapshots else [])


def _scratch(place: Path) -> list[str]:
    """Directories that bear the number of a process that is gone: `termrsi-PURPOSE-PID-RANDOM`."""
    removed = []
    for path in sorted(place.glob("termrsi-*-*-*")):
        found = re.fullmatch(r"termrsi-[a-z]+-(\d+)-\w+", path.name)
        if found and not Path("/proc", found[1]).exists() and path.lstat().st_uid == os.geteuid():
            tree.remove(path)
            removed.append(str(path))
    return removed
