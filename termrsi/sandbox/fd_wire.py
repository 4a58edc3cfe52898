"""A shell's wire where the owner can hand it descriptors: memory files for the text, pipes for script, reports and output.

A command cannot reach them: the mailbox is a file without a name, the report channel is closed while a command runs.
"""

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Awaitable, Callable

from termrsi.sandbox.script import LIBRARY_FD, MAILBOX_FD, REPORT_FD, SCRIPT_FD, Places
from termrsi.sandbox.shell import Listener

READ_BYTES = 1 << 18
PIPE_BYTES = 1 << 18
MAILBOX = f"/proc/self/fd/{MAILBOX_FD}"
# (argv, directory, numbers, descriptors): starts bash with `descriptors[i]` as its descriptor `numbers[i]`.
StartBash = Callable[[list[str], str, list[int], list[int]], Awaitable[None]]


class FdWire:
    """Implements `shell.Wire`. The end of bash is told by whoever started it."""

    def __init__(self, start_bash: StartBash) -> None:
        self._start_bash = start_bash
        self._loop = asyncio.get_running_loop()
        self._places = Places(MAILBOX, MAILBOX, f"/proc/self/fd/{LIBRARY_FD}")
        self._mailbox = os.memfd_create("command", os.MFD_CLOEXEC)
        self._library = os.memfd_create("library", os.MFD_CLOEXEC)
        os.write(self._library, self._places.library_text().encode())
        self._script = self._report = self._output = -1
        self._frame = bytearray()
        self._listener: Listener | None = None

    @property
    def places(self) -> Places:
        return self._places

    async def open(self, listener: Listener, cwd: str) -> None:
        """See `shell.Wire`."""
        self._close_pipes()
        self._listener = listener
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
        try:
            await self._start_bash(argv, cwd, numbers, fds)
        finally:
            for fd in (script_r, report_w, output_w):
                os.close(fd)

    def send(self, command: bytes | None, lines: str, *, status: int, nonce: str) -> None:
        """See `shell.Wire`. `$?` is as it was: nothing runs in between. Reports have a channel of their own."""
        if command is not None:
            self._post(command)
        # A few hundred bytes into an empty pipe: never blocks. A dead reader is told by `Listener.ended`.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._script, lines.encode())

    def send_state(self, state: bytes | None) -> str:
        """See `shell.Wire`."""
        self._post(state or b"")
        return self._places.restore() if state else ""

    def attend(self, listening: bool) -> None:
        """See `shell.Wire`. Between commands output stays in the pipe: a job that prints for ever waits there."""
        if self._output < 0:  # closed meanwhile
            return
        if listening:
            self._loop.add_reader(self._output, self._on_output)
        else:
            self._loop.remove_reader(self._output)

    def drain(self) -> None:
        """What is in the pipe at this moment, and no more: a background job may write for ever."""
        assert self._listener is not None
        left = struct.unpack("i", fcntl.ioctl(self._output, termios.FIONREAD, b"\0" * 4))[0]
        while left > 0:
            try:
                data = os.read(self._output, min(left, READ_BYTES))
            except BlockingIOError:
                return
            if not data:
                return
            self._listener.on_output(data)
            left -= len(data)

    def keep(self) -> bytes | None:
        """See `shell.Wire`: the mailbox, or nothing of a shell that was killed or replaced."""
        size = os.fstat(self._mailbox).st_size
        text = os.pread(self._mailbox, size, 0)
        return text if text.startswith(b"#state\n") and text.endswith(b"#end\n") else b""

    async def state(self) -> bytes:
        """See `shell.Wire`."""
        return self.keep() or b""

    def close(self) -> None:
        """Once."""
        self._close_pipes()
        os.close(self._mailbox)
        os.close(self._library)

    def _post(self, text: bytes) -> None:
        os.ftruncate(self._mailbox, 0)
        view = memoryview(text)
        offset = 0
        while offset < len(view):
            offset += os.pwrite(self._mailbox, view[offset:], offset)

    def _on_output(self) -> None:
        assert self._listener is not None
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._listener.on_output(data)
        else:  # every writer is gone: the shell's end or its report follows
            self._loop.remove_reader(self._output)

    def _on_report(self) -> None:
        assert self._listener is not None
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
            self._listener.on_report(frame)

    def _close_pipes(self) -> None:
        for fd in (self._report, self._output):
            if fd >= 0:
                self._loop.remove_reader(fd)
        for fd in (self._script, self._report, self._output):
            if fd >= 0:
                os.close(fd)
        self._script = self._report = self._output = -1
