"""Stages that are killed: by SIGKILL, in the middle of whatever they do, and taken up again until they end."""

import asyncio
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from termrsi.config.choices import Workflow
from termrsi.config.stages import CollectRecoveryConfig, RsrConfig
from termrsi.fakes import FakeGenerator
from termrsi.records import Completion, SamplingParams
from termrsi.stages import collect_recovery, rsr
from termrsi.stages.base import Context, StageResult
from termrsi.stages.finished import FinishedRollouts
from tests.stage_bench import Bench, lines, rows_in

STAGES: dict[str, Callable[[Context], Coroutine[Any, Any, StageResult]]] = {
    "rsr": lambda ctx: rsr.run(ctx, RsrConfig(attempts=2)),
    "collect_recovery": lambda ctx: collect_recovery.run(ctx, CollectRecoveryConfig(attempts=2, workflow=Workflow.short)),
}
JOURNALS = {"rsr": ("discovered.jsonl", "rewritten.jsonl"), "collect_recovery": ("recovered.jsonl",)}
KILLS = 20


class Deadly(FakeGenerator):
    """Kills its process at a call, before or after it answered."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    async def generate(self, prompt_ids: Any, params: SamplingParams, prefix_key: str = "") -> Completion:
        if self.calls + 1 == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(prompt_ids, params, prefix_key)


def play(kind: str, root: Path, kill_at: int) -> None:
    """The stage from wherever it stands; the result beside, once it ends."""
    bench = Bench(root)
    bench.made.generator = Deadly(kill_at)
    bench.runner = type(bench.runner)(bench.made)
    ctx = bench.ctx(kind)
    ctx.finished = FinishedRollouts(ctx.out / "rollouts.jsonl")
    result = asyncio.run(STAGES[kind](ctx))
    (root / "result.json").write_text(json.dumps({"counts": result.counts, "calls": bench.made.generator.calls}))


def played(kind: str, root: Path, kill_at: int = 0) -> int:
    """In a process of its own; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=play, args=(kind, root, kill_at))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def told(kind: str, root: Path) -> dict[str, Any]:
    """What must not depend on how often it was killed."""
    out = root / kind
    rows = rows_in(out / "data.parquet")
    items = {name: {line["key"]: line["value"] for line in lines(out / name)} for name in JOURNALS[kind]}
    return {"rows": rows, "items": items, "counts": json.loads((root / "result.json").read_text())["counts"]}


@pytest.mark.parametrize("kind", STAGES)
def test_killed_at_random_points_no_item_is_lost_and_none_done_twice(kind: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert played(kind, whole) == 0
    calls = json.loads((whole / "result.json").read_text())["calls"]
    expected = told(kind, whole)
    assert expected["rows"]
    draw = random.Random(f"kills of {kind}")
    root = tmp_path / "killed"
    root.mkdir()
    killed = 0
    while killed < KILLS:
        if played(kind, root, draw.randint(1, max(2, calls // 6))) == -signal.SIGKILL:
            killed += 1
            continue
        assert told(kind, root) == expected  # it ended: the rest of the kills are another life's
        root = tmp_path / f"killed after {killed}"
        root.mkdir()
    assert played(kind, root) == 0
    assert told(kind, root) == expected
    for name in JOURNALS[kind]:
        keys = [line["key"] for line in lines(root / kind / name)]
        assert len(keys) == len(set(keys))
    scored = [line["rollout"] for line in lines(root / kind / "rollouts.jsonl") if line["rollout"]["snapshot"] is None]
    ids = [rollout["id"] for rollout in scored if kind == "rsr"]  # a kept state is made again: it ended with its process
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
