"""What is flagged, and what is not: planted continuations."""

import pytest

from termrsi.records import Turn
from termrsi.stages import recovery_rules


def ran(*commands: tuple[str, int]) -> list[Turn]:
    return [Turn("", command, "No such file or directory" if code else "", code) for command, code in commands]


def test_three_identical_failures_are_flagged() -> None:
    assert recovery_rules.repeated_failures(ran(*[("python fix.py", 1)] * 3)) == [(1, 2, 3)]
    assert recovery_rules.repeated_failures(ran(*[("python fix.py", 1)] * 2)) == []


def test_looking_round_is_no_change() -> None:
    turns = ran(("make", 2), ("cat Makefile 2>/dev/null", 0), ("make", 2), ("ls -l | head && git_log=1 pwd", 0), ("make", 2))
    assert recovery_rules.repeated_failures(turns) == [(1, 3, 5)]


def test_tests_run_again_after_another_repair_are_not() -> None:
    turns = ran(("pytest -q", 1), ("sed -i s/a/b/ f.py", 0), ("pytest -q", 1), ("echo x > g.py", 0), ("pytest -q", 1))
    assert recovery_rules.repeated_failures(turns) == []
    failing = [*turns[:1], *ran(("sed -i s/a/b/ f.py", 1)), turns[2], *ran(("sed -i s/a/b/ g/h.py", 1)), turns[4]]
    assert recovery_rules.repeated_failures(failing) == [(1, 3, 5)], "a repair that failed has changed nothing"


def test_polling_that_ends_is_not() -> None:
    poll = ("curl -s localhost:8080", 7)
    waited = ran(poll, ("sleep 5", 0), poll, ("sleep 5", 0), poll, ("sleep 5", 0), ("curl -s localhost:8080", 0))
    assert recovery_rules.repeated_failures(waited) == []
    inside = ran(*[("sleep 2; curl -s localhost:8080", 7)] * 4, ("sleep 3; curl -s localhost:8080", 0))
    assert recovery_rules.repeated_failures(inside) == []
    assert recovery_rules.repeated_failures(waited[:-1]) == [(1, 3, 5)], "never answered: for the judge"
    assert recovery_rules.repeated_failures(ran(poll, poll, poll, ("curl -s localhost:8080", 0))) == [(1, 2, 3)], "did not wait"


def test_equal_errors_of_unlike_commands_are_not() -> None:
    assert recovery_rules.repeated_failures(ran(("cat a", 1), ("head b", 1), ("wc -l c", 1), ("tail d", 1))) == []


def test_equivalent_commands_are_the_same() -> None:
    """As River has it: lower case, digits as 0, time stamps left out, words as a set."""
    turns = ran(("tool --port 8080 --seed 1", 1), ("TOOL --port 9090 --seed 2", 1), ("tool --seed 3 --port 1", 1))
    assert recovery_rules.repeated_failures(turns) == [(1, 2, 3)]
    eight = "a b c d e f g h"  # 8 of 10 words in common is 0.8, which is not above it
    assert recovery_rules.repeated_failures(ran((f"{eight} x", 1), (f"{eight} y", 1), (f"{eight} z", 1))) == []


def test_several_are_found_and_a_timeout_is_a_failure() -> None:
    late = [Turn("", "make", "", 124, timed_out=True)] * 3
    assert recovery_rules.repeated_failures([*late, *ran(("touch x", 0)), *ran(*[("npm start", 1)] * 4)]) == [
        (1, 2, 3),
        (5, 6, 7, 8),
    ]
    assert recovery_rules.repeated_failures([Turn("", None, "", None)] * 5) == []
    assert recovery_rules.repeated_failures([Turn("", "keys", "", None)] * 5) == [], "a terminal that tells no code"


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("ls -l /app | grep x", False),
        ("cd /app && python -m pytest -q 2>&1 | tail -3", False),
        ("timeout 5 cat f; FOO=1 env", False),
        ("grep 'a > b' f 2>/dev/null", False),
        ("cat > f <<'EOF'\nx\nEOF", True),
        ("echo x >> f", True),
        ("sed -n 3p f", False),
        ("sed -i s/a/b/ f", True),
        ("find . -name x", False),
        ("find . -name x -delete", True),
        ("curl http://x", False),
        ("curl -o f http://x", True),
        ("echo x | tee f", True),
        ("sudo rm f", True),
        ("python fix.py", True),
        ("", False),
    ],
)
def test_what_may_change_something(command: str, changed: bool) -> None:
    assert recovery_rules.changes(command) is changed


@pytest.mark.parametrize(
    ("sentence", "touching", "harmless"),
    [
        ("Do not modify `tests/test_a.py`.", "sed -i s/a/b/ tests/test_a.py", "cat tests/test_a.py"),
        ("You must not change /app/data/raw.csv.", "rm -rf /app/data", "rm -rf /app/out"),
        ("Leave config.json unchanged.", "echo {} > config.json", "echo {} > other.json"),
        ("Never read secrets.txt.", "cat secrets.txt", "cat public.txt"),
        ("Do not use the network.", "pip install numpy", "python run.py"),
        ("Solve it without sudo.", "sudo make", "make"),
        ("Don't delete any file.", "rm old.txt", "touch new.txt"),
        ("You may not install packages.", "apt-get install jq", "jq . f"),
        ("Never hard-code the answer.", "echo 42 > out", "cat out"),
        ("Write only to /app/out.", "echo x > /tmp/y", "ls /tmp"),
        ("Use at most two commands.", "make", "ls"),
    ],
)
def test_a_constraint_and_the_commands_that_may_touch_it(sentence: str, touching: str, harmless: str) -> None:
    instruction = f"Repair the program.\n- {sentence}"
    turns = ran((harmless, 0), (touching, 0), (harmless, 0))
    assert recovery_rules.touched_constraints(instruction, turns) == [recovery_rules.Touch(f"- {sentence}", (2,))]


def test_what_is_no_constraint_flags_nothing() -> None:
    turns = ran(("rm -rf /app", 0), ("curl -o f x", 0))
    assert recovery_rules.touched_constraints("Repair the program. Write the sum to /app/out.txt.", turns) == []
    assert recovery_rules.touched_constraints("Do not use sudo.", []) == []


def test_sentences_are_told_apart() -> None:
    found = recovery_rules.touched_constraints("Never touch a.py. Do not use sudo! Fix b.py.", ran(("sudo cp b.py a.py", 0)))
    assert [touch.sentence for touch in found] == ["Never touch a.py.", "Do not use sudo!"]
    wrapped = "Fix it. You must\nnot use\n  sudo.\n\nRules\n1. never move a.py\n2. avoid rm"
    found = recovery_rules.touched_constraints(wrapped, ran(("sudo mv a.py b.py", 0)))
    assert [touch.sentence for touch in found] == ["You must not use sudo.", "never move a.py", "avoid rm"]
