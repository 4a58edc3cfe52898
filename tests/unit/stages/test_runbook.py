"""Form of a runbook: five headings, each once, none empty."""

import pytest

from termrsi.stages.runbook import BLOCKS, faults, take_apart

WHOLE = "\n".join(f"{heading}: something" for heading in BLOCKS)


def test_a_whole_runbook_has_no_fault() -> None:
    assert faults(WHOLE) == ()
    assert take_apart(WHOLE) == {heading: ["something"] for heading in BLOCKS}


def test_markdown_headings_and_lists_are_headings_too() -> None:
    assert faults("\n".join(f"## {i}. **{heading}**\n- something" for i, heading in enumerate(BLOCKS))) == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "block_missing"),
        (WHOLE.replace("Milestones: something\n", ""), "block_missing"),
        (WHOLE + "\nPitfalls: again", "block_twice"),
        (WHOLE.replace("Useful checks: something", "Useful checks:"), "block_empty"),
        (WHOLE + " long" * 300, "too_long"),
        (WHOLE + "\n```bash\n" + "ls\n" * 9 + "```", "long_code"),
    ],
)
def test_each_fault_is_named(text: str, fault: str) -> None:
    assert fault in faults(text)
