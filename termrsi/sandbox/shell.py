"""The persistent shell: one bash, its commands and its reports. What the bash itself reads is in `script.py`.

The shell reads its script from a pipe. For each command the owner puts the text into a file (the mailbox) and writes fixed
lines to that pipe: one sources the mailbox with the report channel closed, one reports `$?`. So a command of any size or
shape (heredocs, unbalanced quotes, `break`) is one sourced file, and what it prints is only output.

Sourced, not run in a function, because `declare` must stay global; and because `return` in a signal's trap leaves a
sourced file, which is how a time-out ends a loop of the shell itself without ending the shell.

How the bytes travel is the backend's: a `Wire`. `fd_wire.py` hands descriptors over, `stream_wire.py` speaks through one stream.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from signal import SIGCHLD
from typing import Protocol

from termrsi import watched
from termrsi.errors import SandboxError, SandboxSpoiled
from termrsi.records import CommandResult
from termrsi.sandbox.script import EXIT_SIGNAL, UNWIND_SIGNAL, Places

START_S = 60.0  # a bash on a loaded machine answers within this, or never
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Listener(Protocol):
    """What a wire tells: the shell."""

    def on_output(self, data: bytes) -> None: ...

    def on_report(self, fields: bytes) -> None:
        """ "nonce status last-pid shell-pid cwd"."""
        ...

    def ended(self, status: int) -> None:
        """Bash has ended: in a command, or between two (the memory limit, a `kill` left in the background)."""
        ...


class Wire(Protocol):
    """The bytes between the owner and one bash after the other. One event loop."""

    @property
    def places(self) -> Places: ...

    async def open(self, listener: Listener, cwd: str) -> None:
        """Starts a bash and listens to it; what was open before is closed. Raises SandboxError."""
        ...

    def send(self, command: bytes | None, lines: str, *, status: int, nonce: str) -> None:
        """`lines` to the script; before them `command`, if any, into the mailbox. `$?` is `status`; a report of `nonce` comes."""
        ...

    def send_state(self, state: bytes | None) -> str:
        """The script's lines that restore `state`; None: what the bash before left, if it is there."""
        ...

    def attend(self, listening: bool) -> None:
        """Whether a command runs whose output is to be read as it comes."""
        ...

    def drain(self) -> None:
        """Tells what has been printed by now and was not told yet."""
        ...

    def keep(self) -> bytes | None:
        """The state that a bash which has just ended left, if it must be kept here; None: it lies where the next finds it."""
        ...

    async def state(self) -> bytes:
        """What `dump` wrote, b"" if it did not come to its end."""
        ...

    def close(self) -> None: ...


class Host(Protocol):
    """What the backend does for the shell's process."""

    async def kill_since(self, last_pid: int, tick: int, give_up_s: float, signal: int = 0) -> bool:
        """Ends every process but the shell begun after `last_pid`, or after that clock tick; whether all are gone.

        Before that the shell itself gets `signal`, if it is not 0.
        """
        ...

    async def kill_all(self) -> int:
        """Ends every process, the shell included; how many there were besides it."""
        ...

    async def replaced(self) -> list[str]:
        """See `ports.Sandbox`."""
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a living bash stands between two commands: what its owner must know to go on with it."""

    status: int
    last_pid: int
    pid: int
    cwd: str


class Collector:
    """Output in bounded memory: the first half of `limit_bytes`, the last half, and a count of what lay between."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = max(limit_bytes // 2, 1)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.omitted_bytes = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._half:
            dropped = len(self._tail.popleft())
            self._tail_bytes -= dropped
            self.omitted_bytes += dropped

    def text(self, mailbox: str = "") -> str:
        """What was kept, as text. `mailbox`: the file whose name bash puts before what it says of a command."""
        tail = b"".join(self._tail)
        excess = max(len(tail) - self._half, 0)
        self.omitted_bytes += excess
        self._tail, self._tail_bytes = deque([tail[excess:]]), len(tail) - excess
        head = bytes(self._head)
        # A trace (`set -x`) of our own line, and the name under which bash knows the mailbox.
        if mailbox:
            noise = f"+ builtin . {mailbox}\n".encode()
            head = head.removeprefix(noise).replace(f"{mailbox}: line ".encode(), b"bash: line ")
        note = f"\n[... {self.omitted_bytes} bytes omitted ...]\n".encode() if self.omitted_bytes else b""
        return (head + note + tail[excess:]).decode("utf-8", "replace")


class Shell:
    """Runs commands one at a time in a bash that its `wire` starts. Raises SandboxError once `lose` was called.

    A bash that cannot be started again where one ran before raises SandboxSpoiled: it was taken away from inside.
    """

    def __init__(self, host: Host, wire: Wire, cwd: str, output_limit_bytes: int) -> None:
        self._host = host
        self._wire = wire
        self._cwd = self._home = cwd
        self._limit = output_limit_bytes
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._last_pid = 0
        self._status = 0  # what `$?` is in the shell
        self._nonce = ""
        self._done: asyncio.Future[tuple[int, bool]] | None = None  # (status, whether the shell itself has ended)
        self._collector = Collector(output_limit_bytes)
        self._lost: SandboxError | None = None
        self._began = False  # a bash has answered before
        self._closed = False
        self._dead = False  # bash has ended, and none was started in its place
        self.pid = 0  # of bash, as the sandbox numbers its processes

    async def start(self, state: bytes | None = b"") -> None:
        """A bash that answers, with `state` (from `dump`) restored; None: what the one before left. Raises SandboxError."""
        try:
            await self._start(state)
        except SandboxError as error:  # nothing answers any more: later commands must not wait for it
            self.lose(f"no bash: {error.what}", spoiled=isinstance(error, SandboxSpoiled))
            raise
        self._began = True

    async def _start(self, state: bytes | None) -> None:
        self._done = self._loop.create_future()
        self._dead = False
        self._status = 0
        try:
            await self._wire.open(self, self._cwd)
            lines = self._wire.places.prologue() + self._wire.send_state(state)
        except OSError as error:  # descriptors or memory of this process
            raise SandboxError(f"bash could not be begun: {error}", "sandbox.shell") from error
        self._write(lines)
        try:
            async with asyncio.timeout(START_S):
                _, ended = await self._done
        except TimeoutError as error:
            raise await self._no_bash(f"bash did not answer within {START_S:.0f} s") from error
        if ended:
            raise await self._no_bash("bash ended at once")

    async def _no_bash(self, what: str) -> SandboxError:
        """The agent's doing, if one ran before and what bash is or needs was replaced since."""
        mine = False
        if self._began:
            with contextlib.suppress(SandboxError):
                mine = any(watched.relied_on(path) for path in await self._host.replaced())
        return (SandboxSpoiled if mine else SandboxError)(what, "sandbox.shell", "bash must be at /bin/bash")

    async def join(self, standing: Standing) -> None:
        """Goes on with a bash that its wire has been joined to: a restored one. Raises SandboxError if it does not answer."""
        self._status, self._last_pid, self.pid, self._cwd = standing.status, standing.last_pid, standing.pid, standing.cwd
        self._done = self._loop.create_future()
        self._write("")
        try:
            async with asyncio.timeout(START_S):
                await self._done
        except TimeoutError as error:
            self.lose("the restored bash does not answer")
            raise SandboxError(f"the restored bash did not answer within {START_S:.0f} s", "sandbox.shell") from error
        self._began = True

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[Standing]:
        """No command runs meanwhile, and bash lives. Raises SandboxError."""
        async with self._lock:
            await self._revive()
            yield Standing(self._status, self._last_pid, self.pid, self._cwd)

    async def run(self, command: str, timeout_s: float | None) -> CommandResult:
        """One command. Output of background jobs since the last one comes first."""
        async with self._lock:
            await self._revive()
            started = time.perf_counter()
            last_pid = self._last_pid  # of before: the report that follows an interrupted command brings a later one
            tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S) + 1
            collector = self._collector
            self._done = self._loop.create_future()
            self._write(self._wire.places.source(), command.encode("utf-8", "surrogateescape").replace(b"\0", b"") + b"\n")
            self._wire.attend(True)
            timer = self._loop.call_later(timeout_s, self._on_time) if timeout_s is not None else None
            try:
                status, ended = await self._done
                timed_out = status < 0
                if timed_out:
                    ended = await self._interrupt(last_pid, tick)
            except asyncio.CancelledError:
                # The command still runs: no later one can be told apart from it. The owner closes the sandbox.
                self.lose("a command was cancelled")
                raise
            finally:
                if timer is not None:
                    timer.cancel()
                self._wire.attend(False)
            self._wire.drain()
            self._collector = Collector(self._limit)
            if ended:
                await self.start(self._wire.keep())
            return CommandResult(
                exit_code=124 if timed_out else status,
                output=collector.text(self._wire.places.command),
                timed_out=timed_out,
                duration_s=time.perf_counter() - started,
                omitted_bytes=collector.omitted_bytes,
            )

    async def dump(self, timeout_s: float = 5.0) -> bytes:
        """The shell's state as a script: directory, umask, options, variables, functions, aliases. b"" if it cannot say."""
        async with self._lock:
            await self._revive()
            self._done = self._loop.create_future()
            self._write(self._wire.places.dump(), b"")
            timer = self._loop.call_later(timeout_s, self._on_time)
            try:
                await self._done
            finally:
                timer.cancel()
            return await self._wire.state()

    async def restart(self, state: bytes = b"") -> None:
        """A new bash in place of one whose processes have been ended: where the first began, but for what `state` says."""
        async with self._lock:
            self.check()
            self._cwd = self._home
            await self.start(state)

    def ended(self, status: int) -> None:
        """See `Listener`."""
        self._dead = True
        if self._done is not None and not self._done.done():
            self._done.set_result((status, True))

    def lose(self, why: str, *, spoiled: bool = False) -> None:
        """The sandbox is gone: the present command and all later ones raise SandboxError, or, if what ran in it did that,
        SandboxSpoiled."""
        if self._lost is None:
            self._lost = (SandboxSpoiled if spoiled else SandboxError)(f"lost: {why}", "sandbox.shell")
        if self._done is not None and not self._done.done():
            self._done.set_exception(self._again())
            self._done.exception()  # seen: the caller may have gone

    def check(self) -> None:
        """Raises what `lose` was told."""
        if self._lost is not None:
            raise self._again()

    def _again(self) -> SandboxError:
        """One of its own for each caller: an exception raised twice would gather both tracebacks."""
        assert self._lost is not None
        return type(self._lost)(*self._lost.args)

    def close(self) -> None:
        """Gives the descriptors back."""
        if self._closed:
            return
        self.lose("closed")
        self._closed = True
        self._wire.close()

    def on_output(self, data: bytes) -> None:
        """See `Listener`."""
        self._collector.add(data)

    def on_report(self, fields: bytes) -> None:
        """See `Listener`."""
        # A subshell inherits a copy of the report channel and may write to it, but not the nonce that we wait for.
        _, found, rest = fields.rpartition(self._nonce.encode() + b" ")
        numbers = rest.split(b" ", 3)
        if found and len(numbers) == 4 and all(number.isdigit() for number in numbers[:3]):
            self._status, self._last_pid, self.pid = (int(number) for number in numbers[:3])
            self._cwd = os.fsdecode(numbers[3]) or self._cwd
            if self._done is not None and not self._done.done():
                self._done.set_result((self._status, False))

    async def _interrupt(self, last_pid: int, tick: int) -> bool:
        """Ends the present command and all it began; whether the shell had to be ended with it.

        The signal comes first: its trap is pending when the foreground child dies, so no next command of the list starts.
        A loop over functions may need the harder signal (its trap leaves the shell, which dumps its state), and a shell
        that hears no trap at all is killed.
        """
        self._wire.drain()
        self._collector = Collector(1)  # what is said from here on ("Killed") is our doing, and is read only to be gone
        done = self._done = self._loop.create_future()
        for signal, wait_s in ((UNWIND_SIGNAL, 0.1), (EXIT_SIGNAL, 1.0), (EXIT_SIGNAL, 3.0)):  # a loaded machine answers late
            await self._host.kill_since(last_pid, tick, give_up_s=0.05, signal=signal)
            with contextlib.suppress(TimeoutError):
                _, ended = await asyncio.wait_for(asyncio.shield(done), wait_s)
                # Once more, for what the shell began between the two; nothing begins anything now. With it a SIGCHLD: a bash whose
                # `wait` is interrupted as a child dies forgets that child until the next one, and would tell of it only then.
                if not await self._host.kill_since(last_pid, tick, give_up_s=5.0, signal=0 if ended else SIGCHLD):
                    break
                for _ in range(2):
                    # Lets bash say now, unheard, which of its jobs were killed; else the next command would begin with it. Twice:
                    # it may do so after the line that it was reading meanwhile, which is the first report.
                    if not ended:
                        done = self._done = self._loop.create_future()
                        self._write("")
                        _, ended = await asyncio.wait_for(asyncio.shield(done), max(wait_s, 1.0))
                self._wire.drain()
                return ended
        await self._host.kill_all()
        return True

    async def _revive(self) -> None:
        self.check()
        if self._dead:
            await self.start(self._wire.keep())

    def _write(self, lines: str, command: bytes | None = None) -> None:
        """Script for the shell, and a report at its end."""
        self._nonce = os.urandom(8).hex()
        try:
            self._wire.send(command, lines + self._wire.places.report(self._nonce), status=self._status, nonce=self._nonce)
        except OSError as error:  # memory of this machine: whether bash has read a part of it cannot be known
            self.lose(f"cannot be written to: {error}")
            raise self._again() from error

    def _on_time(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result((-1, False))
