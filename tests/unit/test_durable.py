"""What is on disk when a file of a run is said to be: its content, and its name in its directory."""

import errno
import os
import stat
from pathlib import Path

import pytest

from termrsi import durable


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced, in order: "file" or "directory"."""
    kinds: list[str] = []
    sync = os.fsync

    def told(number: int) -> None:
        kinds.append("directory" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        sync(number)

    monkeypatch.setattr(os, "fsync", told)
    return kinds


def test_a_file_is_on_disk_before_its_name_and_its_name_on_return(tmp_path: Path, synced: list[str]) -> None:
    durable.write_text(tmp_path / "a", "text", sync=False)
    assert synced == []
    durable.write_text(tmp_path / "a", "text")
    assert synced == ["file", "directory"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "text")]


def test_the_name_of_a_file_of_lines_is_on_disk_with_the_first_of_them(tmp_path: Path, synced: list[str]) -> None:
    with durable.Lines(tmp_path / "lines") as lines:
        lines.add("1")
        assert synced == []
        lines.add("2", sync=True)
        assert synced == ["file", "directory"]
        lines.sync()
        lines.add("3", sync=True)
    assert synced == ["file", "directory", "file", "file"]
    assert (tmp_path / "lines").read_text() == "1\n2\n3\n"


@pytest.mark.parametrize(("number", "goes_on"), [(errno.EINVAL, True), (errno.EACCES, True), (errno.EIO, False)])
def test_a_file_system_that_syncs_no_directories_is_taken_as_it_is(
    number: int, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def refuses(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses)
    if not goes_on:
        with pytest.raises(OSError, match=os.strerror(number)):
            durable.write_text(tmp_path / "a", "text")
        return
    durable.write_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
