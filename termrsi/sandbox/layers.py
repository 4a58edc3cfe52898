"""The directory a host keeps for local sandboxes: base trees, snapshot layers with their users, snapshots.

    state_dir/base/<key>/              bare tree and masks (`host.prepare`)
              layers/<id>/tree/<part>  one writable layer at rest
              layers/<id>/users/<id>   who needs it: a snapshot or a live sandbox; the last to go removes it
              snapshots/<id>/          manifest.json, shell

Ids are labels `<owner>-<pid>-<start of that process>-<random>`, so a left-over names the process that left it.
"""

import contextlib
import functools
import hashlib
import json
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from termrsi.errors import SandboxError
from termrsi.records import Snapshot
from termrsi.sandbox import host, tree


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot read back: layers top first, what the shell starts with."""

    layers: list[Path]
    env: dict[str, str]
    workdir: str
    state: bytes
    reference: dict[str, str]  # of the watched files, as the image had them
    root: str


def state_dir(given: Path | str | None) -> Path:
    """The directory, made if missing, and closed to other users. Raises SandboxError if another user owns it."""
    if given is not None:
        path = Path(given).absolute()
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(runtime) / "termrsi"
    else:
        path = Path(f"/tmp/termrsi-{os.geteuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.geteuid():
        raise SandboxError("belongs to another user", str(path), "set state_dir")
    return path


def mount_point(directory: Path) -> Path:
    """An empty directory on which each sandbox mounts its layer, in its own mount namespace: nothing of it shows here."""
    path = directory / "mount"
    path.mkdir(exist_ok=True)
    return path


@functools.lru_cache(maxsize=8)
def base(directory: Path) -> Path:
    """`host.prepare`, looked at once per process."""
    return host.prepare(directory)


def label(owner: str) -> str:
    pid = os.getpid()
    return f"{owner}-{pid}-{_start_of(pid)}-{uuid.uuid4().hex[:8]}"


def is_left_over(name: str, owner: str | None) -> bool:
    """Whether a label is of `owner` (None: any) and of a process that is gone."""
    fields = name.rsplit("-", 3)
    if len(fields) != 4 or not fields[1].isdigit():
        return False
    return owner in (None, fields[0]) and _start_of(int(fields[1])) != fields[2]


def save(
    directory: Path,
    snapshot_id: str,
    *,
    upper: str,
    below: list[Path],
    env: Mapping[str, str],
    workdir: str,
    state: bytes,
    lost: tuple[str, ...],
    reference: Mapping[str, str],
    root: str,
) -> Snapshot:
    """Copies the writable layer `upper` into a new layer and writes the snapshot. Raises OSError."""
    layer = directory / "layers" / snapshot_id
    (layer / "users").mkdir(parents=True)
    (layer / "users" / snapshot_id).touch()
    content, size = tree.copy(upper, str(layer / "tree"))
    chain = [layer / "tree", *below]
    for path in below:
        _use(directory, path, snapshot_id)
    manifest = {"layers": [str(path) for path in chain], "env": dict(env), "workdir": workdir, "tree": content}
    manifest |= {"reference": dict(reference), "root": root}
    text = json.dumps(manifest, sort_keys=True)
    home = directory / "snapshots" / snapshot_id
    home.mkdir(parents=True)
    (home / "shell").write_bytes(state)
    (home / "manifest.json").write_text(text)
    return Snapshot(snapshot_id, "local", str(home), _digest(text, state), lost, size)


def restore(directory: Path, snapshot: Snapshot, user: str, *, verify: bool) -> Saved:
    """Reads a snapshot and enters `user` for its layers. Raises SandboxError if it is missing or not what was saved."""
    home = Path(snapshot.handle)
    try:
        text = (home / "manifest.json").read_text()
        state = (home / "shell").read_bytes()
    except OSError as error:
        raise SandboxError(f"snapshot cannot be read: {error}", snapshot.id) from error
    manifest = json.loads(text)
    chain = [Path(path) for path in manifest["layers"]]
    for path in chain:
        _use(directory, path, user)
    if verify and (_digest(text, state) != snapshot.digest or tree.digest(str(chain[0])) != manifest["tree"]):
        release(directory, chain, user)
        raise SandboxError("snapshot is damaged: its digest differs", snapshot.id)
    return Saved(chain, manifest["env"], manifest["workdir"], state, manifest["reference"], manifest["root"])


def release(directory: Path, chain: list[Path], user: str) -> None:
    """`user` needs these layers no longer; a layer without users is removed."""
    for path in chain:
        if path.is_relative_to(directory / "layers"):
            _leave(path.parent, user)


def discard(directory: Path, snapshot_id: str) -> None:
    """Removes a snapshot, also a half-made one. A second time does nothing."""
    home = directory / "snapshots" / snapshot_id
    chain = [directory / "layers" / snapshot_id / "tree"]
    with contextlib.suppress(OSError, ValueError):
        chain = [Path(path) for path in json.loads((home / "manifest.json").read_text())["layers"]]
    tree.remove(home)
    release(directory, chain, snapshot_id)


def reap(directory: Path, owner: str | None, *, snapshots: bool, keep: Collection[str] = frozenset()) -> list[str]:
    """Removes references, half-made layers and, if asked, snapshots of dead processes, but those of the ids `keep`."""
    removed = []
    homes = directory / "snapshots"
    for home in sorted(homes.iterdir()) if homes.is_dir() else []:
        complete = (home / "manifest.json").exists()
        wanted = home.name in keep or not snapshots
        if is_left_over(home.name, owner) and not (complete and wanted):
            discard(directory, home.name)
            removed.append(str(home))
    stacks = directory / "layers"
    for layer in sorted(stacks.iterdir()) if stacks.is_dir() else []:
        users = layer / "users"
        for user in sorted(users.iterdir()) if users.is_dir() else []:
            if is_left_over(user.name, owner) and not (homes / user.name).exists():
                _leave(layer, user.name)
                removed.append(str(user))
        # Killed before it had a user, or between the last one's leave and the removal.
        if is_left_over(layer.name, owner) and not (users.is_dir() and any(users.iterdir())):
            tree.remove(layer)
            removed.append(str(layer))
    return removed


def _use(directory: Path, path: Path, user: str) -> None:
    if path.is_relative_to(directory / "layers"):
        try:
            (path.parent / "users" / user).touch()
        except FileNotFoundError as error:
            raise SandboxError(f"a layer of the snapshot is gone: {path}", user) from error


def _leave(layer: Path, user: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (layer / "users" / user).unlink()
    try:
        (layer / "users").rmdir()  # succeeds for the last user only, whoever else comes at the same time
    except OSError:
        return
    tree.remove(layer)


def _digest(manifest: str, state: bytes) -> str:
    return hashlib.sha256(manifest.encode() + b"\0" + state).hexdigest()


def _start_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
