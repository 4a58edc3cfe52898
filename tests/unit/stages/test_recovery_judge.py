"""The judge of recoveries as the stage asks it: within the room of its context, and counted where it was not asked."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi.config.choices import JudgeUncertain
from termrsi.config.stages import CollectRecoveryConfig
from termrsi.errors import RequestRefused
from termrsi.ports import Writer
from termrsi.records import Message, SamplingParams, Turn, Writing
from termrsi.stages import collect_recovery, recovery_filters
from termrsi.stages.base import Context
from tests.scripted import Scripted
from tests.stage_bench import Bench
from tests.unit.stages.test_recovery_filters import FAILED, FINE, NO, POINT, REPEATED, replies, scored

LONG = (*(replace(FAILED, observation="word " * 700),) * 3, *FINE)


def judged_by(tmp_path: Path, writer: Writer) -> Context:
    ctx = Bench(tmp_path).ctx("collect")
    ctx.writer = lambda role: writer
    return ctx


async def filtered(ctx: Context, config: CollectRecoveryConfig, turns: Sequence[Turn]) -> recovery_filters.Filtered:
    return await collect_recovery._filtered(ctx, config, POINT, scored(*turns))


async def test_a_question_fits_the_context_with_two_answers(tmp_path: Path) -> None:
    writer = Scripted([replies(repeated_failure=NO)] * 2)
    ctx, config = judged_by(tmp_path, writer), CollectRecoveryConfig()
    assert (await filtered(ctx, config, LONG)).kept
    assert (await filtered(ctx, replace(config, judge_prompt_tokens=10**6), LONG)).kept
    ours, unbounded = (len(ctx.chat.prompt(messages)) for messages in writer.asked)
    assert ours <= config.room(ctx.config.model.max_model_len) == 2048 - 2 * 512 - 64 < unbounded
    assert ctx.costs.cost == 1.0


async def test_a_question_without_room_is_not_asked(tmp_path: Path) -> None:
    writer = Scripted(())
    row = await filtered(judged_by(tmp_path, writer), CollectRecoveryConfig(judge_prompt_tokens=50), REPEATED)
    assert (row.refused_by, row.faults, writer.asked) == ("efficiency", ("too_long",), [])


async def test_the_stage_counts_what_was_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Filtering:
        async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
            raise RequestRefused("400 content filter", "http://h")

    monkeypatch.setattr(recovery_filters, "flag", lambda instruction, turns: {"repeated_failure": ["turn 1"]})
    ctx = judged_by(tmp_path, Filtering())
    result = await collect_recovery.run(ctx, CollectRecoveryConfig(teacher_attempts=8, judge_uncertain=JudgeUncertain.keep))
    assert result.counts["judge_refused"] == result.counts["verified"] > 0
    assert result.counts["judge_too_long"] == 0
