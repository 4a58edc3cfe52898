"""Synthesis on real sandboxes: procedural tasks that `tasks check` accepts, and a scripted author whose tasks fail in real ways."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from termrsi import fakes, setup, task_commands
from termrsi.config.choices import Author as Kind
from termrsi.config.schema import Config
from termrsi.config.stages import SynthesiseConfig
from termrsi.ports import Writer
from termrsi.records import Message, SamplingParams, WeightsVersion, Writing
from termrsi.reward.checks import TaskChecks
from termrsi.reward.verifier import HarborVerifier
from termrsi.sandbox.host_pool import HostPool
from termrsi.stages import synthesise
from termrsi.stages.base import Context, Progress, Splits

STEPS = ("=== instruction ===", "=== initial_test", "=== check", "=== file")
GOOD = (
    "=== instruction ===\nWrite the number of lines of /app/in.txt to /app/out.txt.\n=== truth ===\n3\n=== end ===",
    "=== initial_test ===\n[ -f /app/in.txt ] && [ -d /app/made ] && [ ! -e /app/out.txt ]\n=== end ===",
    "=== check count_right ===\n[ \"$(tr -d ' ' < /app/out.txt)\" = 3 ]\n"
    "=== check input_kept ===\ngrep -q two /app/in.txt\n=== end ===",
    "=== file in.txt ===\none\ntwo\nthree\n=== setup ===\nmkdir made\n=== solution ===\nwc -l < in.txt > out.txt\n=== end ===",
)


class ByItem:
    """A reply per item and step: items are told apart by the order in which they ask for their first part (one at a time)."""

    def __init__(self, changed: list[dict[int, str]]) -> None:
        self._changed = changed
        self._item = -1

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        step = next(i for i, mark in enumerate(STEPS) if mark in messages[-1].content)
        self._item += step == 0
        return Writing(self._changed[self._item].get(step, GOOD[step]))


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[HostPool]:
    pool = HostPool(size=2, cache_dir=tmp_path / "images", state_dir=tmp_path / "state", owner=f"test{os.getpid()}")
    yield pool
    await pool.close()


def context(out: Path, pool: HostPool, writer: Writer) -> Context:
    made = fakes.dry_parts()

    async def publish() -> WeightsVersion:
        raise AssertionError("it trains nothing")

    out.mkdir()
    return Context(
        config=Config(), name="synth", out=out, tasks=Splits(*made.tasks), checks=made.checks, chat=made.chat,
        generator=made.generator, writer=lambda role: writer, rollouts=made.rollouts, policy=made.policy, critic=None,
        reference=None, queue=None, groups=made.groups, scan=made.scan, pool=pool, verifier=HarborVerifier(), inputs={},
        log=lambda stage, values: None, progress=Progress(), publish=publish,
    )  # fmt: skip


async def test_procedural_tasks_are_made_and_all_kept(pool: HostPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMRSI_CACHE", str(tmp_path / "cache"))
    result = await synthesise.run(context(tmp_path / "out", pool, ByItem([])), SynthesiseConfig(legacy=6, concurrency=2))
    assert result.counts == {"kept": 6}
    kept = tmp_path / "out" / "tasks"
    assert sorted(path.name for path in kept.iterdir()) == [f"synth-{i:05d}" for i in range(6)]
    balance = json.loads((tmp_path / "out" / "balance.json").read_text())
    assert {axis for axis, index in balance["kept"].items() if index is not None} == {"domain", "complexity"}
    splits, checks = await _to_train_on(kept, pool)
    assert [task.id for task in splits.train] == sorted(path.name for path in kept.iterdir())
    assert all(checks[task.id].solved and checks[task.id].baseline != checks[task.id].checks for task in splits.train)
    assert [task.id for task in splits.heldout] == [task.id for task in fakes.dry_tasks().heldout], "the other splits stay"
    await pool.close()
    assert await asyncio.to_thread(task_commands.run, ["check", str(kept), "jobs=2"]) == 0


async def _to_train_on(kept: Path, pool: HostPool) -> tuple[Splits, dict[str, TaskChecks]]:
    """As a later stage finds them; the other splits are the fakes'."""
    parts = setup.DryParts(Config(dry=True))
    real = cast(Any, parts)  # Any: its ports are the fakes' types
    real.pool, real.verifier = pool, HarborVerifier()
    return await setup.tasks_of(kept, parts, Config(), lambda text: None)


async def test_what_an_author_gets_wrong_is_found_out(pool: HostPool, tmp_path: Path) -> None:
    environment = GOOD[3]
    changed: list[dict[int, str]] = [
        {},
        {3: environment.replace("mkdir made", "mkdir /made/of/nothing")},
        {1: GOOD[1].replace("! -e", "-e")},
        {2: "=== check there ===\n[ -f /app/in.txt ]\n=== end ==="},
        {3: environment.replace("wc -l", "wc -c")},
        {2: GOOD[2].replace('" = 3 ]', '" = 3 ')},
        {0: GOOD[0].replace("=== end ===", "")},
        {3: environment.partition("=== solution")[0] + "=== end ==="},
        {3: "=== dockerfile ===\nFROM a\nWORKDIR /app\nRUN mkdir made && printf 'one\\ntwo\\n3\\n' > in.txt\n=== end ==="},
        {2: GOOD[2].replace("=== check input_kept ===", "=== check hangs ===\nsleep 1000 &\n=== check input_kept ===")},
    ]
    config = SynthesiseConfig(author=Kind.policy, legacy=len(changed), rounds=0, concurrency=1)
    result = await synthesise.run(context(tmp_path / "out", pool, ByItem(changed)), config)
    found = [json.loads(line)["value"] for line in (tmp_path / "out" / "items.jsonl").read_text().splitlines()]
    assert [item["category"] for item in found] == [
        "kept",
        "does_not_build",
        "initial_test_fails",
        "passes_untouched",
        "solution_fails",
        "solution_fails",  # a check that bash cannot read fails, and the others run
        "malformed_template",
        "kept",
        "kept",
        "kept",
    ]
    assert "count_right" in found[4]["detail"]
    assert result.counts["fault_no_end"] == 1
    assert (tmp_path / "out" / "refused" / "synth-00001" / "task.toml").is_file()
