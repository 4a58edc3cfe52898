"""Keys as a keyboard sends them, and a terminal's output as it can be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi.harness.terminal import plain, typed


@pytest.mark.parametrize(
    ("keystrokes", "sent"),
    [
        ("ls\n", "ls\r"),
        ("a\r\nb", "a\rb"),
        ("C-c", "\x03"),
        ("C-d", "\x04"),
        ("C-[", "\x1b"),
        ("C-?", "\x7f"),
        ("Enter", "\r"),
        ("Up", "\x1b[A"),
        ("echo C-c", "echo C-c"),
        ("", ""),
    ],
)
def test_keys(keystrokes: str, sent: str) -> None:
    assert typed(keystrokes) == sent


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("a\r\nb\r\n", "a\nb\n"),
        ("10%\r20%\r100%\r\ndone", "100%\ndone"),
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07x", "red x"),
        ("\x1b[1;1Hfile\x1b[2;1H~   \x1b[3;1H~", "\nfile\n~\n~"),
        ("root$ ", "root$ "),
        ("a\x08\x00b\ttab", "ab\ttab"),
        ('exit\r\n\nScript done on 2026-01-01 [COMMAND_EXIT_CODE="0"]\n', "exit"),
    ],
)
def test_output(output: str, text: str) -> None:
    assert plain(output) == text


@given(st.text())
def test_no_control_character_is_left(output: str) -> None:
    assert not any(ord(sign) < 32 and sign not in "\n\t" for sign in plain(output))
