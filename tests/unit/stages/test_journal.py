"""A journal's items: whole or not there, each once, the same order whoever ended first."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi.durable import drop_half_line
from termrsi.errors import StageError
from termrsi.stages.journal import Journal, each


def test_what_was_added_is_there_for_the_next_owner(tmp_path: Path) -> None:
    with Journal(tmp_path / "items.jsonl") as journal:
        journal.add("b", {"n": 2})
        journal.add("a", [1, "ü"])
    with Journal(tmp_path / "items.jsonl") as again:
        assert ("a" in again, "c" in again, len(again)) == (True, False, 2)
        assert list(again.values(["a", "c", "b"])) == [("a", [1, "ü"]), ("b", {"n": 2})]
        with pytest.raises(ValueError, match="'a' is finished already"):
            again.add("a", 3)


def test_what_is_undone_goes_and_may_be_done_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "items.jsonl") as journal:
        for key in ("1", "2", "3"):
            journal.add(key, f"first {key}")
        journal.keep(["1", "2", "4"])
        assert list(journal.items()) == [("1", "first 1"), ("2", "first 2")]
        journal.add("3", "second")
        journal.keep(["3", "2", "1"])
    with Journal(tmp_path / "items.jsonl") as again:
        assert dict(again.items()) == {"1": "first 1", "2": "first 2", "3": "second"}


@given(st.lists(st.text(max_size=8), max_size=5), st.integers(0, 200))
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "items.jsonl"
    with Journal(path) as journal:
        for number, text in enumerate(texts):
            journal.add(str(number), text)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with Journal(path) as again:
        left = [text for _, text in again.values(map(str, range(len(texts))))]
        assert left == texts[: whole[:cut].count(b"\n")]
        again.add("more", 1)
    assert all(json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1])


def test_a_half_line_longer_than_a_block_goes_too(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"first\n" + b"x" * 200_000)
    drop_half_line(path)
    assert path.read_bytes() == b"first\n"
    path.write_bytes(b"y" * 200_000)
    drop_half_line(path)
    assert path.read_bytes() == b""


def test_a_line_that_is_no_item_is_named(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"key": "a", "value": 1}\n{"id": 3}\n')
    with pytest.raises(StageError, match="line 2 is no finished item"):
        Journal(tmp_path / "items.jsonl")


async def test_each_does_every_item_once_and_no_more_than_so_many_at_a_time(tmp_path: Path) -> None:
    drawn, running, most = [], 0, 0

    def items():
        for number in range(20):
            drawn.append(number)
            yield str(number), number

    notes: list[str] = []

    async def told(note: str) -> None:
        notes.append(note)

    async def work(number: int) -> int:
        nonlocal running, most
        assert len(drawn) <= len(journal) + 3
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number * number

    with Journal(tmp_path / "squares.jsonl") as journal:
        journal.add("7", -1)
        await each(journal, items(), work, at_once=3, done=told)
        assert most == 3
        assert dict(journal.values(map(str, range(20)))) == {str(n): n * n if n != 7 else -1 for n in range(20)}
        assert sorted(notes) == [""] * 19 + ["finished before"]


async def nobody(note: str) -> None: ...


async def test_what_the_machine_lost_is_tried_again(tmp_path: Path) -> None:
    lost = {"1"}

    async def work(key: str) -> str | None:
        return None if key in lost else key

    for there in (["0", "2"], ["0", "1", "2"]):
        with Journal(tmp_path / "items.jsonl") as journal:
            await each(journal, ((key, key) for key in "012"), work, at_once=2, done=nobody)
            assert [key for key, _ in journal.values("012")] == there
        lost.clear()


async def test_an_error_ends_the_others_and_keeps_what_was_added(tmp_path: Path) -> None:
    cleaned = []

    async def work(number: int) -> int:
        if number == 2:
            raise StageError("told to fail", "here")
        try:
            if number > 2:
                await asyncio.Event().wait()
        finally:
            cleaned.append(number)
        return number

    with Journal(tmp_path / "items.jsonl") as journal:
        with pytest.raises(StageError, match="told to fail"):
            await each(journal, ((str(n), n) for n in (0, 1, 3, 2, 4)), work, at_once=2, done=nobody)
        assert [key for key, _ in journal.values("01234")] == ["0", "1"]
    assert cleaned == [0, 1, 3]
