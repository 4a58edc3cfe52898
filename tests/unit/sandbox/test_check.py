"""What a machine's sandboxes cannot be held to is told."""

import os
from pathlib import Path

import pytest

from termrsi.sandbox import cgroups, check


def groups_in(top: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    """A hierarchy whose groups have these files, as the kernel would make them."""

    def limited(groups: list[Path]) -> set[str]:
        for group in groups:
            for name in files:
                (group / name).touch()
        return limits(groups)

    limits = cgroups.limited
    monkeypatch.setattr(cgroups, "parents", lambda: [top])
    monkeypatch.setattr(cgroups, "limited", limited)
    monkeypatch.setattr(cgroups, "end", lambda groups: True)


def test_nothing_is_said_where_groups_hold_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups_in(tmp_path, monkeypatch, "memory.max", "pids.max")
    assert check.weak_limits() == []


@pytest.mark.parametrize(("user", "words"), [(0, "exempts root"), (1000, "of this user's together")])
def test_without_groups_both_are_named(monkeypatch: pytest.MonkeyPatch, user: int, words: str) -> None:
    monkeypatch.setattr(cgroups, "parents", list)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    memory, processes = check.weak_limits()
    assert memory.startswith("no writable memory control group")
    assert processes.startswith("no writable pids control group")
    assert words in processes


def test_a_hierarchy_without_a_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups_in(tmp_path, monkeypatch, "memory.limit_in_bytes")
    (only,) = check.weak_limits()
    assert "pids" in only
