"""Compose files of tasks: extra services beside the agent's container, by the compose program of the machine.

A task's file is not run as it stands. It is read, its variables filled in from our own, and written anew: what reaches into the
host (bind mounts from outside of the task, privileges, the host's namespaces, published ports) is refused by file and key or left
out, images are built through the cache, every part is labelled, and without `network` no service reaches the outside.
"""

import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from termrsi.errors import SandboxError, TaskError
from termrsi.sandbox import dockerfile

NAME = "docker-compose.yaml"
MAIN = ("main", "client")  # Harbor's, and Terminal-Bench's: where the agent works
# What a service may say. A list of what it may not would be one of what compose can do today.
ALLOWED = (
    *("image", "build", "command", "entrypoint", "environment", "depends_on", "networks", "network_mode", "volumes", "working_dir"),
    *(
        "user",
        "healthcheck",
        "hostname",
        "domainname",
        "expose",
        "labels",
        "tmpfs",
        "stop_grace_period",
        "stop_signal",
        "read_only",
    ),
)
NO_HOST = {"com.docker.network.bridge.inhibit_ipv4": "true"}
LEFT_OUT = (
    *("ports", "container_name", "restart", "stdin_open", "tty", "logging", "profiles", "platform", "deploy", "init", "labels"),
    *("mem_limit", "cpus", "shm_size", "pull_policy"),
)
OF_MAIN = ("command", "entrypoint", "volumes", "user", "stop_signal", "healthcheck")  # ours, whatever the file says
Build = Callable[[Path, str], str]  # context and Dockerfile to the name of an image
Json = dict[str, Any]  # Any: YAML of a task


@functools.lru_cache(maxsize=1)
def program() -> tuple[str, ...]:
    """The compose plug-in, or the program of its own; () if neither is there."""
    for argv in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(argv[0]) and subprocess.run([*argv, "version"], capture_output=True, check=False).returncode == 0:
            return argv
    return ()


def others(file: Path) -> list[str]:
    """The services of a Harbor task beside the agent's. Raises TaskError if the file cannot be read.

    Of an older task, whose service is called client, none: what they are for is not told apart from how that format starts one.
    """
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise TaskError(f"cannot be read: {error}", str(file)) from error
    services = data.get("services") if isinstance(data, dict) else None
    names = [str(name) for name in services] if isinstance(services, dict) else []
    return [] if "client" in names else [name for name in names if name not in MAIN]


def read(
    file: Path, variables: Mapping[str, str], build: Build, *, network: bool, image: str = "", limits: Mapping[str, object] = {}
) -> tuple[Json, str]:
    """The file as it may be run, and which of its services is the agent's. Raises TaskError with file and key.

    `image`: the agent's, where its service names none and has no build; `limits`: of every service.
    """
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TaskError(f"cannot be read: {error}", str(file)) from error
    services = data.get("services") if isinstance(data, dict) else None
    if not isinstance(services, dict) or not all(isinstance(one, dict | None) for one in services.values()):
        raise TaskError("has no table of services", str(file))
    services = {str(name): _filled(one or {}, variables) for name, one in services.items()}
    main = next((name for name in MAIN if name in services), MAIN[0])
    services.setdefault(main, {})
    volumes: set[str] = set()
    for name, service in services.items():
        _check(service, f"{file}: services.{name}")
        for key in (*LEFT_OUT, *(OF_MAIN if name == main else ())):
            service.pop(key, None)
        service["volumes"] = [_volume(one, file, f"services.{name}.volumes", volumes) for one in service.get("volumes", [])]
        if name == main and image and "build" not in service:
            service["image"] = service.get("image") or image
        if "build" in service or (not service.get("image") and name == main):
            service["image"] = build(*_context(service.pop("build", "."), file, name))
        service |= limits
        if not service.get("image"):
            raise TaskError(f"services.{name} has neither an image nor a build", str(file))
        _networks(service, name, file)
    names = {str(one) for service in services.values() for one in service.get("networks", ["default"])}
    return {
        "services": services,
        # Internal, and the host without an address in it: the agent reaches its services, and nothing else.
        "networks": {name: {} if network else {"internal": True, "driver_opts": dict(NO_HOST)} for name in names},
        "volumes": {name: {} for name in sorted(volumes)},
    }, main


def _filled(value: Any, variables: Mapping[str, str]) -> Any:  # Any: YAML of a task
    if isinstance(value, dict):
        return {str(key): _filled(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, variables) for one in value]
    return dockerfile.expand(value.replace("$$", "\\$"), variables) if isinstance(value, str) else value


def _check(service: Json, where: str) -> None:
    for key, value in service.items():
        if key not in ALLOWED and key not in LEFT_OUT and value not in (None, False, [], {}):
            raise TaskError(f"{key} is not allowed", where, f"valid: {', '.join(ALLOWED)}")
    if service.get("network_mode") not in (None, "bridge", "none"):
        raise TaskError(f"network_mode {service['network_mode']!r} is not allowed", where, "valid: bridge, none")


def _networks(service: Json, name: str, file: Path) -> None:
    if service.get("network_mode") == "bridge":
        del service["network_mode"]  # the project's own network is one
    networks = service.get("networks")
    if isinstance(networks, dict | list | None):
        if networks is not None:
            service["networks"] = [str(one) for one in networks]
        return
    raise TaskError(f"services.{name}.networks is neither a list nor a table", str(file))


def _context(build: object, file: Path, name: str) -> tuple[Path, str]:
    table = {"context": build} if isinstance(build, str) else build
    if not isinstance(table, dict) or not set(table) <= {"context", "dockerfile"}:
        raise TaskError(f"services.{name}.build is more than a context and a Dockerfile", str(file))
    context = (file.parent / str(table.get("context", "."))).resolve()
    if not context.is_relative_to(file.parent.resolve()):
        raise TaskError(f"services.{name}.build is outside of the task", str(file))
    name_inside = str(table.get("dockerfile", "Dockerfile"))
    if not (context / name_inside).resolve().is_relative_to(context) or not (context / name_inside).is_file():
        raise TaskError(f"services.{name}.build: there is no {name_inside} in its context", str(file))
    return context, name_inside


def _volume(volume: object, file: Path, where: str, named: set[str]) -> str:
    """A named volume, or a directory of the task, read-only. Raises TaskError for one of the host."""
    if isinstance(volume, dict):
        volume = f"{volume.get('source', '')}:{volume.get('target', '')}"
    source, _, rest = str(volume).partition(":")
    target = rest.split(":")[0]
    if not target:
        return source  # an anonymous one
    if source.startswith((".", "/", "~")):
        path = (file.parent / source).resolve()
        if source.startswith("~") or not path.is_relative_to(file.parent.resolve()):
            raise TaskError(f"{where}: {source} is outside of the task", str(file), "a directory of the task, or a named volume")
        return f"{path}:{target}:ro"
    named.add(source)
    return f"{source}:{target}"


@dataclass(slots=True)
class Project:
    """One sandbox's services, from `up` to `down`."""

    name: str
    engine: str
    labels: Mapping[str, str]
    _folder: "tempfile.TemporaryDirectory[str] | None" = field(default=None, init=False)

    def up(self, content: Json, timeout_s: float) -> None:
        """Starts all services. Raises SandboxError with the program's words."""
        for service in content["services"].values():
            service["labels"] = dict(self.labels)
        for kind in ("networks", "volumes"):
            for one in content[kind].values():
                one["labels"] = dict(self.labels)
        self._folder = tempfile.TemporaryDirectory(prefix=f"termrsi-compose-{os.getpid()}-")
        # JSON is YAML; and what looks like a variable now is none any more.
        Path(self._folder.name, NAME).write_text(json.dumps(content).replace("$", "$$"))
        self._run("up", "--detach", timeout_s=timeout_s)

    def down(self) -> None:
        """A second time does nothing. Raises SandboxError."""
        if self._folder is not None:
            self._run("down", "--volumes", "--remove-orphans", "--timeout", "0", timeout_s=120.0)
            self._folder.cleanup()
            self._folder = None

    def _run(self, *arguments: str, timeout_s: float) -> None:
        assert self._folder is not None
        argv = [*program(), "--project-name", self.name, "--file", str(Path(self._folder.name, NAME)), *arguments]
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/")}
        env |= (
            {"DOCKER_HOST": self.engine or os.environ.get("DOCKER_HOST", "")} if self.engine or "DOCKER_HOST" in os.environ else {}
        )
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s, env=env, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"compose {arguments[0]} took longer than {timeout_s:.0f} s", self.name) from error
        if done.returncode != 0:
            raise SandboxError(f"compose {arguments[0]}: {(done.stderr or done.stdout)[-1000:].strip()}", self.name)
