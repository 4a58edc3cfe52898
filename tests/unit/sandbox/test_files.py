"""What comes out of a sandbox as an archive, made by whoever was in it."""

import io
import tarfile
from pathlib import Path

import pytest

from termrsi.sandbox import files


def archive(*members: tuple[str, bytes, bytes | str]) -> tarfile.TarFile:
    """Of (name, type, content or target of a link), as a stream."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as made:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if isinstance(content, str):
                info.linkname = content
            else:
                info.size = len(content)
            made.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    raw.seek(0)
    return tarfile.open(fileobj=raw, mode="r|")


FILE, LINK, HARD, DIR = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("d/../../escape", FILE, b"x")],
        [("/etc/escape", FILE, b"x")],
        [("d/a", FILE, b"x"), ("d/b", HARD, "../../secret")],
        [("d/a", FILE, b"x"), ("d/b", HARD, "/secret")],
    ],
)
def test_names_that_leave_the_archive_are_refused(tmp_path: Path, members: list[tuple[str, bytes, bytes | str]]) -> None:
    target = tmp_path / "a" / "b"
    target.mkdir(parents=True)
    (tmp_path / "secret").write_text("host")
    with pytest.raises(OSError, match="leaves the archive"):
        files.unpack(archive(*members), target, largest_bytes=1000)
    assert not [path for path in tmp_path.rglob("*") if path.name == "escape"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    for path in (outside, target):
        path.mkdir()
    (outside / "f").write_text("host")
    members = [("d/l", LINK, str(outside)), ("d/l/f", FILE, b"agent"), ("d/g", LINK, str(outside / "f")), ("d/g", FILE, b"agent")]
    members += [("d/m", LINK, str(outside)), ("d/h", HARD, "d/m/f")]
    files.unpack(archive(*members), target, largest_bytes=1000)
    assert (outside / "f").read_text() == "host"
    assert [path.name for path in outside.iterdir()] == ["f"]
    assert ((target / "l" / "f").read_text(), (target / "g").read_text()) == ("agent", "agent")


def test_hard_links_and_many_files_cost_no_more_than_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    names = [(f"d/{number}", HARD, "d/first") for number in range(100)]
    files.unpack(archive(("d/first", FILE, b"x" * 5000), *names), tmp_path / "t", largest_bytes=6000)
    assert (tmp_path / "t" / "99").samefile(tmp_path / "t" / "first")
    with pytest.raises(OSError, match="more than the disk allowed"):
        files.unpack(archive(*((f"d/{number}", FILE, b"x" * 1000) for number in range(10))), tmp_path / "t", largest_bytes=6000)


def test_what_an_earlier_copy_left_gives_way(tmp_path: Path) -> None:
    target = tmp_path / "t"
    (target / "was_directory" / "in").mkdir(parents=True)
    (target / "was_file").write_text("old")
    members = [("d/was_directory", FILE, b"new"), ("d/was_file", DIR, b""), ("d/was_file/in", FILE, b"new")]
    files.unpack(archive(*members), target, largest_bytes=1000)
    assert ((target / "was_directory").read_text(), (target / "was_file" / "in").read_text()) == ("new", "new")
