"""Stages that are killed: by SIGKILL, in the middle of whatever they do, and taken up again until they end."""

import asyncio
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from termrsi.config.choices import Author, Workflow
from termrsi.config.stages import (
    AnalyseConfig,
    AuditConfig,
    CollectRecoveryConfig,
    EvaluateConfig,
    RsrConfig,
    SynthesiseConfig,
)
from termrsi.fakes import FakeGenerator
from termrsi.records import CommandResult, Completion, SamplingParams
from termrsi.reward.audit import Auditor
from termrsi.reward.inspection import Bench as Inspectors
from termrsi.stages import analyse, audit, collect_recovery, evaluate, rsr, synthesise
from termrsi.stages.base import Context, StageResult
from termrsi.stages.finished import FinishedRollouts
from tests.stage_bench import Bench, lines, rows_in
from tests.unit.reward.test_audit import World, made

RSR, RECOVERY = RsrConfig(attempts=2), CollectRecoveryConfig(attempts=2, workflow=Workflow.short, judge=False)
SYNTHESIS = SynthesiseConfig(author=Author.policy, legacy=9, rl_v2=3, reply_tokens=96, concurrency=4)
ANALYSIS = AnalyseConfig(of="eval", max_tokens=512, prompt_tokens=20_000, concurrency=4)
STAGES: dict[str, Callable[[Context], Coroutine[Any, Any, StageResult]]] = {
    "rsr": lambda ctx: rsr.run(ctx, RSR),
    "collect_recovery": lambda ctx: collect_recovery.run(ctx, RECOVERY),
    "synthesise": lambda ctx: synthesise.run(ctx, SYNTHESIS),
    "analyse": lambda ctx: analyse.run(ctx, ANALYSIS),
    "audit": lambda ctx: audit.run(ctx, AuditConfig(mutants=3)),
}
# What each writes item by item: the file, and what tells its items apart.
ITEMS: dict[str, dict[str, Callable[[dict], Any]]] = {
    "rsr": {"discovered.jsonl": lambda line: line["key"], "rewritten.jsonl": lambda line: line["key"]},
    "collect_recovery": {"recovered.jsonl": lambda line: line["key"]},
    "synthesise": {"items.jsonl": lambda line: line["key"]},
    "analyse": {"judgements.jsonl": lambda line: line["id"]},
    "audit": {"audit.jsonl": lambda line: (line["task"], line["part"])},
}
KILLS = 20


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(FakeGenerator):
    """Kills its process at a call (from 1), before it is answered. `life`: another one draws otherwise."""

    def __init__(self, at: int, life: int = 0) -> None:
        super().__init__()
        self._at, self._life = at, life

    async def generate(self, prompt_ids: Any, params: SamplingParams, prefix_key: str = "") -> Completion:
        if self.calls + 1 == self._at:
            die()
        seed = None if params.seed is None else params.seed + 1_000_003 * self._life
        return await super().generate(prompt_ids, replace(params, seed=seed), prefix_key)


class DeadlyWorld(World):
    """Likewise at a command in a sandbox."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at, self.calls = at, 0

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        self.calls += 1
        if self.calls == self._at:
            die()
        await asyncio.sleep(0)
        return await super().run(command, timeout_s)


def play(kind: str, root: Path, kill_at: int, life: int) -> None:
    """The stage from wherever it stands; the result beside, once it ends."""
    bench, world = Bench(root), DeadlyWorld(kill_at)
    inputs: dict[str, Path] = {}
    if kind == "analyse":  # of one evaluation, whoever's life it is
        inputs["of"] = root.parent / "eval" / "scores.json"
        if not inputs["of"].exists():
            asyncio.run(evaluate.run(Bench(root.parent).ctx("eval"), EvaluateConfig(k=4, temperature=1.0)))
    bench.made.generator = Deadly(kill_at, life)
    bench.runner = type(bench.runner)(bench.made)
    ctx = bench.ctx(kind, **inputs)
    ctx.finished = FinishedRollouts(ctx.out / "rollouts.jsonl")
    if kind == "audit":
        solutions = ["echo good\n" if i % 3 else "echo bad\n" for i in range(9)]
        ctx.tasks.train[:] = [made(root.parent / "given", f"t{i}", text) for i, text in enumerate(solutions)]
        ctx.auditor = Auditor(bench=Inspectors(world, world), log=ctx.out / "audit.jsonl", mutants=3)
    ctx.take_up_costs()
    result = asyncio.run(STAGES[kind](ctx))
    calls, costs = max(bench.made.generator.calls, world.calls), asdict(asyncio.run(ctx.spent()))
    said = {"counts": result.counts, "summary": result.summary, "calls": calls, "costs": costs}
    (root / "result.json").write_text(json.dumps(said))


def played(kind: str, root: Path, kill_at: int = 0, life: int = 0) -> int:
    """In a process of its own; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=play, args=(kind, root, kill_at, life))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def told(kind: str, root: Path) -> dict[str, Any]:
    """What must not depend on how often it was killed."""
    out = root / kind
    rows = rows_in(out / "data.parquet") if (out / "data.parquet").exists() else []
    items = {name: {key(line): line for line in lines(out / name)} for name, key in ITEMS[kind].items()}
    tree = {str(p.relative_to(out)): p.read_bytes() for p in sorted((out / "tasks").rglob("*")) if p.is_file()}
    result = json.loads((root / "result.json").read_text())
    return {"rows": rows, "items": items, "tree": tree, "counts": result["counts"], "summary": result["summary"]}


def spent(root: Path) -> dict[str, float]:
    """What all lives together took."""
    return json.loads((root / "result.json").read_text())["costs"]


def test_a_recovery_goes_on_from_the_failure_that_it_is_kept_with(tmp_path: Path) -> None:
    """Failures are made again by another life, and are other ones: so are their continuations."""
    (tmp_path / "whole").mkdir()
    assert played("collect_recovery", tmp_path / "whole") == 0
    calls = json.loads((tmp_path / "whole" / "result.json").read_text())["calls"]
    for at in range(calls // 2, calls, max(1, calls // 16)):
        root = tmp_path / str(at)
        root.mkdir()
        assert played("collect_recovery", root, at) == -signal.SIGKILL
        assert played("collect_recovery", root, life=1) == 0
        items = [line["value"] for line in lines(root / "collect_recovery" / "recovered.jsonl")]
        points = {point["id"]: point for item in items for point in item["points"]}
        last = {line["rollout"]["id"]: line["rollout"] for line in lines(root / "collect_recovery" / "rollouts.jsonl")}
        for row in rows_in(root / "collect_recovery" / "data.parquet"):
            history = points[f"point:{row.lineage.parent}"]["history_ids"]
            assert list(row.sample.ids[: len(history)]) == history
            assert last[row.sample.rollout_id]["chunks"][0]["ids"][: len(history)] == history


@pytest.mark.parametrize("kind", STAGES)
def test_killed_at_random_points_no_item_is_lost_and_none_done_twice(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "whole"
    root.mkdir()
    assert played(kind, root) == 0
    calls = json.loads((root / "result.json").read_text())["calls"]
    expected, costs = told(kind, root), spent(root)
    assert all(expected["items"].values())
    draw = random.Random(f"kills of {kind}")
    killed = 0
    while killed < KILLS or not (root / "result.json").exists():
        if (root / "result.json").exists():  # that life ended: the rest of the kills are another's
            root = tmp_path / f"life after {killed}"
            root.mkdir()
        at = draw.randint(1, max(2, calls // 6)) if killed < KILLS else 0
        code = played(kind, root, at)
        assert code == (0 if (root / "result.json").exists() else -signal.SIGKILL)
        if code:
            killed += 1
            continue
        assert told(kind, root) == expected
        assert all(spent(root)[name] >= costs[name] for name in ("completion_tokens", "prompt_tokens", "episodes", "verify_s"))
        for name, key in ITEMS[kind].items():
            keys = [key(line) for line in lines(root / kind / name)]
            assert len(keys) == len(set(keys))
        if kind == "rsr":  # of recoveries, states that were kept end with their process, and are made again
            ids = [line["rollout"]["id"] for line in lines(root / kind / "rollouts.jsonl")]
            assert len(ids) == len(set(ids))


def test_a_finished_episode_is_taken_up_as_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ctx = bench.ctx("rsr")
    ctx.finished = FinishedRollouts(ctx.out / "rollouts.jsonl")
    asyncio.run(STAGES["rsr"](ctx))
    finished = FinishedRollouts(ctx.out / "rollouts.jsonl")
    assert len(finished) == len(lines(ctx.out / "rollouts.jsonl"))
    specs = {spec.id: spec for spec in bench.runner.specs}
    again = Bench(tmp_path / "again")
    (tmp_path / "again").mkdir()

    async def compare() -> None:
        async for result in again.runner.run(list(specs.values())[:8]):
            was = finished.of(result.rollout.id)  # pyright: ignore[reportAttributeAccessIssue]
            assert (was.rollout.chunks, was.rollout.turns[0].text) == (result.rollout.chunks, result.rollout.turns[0].text)  # pyright: ignore[reportAttributeAccessIssue]
            assert was.verdict.passed == result.verdict.passed  # pyright: ignore[reportAttributeAccessIssue]
            assert was.rollout.stop is result.rollout.stop  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(compare())
