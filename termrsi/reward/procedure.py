"""What every verifier does around its tests: end what the agent left running, clean, put fresh tests, run them, fetch the logs.

Nothing here knows a format. A result that cannot be trusted is a VerifierError and never a reward of 0; what the agent did to its
own sandbox is a 0. The agent's processes are dead before the tests start, and what the tests ran of the agent's is dead before the
result is read; an agent that replaced a program which every test script runs through (`watched`) scores 0 without a test.
"""

import asyncio
import contextlib
import dataclasses
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from termrsi import watched
from termrsi.errors import SandboxError, SandboxSpoiled, TaskError, VerifierError
from termrsi.ports import Sandbox
from termrsi.records import KeptFiles, TaskSpec, Verdict
from termrsi.reward import apart, kept, kit, reports
from termrsi.reward.apart import ARTIFACTS, Apart, Artifact, Beside, Hook

LOGS = "/logs/verifier"
GRACE_S = 15.0  # over the verifier's own time-out, for the sandbox to notice
FINISHED = "verifier-finished"
LOG_BYTES = 16 << 10  # of the tests' output, kept with a verdict
ROOM, ROOM_BYTES = "/.room", 4 << 20  # what tests and their report may need

# `/logs` or `/tests` may be a link to anywhere, or a file. A mounted directory cannot be removed: emptying it is enough.
_CLEAN = (
    f"rm -rf {ROOM} {kit.PLACE}; "
    "for d in /logs /tests; do if [ -L $d ] || { [ -e $d ] && [ ! -d $d ]; }; then rm -f $d; fi; done; "
    f"rm -rf /tests {LOGS} 2> /dev/null; mkdir -p /tests {LOGS} && chmod 777 {LOGS} && "
    f'[ ! -L {LOGS} ] && [ -z "$(ls -A /tests)" ] && [ -z "$(ls -A {LOGS})" ]'
)


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of one task, as their format has them."""

    puts: tuple[tuple[Path, str], ...]  # what of the host's goes where in the sandbox, in this order
    script: str  # its path in the sandbox
    timeout_s: float
    read: Callable[[Path, float], Verdict]  # a copy of the log directory, seconds -> verdict. Raises VerifierError
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    workdir: str | None = None  # None: where the shell starts
    windows_lines: bool = False  # of the script: repaired
    kit: Path | None = None  # what stands for the network (`kit`): there for the tests alone
    hooks: tuple[Hook, ...] = ()  # run before all else, while what the agent left running still does
    apart: Apart | None = None  # the container that the tests run in, if it is not the agent's
    place: str | None = None  # the agent's working directory, where hooks run and what artifacts are relative to
    artifacts: tuple[Artifact, ...] = (Artifact(ARTIFACTS),)  # what a trial's directory has of the agent's machine


async def judge(sandbox: Sandbox, task: TaskSpec, suite: Suite, beside: Beside | None = None, *, keep_bytes: int = 0) -> Verdict:
    """Score the sandbox's present state. It is no restart point afterwards: snapshot first. Of what the tests brought only the
    next step of a task of several finds nothing. `keep_bytes`: of logs and of artifacts, to be handed on with the verdict.

    A sandbox that the agent left unusable scores 0, with the source "spoiled". Raises VerifierError if no valid result can be had,
    SandboxError from below, TaskError for a suite `apart` where nothing can be made `beside`.
    """
    started = time.monotonic()
    if suite.apart is not None and beside is None:
        raise TaskError("its verifier wants a container of its own, and none can be made here", task.path)
    try:
        return await _judge(sandbox, task, suite, _Course(started, beside, keep_bytes))
    except SandboxSpoiled:
        return Verdict(False, 0.0, source="spoiled", duration_s=time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Course:
    """One verification."""

    started: float
    beside: Beside | None
    keep_bytes: int


async def _judge(sandbox: Sandbox, task: TaskSpec, suite: Suite, course: _Course) -> Verdict:
    lost: SandboxError | None = None
    try:
        await apart.collect(sandbox, suite.hooks, suite.place)
        await sandbox.kill_processes()
    except SandboxError as error:  # also by an agent whose `bash` is none
        lost = error
    try:
        replaced = tuple(await sandbox.replaced())
    except SandboxError as error:
        raise (lost or error) from error
    foreign = [path for path in replaced if path not in task.touches and watched.EVERYTHING not in task.touches]
    if any(watched.relied_on(path) for path in foreign):
        # Whatever the tests said now, a program of the agent would have said it.
        return Verdict(False, 0.0, source="replaced", duration_s=time.monotonic() - course.started, replaced=replaced)
    if lost is not None:
        raise lost
    if suite.apart is not None and course.beside is not None:
        verdict = await _tested_apart(sandbox, task, suite, suite.apart, course, course.beside)
    else:
        artifacts = await _artifacts(sandbox, suite, course) if course.keep_bytes else None
        await _look_for_room(sandbox)
        await _clean(sandbox, task)
        if aside := [path for path in foreign if path in watched.SET_ASIDE]:
            await sandbox.run(f"rm -rf -- {shlex.join(aside)}", GRACE_S)
        verdict = await _tested(sandbox, task, suite, course, artifacts)
    if task.step:  # there is an agent after this one
        await _clean(sandbox, task)
    return dataclasses.replace(verdict, replaced=replaced)


@contextlib.asynccontextmanager
async def _folder() -> AsyncGenerator[Path, None]:
    """A directory of this machine, for copies."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=f"termrsi-artifacts-{os.getpid()}-"))
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _artifacts(sandbox: Sandbox, suite: Suite, course: _Course) -> KeptFiles:
    async with _folder() as folder:
        found = await apart.fetch(sandbox, suite.place, suite.artifacts, folder)
        return await asyncio.to_thread(kept.artifacts, found, course.keep_bytes)


async def _tested_apart(sandbox: Sandbox, task: TaskSpec, suite: Suite, where: Apart, course: _Course, beside: Beside) -> Verdict:
    async with _folder() as folder:
        found = await apart.fetch(sandbox, suite.place, where.artifacts, folder)
        files = await asyncio.to_thread(kept.artifacts, found, course.keep_bytes) if course.keep_bytes else None
        try:
            async with beside(sandbox, dataclasses.replace(task, environment=where.environment)) as other:
                await apart.lay(other, found)
                await _clean(other, task, bundled=where.bundled)
                return await _tested(other, task, suite, course, files)
        except SandboxSpoiled as error:  # by the tests, or by what they read: the agent was never there
            raise VerifierError(f"the verifier's own container: {error}", task.id) from error


async def _tested(sandbox: Sandbox, task: TaskSpec, suite: Suite, course: _Course, files: KeptFiles | None) -> Verdict:
    """Puts the tests, runs them, reads what they left. `files`: what was kept of the agent's machine."""
    for source, target in (*suite.puts, *(((suite.kit, kit.PLACE),) if suite.kit else ())):
        await sandbox.put(source, target)
    await _run(sandbox, task, suite)
    await sandbox.kill_processes()  # what the tests ran of the agent's may still write
    with tempfile.TemporaryDirectory(prefix=f"termrsi-verify-{os.getpid()}-") as folder:
        await sandbox.get(LOGS, folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_symlink():  # it would be followed on this machine, not inside the sandbox
                path.unlink()
        try:
            verdict = await asyncio.to_thread(suite.read, Path(folder), time.monotonic() - course.started)
            if files is not None:
                files = await asyncio.to_thread(kept.with_logs, files, Path(folder), course.keep_bytes)
        except (OSError, ValueError, OverflowError, RecursionError) as error:  # of bytes that nobody meant to be read
            raise VerifierError(f"its result cannot be read: {type(error).__name__}: {error}", task.id) from error
        log = Path(folder, reports.STDOUT)
        said = reports.end_of(log)[-LOG_BYTES:] if log.is_file() else ""
    return dataclasses.replace(verdict, log=said, kept=files)


async def _clean(sandbox: Sandbox, task: TaskSpec, *, bundled: bool = False) -> None:
    """`bundled`: the tests are the image's, and stay."""
    command = f"rm -rf {LOGS} && mkdir -p {LOGS} && chmod 777 {LOGS}" if bundled else _CLEAN
    if (await sandbox.run(command, GRACE_S)).exit_code != 0:
        raise VerifierError("the log and test directories could not be emptied", task.id)


async def _look_for_room(sandbox: Sandbox) -> None:
    """Raises SandboxSpoiled if the agent filled its disk, SandboxError if a machine's is full: the backend knows which."""
    with tempfile.NamedTemporaryFile(prefix=f"termrsi-room-{os.getpid()}-") as room:
        room.write(os.urandom(ROOM_BYTES))  # not zeros, which take no room
        room.flush()
        await sandbox.put(room.name, ROOM)


async def _run(sandbox: Sandbox, task: TaskSpec, suite: Suite) -> None:
    script = shlex.quote(suite.script)
    fix = f"sed -i 's/\\r$//' {script}; " if suite.windows_lines else ""
    # The script is executed, not sourced, so that its own shebang counts; its exit code does not.
    offline = f"export PATH={kit.PLACE}/bin:$PATH PYTHONPATH={kit.PLACE}/site; " if suite.kit else ""
    inner = f"{offline}{script} > {LOGS}/{reports.STDOUT} 2>&1; echo {FINISHED}"
    inner = apart.as_user(suite.user, inner)
    settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in suite.env.items())
    place = suite.workdir
    command = (
        f"{fix}chmod +x {script}; {f'cd {shlex.quote(place)} 2> /dev/null; ' if place else ''}"
        f"env -u BASH_ENV -u ENV -u LD_PRELOAD {settings} timeout -k 5 {suite.timeout_s:g} bash -c {shlex.quote(inner)}"
    )
    result = await sandbox.run(command, suite.timeout_s + GRACE_S)
    if FINISHED not in result.output:
        what = f"no end within {suite.timeout_s:g} s" if result.timed_out or result.exit_code in (124, 137) else "it broke off"
        raise VerifierError(f"{what}: {result.output[-200:]!r}", task.id)
