"""What of the host is hidden from every sandbox."""

import stat
from pathlib import Path

import pytest

from termrsi.sandbox import host


@pytest.mark.parametrize(
    ("package", "checkout", "hidden"),
    [
        ("opt/termrsi/termrsi", True, ["opt/termrsi"]),
        ("usr/lib/python3/site-packages/termrsi", False, ["usr/lib/python3/site-packages/termrsi"]),
        ("home/me/termrsi/termrsi", True, []),  # no sandbox sees /home
    ],
)
def test_our_own_code_is_hidden_where_a_sandbox_would_see_it(
    package: str, checkout: bool, hidden: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path("/", package)
    known = {place.parent / "pyproject.toml"} if checkout else set()
    monkeypatch.setattr(Path, "is_file", lambda path: path in known)
    assert host.own(place) == hidden


def test_what_is_hidden_becomes_a_whiteout_in_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "own", lambda package: ["usr/bin/env"])
    mask = host.prepare(tmp_path) / "usr" / "bin" / "env"
    info = mask.lstat()
    assert stat.S_ISCHR(info.st_mode)
    assert info.st_rdev == 0
