"""The stage that judges: once per run, whatever stopped it; invalid and too long ones counted; the result from its lines alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from termrsi import fakes
from termrsi.config.schema import Config
from termrsi.config.stages import AnalyseConfig
from termrsi.errors import EngineError, RequestRefused, StageError
from termrsi.ports import Writer
from termrsi.records import Message, Rollout, SamplingParams, ScoredRollout, StopReason, Turn, Verdict, Writing
from termrsi.stages import analyse
from termrsi.stages.base import Context, Progress, Splits
from termrsi.stages.error_rules import CATEGORIES

CONFIG = AnalyseConfig(of="eval", concurrency=2, rounds=1, prompt_tokens=20_000)


def reply(**states: str) -> str:
    """An unresolved or recovered error in turn 1 where it is said."""
    found = {}
    for category in CATEGORIES:
        state = states.get(category, "no_error")
        later = ([2], [3]) if state == "recovered" else ([], [])
        mistake = {"error": [1], "correction": later[0], "confirmation": later[1], "contributes": state == "unresolved"}
        errors = [] if state == "no_error" else [mistake]
        found[category] = {"state": state, "errors": errors, "reason": "seen", "confidence": 1.0}
    return json.dumps(found)


@dataclass
class ByTask:
    """`ports.Writer` that answers by the instruction it is shown; dies at call `dies_at` (from 1)."""

    answers: dict[str, str]
    dies_at: int = 0
    asked: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        if len(self.asked) + 1 == self.dies_at:
            raise EngineError("told to die", "writer")
        (task,) = (name for name in self.answers if f"case {name.replace('-', ' ')}." in messages[1].content)
        self.asked.append(task)
        return Writing(self.answers[task], 10, 3, 0.25)

    def of(self, role: str) -> Writer:
        self.roles.append(role)
        return self


@dataclass
class Evaluated:
    """Evaluations on disk, and a context to analyse them in; the same directory each time."""

    root: Path
    made: fakes.FakeParts = field(default_factory=fakes.dry_parts)

    def write(self, stage: str, runs: Sequence[tuple[str, bool]], turns: int = 3, observation: str = "") -> Path:
        """`runs`: of which task, and whether it was a success."""
        folder = self.root / stage
        folder.mkdir(exist_ok=True)
        lines: list[dict] = [{"label": stage, "id": "x", "group_id": "g", "task_id": "heldout-0", "reason": "lost", "attempts": 3}]
        for number, (task, strict) in enumerate(runs):
            did = tuple(Turn("...", f"do {i}", observation, 0) for i in range(turns))
            family = ("files", "data")[int(task[-1]) % 2]
            rollout = Rollout(f"{stage}/{task}/{number}", "g", task, family, "react", (), did, StopReason.done)
            lines.append({"label": stage, **asdict(ScoredRollout(rollout, Verdict(strict, float(strict), ("a",))))})
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "scores.json").write_text("{}")
        return folder / "scores.json"

    def ctx(self, writer: Callable[[str], Writer], **inputs: Path) -> Context:
        out, made = self.root / "errors", self.made
        out.mkdir(exist_ok=True)
        return Context(
            config=Config(),
            name="errors",
            out=out,
            tasks=Splits(*made.tasks),
            checks=made.checks,
            chat=made.chat,
            generator=made.generator,
            writer=writer,
            rollouts=made.rollouts,
            policy=made.policy,
            critic=None,
            reference=None,
            queue=None,
            groups=made.groups,
            scan=made.scan,
            pool=made.pool,
            verifier=made.verifier,
            inputs=inputs,
            log=lambda stage, values: None,
            progress=Progress(),
            publish=made.policy.publish,
        )


@pytest.fixture
def evaluated(tmp_path: Path) -> Evaluated:
    return Evaluated(tmp_path)


ANSWERS = {
    "heldout-0": reply(planning="recovered"),
    "heldout-1": reply(planning="unresolved", tool_use="recovered"),
    "heldout-2": reply(),
    "heldout-3": reply(planning="recovered"),
}
RUNS = [("heldout-0", True), ("heldout-1", False), ("heldout-2", True), ("heldout-3", False)]


async def test_each_run_is_judged_once_and_counted(evaluated: Evaluated) -> None:
    writer = ByTask(ANSWERS)
    ctx = evaluated.ctx(writer.of, of=evaluated.write("eval", RUNS))
    result = await analyse.run(ctx, CONFIG)
    assert sorted(writer.asked) == sorted(ANSWERS)
    assert set(writer.roles) == {"judge"}
    found = json.loads(Path(result.outputs["errors"]).read_text())
    planning = found["of"]["categories"]["planning"]
    assert (planning["recovered"], planning["unresolved"], planning["no_error"]) == (2, 1, 1)
    assert planning["rate"] == pytest.approx(2 / 3)
    assert found["of"]["families"]["data"]["planning"]["rate"] == 0.5
    assert found["of"]["families"]["files"]["tool_use"]["rate"] is None
    assert (found["of"]["stage"], found["of"]["judged"], found["of"]["invalid"]) == ("eval", 4, 0)
    assert result.summary["planning_recovery"] == pytest.approx(2 / 3)
    assert result.summary["verification_recovery"] is None
    assert (ctx.costs.prompt_tokens, ctx.costs.completion_tokens, ctx.costs.cost, result.summary["cost"]) == (40, 12, 1.0, 1.0)


async def test_an_answer_that_stays_at_fault_is_counted_as_invalid(evaluated: Evaluated) -> None:
    answers = ANSWERS | {"heldout-0": reply(planning="unresolved"), "heldout-2": "no idea"}  # the first was a success
    writer = ByTask(answers)
    result = await analyse.run(evaluated.ctx(writer.of, of=evaluated.write("eval", RUNS)), CONFIG)
    assert writer.asked.count("heldout-0") == writer.asked.count("heldout-2") == 2
    assert result.counts == {"judged_of": 2, "invalid_of": 2, "fault_no_object": 2, "fault_unresolved_in_success": 2}
    nothing = ByTask(dict.fromkeys(ANSWERS, ""))
    (evaluated.root / "errors" / analyse.FILE).unlink()
    result = await analyse.run(evaluated.ctx(nothing.of, of=evaluated.root / "eval" / "scores.json"), CONFIG)
    assert (result.summary["judged"], result.summary["planning_recovery"]) == (0, None)


async def test_a_request_that_is_refused_is_counted_and_the_others_are_judged(evaluated: Evaluated) -> None:
    class Filtering(ByTask):
        async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
            if "case heldout 2." in messages[1].content:
                raise RequestRefused("400 content filter", "http://h")
            return await super().write(messages, sampling, key, begun)

    writer = Filtering(ANSWERS)
    result = await analyse.run(evaluated.ctx(writer.of, of=evaluated.write("eval", RUNS)), CONFIG)
    assert result.counts == {"judged_of": 3, "invalid_of": 1, "fault_refused": 1}
    assert len(writer.asked) == 3


async def test_a_run_too_long_for_the_judge_is_not_asked_about(evaluated: Evaluated) -> None:
    writer = ByTask(ANSWERS)
    scores = evaluated.write("eval", RUNS[:1], turns=40, observation="word " * 400)
    config = AnalyseConfig(of="eval", prompt_tokens=1000)
    result = await analyse.run(evaluated.ctx(writer.of, of=scores), config)
    assert (result.counts, writer.asked) == ({"too_long_of": 1}, [])
    short = evaluated.write("eval", RUNS[:1], turns=4, observation="word " * 400)
    result = await analyse.run(evaluated.ctx(writer.of, of=short), config)
    assert (result.counts, writer.asked) == ({"judged_of": 1}, ["heldout-0"])


async def test_it_goes_on_where_it_was_stopped(evaluated: Evaluated) -> None:
    scores = evaluated.write("eval", RUNS)
    whole = await analyse.run(evaluated.ctx(ByTask(ANSWERS).of, of=scores), CONFIG)
    expected, path = Path(whole.outputs["errors"]).read_text(), Path(whole.outputs["judgements"])
    path.unlink()
    dying = ByTask(ANSWERS, dies_at=3)
    with pytest.raises(EngineError):
        await analyse.run(evaluated.ctx(dying.of, of=scores), CONFIG)
    assert len(path.read_text().splitlines()) == len(dying.asked) == 2
    again = ByTask(ANSWERS)
    result = await analyse.run(evaluated.ctx(again.of, of=scores), CONFIG)
    assert sorted([*dying.asked, *again.asked]) == sorted(ANSWERS), "none twice"
    assert Path(result.outputs["errors"]).read_text() == expected
    assert result.summary == whole.summary


async def test_half_a_line_is_dropped_and_its_run_judged_again(evaluated: Evaluated) -> None:
    scores = evaluated.write("eval", RUNS)
    whole = await analyse.run(evaluated.ctx(ByTask(ANSWERS).of, of=scores), CONFIG)
    path = Path(whole.outputs["judgements"])
    lines = path.read_bytes().splitlines(keepends=True)
    for torn in (lines[-1][:40], lines[-1][:-1], b"\0" * 30, b"\0" * 30 + b"\n"):
        path.write_bytes(b"".join(lines[:-1]) + torn)
        again = ByTask(ANSWERS)
        await analyse.run(evaluated.ctx(again.of, of=scores), CONFIG)
        assert again.asked == [json.loads(lines[-1])["task"]]
        assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)
    nobody = ByTask(ANSWERS, dies_at=1)
    await analyse.run(evaluated.ctx(nobody.of, of=scores), CONFIG)
    assert nobody.asked == []


async def test_judgements_of_other_rollouts_are_not_counted(evaluated: Evaluated) -> None:
    """The evaluation was run again: ids are the same, rollouts are not."""
    await analyse.run(evaluated.ctx(ByTask(ANSWERS).of, of=evaluated.write("eval", RUNS)), CONFIG)
    again = ByTask(ANSWERS)
    changed = [(task, not strict if task == "heldout-2" else strict) for task, strict in RUNS]
    result = await analyse.run(evaluated.ctx(again.of, of=evaluated.write("eval", changed)), CONFIG)
    assert again.asked == ["heldout-2"]
    assert result.counts == {"judged_of": 4}


async def test_two_evaluations_are_compared_by_task(evaluated: Evaluated) -> None:
    before = evaluated.write("base", [("heldout-0", False), ("heldout-1", False)])
    after = evaluated.write("final", [("heldout-0", False), ("heldout-1", False)])

    class BeforeAndAfter(ByTask):
        async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
            first = len(self.asked) < 2  # those of the earlier one come first
            self.answers = dict.fromkeys(self.answers, reply(planning="unresolved" if first else "recovered"))
            return await super().write(messages, sampling, key, begun)

    config = AnalyseConfig(of="final", against="base", concurrency=1, prompt_tokens=20_000)
    result = await analyse.run(evaluated.ctx(BeforeAndAfter(dict(ANSWERS)).of, of=after, against=before), config)
    found = json.loads(Path(result.outputs["errors"]).read_text())
    assert (found["against"]["stage"], found["of"]["stage"]) == ("base", "final")
    difference = found["difference"]["planning"]
    assert (difference["recovery"], difference["unresolved"], difference["tasks"], difference["paired"]) == (1.0, -1.0, 2, 1)
    assert result.counts == {"judged_against": 2, "judged_of": 2}


async def test_a_rollout_of_an_unknown_task_stops_the_stage(evaluated: Evaluated) -> None:
    scores = evaluated.write("eval", [("heldout-9", True)])
    with pytest.raises(StageError, match="'heldout-9'"):
        await analyse.run(evaluated.ctx(ByTask(ANSWERS).of, of=scores), CONFIG)


async def test_rollouts_are_read_as_they_are_needed(evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two at work no more than two are held."""
    read, written = 0, 0
    runs = analyse._runs

    def counted(ctx: Context):  # the type of what it wraps
        nonlocal read
        for found in runs(ctx):
            read += 1
            assert read - written <= 2
            yield found

    class Counting(ByTask):
        async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
            nonlocal written
            answer = await super().write(messages, sampling, key, begun)
            written += 1
            return answer

    monkeypatch.setattr(analyse, "_runs", counted)
    await analyse.run(evaluated.ctx(Counting(ANSWERS).of, of=evaluated.write("eval", RUNS * 5)), CONFIG)
    assert (read, written) == (20, 20)
