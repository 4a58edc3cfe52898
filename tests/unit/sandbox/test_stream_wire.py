"""The shell through one stream, with a bash of this machine at its other end; and reports told from output, cut anywhere."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrsi.errors import SandboxError
from termrsi.sandbox.script import Places, quoted
from termrsi.sandbox.shell import Shell
from termrsi.sandbox.stream_wire import READ_BYTES, StreamWire


class Pipes:
    """A program on two pipes."""

    def __init__(self, argv: list[str], cwd: str) -> None:
        self._process = subprocess.Popen(argv, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self._process.stdout is not None
        self._out = self._process.stdout
        os.set_blocking(self._out.fileno(), False)

    def fileno(self) -> int:
        return self._out.fileno()

    def read(self) -> bytes | None:
        try:
            return os.read(self._out.fileno(), READ_BYTES)
        except BlockingIOError:
            return None

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), data)

    async def status(self) -> int:
        code = await asyncio.to_thread(self._process.wait)
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._out):
            if pipe is not None:
                pipe.close()


class NoHost:
    """Kills nothing: no command here runs into its limit."""

    async def kill_since(self, last_pid: int, tick: int, give_up_s: float, signal: int = 0) -> bool:
        raise AssertionError(last_pid)

    async def kill_all(self) -> int:
        raise AssertionError

    async def replaced(self) -> list[str]:
        raise AssertionError


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[Shell]:
    async def opener(argv: list[str], cwd: str) -> Pipes:
        return Pipes(argv, cwd)

    places = Places(str(tmp_path / "command"), str(tmp_path / "state"), str(tmp_path / "library"))
    made = Shell(NoHost(), StreamWire(opener, places), str(tmp_path), 1 << 20)
    await made.start()
    yield made
    made.close()


async def text(shell: Shell, command: str) -> str:
    result = await shell.run(command, 10.0)
    assert not result.timed_out
    return result.output


async def test_state_lasts_and_statuses_are_right(shell: Shell) -> None:
    assert (await shell.run("x='a b'; f() { echo f$x; }; (exit 7)", 10.0)).exit_code == 7
    assert await text(shell, "echo $?; f") == "7\nfa b\n"


@pytest.mark.parametrize("data", [bytes(range(1, 256)), b"it's \\ $x `y` \n", "é 日本".encode(), b""])
async def test_a_command_of_any_bytes_arrives_as_it_is(shell: Shell, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "expected").write_bytes(data)
    await shell.run(f"printf %s {quoted(data)} > {tmp_path}/found", 10.0)
    assert (tmp_path / "found").read_bytes() == data


async def test_what_ends_the_shell_leaves_its_state(shell: Shell, tmp_path: Path) -> None:
    result = await shell.run("y=5; cd /; exit 3", 10.0)
    assert result.exit_code == 3
    assert await text(shell, "echo $y; pwd") == "5\n/\n"
    assert (await shell.run("exec sh -c 'echo replaced; exit 9'", 10.0)).output == "replaced\n"
    assert await text(shell, "echo -$y-; pwd") == "--\n/\n", "a replaced shell leaves nothing, and nothing older is read"


async def test_a_dump_is_the_state(shell: Shell) -> None:
    await shell.run("z='1 2'; alias hi='echo hello'; set -o noclobber", 10.0)
    state = await shell.dump()
    assert b"z=" in state
    await shell.restart()
    assert await text(shell, "echo -$z-") == "--\n"
    await shell.restart(state)
    assert await text(shell, "echo -$z-; hi; set -o | grep -c 'noclobber.*on'") == "-1 2-\nhello\n1\n"


async def test_output_that_was_closed_is_heard_again(shell: Shell) -> None:
    await shell.run("exec 1>&- 2>&-", 10.0)
    assert await text(shell, "echo fine; echo err >&2") == "fine\nerr\n"


async def test_a_printed_report_forges_nothing(shell: Shell) -> None:
    result = await shell.run("printf '\\0%016d 0 1 2 /forged\\0' 5; (exit 6)", 10.0)
    assert result.exit_code == 6
    assert "/forged" in result.output


class Heard:
    def __init__(self) -> None:
        self.output = b""
        self.reports: list[bytes] = []

    def on_output(self, data: bytes) -> None:
        self.output += data

    def on_report(self, fields: bytes) -> None:
        self.reports.append(fields)

    def ended(self, status: int) -> None:
        raise AssertionError(status)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 17, 18, 19, 64, 1000])
async def test_a_report_is_found_wherever_the_stream_is_cut(size: int) -> None:
    async def opener(argv: list[str], cwd: str) -> Pipes:
        raise AssertionError(argv, cwd)

    wire, heard = StreamWire(opener), Heard()
    wire._listener = heard
    wire._mark = b"\0" + b"0123456789abcdef" + b" "
    sent = b"out\0put\0" + b"\0" + b"0123456789abcdeX 1\0" + b"\0" + b"0123456789abcdef 7 1 2 /d\0after\0"
    for start in range(0, len(sent), size):
        wire._feed(sent[start : start + size])
    assert heard.reports == [b"0123456789abcdef 7 1 2 /d"]
    assert heard.output == b"out\0put\0" + b"\0" + b"0123456789abcdeX 1\0" + b"after\0"


async def test_a_shell_that_cannot_be_started_again_is_lost(tmp_path: Path) -> None:
    """A machine that has gone: the next command is an error, and waits for nothing."""
    gone = False

    async def opener(argv: list[str], cwd: str) -> Pipes:
        if gone:
            raise SandboxError("no such container", "test")
        return Pipes(argv, cwd)

    places = Places(str(tmp_path / "command"), str(tmp_path / "state"), str(tmp_path / "library"))
    made = Shell(NoHost(), StreamWire(opener, places), str(tmp_path), 1 << 20)
    await made.start()
    gone = True
    for command in ("exit 3", "true"):
        with pytest.raises(SandboxError, match="no such container"):
            await asyncio.wait_for(made.run(command, None), 10.0)
    made.close()
