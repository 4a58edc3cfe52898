"""Output in bounded memory. The shell itself is tested on real processes, in `contract/test_sandbox.py`."""

import pytest

from termrsi.sandbox.script import Places
from termrsi.sandbox.shell import Collector


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_head_and_tail(piece: int) -> None:
    data = bytes(range(48, 58)) * 20
    collector = Collector(20)
    for start in range(0, len(data), piece):
        collector.add(data[start : start + piece])
    assert collector.text() == "0123456789\n[... 180 bytes omitted ...]\n0123456789"
    assert collector.omitted_bytes == 180


def test_all_of_it_up_to_the_limit() -> None:
    collector = Collector(10)
    collector.add(b"12345")
    collector.add(b"67890")
    assert (collector.text(), collector.omitted_bytes) == ("1234567890", 0)


def test_a_character_cut_in_two_is_replaced_only_at_the_cut() -> None:
    collector = Collector(100)
    collector.add("é".encode()[:1])
    collector.add("é".encode()[1:] + b"\xff")
    assert collector.text() == "é�"


def test_memory_stays_bounded() -> None:
    collector = Collector(1000)
    for _ in range(1000):
        collector.add(b"x" * 10_000)
    assert sum(len(part) for part in collector._tail) <= 10_500


def test_writing_the_state_begins_no_process() -> None:
    """A time-out ends every process but the shell, perhaps in the middle of that: what another one was to say would be missing."""
    dump = Places("/command", "/state", "/library").library_text().partition("dump)")[2]
    assert "declare -p" in dump
    assert not any(sign in dump for sign in ("<(", "$(", " | ", "`"))
