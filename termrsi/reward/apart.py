"""A verifier in a container of its own (Harbor's `environment_mode = "separate"`), and commands that collect what it reads.

As Harbor 0.26: when the agent has ended, the collect hooks run in its container; then only the declared artifacts and
/logs/artifacts cross over, to the same paths of a fresh container, where the tests run. Its image is the one that
`[verifier.environment]` names, else the one of `tests/Dockerfile` (a step's first): then the tests are in it; else the agent's, and
the tests are put there. Ours: the agent's own sandbox is looked at before, as in every verification; an artifact that is not
there is no error; services other than the main one are refused.
"""

import fnmatch
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from termrsi.errors import SandboxError, SandboxSpoiled, TaskError
from termrsi.ports import Sandbox
from termrsi.records import EnvironmentSpec, TaskSpec

ARTIFACTS = "/logs/artifacts"
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


@dataclass(frozen=True, slots=True)
class Apart:
    """The container of a verifier."""

    environment: EnvironmentSpec
    bundled: bool  # its tests are in its image
    artifacts: tuple[Artifact, ...]


def of(task: TaskSpec, data: Mapping[str, Any]) -> Apart | None:  # Any: parsed TOML
    """None: the tests run in the agent's container. `data` is the task's configuration. Raises TaskError."""
    own = next((step for step in data.get("steps", []) if task.step and step.get("name") == task.step), {})
    levels = [_table(level, "verifier") for level in (own, data)]
    mode = next((mode for level in levels if (mode := _mode(level)) is not None), "shared")
    if mode != "separate":
        return None
    given = next((level["environment"] for level in levels if "environment" in level), {})
    environment = _environment(task, given) if given else replace(task.environment, healthcheck=None)
    environment = replace(environment, network=_network(data, levels))
    artifacts = tuple(_artifacts([ARTIFACTS, *data.get("artifacts", []), *own.get("artifacts", [])]))
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


def hooks(task: TaskSpec, data: Mapping[str, Any]) -> tuple[Hook, ...]:  # Any: parsed TOML
    """Of the task, and of the step that this is the task of. Raises TaskError for one of another service."""
    own = next((step for step in data.get("steps", []) if task.step and step.get("name") == task.step), {})
    found = []
    for one in (one for level in (data, own) for one in _table(level, "verifier").get("collect", [])):
        if not isinstance(one, dict) or not isinstance(one.get("command"), str):
            raise TaskError("verifier.collect has an entry without a command", task.path)
        if one.get("service", "main") != "main":
            raise TaskError(f"verifier.collect of service {one['service']!r}: only main is supported", task.path)
        user = one.get("user")
        found.append(Hook(one["command"], float(one.get("timeout_sec", HOOK_TIMEOUT_S)), None if user is None else str(user)))
    return tuple(found)


async def collect(sandbox: Sandbox, hooks: tuple[Hook, ...]) -> None:
    """Runs the hooks, whose failure is theirs: what they were to collect is not there then. Raises SandboxError."""
    if hooks:
        await sandbox.run(f"mkdir -p {ARTIFACTS}; chmod 777 {ARTIFACTS}")
    for hook in hooks:
        await sandbox.run(f"( bash -c {shlex.quote(as_user(hook.user, hook.command))} < /dev/null )", hook.timeout_s)


def as_user(user: str | None, command: str) -> str:
    """A command of bash that runs another as a user, by name or by number; None is root."""
    if user in (None, "root", "0"):
        return command
    if str(user).isdigit():  # who has a number need not have a name
        return f"setpriv --reuid={user} --regid={user} --clear-groups -- /bin/bash -c {shlex.quote(command)}"
    return f"su -s /bin/bash {shlex.quote(str(user))} -c {shlex.quote(command)}"


async def carry(source: Sandbox, target: Sandbox, task: TaskSpec, artifacts: tuple[Artifact, ...]) -> None:
    """Copies what was declared from the agent's sandbox to the same places of the verifier's. Raises SandboxError."""
    with tempfile.TemporaryDirectory(prefix=f"termrsi-artifacts-{os.getpid()}-") as folder:
        for number, artifact in enumerate(artifacts):
            place = PurePosixPath(task.environment.workdir or "/", artifact.source)
            copy = Path(folder, str(number), place.name or "root")
            copy.parent.mkdir()
            try:
                await source.get(str(place), copy)
            except SandboxSpoiled:
                raise
            except SandboxError:
                if (await source.run(f"[ -e {shlex.quote(str(place))} ]")).exit_code == 0:
                    raise
                continue  # the agent did not make it
            for path in [*_excluded(copy, artifact.exclude)]:
                path.unlink()
            await target.run(f"mkdir -p -- {shlex.quote(str(place if copy.is_dir() else place.parent))}")
            await target.put(copy, str(place))


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
        yield Artifact(table["source"], tuple(str(pattern) for pattern in table.get("exclude", [])))


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
