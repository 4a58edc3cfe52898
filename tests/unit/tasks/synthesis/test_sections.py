"""An author's replies: what has the form is taken apart exactly, and what has not is one category."""

import pytest

from termrsi.tasks.synthesis.parse import FORMS, Fault, Section, sections, without_thought

TEMPLATE = "=== instruction ===\nDo it.\n\nAll of it.\n=== truth ===\n42\n=== end ==="


def test_a_template() -> None:
    assert sections(TEMPLATE, FORMS["template"]) == (
        Section("instruction", "", "Do it.\n\nAll of it.\n"),
        Section("truth", "", "42\n"),
    )


def test_order_blank_lines_and_what_was_thought_play_no_part() -> None:
    text = "<think>\nwhich one?\n</think>\n\n=== truth ===\n\n42\n\n=== instruction ===  \nDo it.\n=== end ===\n\n"
    assert sections(text, FORMS["template"]) == (Section("truth", "", "42\n"), Section("instruction", "", "Do it.\n"))
    assert sections(f"which one?</think>{TEMPLATE}", FORMS["template"]) == sections(TEMPLATE, FORMS["template"])


def test_a_thought_inside_of_a_section_is_text() -> None:
    text = "=== instruction ===\nWrite </think> to a file.\n=== truth ===\n42\n=== end ==="
    assert without_thought(text) == text
    found = sections(text, FORMS["template"])
    assert not isinstance(found, Fault)
    assert found[0].body == "Write </think> to a file.\n"


def test_checks_and_files_have_names() -> None:
    text = "=== check a_1 ===\ntrue\n=== check b ===\n\n  false\n=== end ==="
    assert sections(text, FORMS["final_test"]) == (Section("check", "a_1", "true\n"), Section("check", "b", "  false\n"))
    text = "=== file data/a.txt ===\n```\nkept\n```\n=== file empty ===\n=== setup ===\nchmod 600 data/a.txt\n=== end ==="
    assert sections(text, FORMS["environment"]) == (
        Section("file", "data/a.txt", "```\nkept\n```\n"),
        Section("file", "empty", ""),
        Section("setup", "", "chmod 600 data/a.txt\n"),
    )
    assert sections("=== end ===", FORMS["environment"]) == (), "a machine may need nothing"


@pytest.mark.parametrize(
    ("step", "text", "fault"),
    [
        ("template", "", Fault.no_end),
        ("template", "Sure!", Fault.text_outside),
        ("template", TEMPLATE.removesuffix("=== end ==="), Fault.no_end),
        ("template", f"Here it is:\n{TEMPLATE}", Fault.text_outside),
        ("template", f"{TEMPLATE}\nGood luck!", Fault.text_outside),
        ("template", f"{TEMPLATE}\n=== truth ===\nmore", Fault.text_outside),
        ("template", TEMPLATE.replace("truth", "secret"), Fault.unknown_section),
        ("template", "=== instruction ===\nDo it.\n=== end ===", Fault.missing_section),
        ("template", TEMPLATE.replace("=== truth", "=== truth ===\n41\n=== truth"), Fault.repeated_section),
        ("template", TEMPLATE.replace("42", " "), Fault.empty_section),
        ("template", TEMPLATE.replace("=== truth", "=== truth of it"), Fault.missing_section),
        ("template", TEMPLATE.replace("truth ===", "truth now ==="), Fault.bad_name),
        ("initial_test", "=== initial_test ===\n```bash\ntrue\n```\n=== end ===", Fault.fenced),
        ("final_test", "=== end ===", Fault.missing_section),
        ("final_test", "=== check ===\ntrue\n=== end ===", Fault.bad_name),
        ("final_test", "=== check Upper ===\ntrue\n=== end ===", Fault.bad_name),
        ("final_test", "=== check a;rm ===\ntrue\n=== end ===", Fault.bad_name),
        ("final_test", "=== check a ===\ntrue\n=== check a ===\nfalse\n=== end ===", Fault.repeated_section),
        ("final_test", "=== check a ===\n=== end ===", Fault.empty_section),
        ("environment", "=== file /etc/passwd ===\nx\n=== end ===", Fault.bad_name),
        ("environment", "=== file a/../../b ===\nx\n=== end ===", Fault.bad_name),
        ("environment", "=== file .. ===\nx\n=== end ===", Fault.bad_name),
        ("environment", "=== file a ===\nx\n=== file a/b ===\ny\n=== end ===", Fault.bad_name),
        ("environment", "=== setup ===\ntrue\n=== setup ===\nfalse\n=== end ===", Fault.repeated_section),
        ("environment", "=== solution ===\n=== end ===", Fault.empty_section),
    ],
)
def test_what_is_wrong_has_a_category(step: str, text: str, fault: Fault) -> None:
    assert sections(text, FORMS[step]) is fault


def test_a_reply_that_was_cut_is_none() -> None:
    assert sections(TEMPLATE, FORMS["template"], cut=True) is Fault.cut


def test_what_is_no_unicode_can_be_written() -> None:
    found = sections(TEMPLATE.replace("42", "a\ud800b"), FORMS["template"])
    assert not isinstance(found, Fault)
    assert found[1].body.encode() == b"a?b\n"
