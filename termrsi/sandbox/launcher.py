"""The owner's side of the helper process (`init.py`), and of process 1 of one sandbox.

One helper serves all sandboxes of a process. It ends by itself: with its owner, or when it had no sandbox for a while.
"""

import array
import asyncio
import atexit
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from termrsi.errors import SandboxError

MESSAGE_BYTES = 1 << 17
ANSWER_S = 60.0  # the longest request kills for 5 s
CREDENTIALS = struct.Struct("iii")


def send(sock: socket.socket, message: dict[str, object], fds: Sequence[int] = ()) -> None:
    """One message. Raises SandboxError if it is too long for the other side, OSError if that is gone."""
    text = json.dumps(message).encode()
    if len(text) > MESSAGE_BYTES:
        raise SandboxError(f"environment of {len(text)} bytes", "sandbox.local", f"at most {MESSAGE_BYTES}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([text], ancillary)


def receive(sock: socket.socket) -> tuple[dict[str, object] | None, list[int]]:
    """The next message and its descriptors; (None, []) at the end of the stream."""
    ints = array.array("i")
    space = socket.CMSG_SPACE(4 * ints.itemsize) + socket.CMSG_SPACE(CREDENTIALS.size)
    data, ancillary, _, _ = sock.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    message = json.loads(data) if data else None
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            ints.frombytes(payload[: len(payload) - len(payload) % ints.itemsize])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and message is not None:
            message["sender_pid"] = CREDENTIALS.unpack(payload)[0]  # by the kernel, in our numbering
    return message, list(ints)


class Launcher:
    """Starts the helper when first needed, again when it has gone. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._pid = 0

    def launch(self, request: dict[str, object]) -> socket.socket:
        """A control socket on which process 1 of the new sandbox will report. Raises SandboxError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            with self._lock:
                if self._pid != os.getpid():  # a forked copy of the owner must not speak on its parent's socket
                    self._sock, self._pid = None, os.getpid()
                if self._sock is None or self._has_ended(self._sock):
                    self._start()
                assert self._sock is not None
                try:
                    send(self._sock, request, [theirs.fileno()])
                except BrokenPipeError:  # the helper had been idle, and stopped listening at this moment
                    self._start()
                    send(self._sock, request, [theirs.fileno()])
        except (OSError, subprocess.SubprocessError) as error:
            ours.close()
            raise SandboxError(f"the helper process could not be reached: {error}", "sandbox.local") from error
        except SandboxError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        """The helper ends once its sandboxes have."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    @staticmethod
    def _has_ended(sock: socket.socket) -> bool:
        try:
            return sock.recv(1, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _start(self) -> None:
        if self._sock is None:
            atexit.register(self.close)
        else:
            self._sock.close()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -I and -S: nothing of the user's environment or site-packages; half the start, a third of the memory.
            subprocess.run(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("init.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=True,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
            )


# One per process: it owns no sandbox, only the socket to the helper that forks them.
shared = Launcher()


class Control:
    """Requests to process 1 of one sandbox, answered in order. `on_exit` and `on_lost` are called from the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting: deque[asyncio.Future[tuple[dict[str, object], list[int]]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._on_readable)
        self.lost = False
        self._opening = self._expect()
        self._opening.add_done_callback(lambda future: future.cancelled() or future.exception())  # seen, if nobody asks
        self.on_exit: Callable[[int], None] = lambda _status: None
        self.on_lost: Callable[[], None] = lambda: None

    async def ready(self) -> tuple[int, int, int]:
        """Descriptors: the sandbox's root, its writable layer, its process 1. Raises SandboxError if it could not be built.

        Asked again after a cancelled first time, it answers still: they are handed over once.
        """
        message, fds = await asyncio.shield(self._opening)
        if "ready" not in message:
            raise SandboxError(f"could not be built: {message.get('error', 'no reason given')}", "sandbox.local")
        if len(fds) < 2:  # descriptors are dropped, not refused, where this process has reached its limit
            self._close_all(fds)
            raise SandboxError("too many open files in this process", "sandbox.local", "raise `ulimit -n`")
        try:
            return fds[0], fds[1], os.pidfd_open(int(str(message["sender_pid"])))
        except OSError as error:
            self._close_all(fds)
            raise SandboxError(f"process 1 cannot be watched: {error}", "sandbox.local") from error

    async def request(self, op: str, fds: Sequence[int] = (), **arguments: object) -> dict[str, object]:
        if self.lost:
            raise SandboxError("process 1 has ended", "sandbox.local")
        try:
            send(self._sock, {"op": op, **arguments}, fds)
        except OSError as error:
            self._end()
            raise SandboxError("process 1 has ended", "sandbox.local") from error
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await self._expect())[0]
        except TimeoutError as error:
            raise SandboxError(f"process 1 did not answer {op!r} within {ANSWER_S:.0f} s", "sandbox.local") from error

    @staticmethod
    def _close_all(fds: list[int]) -> None:
        """Once: who asks for them again finds none."""
        while fds:
            os.close(fds.pop())

    def _expect(self) -> "asyncio.Future[tuple[dict[str, object], list[int]]]":
        waiter: asyncio.Future[tuple[dict[str, object], list[int]]] = self._loop.create_future()
        self._waiting.append(waiter)
        return waiter

    def _on_readable(self) -> None:
        try:
            message, fds = receive(self._sock)
        except BlockingIOError:
            return
        except OSError:
            message, fds = None, []
        if message is None:
            self._end()
        elif "exit" in message:
            self.on_exit(int(str(message["exit"])))
        elif self._waiting:
            waiter = self._waiting.popleft()
            if waiter.done():  # the caller was cancelled
                for fd in fds:
                    os.close(fd)
            else:
                waiter.set_result((message, fds))

    def _end(self) -> None:
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._sock.fileno())
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(SandboxError("process 1 has ended", "sandbox.local"))
        self._waiting.clear()
        self.on_lost()

    def close(self) -> None:
        """The sandbox's processes end with this socket."""
        self.on_lost = lambda: None
        self.on_exit = lambda _status: None
        self._end()
        with contextlib.suppress(OSError):
            self._sock.close()
