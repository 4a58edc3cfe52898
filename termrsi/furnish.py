"""What a task's author wants to be there, and to answer, before an agent begins: as Harbor 0.26 does it after a start."""

import asyncio
import os
import shlex
import time
from pathlib import Path

from termrsi.errors import SandboxError
from termrsi.ports import Sandbox
from termrsi.records import EnvironmentSpec, Healthcheck

IMAGE_FILES = ("Dockerfile", "docker-compose.yaml")


def workdir_of(environment: EnvironmentSpec) -> str | None:
    """Where a shell starts, as far as files tell: the task's own word, else the WORKDIR that its Dockerfile ends with."""
    if environment.workdir or not environment.context:  # an image that is made elsewhere knows its own
        return environment.workdir
    dockerfile = Path(environment.context) / "Dockerfile"
    if not dockerfile.is_file():
        return None
    place: str | None = None
    for line in dockerfile.read_text(encoding="utf-8", errors="replace").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            place = None
        elif word.upper() == "WORKDIR" and "$" not in rest:
            place = os.path.normpath(os.path.join(place or "/", rest.strip().strip("\"'")))  # noqa: PTH118 - a path inside
    return place


async def furnish(sandbox: Sandbox, environment: EnvironmentSpec) -> None:
    """Files of an environment that has a ready image go into the working directory; then its healthcheck must pass.

    Raises SandboxError, also if it does not: another machine may be ready in time.
    """
    folder = Path(environment.context)
    if environment.context and environment.docker_image and not any((folder / name).exists() for name in IMAGE_FILES):
        place = environment.workdir or (await sandbox.run("pwd")).output.strip()
        await sandbox.put(folder, place)
    if environment.healthcheck is not None and (why := await unhealthy(sandbox, environment.healthcheck)):
        raise SandboxError(why, environment.healthcheck.command)


async def unhealthy(sandbox: Sandbox, check: Healthcheck) -> str:
    """Why, once it has failed too often; "" when it passes. Raises SandboxError."""
    began, failures = time.monotonic(), 0
    while True:
        result = await sandbox.run(f"bash -c {shlex.quote(check.command)} < /dev/null", check.timeout_s)
        if result.exit_code == 0:
            return ""
        starting = time.monotonic() - began < check.start_period_s
        failures += 0 if starting else 1
        if failures >= max(check.retries, 1):
            return f"its healthcheck fails, with exit code {result.exit_code}: {result.output[-200:]!r}"
        # The pause that the task asks for: nothing tells when a service of its will answer.
        await asyncio.sleep(check.start_interval_s if starting else check.interval_s)
