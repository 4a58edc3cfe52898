"""What sandboxes of every backend share: one start, one shell, copies by way of a snapshot, one end that all wait for."""

import abc
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

from termrsi.errors import SandboxError
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, Snapshot
from termrsi.sandbox import layers
from termrsi.sandbox.jobs import Jobs
from termrsi.sandbox.options import Options
from termrsi.sandbox.shell import Shell

O = TypeVar("O", bound=Options)  # noqa: E741 - a type, not a number


class Base(abc.ABC, Generic[O]):
    """The common half of `ports.Sandbox`; what is abstract here is a backend's to add.

    Lives in the event loop that started it.
    """

    def __init__(self, options: O) -> None:
        self._options: O = options
        self._id = layers.label(options.owner)
        self._shell: Shell | None = None
        self._jobs = Jobs()
        self._begun = self._closed = False
        self._starting: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        return self._id

    async def start(self) -> None:
        """Ready for `run` on return. Raises SandboxError, after giving back what it had."""
        if self._closed or self._begun:
            raise SandboxError("started twice, or after close", self._id)
        self._begun = True
        self._starting = asyncio.ensure_future(self._start())
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._starting
        except TimeoutError as error:
            await self.close()
            raise SandboxError(f"could not start within {self._options.start_timeout_s:.0f} s", self._id) from error
        except OSError as error:
            await self.close()
            raise SandboxError(f"could not start: {error}", self._id) from error
        except asyncio.CancelledError as error:
            await self.close()
            caller = asyncio.current_task()
            if caller is None or not caller.cancelling():  # it was the start that was cancelled, by a `close` of another
                raise SandboxError("closed while it started", self._id) from error
            raise
        except BaseException:
            await self.close()
            raise

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        """See `ports.Sandbox`. A command whose caller is cancelled makes the sandbox lost: close it."""
        return await self._live_shell().run(command, timeout_s)

    async def fork(self, n: int) -> list[Sandbox]:
        """n started copies of the present state, as `snapshot` has it. Raises SandboxError, leaving none."""
        snapshot = await self.snapshot()
        copies: list[Sandbox] = [self._restored(snapshot) for _ in range(n)]
        try:
            try:
                await _all_started(copies)
            finally:
                await asyncio.to_thread(self._discard, snapshot)  # what the copies need of it they hold, or have read
        except BaseException:
            await asyncio.gather(*(copy.close() for copy in copies), return_exceptions=True)
            raise
        return copies

    async def kill_processes(self) -> int:
        """See `ports.Sandbox`."""
        shell = self._live_shell()
        count = await self.kill_all()
        await shell.restart()
        return count

    async def close(self) -> None:
        """Ends everything it holds. Whoever calls it waits for the same end; a caller that is cancelled does not stop it."""
        self._closed = True
        if self._closing is None or (self._closing.done() and _failed(self._closing)):
            self._closing = asyncio.ensure_future(self._end())
        await asyncio.shield(self._closing)

    @abc.abstractmethod
    async def snapshot(self) -> Snapshot:
        """See `ports.Sandbox`."""

    @abc.abstractmethod
    async def put(self, source: Path | str, target: str) -> None:
        """See `ports.Sandbox`."""

    @abc.abstractmethod
    async def get(self, source: str, target: Path | str) -> None:
        """See `ports.Sandbox`."""

    @abc.abstractmethod
    async def replaced(self) -> list[str]:
        """See `ports.Sandbox`."""

    @abc.abstractmethod
    async def kill_all(self) -> int:
        """Ends every process but process 1, the shell too; how many there were besides it. Raises SandboxError if one lives on."""

    @abc.abstractmethod
    async def _start(self) -> None:
        """Makes the sandbox, and `_shell`, which answers on return. May raise what it likes: `close` follows."""

    @abc.abstractmethod
    def _restored(self, snapshot: Snapshot) -> "Base[O]":
        """One that will start from a snapshot that this one took a moment ago, and else as this one did."""

    @abc.abstractmethod
    def _discard(self, snapshot: Snapshot) -> None:
        """Frees what a snapshot holds. Called in a thread."""

    @abc.abstractmethod
    async def _close(self) -> None:
        """Gives back what was made, of a start that broke off too. No job runs any more."""

    def _stop(self) -> None:
        """Ends what a running job may wait for."""

    async def _end(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._shell is not None:
            self._shell.close()
        self._stop()
        # A cancelled caller's thread works on: it may still make something, or hold what is closed next.
        await self._jobs.ended()
        await self._close()

    def _live_shell(self) -> Shell:
        if self._shell is None or self._closed:
            raise SandboxError("lost, closed or not started", self._id)
        return self._shell


async def _all_started(boxes: Sequence[Sandbox]) -> None:
    """Starts all at once. Whatever keeps one from it, a cancellation too, none is left."""
    starts = [asyncio.ensure_future(box.start()) for box in boxes]
    try:
        await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(box.close() for box in boxes), return_exceptions=True)
        raise


def _failed(done: "asyncio.Future[None]") -> bool:
    """Whether a future that is done has not done what it was for."""
    return done.cancelled() or done.exception() is not None
