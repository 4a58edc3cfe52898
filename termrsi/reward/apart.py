"""A verifier in a container of its own (Harbor's `environment_mode = "separate"`), and commands that collect what it reads.

As Harbor 0.26: when the agent has ended, the collect hooks run in its container; then only the declared artifacts and
/logs/artifacts cross over, to the same paths of a fresh container, where the tests run. Its image is the one that
`[verifier.environment]` names, else the one of `tests/Dockerfile` (a step's first): then the tests are in it; else the agent's, and
the tests are put there. Ours: the agent's own sandbox is looked at before, as in every verification; an artifact that is not
there is no error; services other than the main one are refused.
"""

import asyncio
import contextlib
import fnmatch
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from termrsi.errors import SandboxError, TaskError
from termrsi.ports import Sandbox
from termrsi.records import EnvironmentSpec, TaskSpec

ARTIFACTS = "/logs/artifacts"
ANSWER_S = 30.0
UNSET = " ".join(f"-u {name}" for name in ("BASH_ENV", "ENV", "LD_PRELOAD", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"))
HOOK_TIMEOUT_S = 60.0

# A started sandbox of the second task's environment beside a leased one, closed on exit. Raises SandboxError, TaskError.
Beside = Callable[[Sandbox, TaskSpec], AbstractAsyncContextManager[Sandbox]]


@dataclass(frozen=True, slots=True)
class Hook:
    """A command that runs in the agent's container when the agent has ended."""

    command: str
    timeout_s: float = HOOK_TIMEOUT_S
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or directory that crosses over; `exclude` as tar's."""

    source: str
    exclude: tuple[str, ...] = ()
    destination: str = ""  # below a trial's artifacts/; "": as its source


@dataclass(frozen=True, slots=True)
class Apart:
    """The container of a verifier."""

    environment: EnvironmentSpec
    bundled: bool  # its tests are in its image
    artifacts: tuple[Artifact, ...]


def of(task: TaskSpec, data: Mapping[str, Any]) -> Apart | None:  # Any: parsed TOML
    """None: the tests run in the agent's container. `data` is the task's configuration. Raises TaskError."""
    with _understood(task):
        return _of(task, data)


def declared(task: TaskSpec, data: Mapping[str, Any]) -> tuple[Artifact, ...]:  # Any: parsed TOML
    """/logs/artifacts, and what the task and the step that this is the task of declare. Raises TaskError."""
    with _understood(task):
        return _declared(data, _own_step(task, data))


def hooks(task: TaskSpec, data: Mapping[str, Any]) -> tuple[Hook, ...]:  # Any: parsed TOML
    """Of the task, and of the step that this is the task of. Raises TaskError for one of another service."""
    with _understood(task):
        return _hooks(task, data)


@contextlib.contextmanager
def _understood(task: TaskSpec) -> Iterator[None]:
    """What authors write knows no bounds: a value of another kind than it must be is the task's fault."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"task.toml: its verifier's container cannot be understood: {error}", task.path) from error


def _own_step(task: TaskSpec, data: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((step for step in data.get("steps", []) if task.step and step.get("name") == task.step), {})


def _declared(data: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Artifact, ...]:
    found = list(_artifacts([*_list(data, "artifacts"), *_list(own, "artifacts")]))
    given = any(artifact.source.rstrip("/") == ARTIFACTS for artifact in found)  # then as the task says, exclusions and all
    return tuple(found) if given else (Artifact(ARTIFACTS), *found)


def _of(task: TaskSpec, data: Mapping[str, Any]) -> Apart | None:
    own = _own_step(task, data)
    levels = [_table(level, "verifier") for level in (own, data)]
    mode = next((mode for level in levels if (mode := _mode(level)) is not None), "shared")
    if mode != "separate":
        return None
    given = next((_table(level, "environment") for level in levels if "environment" in level), {})
    environment = _environment(task, given) if given else replace(task.environment, healthcheck=None)
    environment = replace(environment, network=_network(data, levels))
    artifacts = _declared(data, own)
    root = Path(task.path)
    folders = [root / "steps" / task.step / "tests"] if task.step else []
    for level, folder in zip(levels if task.step else levels[1:], [*folders, root / "tests"], strict=True):
        image = _table(level, "environment").get("docker_image")
        if image:
            return Apart(replace(environment, docker_image=str(image), context=""), True, artifacts)
        if (folder / "docker-compose.yaml").is_file():
            raise TaskError("its verifier has services of its own: not supported", str(folder / "docker-compose.yaml"))
        if (folder / "Dockerfile").is_file():
            return Apart(replace(environment, docker_image=None, context=str(folder)), True, artifacts)
    agents = task.environment
    return Apart(replace(environment, docker_image=agents.docker_image, context=agents.context), False, artifacts)


def is_separate(path: Path | str) -> bool:
    """Whether a task of one step has its tests run in a container of their own. Raises TaskError if task.toml cannot be read."""
    file = Path(path) / "task.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise TaskError(f"cannot be read: {error}", str(file)) from error
    return _mode(_table(data, "verifier")) == "separate"


def _hooks(task: TaskSpec, data: Mapping[str, Any]) -> tuple[Hook, ...]:
    own = _own_step(task, data)
    found = []
    for one in (one for level in (data, own) for one in _list(_table(level, "verifier"), "collect")):
        if not isinstance(one, dict) or not isinstance(one.get("command"), str):
            raise TaskError("verifier.collect has an entry without a command", task.path)
        if one.get("service", "main") != "main":
            raise TaskError(f"verifier.collect of service {one['service']!r}: only main is supported", task.path)
        user = one.get("user")
        found.append(Hook(one["command"], float(one.get("timeout_sec", HOOK_TIMEOUT_S)), None if user is None else str(user)))
    return tuple(found)


async def collect(sandbox: Sandbox, hooks: tuple[Hook, ...], place: str | None) -> None:
    """Runs the hooks in `place`, whose failure is theirs: what they were to collect is not there then. Raises SandboxError.

    In the agent's own machine, which is the agent's: but not with its directory, its functions, or what sends git elsewhere.
    """
    if hooks:
        await sandbox.run(f"/bin/mkdir -p {ARTIFACTS}; /bin/chmod 777 {ARTIFACTS}", HOOK_TIMEOUT_S)
    for hook in hooks:
        script = f"cd {shlex.quote(place)} && {{ {hook.command}\n}}" if place else hook.command
        inner = shlex.quote(as_user(hook.user, script))
        await sandbox.run(f"/usr/bin/env {UNSET} /bin/bash -p -c {inner} < /dev/null", hook.timeout_s)


def as_user(user: str | None, command: str) -> str:
    """A command of bash that runs another as a user, by name or by number; None is root."""
    if user in (None, "root", "0"):
        return command
    if str(user).isdigit():  # who has a number need not have a name
        home = f'HOME=$(getent passwd {user} | cut -d: -f6); export HOME="${{HOME:-/}}"'
        return f"{home}; /usr/bin/setpriv --reuid={user} --regid={user} --clear-groups -- /bin/bash -c {shlex.quote(command)}"
    return f"su -s /bin/bash {shlex.quote(str(user))} -c {shlex.quote(command)}"


@dataclass(frozen=True, slots=True)
class Fetched:
    """An artifact, its place in the sandbox, and the copy of what is there, if it could be had."""

    artifact: Artifact
    place: PurePosixPath
    copy: Path | None
    skipped: bool = False  # it is part of another, or the other way


async def fetch(source: Sandbox, workdir: str | None, artifacts: tuple[Artifact, ...], folder: Path) -> list[Fetched]:
    """Copies of what was declared and is there, in `folder`. One inside another is part of that, as in Harbor.

    What cannot be copied (a pipe, more than a disk) is not there. Raises SandboxError if the sandbox is lost.
    """
    found: list[Fetched] = []
    for number, artifact in enumerate(artifacts):
        place = PurePosixPath(os.path.normpath(PurePosixPath(workdir or "/", artifact.source)))
        if any(place == one.place or one.place in place.parents or place in one.place.parents for one in found):
            found.append(Fetched(artifact, place, None, skipped=True))
            continue
        copy = folder / str(number) / (place.name or "root")
        copy.parent.mkdir()
        try:
            await source.get(str(place), copy)
        except SandboxError:
            await source.run("true", ANSWER_S)  # raises, if it is the sandbox that is lost
            found.append(Fetched(artifact, place, None))
            continue
        there = await asyncio.to_thread(_trimmed, copy, artifact.exclude)
        found.append(Fetched(artifact, place, copy if there else None))
    return found


async def lay(target: Sandbox, found: list[Fetched]) -> None:
    """Puts them where they were, in place of what is there. Raises SandboxError."""
    for copy, place in ((one.copy, one.place) for one in found):
        if copy is None:
            continue
        where, parent = shlex.quote(str(place)), shlex.quote(str(place.parent))
        empty = f"[ ! -L {where} ] || rm -f {where}; "
        if copy.is_dir():
            empty += f"[ -d {where} ] || rm -rf {where}; mkdir -p {where} && find {where} -mindepth 1 -delete"
        else:
            empty += f"rm -rf {where}; mkdir -p {parent}"
        await target.run(empty)
        await target.put(copy, str(place))


def _trimmed(copy: Path, patterns: tuple[str, ...]) -> bool:
    """Takes out what is excluded, and links that lead out of the copy; whether something is left."""
    if copy.is_symlink() or not copy.exists():
        return False
    if copy.is_dir():
        for path in [*_excluded(copy, patterns)] if patterns else []:
            path.unlink()
        top = copy.resolve()
        for path in [path for path in copy.rglob("*") if path.is_symlink()]:
            if path.readlink().is_absolute() or not _leads_into(path, top):
                path.unlink()
    return True


def _leads_into(link: Path, top: Path) -> bool:
    """Whether a link, and every link that it leads through, ends below `top`, at something that is there."""
    try:
        return Path(os.path.realpath(link, strict=True)).is_relative_to(top)
    except OSError:  # nothing is there, or links in a ring
        return False


def _excluded(copy: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """Files of a copied directory that one of the patterns names: any end of their path, or a directory's above them."""
    if not copy.is_dir() or copy.is_symlink():
        return
    for path in sorted(copy.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        parts = path.relative_to(copy).parts
        ends = ["/".join(parts[first:last]) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1)]
        if any(fnmatch.fnmatchcase(end, pattern.removeprefix("./").rstrip("/")) for end in ends for pattern in patterns):
            yield path


def _mode(verifier: Mapping[str, Any]) -> str | None:
    given = verifier.get("environment_mode")
    return given if given is not None else "separate" if "environment" in verifier else None


def _artifacts(entries: list[Any]) -> Iterator[Artifact]:
    for entry in entries:
        table = {"source": entry} if isinstance(entry, str) else entry
        if not isinstance(table, dict) or not isinstance(table.get("source"), str):
            raise TaskError("artifacts has an entry without a source", "task.toml")
        if table.get("service", "main") != "main":
            raise TaskError(f"artifact {table['source']} of service {table['service']!r}: only main is supported", "task.toml")
        exclude = tuple(str(pattern) for pattern in _list(table, "exclude"))
        yield Artifact(table["source"], exclude, str(table.get("destination") or ""))


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg])", re.IGNORECASE)


def _environment(task: TaskSpec, given: Mapping[str, Any]) -> EnvironmentSpec:
    """Of `[verifier.environment]`: its own limits and variables."""
    try:
        return EnvironmentSpec(
            workdir=str(given["workdir"]) if given.get("workdir") else None,
            cpus=float(given["cpus"]) if given.get("cpus") is not None else None,
            memory_mb=_megabytes(given, "memory"),
            storage_mb=_megabytes(given, "storage"),
            env={str(key): str(value) for key, value in _table(given, "env").items()},
            build_timeout_s=float(given.get("build_timeout_sec", 600.0)),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise TaskError(f"verifier.environment: {error}", task.path) from error


def _network(data: Mapping[str, Any], levels: list[dict[str, Any]]) -> bool:
    """The verifier's own word, its environment's, or the task environment's: not the agent's."""
    for table in (*levels, *(_table(level, "environment") for level in levels), _table(data, "environment")):
        if table.get("network_mode") is not None:
            return table["network_mode"] == "public"
        if table.get("allow_internet") is not None:
            return bool(table["allow_internet"])
    return True


def _megabytes(given: Mapping[str, Any], key: str) -> int | None:
    if given.get(f"{key}_mb") is not None:
        return int(given[f"{key}_mb"])
    match = _SIZE.match(str(given.get(key, "")))
    return int(float(match[1]) * {"k": 1 / 1024, "m": 1.0, "g": 1024.0}[match[2].lower()]) if match else None


def _table(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key, {})
    return found if isinstance(found, dict) else {}


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    found = data.get(key, [])
    if not isinstance(found, list):
        raise TaskError(f"{key} is not an array", "task.toml")
    return found
