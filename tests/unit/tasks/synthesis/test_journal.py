"""Lines of finished items: half a line at the end is none, and what follows it is whole."""

from pathlib import Path

import pytest

from termrsi.errors import StageError
from termrsi.tasks.synthesis.journal import Journal


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "items.jsonl")
    assert list(journal.read()) == []
    journal.add({"index": 0, "word": "é\n"})
    journal.add({"index": 1})
    assert list(Journal(tmp_path / "items.jsonl").read()) == [{"index": 0, "word": "é\n"}, {"index": 1}]


@pytest.mark.parametrize("half", ['{"index": 1', '{"index": 1}', "{", "\u00e9"])
def test_half_a_line_is_dropped_for_good(tmp_path: Path, half: str) -> None:
    path = tmp_path / "items.jsonl"
    journal = Journal(path)
    journal.add({"index": 0})
    path.write_bytes(path.read_bytes() + half.encode())
    assert list(journal.read()) == [{"index": 0}]
    journal.add({"index": 2})
    assert list(journal.read()) == [{"index": 0}, {"index": 2}]


def test_a_whole_line_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"index": 0}\nnonsense\n')
    with pytest.raises(StageError, match="line 2 is no JSON"):
        list(Journal(tmp_path / "items.jsonl").read())
