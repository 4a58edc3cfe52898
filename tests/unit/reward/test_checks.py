"""Measuring a task's checks: baseline and oracle on scripted verdicts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi.errors import TaskError, VerifierError
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, EnvironmentSpec, Snapshot, TaskSpec, Verdict
from termrsi.reward.checks import TaskChecks, measure


class ScriptedSandbox:
    """Knows only whether the solution was run."""

    id = "scripted"

    def __init__(self, timed_out: bool = False) -> None:
        self.solved = False
        self.timed_out = timed_out
        self.commands: list[str] = []

    async def put(self, source: Path | str, target: str) -> None:
        assert target == "/solution"

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        self.commands.append(command)
        self.solved = self.solved or "solve.sh" in command
        return CommandResult(124 if self.timed_out else 0, "", timed_out=self.timed_out)


class ScriptedPool:
    def __init__(self, timed_out: bool = False) -> None:
        self.out: list[ScriptedSandbox] = []
        self.commands: list[str] = []  # of those released
        self.leases = 0
        self.timed_out = timed_out

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
        self.leases += 1
        self.out.append(ScriptedSandbox(self.timed_out))
        return self.out[-1]  # pyright: ignore[reportReturnType]  # only what is used

    async def release(self, sandbox: Sandbox) -> None:
        self.commands += sandbox.commands  # pyright: ignore[reportAttributeAccessIssue]  # a ScriptedSandbox
        self.out.remove(sandbox)  # pyright: ignore[reportArgumentType]  # only what is used

    async def discard(self, snapshot: Snapshot) -> None: ...

    async def kept(self, snapshot: Snapshot) -> bool:
        raise NotImplementedError


class ScriptedVerifier:
    def __init__(self, empty: list[Verdict], solved: list[Verdict]) -> None:
        self.verdicts = {False: empty, True: solved}

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        verdicts = self.verdicts[sandbox.solved]  # pyright: ignore[reportAttributeAccessIssue]  # a ScriptedSandbox
        if not verdicts:
            raise VerifierError("no more verdicts", task.id)
        return verdicts.pop(0)


@pytest.fixture
def task(tmp_path: Path) -> TaskSpec:
    (tmp_path / "solution").mkdir()
    (tmp_path / "solution" / "solve.sh").write_text("true\n")
    return TaskSpec("t", "f", "do it", str(tmp_path), EnvironmentSpec())


EMPTY = Verdict(False, 0.0, passed=("kept",), failed=("made", "right"), source="ctrf")
SOLVED = Verdict(True, 1.0, passed=("made", "right", "kept"), source="ctrf")


async def test_checks_and_baseline(task: TaskSpec) -> None:
    pool = ScriptedPool()
    found = await measure(pool, ScriptedVerifier([EMPTY], [SOLVED]), task)
    assert found == TaskChecks(
        "t", "f", ("made", "right", "kept"), ("kept",), {"made": 1.0, "right": 1.0, "kept": 1.0}, (), ("made", "right", "kept")
    )
    assert TaskChecks.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert pool.leases == 2
    assert not pool.out


async def test_what_the_solution_replaces_is_the_tasks_own_wish(task: TaskSpec) -> None:
    changed = replace(SOLVED, replaced=("/usr/bin/python3", "/usr/local/bin/black"))
    assert (await measure(ScriptedPool(), ScriptedVerifier([EMPTY], [changed]), task)).touches == ("/usr/bin/python3",)


async def test_a_check_that_differs_between_equal_runs_weighs_nothing(task: TaskSpec) -> None:
    flaky = Verdict(False, 0.0, passed=("kept", "made"), failed=("right",), source="ctrf")
    found = await measure(ScriptedPool(), ScriptedVerifier([EMPTY, flaky], [SOLVED, SOLVED]), task, repeats=2)
    assert found.weights == {"made": 0.0, "right": 1.0, "kept": 1.0}


async def test_refusals_return_every_sandbox(task: TaskSpec) -> None:
    for empty, solved, message in (
        ([SOLVED], [SOLVED], "empty submission passes"),
        ([EMPTY], [EMPTY], "own solution fails: made, right"),
    ):
        pool = ScriptedPool()
        with pytest.raises(TaskError, match=message):
            await measure(pool, ScriptedVerifier(empty, solved), task)
        assert not pool.out


async def test_a_broken_verifier_is_not_a_verdict(task: TaskSpec) -> None:
    pool = ScriptedPool()
    with pytest.raises(VerifierError):
        await measure(pool, ScriptedVerifier([], []), task)
    assert not pool.out


async def test_a_solution_that_runs_out_of_time(task: TaskSpec) -> None:
    with pytest.raises(TaskError, match="out of time"):
        await measure(ScriptedPool(timed_out=True), ScriptedVerifier([EMPTY], [SOLVED]), task)


async def test_no_solution(task: TaskSpec) -> None:
    (Path(task.path) / "solution" / "solve.sh").unlink()
    with pytest.raises(TaskError, match="solve"):
        await measure(ScriptedPool(), ScriptedVerifier([EMPTY], [SOLVED]), task)


async def test_a_solution_has_its_own_variables(task: TaskSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_HERE", "a b")
    Path(task.path, "task.toml").write_text('[solution]\nenv = {A = "${TOKEN_OF_HERE}", B = "${GONE:-c}"}\n')
    pool = ScriptedPool()
    await measure(pool, ScriptedVerifier([EMPTY], [SOLVED]), task)
    assert any(command.startswith("env A='a b' B=c bash /solution/solve.sh") for command in pool.commands), pool.commands
