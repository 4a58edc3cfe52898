"""Broken copies of solutions: where commands end, what is left out or changed, and how many there are."""

import subprocess

from termrsi.reward.mutants import commands, mutants

SCRIPT = """#!/bin/bash
set -e
# first
cd /app
cat > run.py <<'END'
for i in range(3):
    print("no; done")
END
if [ -f x ]; then
  rm x
fi
echo a \\
  b > y.txt
"""


def test_commands_of_several_lines_are_one() -> None:
    found = commands(SCRIPT)
    assert [first for first, _ in found] == [4, 5, 9, 12]
    assert found[1][1].endswith("END\n")
    assert found[3][1] == "echo a \\\n  b > y.txt\n"


def test_what_never_ends_is_the_last_command() -> None:
    assert commands("true\nif x; then\n  y\n") == [(1, "true\n"), (2, "if x; then\n  y\n")]
    assert commands("") == commands("#!/bin/bash\nset -euo pipefail\n") == []


def test_each_mutant_is_one_change_and_still_a_script() -> None:
    found = mutants({"solve.sh": SCRIPT}, 100, "seed")
    assert len({one.text for one in found}) == len(found)
    assert all(one.text != SCRIPT for one in found)
    for one in found:
        assert subprocess.run(["bash", "-n"], input=one.text, text=True, capture_output=True, check=False).returncode == 0, one
    said = {one.what for one in found}
    assert "solve.sh: ends before line 9" in said
    assert "solve.sh line 4: without 'cd /app'" in said
    assert "solve.sh line 7: without 'print(\"no; done\")'" in said, "a line inside a here-document"
    assert "solve.sh line 10: without 'rm x'" not in said, "an `if` without a command is no script"
    assert "solve.sh line 6: 3 is 4" in said
    assert 'solve.sh line 7: "no; done" is "no; donf"' in said
    assert "solve.sh line 13: y.txt is y.txu" in said
    assert not any("line 1:" in what or "line 2:" in what or "line 3:" in what for what in said)


def test_other_files_of_the_solution_are_broken_by_the_line() -> None:
    found = mutants({"solve.sh": "python3 /solution/s.py\n", "s.py": "# says\nx = 1\nprint(x)\n"}, 100, "seed")
    assert {"s.py line 2: without 'x = 1'", "s.py line 3: without 'print(x)'", "s.py line 2: 1 is 2"} <= {one.what for one in found}
    assert all(one.text.startswith("# says\n") for one in found if one.file == "s.py")


def test_typed_commands_are_left_out_one_by_one() -> None:
    found = mutants({"solution.yaml": "- command: cd /app\n- command: touch done\n"}, 100, "seed")
    assert [one.text for one in found] == ["- command: touch done\n", "- command: cd /app\n"]
    assert mutants({"solution.yaml": "a: {"}, 100, "seed") == []


def test_a_bound_keeps_some_of_each_kind_and_the_same_ones_for_a_seed() -> None:
    script = "".join(f"echo {i}00 > /app/f{i}.txt\n" for i in range(30))
    found = mutants({"solve.sh": script}, 7, "a")
    assert len(found) == 7
    kinds = [("ends" in one.what, "without" in one.what, " is " in one.what) for one in found]
    assert [sum(kind) for kind in zip(*kinds, strict=True)] == [1, 3, 3]
    assert mutants({"solve.sh": script}, 7, "a") == found
    assert mutants({"solve.sh": script}, 7, "b") != found


def test_what_is_data_is_left_alone() -> None:
    assert mutants({"solve.sh": "cp /solution/x /app\n", "x": "word 1\n" * 20_000}, 1000, "s") == mutants(
        {"solve.sh": "cp /solution/x /app\n"}, 1000, "s"
    )
