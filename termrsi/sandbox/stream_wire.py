"""A shell's wire through one attached stream: script in, output and reports out, the text of commands in a file inside.

For backends that cannot be handed descriptors. Commands write to the same pipe as the reports, so their order is kept; a report
stands between two zero bytes and carries a nonce that the command cannot know beforehand. The files lie in /dev/shm of the
sandbox: an agent that deletes them harms its own shell, which is then ended at the next time-out and started again.
"""

import asyncio
import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import Protocol

from termrsi.sandbox.script import REPORT_FD, SCRIPT_FD, Places, quoted
from termrsi.sandbox.shell import Listener

READ_BYTES = 1 << 18
AHEAD_BYTES = 1 << 18  # of output that no command asked for; then the jobs that print it wait
STATE_S = 10.0
SCRIPT = "script"  # in a shared directory: what the next line of the stream sources
PLACES = Places("/dev/shm/.termrsi-command", "/dev/shm/.termrsi-state", "/dev/shm/.termrsi-library")
# bash with its script on a descriptor of its own, an empty standard input, and one pipe for all it prints.
LAUNCH = f'exec {SCRIPT_FD}<&0 {REPORT_FD}>&1 </dev/null 2>&1; exec "$BASH" --norc --noprofile /dev/fd/{SCRIPT_FD}'
ARGV = ["/bin/bash", "--norc", "--noprofile", "-c", LAUNCH]


class Stream(Protocol):
    """Both directions of one started program's standard input and output."""

    def fileno(self) -> int:
        """Readable when there is output, or at its end."""
        ...

    def read(self) -> bytes | None:
        """Output that is there; b"" at the end, None if there is none now. Never blocks."""
        ...

    async def write(self, data: bytes) -> None:
        """Raises OSError if the program is gone."""
        ...

    async def status(self) -> int:
        """The exit code, once output has ended."""
        ...

    def close(self) -> None: ...


class Opener(Protocol):
    """Starts `ARGV` in a directory of the sandbox. Raises SandboxError."""

    async def __call__(self, argv: list[str], cwd: str) -> Stream: ...


class StreamWire:
    """Implements `shell.Wire`."""

    def __init__(self, opener: Opener, places: Places = PLACES, shared: Path | None = None) -> None:
        """`shared`: the owner's own directory that the sandbox sees, and cannot write to, as that of command and library.

        Then texts go there, and the stream carries one short line each: bash reads a stream byte by byte.
        """
        self._opener = opener
        self._places = places
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._listener: Listener | None = None
        self._reading = False
        self._ahead_bytes = 0
        self._mark = b""  # how the awaited report begins; b"" if none is
        self._held = b""  # output that may be the beginning of it, or is
        self._asked: asyncio.Future[bytes] | None = None  # by `state`
        self._unsent = bytearray()
        self._writer: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def places(self) -> Places:
        return self._places

    async def open(self, listener: Listener, cwd: str) -> None:
        """See `shell.Wire`."""
        self.close()
        self._listener = listener
        self._mark = self._held = b""
        self._unsent.clear()
        self._ahead_bytes = 0
        self._stream = await self._opener(ARGV, cwd)
        self._read(True)
        if not self._put_library():
            self._write(f"builtin printf %s {quoted(self._places.library_text().encode())} >|{self._places.library}\n")

    def join(self, listener: Listener, stream: Stream) -> None:
        """Goes on with a bash that runs already, and waits."""
        self._listener = listener
        self._stream = stream
        self._put_library()

    def send(self, command: bytes | None, lines: str, *, status: int, nonce: str) -> None:
        """See `shell.Wire`."""
        text = ""
        if command is not None:
            if self._shared is not None:
                (self._shared / PurePosixPath(self._places.command).name).write_bytes(command)
            else:
                text = f"\\builtin printf %s {quoted(command)} >|{self._places.command}\n"
            # A command may have closed what it prints to: the next one is heard again. (`builtin exec` would not last.)
            text += "".join(f"\\builtin [ -e /dev/fd/{n} ] || \\exec {n}>&{REPORT_FD}\n" for n in (1, 2))
            text += f"\\builtin . {self._places.library} status {status}\n"
        self._expect(nonce)
        if self._shared is not None:
            (self._shared / SCRIPT).write_text(text + lines)
            self._write(f"\\builtin . {PurePosixPath(self._places.command).parent / SCRIPT}\n")
        else:
            self._write(text + lines)

    def send_state(self, state: bytes | None) -> str:
        """See `shell.Wire`. A dump that did not come to its end is not read; none is read twice."""
        given = "" if state is None else f"\\builtin printf %s {quoted(state)} >|{self._places.state}\n"
        return (
            f"{given}{{ \\builtin mapfile -t __trsi_lines <{self._places.state}; }} 2>&-\n"
            f"if \\builtin [ \"${{__trsi_lines[*]: -1}}\" = '#end' ]; then\n{self._places.restore()}fi\n"
            f"\\builtin unset -v __trsi_lines; >|{self._places.state}\n"
        )

    def attend(self, listening: bool) -> None:
        """See `shell.Wire`: output is read while a report is awaited; otherwise a little ahead, enough to see bash end."""

    def drain(self) -> None:
        """See `shell.Wire`: output comes before the report that follows it."""

    def keep(self) -> bytes | None:
        """See `shell.Wire`."""
        return None

    async def state(self) -> bytes:
        """See `shell.Wire`."""
        self._asked = self._loop.create_future()
        nonce = os.urandom(8).hex()
        self._expect(nonce)
        told = f"{{ \\builtin printf '\\0%s %s\\0' {nonce} \"$(<{self._places.state})\" >&{REPORT_FD}; }} 2>&-"
        self._write(f"{told}; >|{self._places.state}\n")
        try:
            async with asyncio.timeout(STATE_S):
                text = await self._asked
        except TimeoutError:
            return b""
        finally:
            self._asked = None
        text = text.partition(b" ")[2] + b"\n"
        return text if text.startswith(b"#state\n") and text.endswith(b"#end\n") else b""

    def close(self) -> None:
        """As often as one likes."""
        for task in (self._writer, self._ending):
            if task is not None:
                task.cancel()
        self._writer = self._ending = None
        if self._stream is not None:
            self._read(False)
            self._stream.close()
            self._stream = None

    def _put_library(self) -> bool:
        """Whether it could be put where the sandbox sees it."""
        if self._shared is not None:
            (self._shared / PurePosixPath(self._places.library).name).write_text(self._places.library_text())
        return self._shared is not None

    def _expect(self, nonce: str) -> None:
        self._mark = f"\0{nonce} ".encode()
        self._ahead_bytes = 0
        self._read(True)

    def _read(self, on: bool) -> None:
        if self._stream is None or on == self._reading or (on and self._ending is not None):
            return
        self._reading = on
        if on:
            self._loop.add_reader(self._stream.fileno(), self._on_readable)
        else:
            self._loop.remove_reader(self._stream.fileno())

    def _on_readable(self) -> None:
        assert self._stream is not None
        assert self._listener is not None
        for _ in range(2):  # the end that stood behind the last output makes nothing readable once more
            data = self._stream.read()
            if data:
                self._feed(data)
            elif data == b"":
                self._read(False)
                if self._held:
                    self._listener.on_output(self._held)
                    self._held = b""
                self._ending = self._loop.create_task(self._end(self._stream, self._listener))
                return

    async def _end(self, stream: Stream, listener: Listener) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(b"")
        listener.ended(await stream.status())

    def _feed(self, data: bytes) -> None:
        """Output to the listener, and the awaited report out of it."""
        assert self._listener is not None
        data = self._held + data
        self._held = b""
        while self._mark:
            at = data.find(self._mark)
            if at < 0:
                keep = next((n for n in range(min(len(self._mark) - 1, len(data)), 0, -1) if data.endswith(self._mark[:n])), 0)
                self._held = data[len(data) - keep :]
                data = data[: len(data) - keep]
                break
            end = data.find(b"\0", at + 1)
            if end < 0:
                self._held, data = data[at:], data[:at]
                break
            if at:
                self._listener.on_output(data[:at])
            frame, data = data[at + 1 : end], data[end + 1 :]
            self._mark = b""
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(frame)
            else:
                self._listener.on_report(frame)
        if data:
            self._listener.on_output(data)
            if not self._mark:
                self._ahead_bytes += len(data)
                if self._ahead_bytes > AHEAD_BYTES:
                    self._read(False)

    def _write(self, text: str) -> None:
        self._unsent += text.encode()
        if self._writer is None or self._writer.done():
            self._writer = self._loop.create_task(self._flush())

    async def _flush(self) -> None:
        # A program that is gone is told by the end of its output.
        with contextlib.suppress(OSError):
            while self._unsent and self._stream is not None:
                data = bytes(self._unsent)
                self._unsent.clear()
                await self._stream.write(data)
