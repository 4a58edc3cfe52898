"""A run directory for one process; what a refused run leaves, and one that cannot be written."""

import fcntl
from pathlib import Path
from typing import Any

import pytest

from termrsi.claim import Claim, check_place
from termrsi.errors import ConfigError, StageError


def refused(run_dir: Path, *, keep: bool = False, error: Exception | None = None) -> None:
    with Claim(run_dir) as claim:
        if keep:
            claim.keep()
        (run_dir / "pool.json").write_text("{}")
        raise error or ConfigError("no")


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        refused(tmp_path / "runs" / "a")
    assert list(tmp_path.iterdir()) == []


def test_of_directories_that_it_shares_it_takes_only_its_own(tmp_path: Path) -> None:
    (tmp_path / "runs" / "other").mkdir(parents=True)
    with pytest.raises(ConfigError):
        refused(tmp_path / "runs" / "a")
    assert [place.name for place in (tmp_path / "runs").iterdir()] == ["other"]


def test_in_a_directory_that_was_there_nothing_but_the_lock_goes(tmp_path: Path) -> None:
    (tmp_path / "ledger.md").write_text("x")
    with pytest.raises(ConfigError):
        refused(tmp_path)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["ledger.md", "pool.json"]


def test_a_lock_of_an_earlier_run_stays(tmp_path: Path) -> None:
    with Claim(tmp_path) as claim:
        claim.keep()
    with pytest.raises(ConfigError):
        refused(tmp_path)
    assert (tmp_path / "lock").is_file()


@pytest.mark.parametrize(("keep", "error"), [(True, None), (False, StageError("no"))])
def test_what_has_begun_stays_and_so_does_what_a_fault_ended(tmp_path: Path, keep: bool, error: Exception | None) -> None:
    with pytest.raises((ConfigError, StageError)):
        refused(tmp_path / "a", keep=keep, error=error)
    assert sorted(place.name for place in (tmp_path / "a").iterdir()) == ["lock", "pool.json"]


def test_a_second_process_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    with Claim(tmp_path / "a") as claim:
        claim.keep()
        with pytest.raises(ConfigError, match="another process is running in"), Claim(tmp_path / "a"):
            pass
        assert (tmp_path / "a" / "lock").is_file()
    with Claim(tmp_path / "a"):
        pass


def test_a_lock_that_its_owner_has_just_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, real, asked = tmp_path / "lock", fcntl.flock, []

    def flock(file: Any, how: int) -> None:  # Any: a file or its number
        asked.append(how)
        if len(asked) == 1:
            lock.unlink()  # between the opening and the locking
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Claim(tmp_path) as claim:
        claim.keep()
        assert lock.is_file()
        with pytest.raises(ConfigError, match="another process"), Claim(tmp_path):
            pass
    assert len(asked) == 3


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place, what in (
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "file" / "run", f"{tmp_path / 'file'} is not a directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_place(place, "CURE")
        assert what in caught.value.what
        assert (caught.value.where, caught.value.valid) == (str(place), "CURE")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stages").write_text("x")
    with pytest.raises(ConfigError, match="stages: is not a directory"), Claim(tmp_path / "run"):
        pass
    assert [place.name for place in (tmp_path / "run").iterdir()] == ["stages"]


def test_a_lock_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError) as caught, Claim(tmp_path):
        pass
    assert str(caught.value) == f"{tmp_path}/lock: cannot be written: Is a directory; give run_dir=DIR, where this user may write"


def test_the_part_that_is_there(tmp_path: Path) -> None:
    assert check_place(tmp_path / "a" / "b", "") == tmp_path
    assert list(tmp_path.iterdir()) == []
