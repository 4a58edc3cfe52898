"""What a stage keeps of its costs beside every rollout, and what it asks for that; what a rollout's line holds."""

import json
from dataclasses import asdict
from pathlib import Path

from termrsi.harness.group import task_group
from termrsi.records import Limits, SamplingParams
from termrsi.stages import base
from termrsi.stages.base import ROLLOUTS
from termrsi.stages.finished import FinishedRollouts
from tests.stage_bench import Bench, lines


async def test_seconds_of_work_are_asked_for_once_a_second(tmp_path: Path) -> None:
    ctx = Bench(tmp_path).ctx("grpo")
    now, asked = [100.0], [0]

    async def busy() -> dict[str, float]:
        asked[0] += 1
        return {"generator": now[0]}

    ctx.finished, ctx.clock, ctx.busy, ctx.started_s = FinishedRollouts(ctx.out / ROLLOUTS), lambda: now[0], busy, 90.0
    ctx.busy_before = {"generator": 40.0}
    for at, calls, told in ((100.0, 1, 60.0), (100.9, 1, 60.0), (101.0, 2, 61.0), (101.5, 2, 61.0), (107.0, 3, 67.0)):
        now[0] = at
        await ctx.keep_costs()
        kept = json.loads((ctx.out / "costs.json").read_text())["costs"]
        assert (asked[0], kept["generator_busy_s"], kept["wall_s"]) == (calls, told, at - 90.0)
    now[0] = 107.5
    assert (await ctx.spent()).generator_busy_s == 67.5, "the end of a stage asks anew"


async def test_a_phase_counts_from_its_own_start(tmp_path: Path) -> None:
    ctx = Bench(tmp_path).ctx("rsr")
    now = [10.0]

    async def busy() -> dict[str, float]:
        return {"generator": now[0]}

    ctx.finished, ctx.clock, ctx.busy = FinishedRollouts(ctx.out / ROLLOUTS), lambda: now[0], busy
    await ctx.keep_costs()
    now[0] = 10.5
    async with ctx.phase("execute", 2):
        await ctx.keep_costs()
        kept = json.loads((ctx.out / "costs.json").read_text())["phases"]
        assert kept == {"execute": {"generator": 0.0, "wall": 0.0}}
        now[0] = 12.5
    assert ctx.phases == {"execute": {"generator": 2.0, "wall": 2.0}}


async def test_a_line_is_the_whole_record(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ctx = bench.ctx("evaluate")
    task = bench.made.tasks.train[0]
    specs = task_group(task, 2, label="a", harness="react", sampling=SamplingParams(), limits=Limits(), seed=0)
    found = {scored.rollout.id: scored for scored in await ctx.episodes(specs, "a")}
    written = lines(ctx.out / ROLLOUTS)
    assert len(written) == 2
    for line in written:
        whole = json.loads(json.dumps(asdict(found[line["rollout"]["id"]]), default=base._plain))
        assert {key: line[key] for key in whole} == whole
        assert line["rollout"]["chunks"][0]["ids"]
    assert json.loads(json.dumps({"routing": b"12345"}, default=base._plain)) == {"routing": "5 bytes"}
