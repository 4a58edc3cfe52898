"""An audit of tasks over scripted sandboxes: gates in order, machine faults, a log that is gone on with."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from termrsi.errors import ConfigError, EngineError, SandboxError, SandboxSpoiled, TaskError, VerifierError
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, EnvironmentSpec, Outcome, Snapshot, TaskAudit, TaskSpec, Verdict, Writing
from termrsi.reward import gates, inspection, judges
from termrsi.reward.audit import Auditor
from termrsi.reward.inspection import Bench


class World:
    """Pool, sandbox and verifier in one: strict if the last solution that was put says `good`."""

    id = "scripted"

    def __init__(self) -> None:
        self.leases = 0
        self.held = 0
        self.text = ""
        self.lease_fault: Callable[[int], Exception | None] = lambda number: None
        self.verify_fault: Callable[[int], Exception | None] = lambda number: None
        self.run_fault: Exception | None = None
        self.verified = 0
        self.given_s: list[float | None] = []  # to each solution

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
        self.leases += 1
        if fault := self.lease_fault(self.leases):
            raise fault
        self.held += 1
        self.text = ""
        return self  # pyright: ignore[reportReturnType]  # only what is used

    async def release(self, sandbox: Sandbox) -> None:
        self.held -= 1

    async def discard(self, snapshot: Snapshot) -> None: ...

    async def kept(self, snapshot: Snapshot) -> bool:
        raise NotImplementedError

    async def put(self, source: Path | str, target: str) -> None:
        source = Path(source)
        self.text = (source / "solve.sh" if source.is_dir() else source).read_text()

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        if "bash /solution" in command:
            self.given_s.append(timeout_s)
            if self.run_fault is not None:
                raise self.run_fault
        return CommandResult(1 if "find /" in command else 0, "", duration_s=20.0)  # no state can be had

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        self.verified += 1
        if fault := self.verify_fault(self.verified):
            raise fault
        good = "good" in self.text
        return Verdict(good, float(good), ("a",) if good else (), () if good else ("a",))


@pytest.fixture
def task(tmp_path: Path) -> TaskSpec:
    return made(tmp_path, "t")


def made(root: Path, name: str, solution: str = "echo good\n") -> TaskSpec:
    for file, text in (("task.toml", ""), ("tests/test.sh", "true\n"), ("solution/solve.sh", solution)):
        (root / name / file).parent.mkdir(parents=True, exist_ok=True)
        (root / name / file).write_text(text)
    return TaskSpec(name, "f", "do it", str(root / name), EnvironmentSpec())


async def audited(world: World, *tasks: TaskSpec, log: Path, mutants: int = 3, **others) -> list[TaskAudit]:
    auditor = Auditor(bench=Bench(world, world), log=log, mutants=mutants, **others)
    found = [audit async for audit in auditor.run(tasks)]
    assert world.held == 0
    return sorted(found, key=lambda audit: audit.task_id)


def said(audit: TaskAudit) -> dict[str, Outcome]:
    return {finding.gate: finding.outcome for finding in audit.findings}


async def test_every_gate_in_order(task: TaskSpec, tmp_path: Path) -> None:
    world = World()
    (audit,) = await audited(world, task, log=tmp_path / "log")
    assert list(said(audit)) == list(gates.GATES)
    assert audit.verdict == "clean", audit
    assert world.leases == 1 + 2 + 2 + 1 + 1, "a start, two solutions, two of nothing, a replay, a mutant"
    assert audit.findings[6].evidence == ("1 of 1 broken solutions noticed (100%); 0 changed nothing, 0 had no result",)


async def test_a_task_leaves_at_the_first_gate_that_rejects_it(tmp_path: Path) -> None:
    world = World()
    (audit,) = await audited(world, made(tmp_path, "t", "echo bad\n"), log=tmp_path / "log")
    assert list(said(audit)) == ["loads", "builds", "network", "oracle"]
    assert world.leases == 3


async def test_without_a_solution_nothing_shows_that_it_can_be_done(task: TaskSpec, tmp_path: Path) -> None:
    (Path(task.path) / "solution" / "solve.sh").unlink()
    (audit,) = await audited(World(), task, log=tmp_path / "log")
    assert audit.findings[-1] == gates.oracle([gates.Run(refused="there is no solution/solve.sh")])


async def test_what_the_machine_loses_is_tried_again(task: TaskSpec, tmp_path: Path) -> None:
    world = World()
    world.lease_fault = lambda number: SandboxError("lost") if number % 3 == 1 else None
    world.verify_fault = lambda number: VerifierError("broke off") if number % 4 == 1 else None
    (audit,) = await audited(world, task, log=tmp_path / "log")
    assert audit.verdict == "clean", audit


async def test_what_it_loses_each_time_is_not_measured_and_measured_the_next_time(task: TaskSpec, tmp_path: Path) -> None:
    world = World()
    world.verify_fault = lambda number: VerifierError("no reward file")
    (audit,) = await audited(world, task, log=tmp_path / "log")
    assert audit.verdict == "not measured"
    assert audit.findings[-1].evidence == ("its solution could not be judged: no reward file",)
    assert world.verified == 2 * (1 + inspection.RETRIES)
    (audit,) = await audited(World(), task, log=tmp_path / "log")
    assert audit.verdict == "clean"
    world = World()
    world.lease_fault = lambda number: SandboxError("no namespaces here")
    (audit,) = await audited(world, made(tmp_path, "u"), log=tmp_path / "log")
    assert (audit.verdict, audit.findings[-1].gate) == ("not measured", "builds")


async def test_what_the_task_does_is_not_the_machines(tmp_path: Path) -> None:
    world = World()
    world.lease_fault = lambda number: TaskError("RUN 1 fails", "Dockerfile:2")
    (audit,) = await audited(world, made(tmp_path, "t"), log=tmp_path / "log")
    assert said(audit) == {"loads": Outcome.passed, "builds": Outcome.reject}
    world = World()
    world.run_fault = SandboxSpoiled("its disk is full")
    (audit,) = await audited(world, made(tmp_path, "u"), log=tmp_path / "log")
    assert audit.findings[-1].evidence == ("its own solution leaves the sandbox unusable: its disk is full",)


async def test_a_mutant_is_verified_as_it_is(tmp_path: Path) -> None:
    weak = made(tmp_path, "t", "echo good\necho more\necho and more\n")
    (audit,) = await audited(World(), weak, log=tmp_path / "log", mutants=9)
    assert audit.findings[6].outcome is Outcome.reject
    assert audit.findings[6].evidence[0].startswith("1 of 4 broken")  # it ends half-way, or one of its commands is left out


WHOLE = {"/app/a": "f 1"}
OTHERS = {"/opt/of-another": "d 1"}


@pytest.mark.parametrize(
    ("states", "now", "said"),
    [
        ([WHOLE, WHOLE], WHOLE, "1 of 1 broken solutions noticed (100%); 1 changed nothing, 0 had no result"),
        ([WHOLE | OTHERS, WHOLE], WHOLE, "1 of 1 broken solutions noticed (100%); 1 changed nothing, 0 had no result"),
        ([None, WHOLE], WHOLE, "1 of 1 broken solutions noticed (100%); 1 changed nothing, 0 had no result"),
        ([None, None], WHOLE, "1 of 1 broken solutions noticed (100%); 0 changed nothing, 1 had no result"),
        ([WHOLE | {"/b": "f 1"}] * 2, WHOLE, "1 of 2 broken solutions noticed (50%); 0 changed nothing, 0 had no result"),
        ([WHOLE | OTHERS] * 2, WHOLE | OTHERS, "1 of 1 broken solutions noticed (100%); 1 changed nothing, 0 had no result"),
        ([WHOLE | {"/b": "f 1"}] * 2, WHOLE | OTHERS, "1 of 2 broken solutions noticed (50%); 0 changed nothing, 0 had no result"),
        ([WHOLE | {"/b": "f 1"}] * 2, None, "1 of 2 broken solutions noticed (50%); 0 changed nothing, 0 had no result"),
    ],
)
async def test_a_verifier_is_blamed_for_what_it_takes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[dict[str, str] | None], now: dict[str, str] | None, said: str
) -> None:
    """A directory that somebody made on the host meanwhile, for a moment or to stay, or a listing that failed, is no change by a
    mutant. `now`: what a whole solution leaves after the mutant."""
    world, left = World(), list(states)

    async def taken(sandbox: Sandbox, instruction: str) -> dict[str, str] | None:
        if "sleep 2" in world.text:
            return left.pop(0)
        return {} if "good" not in world.text else WHOLE if left else now

    monkeypatch.setattr(inspection.endstate, "taken", taken)
    monkeypatch.setattr(inspection.mutants, "mutants", lambda files, limit, seed: [
        inspection.mutants.Mutant(":solve.sh", "a sleep is longer", "echo good; sleep 2\n"),
        inspection.mutants.Mutant(":solve.sh", "it says another thing", "echo bad\n"),
    ])  # fmt: skip
    (audit,) = await audited(world, made(tmp_path, "t", "echo good; sleep 1\n"), log=tmp_path / "log")
    assert next(one for one in audit.findings if one.gate == "mutation").evidence[0] == said


async def test_a_mutant_has_three_times_the_solutions_seconds(task: TaskSpec, tmp_path: Path) -> None:
    world = World()
    (audit,) = await audited(world, task, log=tmp_path / "log")
    assert world.given_s == [600.0, 600.0, 600.0, 60.0]
    assert said(audit)["time"] is Outcome.passed, "a task without a limit has none to come near"


async def test_finished_items_are_never_done_twice(tmp_path: Path) -> None:
    tasks = [made(tmp_path, name) for name in ("a", "b", "c")]
    log, world = tmp_path / "log", World()
    before = await audited(world, *tasks[:2], log=log)
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"key": "killed he')
    leases = world.leases
    after = await audited(world, *tasks, log=log)
    assert [audit.findings for audit in after[:2]] == [audit.findings for audit in before]
    assert world.leases == leases + leases // 2
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["task"] for line in lines] == ["a", "b", "c"]
    assert log.read_bytes().startswith(whole)
    made(tmp_path, "a", "echo bad\n")
    assert (await audited(world, *tasks, log=log))[0].verdict == "rejected", "another content is another task"
    assert (await audited(world, *tasks, log=log, mutants=2))[1].verdict == "clean"
    assert len(log.read_text().splitlines()) == 3 + 1 + 3, "and other settings are another audit"


async def test_a_log_is_one_audits_at_a_time_and_must_be_one(task: TaskSpec, tmp_path: Path) -> None:
    log, world = tmp_path / "log", World()
    first = Auditor(bench=Bench(world, world), log=log).run([task])
    await anext(first)
    with pytest.raises(ConfigError, match="another audit writes there"):
        await audited(world, task, log=log)
    await first.aclose()
    log.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="line 1 is none of an audit"):
        await audited(world, task, log=log)


async def test_a_judge_reads_what_passed_every_gate_only(tmp_path: Path) -> None:
    asked: list[str] = []

    class Silent:
        async def write(self, messages, sampling, key="", begun=""):
            asked.append(key)
            raise SandboxError("never mind")  # whatever a writer raises that is none of its own comes out

    with pytest.raises(SandboxError):
        await audited(World(), made(tmp_path, "a"), log=tmp_path / "log", judge=Silent())
    await audited(World(), made(tmp_path, "b", "echo bad\n"), log=tmp_path / "log", judge=Silent())
    assert asked == ["audit/a/1"]


async def test_what_the_judges_say_stands_behind_the_gates_and_is_asked_once(task: TaskSpec, tmp_path: Path) -> None:
    seeds: list[int] = []

    class Strict:
        async def write(self, messages, sampling, key="", begun=""):
            seeds.append(sampling.seed)
            said = {facet: {"verdict": "accept", "reason": "", "evidence": []} for facet in judges.FACETS}
            if key.endswith("/2"):
                said["leakage"] = {"verdict": "reject", "reason": "it is there", "evidence": ["do it"]}
            return Writing(json.dumps(said), 50, 5, 0.5)

    log = tmp_path / "log"
    (audit,) = await audited(World(), task, log=log, judge=Strict(), judge_name="m")
    assert (audit.verdict, audit.prompt_tokens, audit.cost) == ("rejected", 100, 1.0)
    assert list(said(audit)) == [*gates.GATES, *judges.FACETS]
    (again,) = await audited(World(), task, log=log, judge=Strict(), judge_name="m")
    assert (again.findings, again.prompt_tokens, again.sandbox_s, again.cost) == (audit.findings, 0, 0.0, 0.0)
    assert seeds == [3, 6]
    await audited(World(), task, log=log, judge=Strict(), judge_name="another")
    assert seeds == [3, 6, 3, 6], "another model is another judge; the gates are not measured again"
    assert len(log.read_text().splitlines()) == 1 + 2 + 2


async def test_a_judge_who_cannot_be_had_ends_the_audit_and_one_without_room_is_told(task: TaskSpec, tmp_path: Path) -> None:
    class Dead:
        async def write(self, messages, sampling, key="", begun=""):
            raise EngineError("nobody there", "http://h")

    with pytest.raises(EngineError, match="nobody there"):
        await audited(World(), task, log=tmp_path / "log", judge=Dead())
    (audit,) = await audited(World(), task, log=tmp_path / "log", judge=Dead(), judge_fits=lambda messages: False)
    assert (audit.verdict, audit.sandbox_s) == ("not measured", 0.0), "what the gates said was kept"
    assert audit.findings[-1].evidence == ("unjudged", "judge 1: too_long", "judge 2: too_long")
