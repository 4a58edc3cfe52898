"""What an agent sees of a result, in every wording."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrsi.harness.observe import LONG, Wording, cut, shorten, tell, together
from termrsi.records import CommandResult

OK, BAD, LATE = CommandResult(0, "a\nb\n"), CommandResult(3, ""), CommandResult(124, "part", timed_out=True)


@pytest.mark.parametrize(
    ("wording", "ok", "bad", "late"),
    [
        (Wording.exit_first, "[exit 0]\na\nb", "[exit 3]", "[timed out]\npart"),
        (Wording.exit_last, "a\nb\n\n(exit_code=0)", "(no output)\n\n(exit_code=3)", "part\n\n(timed out)"),
        (
            Wording.tags,
            "<returncode>0</returncode>\n<output>\na\nb\n</output>",
            "<returncode>3</returncode>\n<output>\n\n</output>",
            "<exception>The command took too long and was ended.</exception>\n"
            "<returncode>-1</returncode>\n<output>\npart\n</output>",
        ),
        (Wording.footer, "a\nb\n[exit code: 0]", "[exit code: 3]", "part\n[the command took too long and was ended]"),
        (Wording.screen, "New terminal output:\na\nb", "New terminal output: none", "New terminal output:\npart"),
    ],
)
def test_each_wording(wording: Wording, ok: str, bad: str, late: str) -> None:
    assert [tell(wording, result, 100) for result in (OK, BAD, LATE)] == [ok, bad, late]


def test_json_is_json() -> None:
    assert json.loads(tell(Wording.json, OK, 100)) == {"returncode": 0, "output": "a\nb"}
    late = json.loads(tell(Wording.json, LATE, 100))
    assert (late["returncode"], late["output"]) == (-1, "part")
    assert "too long" in late["exception_info"]
    long = json.loads(tell(Wording.json, CommandResult(0, "h" * 60 + "t" * 60), 100))
    assert long == {"returncode": 0, "output_head": "h" * 50, "output_tail": "t" * 50, "elided_chars": 20, "warning": LONG}


def test_long_output_loses_its_middle() -> None:
    text = "h" * 60 + "m" * 500 + "t" * 60
    assert cut(text, 100) == f"{'h' * 50}\n[... 520 characters left out ...]\n{'t' * 50}"
    assert cut("x" * 100, 100) == "x" * 100
    seen = tell(Wording.tags, CommandResult(0, text), 100)
    assert f"<output_head>\n{'h' * 50}\n</output_head>\n<elided_chars>520</elided_chars>" in seen
    assert LONG in seen
    assert LONG in tell(Wording.exit_last, CommandResult(0, text), 100)


def test_what_was_ignored_comes_first() -> None:
    assert together(["a", "b"], ["x was ignored"]) == "Note: x was ignored.\na\nb"
    assert together([]) == ""


@given(st.text(), st.integers(2, 40), st.sampled_from(list(Wording)))
def test_what_is_seen_is_bounded_and_counts_what_is_not(output: str, limit: int, wording: Wording) -> None:
    head, omitted, tail = shorten(output, limit)
    assert len(head) + len(tail) <= limit
    assert len(head) + omitted + len(tail) == len(output)
    assert output.startswith(head)
    assert output.endswith(tail)
    assert len(tell(wording, CommandResult(0, output), limit)) <= 400 + 6 * limit + len(str(len(output)))  # JSON escapes
