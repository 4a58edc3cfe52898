"""The audit as a stage of a pipeline, over the shipped fakes: later stages draw from what it leaves."""

import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from termrsi import fakes
from termrsi.config.load import load
from termrsi.config.schema import Config
from termrsi.config.stages import AuditConfig
from termrsi.errors import StageError, TaskError
from termrsi.pipeline import Pipeline
from termrsi.ports import Auditor
from termrsi.records import Finding, Outcome, TaskAudit, TaskSpec, WeightsVersion
from termrsi.stages import audit
from termrsi.stages.base import Context, Progress, Splits
from termrsi.stages.roles import PolicyWriter


class Told:
    """`ports.Auditor`: outcomes by task id, every other task is rejected; the last comes first."""

    def __init__(self, **outcomes: Outcome) -> None:
        self.outcomes = {name.replace("_", "-"): outcome for name, outcome in outcomes.items()}

    async def run(self, tasks: Sequence[TaskSpec]) -> AsyncGenerator[TaskAudit, None]:
        for task in reversed(tasks):
            outcome = self.outcomes.get(task.id, Outcome.reject)
            yield TaskAudit(
                task.id, task.path, (Finding("loads", Outcome.passed), Finding("oracle", outcome, ("why",))), 2.0, 30, 4, 0.25
            )


def context(out: Path, auditor: Auditor) -> Context:
    made = fakes.dry_parts()

    async def publish() -> WeightsVersion:
        raise AssertionError("it trains nothing")

    return Context(
        config=Config(),
        name="audit",
        out=out,
        tasks=Splits(*made.tasks),
        checks=made.checks,
        chat=made.chat,
        generator=made.generator,
        rollouts=made.rollouts,
        policy=made.policy,
        critic=None,
        reference=None,
        queue=made.queue,
        groups=made.groups,
        scan=made.scan,
        pool=made.pool,
        verifier=made.verifier,
        writer=lambda role: PolicyWriter(made.generator, made.chat),
        inputs={},
        log=lambda stage, values: None,
        progress=Progress(),
        publish=publish,
        auditor=auditor,
    )


async def test_what_stays_and_why_the_others_left(tmp_path: Path) -> None:
    told = Told(train_0=Outcome.passed, train_1=Outcome.flag, train_2=Outcome.unmeasured, train_3=Outcome.passed)
    ctx = context(tmp_path, told)
    result = await audit.run(ctx, AuditConfig())
    assert json.loads(Path(result.outputs["tasks"]).read_text()) == [
        {"task": "train-0", "verdict": "clean", "path": "fake/train-0"},
        {"task": "train-3", "verdict": "clean", "path": "fake/train-3"},
    ]
    left = {entry["task"]: entry for entry in json.loads((tmp_path / "left.json").read_text())}
    assert left["train-1"] == {"task": "train-1", "verdict": "flagged", "evidence": ["oracle: why"]}
    assert result.summary == {"tasks": 8, "kept": 2, "clean": 2, "flagged": 1, "not_measured": 1, "rejected": 4}
    assert result.counts == {"left_at_oracle": 5}
    assert result.verdict == "gates only: no judge was given"
    rows = json.loads((tmp_path / "funnel.json").read_text())
    assert rows[3] == {"gate": "oracle", "entered": 8, "rejected": 4, "not measured": 1, "flagged": 1}
    assert (ctx.costs.sandbox_s, ctx.costs.prompt_tokens, ctx.costs.completion_tokens, ctx.costs.cost) == (16.0, 240, 32, 2.0)


async def test_flagged_tasks_stay_if_asked(tmp_path: Path) -> None:
    told = Told(train_0=Outcome.passed, train_1=Outcome.flag, train_2=Outcome.unmeasured)
    result = await audit.run(context(tmp_path, told), AuditConfig(keep_flagged=True))
    assert [entry["task"] for entry in json.loads(Path(result.outputs["tasks"]).read_text())] == ["train-0", "train-1"]


async def test_with_nothing_left_there_is_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="none of 8 train tasks is clean"):
        await audit.run(context(tmp_path, Told()), AuditConfig())
    assert len(json.loads((tmp_path / "left.json").read_text())) == 8, "and why is told"


async def test_river_trains_on_what_its_audit_left(tmp_path: Path) -> None:
    overrides = ["experiment=river", "scale=dry", f"run_dir={tmp_path}/run", "stages.grpo.groups=7"]
    await Pipeline(load(overrides), overrides).run()
    stages = tmp_path / "run" / "stages"
    kept = {entry["task"] for entry in json.loads((stages / "audit" / "tasks.json").read_text())}
    rolled = [json.loads(line)["rollout"] for line in (stages / "grpo" / "rollouts.jsonl").read_text().splitlines()]
    drawn = {rollout["task_id"] for rollout in rolled if rollout["task_id"].startswith("train")}
    assert drawn == kept == {f"train-{i}" for i in range(7)}, "train-7 is what the fake auditor rejects"


async def test_tasks_that_are_no_more_are_told(tmp_path: Path) -> None:
    overrides = ["experiment=river", "scale=dry", f"run_dir={tmp_path}/run"]
    await Pipeline(load([*overrides, "stage=base_eval"]), overrides).run()
    await Pipeline(load([*overrides, "stage=audit"]), overrides).run()
    left = [{"task": "another", "verdict": "clean", "path": "/nowhere"}]
    (tmp_path / "run" / "stages" / "audit" / "tasks.json").write_text(json.dumps(left))
    with pytest.raises(TaskError, match="/nowhere: no such directory"):
        await Pipeline(load([*overrides, "stage=grpo"]), overrides).run()
