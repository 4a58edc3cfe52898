"""What the planner is shown where its context is short, and what becomes of a runbook that it is not let write."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from termrsi.config.stages import RsrConfig
from termrsi.errors import RequestRefused
from termrsi.records import Message, SamplingParams, Writing
from termrsi.stages import rsr
from termrsi.stages.roles import PolicyWriter
from termrsi.stages.rsr.plan import LEAST_CHARS, Planner
from tests.scripted import Scripted
from tests.stage_bench import Bench, lines

COMMANDS = ("echo first", *(f"echo {number} > f{number}" for number in range(200)), "echo last")


def chars(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)


async def asked(room: int, *, refused: str = "", instruction: str = "Do it.") -> list[Message]:
    writer = Scripted(["Target end state: x"])

    async def ask(role: str, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        return await writer.write(messages, sampling, key, begun)

    planner = Planner(ask, SamplingParams(), whole=True, fits=lambda messages: chars(messages) <= room)
    await planner.write(instruction, COMMANDS, 1, refused, ("leak_path",) if refused else ())
    return writer.asked[0]


async def test_commands_are_whole_where_they_fit_and_have_both_ends_where_they_do_not() -> None:
    whole = await asked(10**6)
    assert whole[-1].content == f"Task: Do it.\nCommands that worked: {'; '.join(COMMANDS)}"
    room = chars(whole) - 1
    cut = await asked(room)
    shown = cut[-1].content
    assert chars(cut) <= room
    assert shown.startswith("Task: Do it.\nCommands that worked: echo first; echo 0")
    assert shown.endswith("; echo last")
    assert "characters left out" in shown
    assert cut[:-1] == whole[:-1], "the examples stay"


async def test_a_refused_draft_is_cut_as_well_and_the_reasons_stay() -> None:
    messages = await asked(4000, refused="Limits: " + "x" * 9000 + " end")
    draft, again = messages[-2:]
    assert (draft.role, draft.content[:8], draft.content[-4:], len(draft.content) < 2000) == ("assistant", "Limits: ", " end", True)
    assert "(leak_path)" in again.content
    assert chars(messages) <= 4000


async def test_what_never_fits_is_asked_with_the_least() -> None:
    messages = await asked(10, instruction="long " * 1000)
    assert len(messages[-1].content) < 5000 + LEAST_CHARS + 100


@pytest.mark.parametrize(("role", "reason"), [("planner", "planner_refused"), ("critic", "critic_refused")])
async def test_a_refused_request_costs_a_runbook_and_not_the_stage(tmp_path: Path, role: str, reason: str) -> None:
    bench = Bench(tmp_path)
    policy, first = PolicyWriter(bench.made.generator, bench.made.chat), []

    class Filtering:
        async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
            if not first:
                first.append(messages)
                raise RequestRefused("400 content filter", "http://h")
            return await policy.write(messages, sampling, key, begun)

    ctx = bench.ctx("rsr")
    ctx.writer = lambda name: Filtering() if name == role else policy
    result = await rsr.run(ctx, RsrConfig(attempts=8))
    assert (result.counts[f"refused_{reason}"], result.counts["kept"] > 0) == (1, True)
    drafts = [draft for line in lines(ctx.out / "rewritten.jsonl") for draft in line["value"]["drafts"]]
    assert sum(draft["refused"] == [reason] for draft in drafts) == 1
    assert bench.nothing_is_held()
