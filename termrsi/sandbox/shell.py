"""The persistent shell: one bash, its commands and its reports on channels that a command cannot reach.

The shell reads its script from a pipe. For each command the owner puts the text into a memory file (the mailbox) and
writes two fixed lines to that pipe: one sources the mailbox with the report channel closed, one reports `$?`. So a
command of any size or shape (heredocs, unbalanced quotes, `break`) is one sourced file, and what it prints is only output.

Sourced, not run in a function, because `declare` must stay global; and because `return` in a signal's trap leaves a
sourced file, which is how a time-out ends a loop of the shell itself without ending the shell.
"""

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from termrsi.errors import SandboxError
from termrsi.records import CommandResult

SCRIPT_FD, MAILBOX_FD, REPORT_FD, LIBRARY_FD = 200, 201, 202, 203
READ_BYTES = 1 << 18
PIPE_BYTES = 1 << 18
UNWIND_SIGNAL, EXIT_SIGNAL = 57, 58  # SIGRTMAX-7 and -6: no program uses them
START_S = 60.0  # a bash on a loaded machine answers within this, or never
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# The names the shell sets itself, or that describe this one process: not part of the state.
PRIVATE_NAMES = (
    "BASH|BASH_*|BASHOPTS|BASHPID|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OPTERR|PIPESTATUS|PPID|RANDOM"
    "|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_|COMP_WORDBREAKS|__trsi_*"
)

# `report`: "nonce status last-pid cwd". `dump`: the state as a script; options last, for errexit would end the reading of it.
LIBRARY = rf"""case "$1" in
report)
  {{ \builtin read -r __trsi_last </proc/sys/kernel/ns_last_pid || __trsi_last=0; }} 2>&-
  \builtin printf '%s %s %s %s\0' "$3" "$2" "$__trsi_last" "$PWD" >&{REPORT_FD}
  \builtin unset -v __trsi_last
  \builtin return "$2" ;;
dump)
  {{
    \builtin printf '#state\nbuiltin cd -- %q\n' "$PWD"
    \builtin umask -p
    \builtin shopt -p
    \builtin mapfile -t __trsi_names < <(\builtin compgen -v)
    for __trsi_name in "${{__trsi_names[@]}}"; do
      case "$__trsi_name" in
      {PRIVATE_NAMES}) ;;
      *) \builtin declare -p -- "$__trsi_name" || : ;;
      esac
    done
    \builtin declare -f
    \builtin declare -Fx
    \builtin alias -p
    \builtin set +o
    \builtin printf '#end\n'
  }} >|/proc/self/fd/{MAILBOX_FD} 2>&-
  \builtin unset -v __trsi_names __trsi_name ;;
esac
"""

PROLOGUE = (
    f"exec {SCRIPT_FD}<&-; shopt -s expand_aliases\n"
    f"trap '\\builtin . /proc/self/fd/{LIBRARY_FD} dump' EXIT\n"
    f"trap '\\builtin return 124' {UNWIND_SIGNAL}; trap '\\builtin exit 124' {EXIT_SIGNAL}\n"
)
SOURCE = f"\\builtin . /proc/self/fd/{MAILBOX_FD} {REPORT_FD}>&-\n"
RESTORE = f"{{ \\builtin . /proc/self/fd/{MAILBOX_FD}; }} >/dev/null 2>&1\n"
DUMP = f"{{ \\builtin . /proc/self/fd/{LIBRARY_FD} dump; }} 2>&-\n"
REPORT = f'{{{{ \\builtin . /proc/self/fd/{LIBRARY_FD} report "$?" {{nonce}}; }}}} 2>&-\n'


class Host(Protocol):
    """Where the shell's process lives: what the backend does for it."""

    async def start_shell(self, argv: list[str], env: Mapping[str, str], cwd: str, numbers: list[int], fds: list[int]) -> None:
        """Starts bash with `fds[i]` as its descriptor `numbers[i]`; its end is told by `Shell.ended`."""
        ...

    async def signal_shell(self, signal: int) -> None: ...

    async def kill_since(self, last_pid: int, tick: int, give_up_s: float) -> bool:
        """Ends every process but the shell begun after `last_pid`, or after that clock tick; whether all are gone."""
        ...

    async def kill_all(self) -> int:
        """Ends every process, the shell included; how many there were besides it."""
        ...


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

    def text(self) -> str:
        tail = b"".join(self._tail)
        excess = max(len(tail) - self._half, 0)
        self.omitted_bytes += excess
        self._tail, self._tail_bytes = deque([tail[excess:]]), len(tail) - excess
        head = bytes(self._head)
        # A trace (`set -x`) of our own line, and the name under which bash knows the mailbox.
        noise = f"+ builtin . /proc/self/fd/{MAILBOX_FD}\n".encode()
        head = head.removeprefix(noise).replace(f"/proc/self/fd/{MAILBOX_FD}: line ".encode(), b"bash: line ")
        note = f"\n[... {self.omitted_bytes} bytes omitted ...]\n".encode() if self.omitted_bytes else b""
        return (head + note + tail[excess:]).decode("utf-8", "replace")


class Shell:
    """Runs commands one at a time in a bash that its `host` starts. Raises SandboxError once `lose` was called."""

    def __init__(self, host: Host, env: Mapping[str, str], cwd: str, output_limit_bytes: int) -> None:
        self._host = host
        self._env = dict(env)
        self._cwd = cwd
        self._limit = output_limit_bytes
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._mailbox = os.memfd_create("command", os.MFD_CLOEXEC)
        self._library = os.memfd_create("library", os.MFD_CLOEXEC)
        os.write(self._library, LIBRARY.encode())
        self._script = self._report = self._output = -1
        self._frame = bytearray()
        self._last_pid = 0
        self._nonce = ""
        self._done: asyncio.Future[tuple[int, bool]] | None = None  # (status, whether the shell itself has ended)
        self._collector = Collector(output_limit_bytes)
        self._lost = ""
        self._closed = False
        self._dead = False  # bash has ended, and none was started in its place

    async def start(self, state: bytes = b"") -> None:
        """A bash that answers, with `state` (from `dump`) restored. Raises SandboxError."""
        self._close_pipes()
        script_r, self._script = os.pipe2(os.O_CLOEXEC)
        self._report, report_w = os.pipe2(os.O_CLOEXEC)
        self._output, output_w = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a user's total is limited; the usual 64 KiB do as well
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        for fd in (self._report, self._output, self._script):
            os.set_blocking(fd, False)
        self._frame.clear()
        self._loop.add_reader(self._report, self._on_report)
        numbers = [1, 2, SCRIPT_FD, MAILBOX_FD, REPORT_FD, LIBRARY_FD]
        fds = [output_w, output_w, script_r, self._mailbox, report_w, self._library]
        argv = ["bash", "--norc", "--noprofile", f"/proc/self/fd/{SCRIPT_FD}"]
        self._done = self._loop.create_future()
        self._dead = False
        try:
            await self._host.start_shell(argv, self._env, self._cwd, numbers, fds)
        finally:
            for fd in (script_r, report_w, output_w):
                os.close(fd)
        self._post(state)
        self._write(PROLOGUE + (RESTORE if state else ""))
        try:
            async with asyncio.timeout(START_S):
                _, ended = await self._done
        except TimeoutError as error:
            raise SandboxError(f"bash did not answer within {START_S:.0f} s", "sandbox.shell") from error
        if ended:
            raise SandboxError("bash ended at once", "sandbox.shell", "bash must be at /bin/bash")

    async def run(self, command: str, timeout_s: float | None) -> CommandResult:
        """One command. Output of background jobs since the last one comes first."""
        async with self._lock:
            await self._revive()
            started = time.perf_counter()
            last_pid = self._last_pid  # of before: the report that follows an interrupted command brings a later one
            tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S) + 1
            collector = self._collector = Collector(self._limit)
            self._done = self._loop.create_future()
            self._post(command.encode("utf-8", "surrogateescape").replace(b"\0", b"") + b"\n")
            self._write(SOURCE)
            self._loop.add_reader(self._output, self._on_output)
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
                if self._output >= 0:  # not closed meanwhile
                    self._loop.remove_reader(self._output)
            self._drain()
            if ended:
                await self.start(self._state_left())
            return CommandResult(
                exit_code=124 if timed_out else status,
                output=collector.text(),
                timed_out=timed_out,
                duration_s=time.perf_counter() - started,
                omitted_bytes=collector.omitted_bytes,
            )

    async def dump(self, timeout_s: float = 5.0) -> bytes:
        """The shell's state as a script: directory, umask, options, variables, functions, aliases. b"" if it cannot say."""
        async with self._lock:
            await self._revive()
            self._done = self._loop.create_future()
            self._post(b"")
            self._write(DUMP)
            timer = self._loop.call_later(timeout_s, self._on_time)
            try:
                await self._done
            finally:
                timer.cancel()
            return self._state_left()

    async def restart(self, state: bytes = b"") -> None:
        """A new bash in place of one whose processes have been ended."""
        async with self._lock:
            self._check()
            await self.start(state)

    def ended(self, status: int) -> None:
        """The host tells that bash has ended: in a command, or between two (the memory limit, a `kill` left in the background)."""
        self._dead = True
        if self._done is not None and not self._done.done():
            self._done.set_result((status, True))

    def lose(self, why: str) -> None:
        """The sandbox is gone: the present command and all later ones raise SandboxError."""
        self._lost = self._lost or why
        if self._done is not None and not self._done.done():
            self._done.set_exception(SandboxError(f"lost: {why}", "sandbox.shell"))

    def close(self) -> None:
        """Gives the descriptors back."""
        if self._closed:
            return
        self.lose("closed")
        self._closed = True
        self._close_pipes()
        os.close(self._mailbox)
        os.close(self._library)

    async def _interrupt(self, last_pid: int, tick: int) -> bool:
        """Ends the present command and all it began; whether the shell had to be ended with it.

        The signal comes first: its trap is pending when the foreground child dies, so no next command of the list starts.
        A loop over functions may need the harder signal (its trap leaves the shell, which dumps its state), and a shell
        that hears no trap at all is killed.
        """
        self._drain()
        self._collector = Collector(1)  # what is said from here on ("Killed") is our doing, and is read only to be gone
        done = self._done = self._loop.create_future()
        for signal, wait_s in ((UNWIND_SIGNAL, 0.05), (EXIT_SIGNAL, 0.2), (EXIT_SIGNAL, 0.2)):
            await self._host.signal_shell(signal)
            await self._host.kill_since(last_pid, tick, give_up_s=0.05)
            with contextlib.suppress(TimeoutError):
                _, ended = await asyncio.wait_for(asyncio.shield(done), wait_s)
                # Once more, for what the shell began between the two; nothing begins anything now.
                if not await self._host.kill_since(last_pid, tick, give_up_s=5.0):
                    break
                if not ended:
                    # Lets bash say now, unheard, which of its jobs were killed; else the next command would begin with it.
                    done = self._done = self._loop.create_future()
                    self._write("")
                    _, ended = await asyncio.wait_for(asyncio.shield(done), wait_s)
                self._drain()
                return ended
        await self._host.kill_all()
        return True

    def _state_left(self) -> bytes:
        """What the shell wrote into the mailbox: its state, or (a killed or replaced shell) only the last directory known."""
        size = os.fstat(self._mailbox).st_size
        text = os.pread(self._mailbox, size, 0)
        if text.startswith(b"#state\n") and text.endswith(b"#end\n"):
            return text
        return b""

    async def _revive(self) -> None:
        self._check()
        if self._dead:
            await self.start(self._state_left())

    def _check(self) -> None:
        if self._lost:
            raise SandboxError(f"lost: {self._lost}", "sandbox.shell")

    def _post(self, text: bytes) -> None:
        os.ftruncate(self._mailbox, 0)
        view = memoryview(text)
        offset = 0
        while offset < len(view):
            offset += os.pwrite(self._mailbox, view[offset:], offset)

    def _write(self, lines: str) -> None:
        """Script for the shell, and a report at its end."""
        # A nonce: a subshell inherits a copy of the report channel and may write to it, but not what we wait for.
        self._nonce = os.urandom(8).hex()
        # A few hundred bytes into an empty pipe: never blocks. A dead reader is told by `ended`.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._script, (lines + REPORT.format(nonce=self._nonce)).encode())

    def _on_time(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result((-1, False))

    def _on_output(self) -> None:
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._collector.add(data)
        else:  # every writer is gone: the shell's end or its report follows
            self._loop.remove_reader(self._output)

    def _drain(self) -> None:
        """What is in the pipe at this moment, and no more: a background job may write for ever."""
        left = struct.unpack("i", fcntl.ioctl(self._output, termios.FIONREAD, b"\0" * 4))[0]
        while left > 0:
            try:
                data = os.read(self._output, min(left, READ_BYTES))
            except BlockingIOError:
                return
            if not data:
                return
            self._collector.add(data)
            left -= len(data)

    def _on_report(self) -> None:
        try:
            data = os.read(self._report, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._report)
            return
        *frames, rest = (bytes(self._frame) + data).split(b"\0")
        self._frame[:] = rest[-8192:]
        for frame in frames:
            fields = frame.rpartition(self._nonce.encode() + b" ")
            numbers = fields[2].split(b" ", 2)
            if fields[1] and len(numbers) == 3 and numbers[0].isdigit() and numbers[1].isdigit():
                self._last_pid = int(numbers[1])
                self._cwd = os.fsdecode(numbers[2]) or self._cwd
                if self._done is not None and not self._done.done():
                    self._done.set_result((int(numbers[0]), False))

    def _close_pipes(self) -> None:
        for fd in (self._report, self._output):
            if fd >= 0:
                self._loop.remove_reader(fd)
        for fd in (self._script, self._report, self._output):
            if fd >= 0:
                os.close(fd)
        self._script = self._report = self._output = -1
