"""Replies to actions: every category, and no input that raises or passes for done."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from termrsi.harness import actions
from termrsi.harness.actions import Action, FormatError
from termrsi.harness.parse import DONE_WORD, parse, parse_with_state

BLOCK = "```bash\nls -l\n```"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (BLOCK, "ls -l"),
        (f"I look first.\n\n{BLOCK}\nThen I go on.", "ls -l"),
        ("```sh\nls\n```", "ls"),
        ("```shell\nls\n```", "ls"),
        ("```BASH\nls\n```", "ls"),
        ("  ```bash  \nls\n  ```  ", "ls"),
        ("```bash\ncd /tmp\nls | wc -l\n```", "cd /tmp\nls | wc -l"),
        ("```bash\n\n  indented\n\n```", "  indented"),
        ("```bash\ncat > f <<'X'\n`a` \"b\"\nX\n```", "cat > f <<'X'\n`a` \"b\"\nX"),
        ("```bash\necho DONE\n```", "echo DONE"),
        ("```bash\nDONE\n```", "DONE"),  # a command of that name, not a claim
        (f"```python\nprint(1)\n```\n{BLOCK}", "ls -l"),  # a block that is no shell is talk
        (f"{BLOCK}\nWhen this works I am DONE.", "ls -l"),
    ],
)
def test_commands(text: str, command: str) -> None:
    assert parse(text) == actions.run(command)


@pytest.mark.parametrize("text", ["DONE", "DONE\n", "  DONE  ", "DONE.", "**DONE**", "`DONE`", "The file is there.\n\nDONE"])
def test_done(text: str) -> None:
    assert parse(text) == Action(done=True)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", FormatError.no_action),
        ("ls -l", FormatError.no_action),
        ("done", FormatError.no_action),
        ("I am DONE", FormatError.no_action),
        ("DONE is what I will say", FormatError.no_action),
        ("UNDONE", FormatError.no_action),
        ("```\nls\n```", FormatError.no_action),
        ("```\nDONE\n```", FormatError.no_action),
        ("```python\nls\n```", FormatError.no_action),
        ("```bash ls```", FormatError.no_action),
        (f"{BLOCK}\n{BLOCK}", FormatError.several_actions),
        ("```bash\n```\n" + BLOCK, FormatError.several_actions),
        ("```bash\nls", FormatError.unclosed_block),
        ("```bash\nls\nDONE", FormatError.unclosed_block),
        (f"{BLOCK}\n```bash\nls", FormatError.unclosed_block),
        ("DONE\n```bash\nls", FormatError.unclosed_block),
        ("```bash\n```", FormatError.empty_command),
        ("```bash\n \n\t\n```", FormatError.empty_command),
        (f"{BLOCK}\nDONE", FormatError.done_with_command),
        (f"DONE\n{BLOCK}", FormatError.done_with_command),
        ("```bash\n```\nDONE", FormatError.done_with_command),
    ],
)
def test_errors(text: str, error: FormatError) -> None:
    assert parse(text) == Action(error=error)


def test_every_error_of_this_protocol_says_what_would_be_valid() -> None:
    for text in ("", f"{BLOCK}\n{BLOCK}", "```bash\nls", "```bash\n```", f"{BLOCK}\nDONE"):
        detail = parse(text).detail
        assert "```" in detail or DONE_WORD in detail
    other = parse("ls", tags={"sh_x"}, tag="sh_x", word="")
    assert other.detail == "Your reply had no command. Reply with one ```sh_x block."
    assert parse("DONE", tags={"sh_x"}, tag="sh_x", word="").error is FormatError.no_action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (f"<state>\nGoal: x\n</state>\n{BLOCK}", actions.run("ls -l")),
        ("<state>all is there</state>\nDONE", Action(done=True)),
        (BLOCK, Action(error=FormatError.missing_state)),
        ("DONE", Action(error=FormatError.missing_state)),
        ("<state>\nDONE\n</state>", Action(error=FormatError.no_action)),  # a word of the state is no claim
        (f"<state> \n</state>\n{BLOCK}", Action(error=FormatError.missing_state)),
        (f"<state>\nGoal\n{BLOCK}", Action(error=FormatError.unclosed_block)),
        (f"{BLOCK}\n<state>late</state>", Action(error=FormatError.missing_state)),
        ("```bash\necho '<state>x</state>'\n```", Action(error=FormatError.missing_state)),
        (f"<state>x</state>\n{BLOCK}\n{BLOCK}", Action(error=FormatError.several_actions)),
    ],
)
def test_a_state_comes_first(text: str, action: Action) -> None:
    assert parse_with_state(text) == action


LINES = st.sampled_from(
    [
        "```",
        "```bash",
        "```sh",
        "```python",
        " ``` ",
        "````",
        "```bash\r",
        "DONE",
        "**DONE**",
        "DONE DONE",
        "done",
        "ls",
        "",
        "\x00",
        "\x85",
    ]
)
TEXTS = st.one_of(st.text(), st.lists(st.one_of(LINES, st.text(max_size=8)), max_size=9).map("\n".join))


@settings(max_examples=1000)
@given(TEXTS)
def test_no_reply_raises_and_each_is_exactly_one_thing(text: str) -> None:
    action = parse(text)
    assert (action.command is not None) + action.done + (action.error is not None) == 1
    assert action == parse(text)
    if action.command is not None:
        assert action.command.strip()
    if action.done:
        assert any(line.strip().strip("*`.") == "DONE" for line in text.splitlines()), "only the word alone on its line"
        fences = [m for m in (re.fullmatch(r"[ \t]*```[ \t]*(\w*)[ \t]*", line) for line in text.splitlines()) if m]
        assert not fences or fences[0].group(1).lower() not in {"bash", "sh", "shell"}, "a command is there"


@settings(max_examples=300)
@given(st.text(alphabet=st.characters(exclude_characters="`", exclude_categories=("Cs", "Cc", "Zl", "Zp"))), st.text(max_size=20))
def test_a_block_gives_back_what_was_put_in(command: str, talk: str) -> None:
    text = f"```bash\n{command}\n```"
    assert parse(text) == (actions.run(command) if command.strip() else Action(error=FormatError.empty_command))
    if "`" not in talk and "DONE" not in talk:
        assert parse(f"{talk}\n{text}") == parse(text)
        assert parse(talk) == Action(error=FormatError.no_action)
