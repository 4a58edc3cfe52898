"""The owner's end of a gVisor sandbox's pipes, with a process 1 that is the test."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrsi.errors import SandboxError
from termrsi.sandbox.keeper import Keeper, ShellStream


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(tmp_path)
    yield made
    made.close()
    made.close()


def test_the_end_of_a_shell_is_found_wherever_its_report_is_torn(tmp_path: Path, keeper: Keeper) -> None:
    out = os.open(tmp_path / "out", os.O_WRONLY)
    whole = b"some output\1\0\n" + b"\1aa end 9\1"  # of another shell
    for end in (b"7", b"130"):
        stream: ShellStream = keeper.joined("ab12")
        text = whole + b"\1ab12 end " + end + b"\1"
        for cut in range(1, len(text)):
            stream = keeper.joined("ab12")
            got = b""
            for piece in (text[:cut], text[cut:]):
                os.write(out, piece)
                while (data := stream.read()) is not None and data != b"":
                    got += data
            assert (got, stream.read(), asyncio.run(stream.status())) == (whole, b"", int(end))
    os.close(out)


def test_a_report_is_never_held_back(tmp_path: Path, keeper: Keeper) -> None:
    """It ends with a zero byte, and nothing may come after it."""
    stream = keeper.joined("ab12")
    out = os.open(tmp_path / "out", os.O_WRONLY)
    os.write(out, b"\0nonce 0 7 7 /app\0")
    assert stream.read() == b"\0nonce 0 7 7 /app\0"
    assert stream.read() is None
    os.close(out)


async def test_questions_and_answers(tmp_path: Path, keeper: Keeper) -> None:
    ctl, reply = os.open(tmp_path / "ctl", os.O_RDONLY | os.O_NONBLOCK), os.open(tmp_path / "reply", os.O_WRONLY)

    def process_1() -> None:
        line = os.read(ctl, 4096).decode()
        verb, nonce, *rest = line.split()
        assert (verb, rest) == ("some", ["7", "40", "1", "57", "/a\\0040b/\\0303\\0251"])
        os.write(reply, f"forged gone\nxx{nonce} no\n{nonce} 12 13\n".encode())

    asyncio.get_running_loop().add_reader(ctl, process_1)
    answer = await keeper.ask("some", shell=7, last=40, seconds=0.05, signal=57, path="/a b/é")
    assert answer == "12 13"
    asyncio.get_running_loop().remove_reader(ctl)
    with pytest.raises(SandboxError, match="did not answer ping"):
        await keeper.ask("ping", timeout_s=0.05)
    os.close(ctl)
    os.close(reply)


async def test_no_answer_is_awaited_of_one_that_is_lost(keeper: Keeper) -> None:
    asked = asyncio.ensure_future(keeper.ask("all"))
    await asyncio.sleep(0.01)
    keeper.lose("runsc ended")
    for question in (asked, keeper.ask("ping")):
        with pytest.raises(SandboxError, match="lost: runsc ended"):
            await asyncio.wait_for(question, 5.0)


async def test_a_new_shell_does_not_read_what_the_last_one_left(tmp_path: Path, keeper: Keeper) -> None:
    stream = keeper.joined("old")
    await stream.write(b"unread script\n")
    out = os.open(tmp_path / "out", os.O_WRONLY)
    os.write(out, b"unheard output\n\1old end 9\1")
    new = keeper.begin_shell("/app")
    assert new.read() is None
    into = os.open(tmp_path / "in", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        os.read(into, 1)
    big = b"x" * 300_000  # more than a pipe holds
    writing = asyncio.create_task(new.write(big))
    got = b""
    while len(got) < len(big):
        await asyncio.sleep(0)
        try:
            got += os.read(into, 1 << 16)
        except BlockingIOError:
            continue
    await writing
    assert got == big
    for fd in (into, out):
        os.close(fd)
