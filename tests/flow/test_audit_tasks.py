"""`termrsi tasks audit` on real sandboxes: each planted fault is caught by its own gate and by no other; a clean task passes."""

import contextlib
import io
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrsi import task_commands

REWARD = "if {}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
TEST = "#!/bin/bash\n" + REWARD.format('[ "$(cat /app/a)" = 17 ] && [ "$(cat /app/b)" = 23 ]')
SOLUTION = "#!/bin/bash\nset -e\necho 17 > /app/a\necho 23 > /app/b\n"
OFFLINE = "[environment]\nallow_internet = false\n"
NAMES = """name=$(head -c 8 /dev/urandom | sha256sum | cut -c-16)
cat > /logs/verifier/ctrf.json <<END
{"results":{"tests":[{"name":"test_done","status":"passed"},{"name":"test_case[$name]","status":"passed"}]}}
END
"""


def task(
    root: Path, *, test: str = TEST, solution: str = SOLUTION, dockerfile: str = "", toml: str = OFFLINE, **others: str
) -> None:
    files = {
        "instruction.md": "Write 17 to /app/a, and 23 to /app/b.\n",
        "environment/Dockerfile": f"FROM debian:bookworm-slim\nWORKDIR /app\n{dockerfile}",
        "task.toml": f'version = "1.0"\n{toml}',
        "tests/test.sh": test,
        "solution/solve.sh": solution,
    }
    for name, text in (files | others).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"17\n")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server on this machine, which a sandbox with a network can reach."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def audited(tasks: Path, out: Path, *words: str) -> tuple[str, dict[str, dict[str, tuple[str, list[str]]]]]:
    """What was printed, and what was written: task -> gate -> (outcome, evidence)."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert task_commands.run(["audit", str(tasks), f"out={out}", "jobs=2", *words]) == 0
    lines = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    return printed.getvalue(), {line["task"]: {gate: (outcome, told) for gate, outcome, told in line["found"]} for line in lines}


@pytest.fixture(scope="module")
def found(port: int, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, tuple[str, list[str]]]]]:
    """All planted faults in one collection."""
    root = tmp_path_factory.mktemp("planted")
    tasks = root / "tasks"
    task(tasks / "clean")
    task(tasks / "does-not-build", dockerfile="RUN no-such-program\n")
    task(tasks / "solution-fails", solution="echo 17 > /app/a\n")
    task(tasks / "empty-passes", test="#!/bin/bash\n" + REWARD.format("true"))
    task(tasks / "leans-on-its-directory", solution="ln -s /solution/a /app/a\necho 23 > /app/b\n", **{"solution/a": "17\n"})
    task(tasks / "eats-what-it-judges", test=f"{TEST}rm -f /app/a\n")
    task(tasks / "weak", test="#!/bin/bash\n" + REWARD.format("[ -s /app/a ]"))
    task(tasks / "other-names-each-time", test=f"{TEST}{NAMES}")
    fetches = f"cat < /dev/tcp/127.0.0.1/{port} > /app/a\necho 23 > /app/b\n"
    task(tasks / "hides-its-network", solution=fetches)
    task(tasks / "tells-its-network", solution=fetches, toml="[environment]\nallow_internet = true\n")
    task(tasks / "slow", solution=f"sleep 8\n{SOLUTION}", toml=f"[agent]\ntimeout_sec = 15.0\n{OFFLINE}")
    task(tasks / "slow-to-judge", test=f"{TEST}sleep 8\n", toml=f"[verifier]\ntimeout_sec = 15.0\n{OFFLINE}")
    looks = REWARD.format('[ "$(cat /app/a)" = 17 ] && [ "$(cat /app/b)" = 23 ] && [ -s /app/when ] && [ -s /app/number ]')
    task(tasks / "holds-the-time", test=f"#!/bin/bash\n{looks}", solution=f"{SOLUTION}date > /app/when\necho $$ > /app/number\n")
    task(tasks / "no-verifier")
    (tasks / "no-verifier" / "tests" / "test.sh").unlink()
    return audited(tasks, root / "out", "network=host", "mutants=6")


GATES = ["loads", "builds", "network", "oracle", "empty", "replay", "mutation", "flaky", "time"]


@pytest.mark.parametrize(
    ("name", "gate", "outcome", "evidence"),
    [
        ("does-not-build", "builds", "reject", "no-such-program"),
        ("solution-fails", "oracle", "reject", "its solution passes 0 of 2 times, with rewards 0, 0"),
        ("empty-passes", "empty", "reject", "an empty submission passes 2 of 2 times"),
        ("leans-on-its-directory", "replay", "reject", "passes only while /solution is there, which no agent has"),
        ("eats-what-it-judges", "replay", "flag", "a second verification of the same state gives 0, the first 1"),
        ("weak", "mutation", "reject", "not noticed: solve.sh: ends before line 4"),
        ("other-names-each-time", "flaky", "flag", "differs between two runs of the solution"),
        ("hides-its-network", "network", "reject", "fails without a network and passes with one, which it does not ask for"),
        ("tells-its-network", "network", "flag", "passes with a network only, as its task.toml lets it"),
        ("slow", "time", "flag", "its solution takes "),
        ("slow-to-judge", "time", "flag", "its verifier takes "),
    ],
)
def test_each_fault_is_caught_by_its_gate(found, name: str, gate: str, outcome: str, evidence: str) -> None:
    _, by_task = found
    gates = by_task[name]
    assert gates[gate][0] == outcome, gates
    assert any(evidence in line for line in gates[gate][1]), gates
    assert [key for key, (said, _) in gates.items() if said != "passed"] == [gate]
    assert list(gates) == (GATES[: GATES.index(gate) + 1] if outcome == "reject" else GATES), "and there it leaves"


def test_a_clean_task_passes_all(found) -> None:
    _, by_task = found
    assert list(by_task["clean"]) == GATES
    assert {outcome for outcome, _ in by_task["clean"].values()} == {"passed"}
    assert by_task["clean"]["mutation"][1] == ["6 of 6 broken solutions noticed (100%); 0 changed nothing, 0 had no result"]


def test_what_no_two_runs_share_is_no_difference(found) -> None:
    """Times and numbers of processes: a broken solution is not told from the whole by them, and the verifier not blamed."""
    _, by_task = found
    assert {outcome for outcome, _ in by_task["holds-the-time"].values()} == {"passed"}, by_task["holds-the-time"]


def test_the_funnel_and_the_verdicts_are_printed(found) -> None:
    printed, _ = found
    rows = {cells[0]: cells[1:] for line in printed.splitlines() if (cells := [cell.strip() for cell in line.split("│")[1:-1]])}
    assert rows["loads"][:4] == ["14", "1", "0", "0"]
    assert rows["builds"][:4] == ["13", "1", "0", "0"]
    assert rows["network"][:4] == ["12", "1", "0", "1"]
    assert rows["oracle"][:4] == ["11", "1", "0", "0"]
    assert rows["mutation"][:4] == ["8", "1", "0", "0"]
    assert rows["time"][:4] == ["7", "0", "0", "2"]
    assert "14 tasks: 2 clean, 5 flagged, 0 not measured, 7 rejected" in printed
    assert "rejected: no-verifier\n  loads: tests/test.sh is missing" in printed
    assert "no judge was given" in printed


def test_without_a_network_to_try_what_programs_say_counts(tmp_path: Path) -> None:
    looks = "read -r x < /dev/tcp/example.invalid/80\necho $x > /app/a\necho 23 > /app/b\n"
    task(tmp_path / "tasks" / "hidden", solution=looks)
    task(tmp_path / "tasks" / "told", solution=looks, toml="[environment]\nallow_internet = true\n")
    task(tmp_path / "tasks" / "idle", solution=f"( {looks.splitlines()[0]} )\n{SOLUTION}")
    _, by_task = audited(tmp_path / "tasks", tmp_path / "out", "mutants=2")
    for name, outcome in (("hidden", "reject"), ("told", "unmeasured"), ("idle", "flag")):
        assert by_task[name]["network"][0] == outcome, by_task[name]
        assert any("example.invalid" in line for line in by_task[name]["network"][1])


def test_what_is_found_is_not_looked_for_again(tmp_path: Path) -> None:
    task(tmp_path / "tasks" / "one")
    task(tmp_path / "tasks" / "two", solution="true\n")
    first, _ = audited(tmp_path / "tasks", tmp_path / "out", "mutants=2")
    log = tmp_path / "out" / "audit.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"key": "half')
    (tmp_path / "tasks" / "two" / "solution" / "solve.sh").write_text(SOLUTION)
    second, _ = audited(tmp_path / "tasks", tmp_path / "out", "mutants=2")
    added = [json.loads(line)["task"] for line in log.read_bytes().removeprefix(whole).splitlines()]
    assert added == ["two"], "whose solution is another; and the half line is gone"
    assert "1 clean, 0 flagged, 0 not measured, 1 rejected" in first
    assert "2 clean" in second
