"""The stage on fakes: a scripted author, every way to be refused, and going on after a stop at any point."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from termrsi import fakes, tasks
from termrsi.config.choices import Author as Kind
from termrsi.config.schema import Config
from termrsi.config.stages import SynthesiseConfig
from termrsi.errors import EngineError, RequestRefused, StageError
from termrsi.fakes import FakePool, FakeVerifier, FakeWorld
from termrsi.ports import Sandbox, SandboxPool, Verifier, Writer
from termrsi.records import Message, SamplingParams, Snapshot, TaskSpec, Verdict, WeightsVersion, Writing
from termrsi.stages import synthesise
from termrsi.stages.base import Context, Progress, Splits
from termrsi.stages.finished import FinishedRollouts
from termrsi.tasks.synthesis import parse

GOOD = {
    "template": "=== instruction ===\nMake both files of case {n}.\n=== truth ===\n/app/half\n=== end ===",
    "initial_test": "=== initial_test ===\ntrue\n=== end ===",
    "final_test": "=== check half_done ===\ncat /app/half\n=== check all_done ===\ncat /app/all\n=== end ===",
    "environment": "=== file notes ===\nx\n=== solution ===\nsolve\n=== end ===",
}
SHOWN = {
    "=== instruction ===": "template",
    "=== initial_test": "initial_test",
    "=== check": "final_test",
    "=== file": "environment",
}


@dataclass
class Scripted:
    """Replies by step: fixed texts, the last of them again and again. `asked`: the steps, in order, and what was said."""

    replies: dict[str, list[str]] = field(default_factory=dict)
    asked: list[tuple[str, list[Message], SamplingParams]] = field(default_factory=list)
    dies_at: int = 0

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        if self.dies_at and len(self.asked) >= self.dies_at:
            raise EngineError("told to die", "author")
        last = messages[-1].content
        step = next(step for mark, step in SHOWN.items() if mark in last)
        self.asked.append((step, list(messages), sampling))
        await asyncio.sleep(0)
        texts = self.replies.get(step) or [GOOD[step]]
        number = sum(message.role == "assistant" for message in messages) - list(GOOD).index(step)  # refused before
        text = texts[min(number, len(texts) - 1)].format(n=sampling.seed)
        return Writing(text, prompt_tokens=100, completion_tokens=10, cost=0.5)


@dataclass
class Made:
    """One directory and the fakes around it."""

    out: Path
    writer: Writer
    pool: SandboxPool = field(default_factory=FakePool)
    verifier: Verifier = field(default_factory=FakeVerifier)
    name: str = "synth"

    def ctx(self) -> Context:
        made = fakes.dry_parts()
        self.out.mkdir(exist_ok=True)

        async def publish() -> WeightsVersion:
            raise AssertionError("it trains nothing")

        return Context(
            config=Config(), name=self.name, out=self.out, tasks=Splits(*made.tasks), checks=made.checks, chat=made.chat,
            generator=made.generator, writer=lambda role: self.writer, rollouts=made.rollouts, policy=made.policy, critic=None,
            reference=None, queue=None, groups=made.groups, scan=made.scan, pool=self.pool, verifier=self.verifier, inputs={},
            log=lambda stage, values: None, progress=Progress(), publish=publish,
        )  # fmt: skip

    def items(self) -> list[dict]:
        return [json.loads(line)["value"] for line in (self.out / "items.jsonl").read_text().splitlines()]

    def tree(self) -> dict[str, str]:
        """Every file of what was kept, with its content."""
        root = self.out / "tasks"
        return {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}


CONFIG = SynthesiseConfig(author=Kind.policy, legacy=3, rounds=1)


async def only(tmp_path: Path, writer: Writer, **more: object) -> tuple[dict, Made]:
    """The line of one item."""
    made = Made(tmp_path / "out", writer, **more)  # type: ignore[arg-type]  # of tests
    config = replace(CONFIG, legacy=1)
    with contextlib.suppress(StageError):  # where it was not kept
        await synthesise.run(made.ctx(), config)
    (line,) = made.items()
    return line, made


async def test_good_replies_become_tasks(tmp_path: Path) -> None:
    writer = Scripted()
    made = Made(tmp_path / "out", writer)
    ctx = made.ctx()
    result = await synthesise.run(ctx, CONFIG)
    assert Counter(step for step, _, _ in writer.asked) == dict.fromkeys(parse.FORMS, 3)
    found = tasks.load_dir(result.outputs["tasks"])
    assert [task.id for task in found.tasks] == ["synth-00000", "synth-00001", "synth-00002"]
    assert found.skipped == ()
    assert len({task.instruction for task in found.tasks}) == 3
    root = made.out / "tasks" / "synth-00000"
    assert (root / "solution" / "solve.sh").read_text().endswith("cd /app\nsolve\n")
    assert (root / "tests" / "checks" / "half_done.sh").read_text() == "cat /app/half\n"
    assert "bash /tests/checks/half_done.sh" in (root / "tests" / "test.sh").read_text()
    assert (result.counts, ctx.costs.prompt_tokens, ctx.costs.completion_tokens) == ({"kept": 3}, 1200, 120)
    assert ([item["cost"] for item in made.items()], ctx.costs.cost) == ([2.0, 2.0, 2.0], 6.0)
    assert (result.summary["items"], result.summary["kept"]) == (3, 3)
    balance = json.loads(Path(result.outputs["balance"]).read_text())
    assert balance["drawn"] == balance["kept"]
    assert balance["kept"]["fixture"] == 1.0
    assert list((made.out / "refused").iterdir()) == []
    assert not list((made.out / "drafts").iterdir())


async def test_the_author_sees_its_blueprint_and_its_own_parts(tmp_path: Path) -> None:
    writer = Scripted()
    line, _ = await only(tmp_path, writer)
    first, last = writer.asked[0], writer.asked[-1]
    for word in (line["drawn"]["persona"], line["drawn"]["primitives"][0], line["drawn"]["domain"]):
        assert word in first[1][-1].content
    assert [message.role for message in last[1]] == ["system", *["user", "assistant"] * 3, "user"]
    assert len({sampling.seed for _, _, sampling in writer.asked}) == 4


async def test_a_malformed_reply_is_asked_for_again_with_its_category(tmp_path: Path) -> None:
    writer = Scripted({"final_test": ["Here you are.", GOOD["final_test"]]})
    line, _ = await only(tmp_path, writer)
    assert (line["category"], line["faults"]) == ("kept", {"text_outside": 1})
    steps = [step for step, _, _ in writer.asked]
    assert steps == ["template", "initial_test", "final_test", "final_test", "environment"]
    again = writer.asked[3][1]
    assert [again[-2].content, again[-1].role] == ["Here you are.", "user"]
    assert "(text_outside)" in again[-1].content
    assert "Here you are." not in [message.content for message in writer.asked[4][1]], "what was refused is not shown later"


@pytest.mark.parametrize("step", list(GOOD))
async def test_an_author_who_never_has_the_form_is_counted(tmp_path: Path, step: str) -> None:
    writer = Scripted({step: ["no form"]})
    line, made = await only(tmp_path, writer)
    assert (line["category"], line["faults"]) == (f"malformed_{step}", {"text_outside": 2})
    assert writer.asked[-1][0] == step, "nothing is asked for after it"
    assert made.tree() == {}


async def test_a_request_that_is_refused_costs_its_item_alone(tmp_path: Path) -> None:
    class Filtering(Scripted):
        async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
            if len(self.asked) == 5:  # the second step of the second item
                self.asked.append(("refused", list(messages), sampling))
                raise RequestRefused("400 content filter", "author")
            return await super().write(messages, sampling, key, begun)

    made = Made(tmp_path / "out", Filtering())
    result = await synthesise.run(made.ctx(), replace(CONFIG, concurrency=1))
    assert result.counts == {"kept": 2, "refused_initial_test": 1}
    assert [item["prompt_tokens"] for item in made.items()] == [400, 100, 400], "what was spent before is told"


async def test_what_was_spent_before_a_stop_is_in_the_costs(tmp_path: Path) -> None:
    made = Made(tmp_path / "out", Scripted(dies_at=9))
    ctx = made.ctx()
    ctx.finished = FinishedRollouts(made.out / "rollouts.jsonl")
    with pytest.raises(EngineError):
        await synthesise.run(ctx, replace(CONFIG, concurrency=1))
    assert json.loads((made.out / "costs.json").read_text())["costs"]["cost"] == 4.0


async def test_a_task_that_does_not_build_is_refused_and_kept_to_look_at(tmp_path: Path) -> None:
    writer = Scripted({"environment": ["=== dockerfile ===\nWORKDIR /app\n=== end ==="]})

    class Building(FakePool):
        async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
            from termrsi.sandbox import dockerfile

            dockerfile.parse(Path(task.environment.context) / "Dockerfile")
            return await super().lease(task, snapshot)

    line, made = await only(tmp_path, writer, pool=Building())
    assert (line["category"], line["detail"]) == ("does_not_build", "no FROM instruction")
    assert (made.out / "refused" / line["name"] / "environment" / "Dockerfile").is_file()
    assert made.tree() == {}


@dataclass
class Always(FakeVerifier):
    """One verdict, or a fault, for whatever is there."""

    strict: bool | None = None

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        from termrsi.errors import VerifierError

        if self.strict is None:
            raise VerifierError("no reward file", task.id)
        return Verdict(self.strict, float(self.strict), failed=() if self.strict else ("half_done",))


async def test_the_smoke_test_has_a_category_for_each_way_to_fail(tmp_path: Path) -> None:
    found = {}
    for number, (replies, more) in enumerate(
        [
            ({"initial_test": ["=== initial_test ===\nfalse\n=== end ==="]}, {}),
            ({}, {"verifier": Always(strict=True)}),
            ({}, {"verifier": Always(strict=None)}),
            ({"environment": ["=== solution ===\nhalf\n=== end ==="]}, {}),
            ({"environment": ["=== end ==="]}, {}),
            ({}, {"pool": FakePool(FakeWorld(lost_at={1: 1}, spoiled=frozenset({1})))}),
            ({}, {"pool": FakePool(FakeWorld(lost_at={3: 1}, spoiled=frozenset({3})))}),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        line, _ = await only(tmp_path / str(number), Scripted(replies), **more)
        found[number] = (line["category"], line["detail"])
    assert found == {
        0: ("initial_test_fails", ""),
        1: ("passes_untouched", ""),
        2: ("no_verdict", "no reward file"),
        3: ("solution_fails", "all_done"),
        4: ("kept", ""),  # nobody says that it can be solved
        5: ("initial_test_fails", "lost"),
        6: ("solution_fails", "lost"),
    }


async def test_what_a_benchmark_says_is_refused_before_its_tests_are_written(tmp_path: Path) -> None:
    run = "sort the words of all the letters in the folder by their last character"
    (tmp_path / "bench.jsonl").write_text(json.dumps({"prompt": f"You shall {run}, please."}))
    config = replace(CONFIG, legacy=2, benchmarks=[str(tmp_path / "bench.jsonl")])
    writer = Scripted({"template": [f"=== instruction ===\nNow {run}!\n=== truth ===\n1\n=== end ==="]})
    made = Made(tmp_path / "out", writer)
    with pytest.raises(StageError, match="'contaminated': 2"):
        await synthesise.run(made.ctx(), config)
    assert [step for step, _, _ in writer.asked] == ["template", "template"]
    twelve = " ".join(run.split()[:12])
    writer = Scripted({"template": [f"=== instruction ===\nNow {twelve}!\n=== truth ===\n1\n=== end ==="]})
    result = await synthesise.run(Made(tmp_path / "other", writer).ctx(), config)
    assert result.counts == {"kept": 2}


async def test_a_lost_machine_is_tried_again_and_is_never_a_refusal(tmp_path: Path) -> None:
    line, made = await only(tmp_path, Scripted(), pool=FakePool(FakeWorld(lost_at={1: 1, 3: 1})))
    assert line["category"] == "kept"
    pool = FakePool(FakeWorld(lost_at=dict.fromkeys(range(1, 4), 1)))
    made = Made(tmp_path / "lossy", Scripted(), pool=pool)
    result = await synthesise.run(made.ctx(), replace(CONFIG, concurrency=1))
    assert result.counts == {"kept": 2, "lost": 1}
    assert len(made.items()) == 2, "what was lost is not finished"
    result = await synthesise.run(made.ctx(), replace(CONFIG, concurrency=1))
    assert result.counts == {"kept": 3}
    assert pool.world.leases == pool.world.releases


# --- going on --------------------------------------------------------------------------------------------------------

MIXED = replace(CONFIG, legacy=5, rl_v2=3, concurrency=3)


class Picky(Scripted):
    """Never has the form for a template of C++, whenever it is asked."""

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        writing = await super().write(messages, sampling, key, begun)
        bad = "=== instruction ===" in messages[-1].content and "Language: cpp" in messages[1].content
        return replace(writing, text="no form") if bad else writing


async def whole(tmp_path: Path) -> Made:
    made = Made(tmp_path / "whole", Picky())
    await synthesise.run(made.ctx(), MIXED)
    return made


def lines(made: Made) -> list[dict]:
    return sorted(made.items(), key=lambda item: item["index"])


@pytest.mark.parametrize("steps", [1, 4, 8, 12, 16, 20, 25, 30])
async def test_stopped_anywhere_it_goes_on_to_the_same_set(tmp_path: Path, steps: int) -> None:
    """Cancelled after so many turns of the event loop, with half a line and an unfinished directory left, and run again."""
    reference = await whole(tmp_path)
    made = Made(tmp_path / "out", Picky())
    running = asyncio.create_task(synthesise.run(made.ctx(), MIXED))
    for _ in range(steps):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    path = made.out / "items.jsonl"
    done = [item["index"] for item in made.items()] if path.exists() else []
    if done:
        path.write_bytes(path.read_bytes() + b'{"index": 7, "seed"')
    (made.out / "tasks" / "synth-00007").mkdir(exist_ok=True, parents=True)  # renamed, and no line of it
    (made.out / "drafts" / "synth-00006").mkdir(exist_ok=True, parents=True)
    before = {index: (made.out / "tasks" / f"synth-{index:05d}").exists() for index in done}
    asked = len(made.writer.asked)  # type: ignore[attr-defined]  # it is Scripted
    result = await synthesise.run(made.ctx(), MIXED)
    assert lines(made) == lines(reference)
    assert made.tree() == reference.tree()
    assert len({item["index"] for item in made.items()}) == len(made.items()) == 8
    assert [item["index"] for item in made.items()][: len(done)] == done
    assert sum(result.counts[name] for name in ("kept", "malformed_template")) == 8
    assert before == {index: (made.out / "tasks" / f"synth-{index:05d}").exists() for index in done}
    world = made.pool.world  # type: ignore[attr-defined]  # it is FakePool
    assert world.leases == world.releases
    templates = [s.seed for step, _, s in made.writer.asked[asked:] if step == "template"]  # type: ignore[attr-defined]
    assert len(templates) <= 2 * (8 - len(done)), "no finished item is asked for again"


async def test_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    made = await whole(tmp_path)
    first, silent = made.tree(), Scripted(dies_at=-1)
    balance = (made.out / "balance.json").read_text()
    again = Made(made.out, silent)
    await synthesise.run(again.ctx(), MIXED)
    assert (silent.asked, again.tree(), (made.out / "balance.json").read_text()) == ([], first, balance)


async def test_an_author_who_cannot_be_had_stops_the_stage_and_loses_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path / "out", Scripted(dies_at=9))
    with pytest.raises(EngineError, match="told to die"):
        await synthesise.run(made.ctx(), replace(CONFIG, concurrency=1))
    assert [item["index"] for item in made.items()] == [0, 1]
    made.writer = Scripted()
    result = await synthesise.run(made.ctx(), replace(CONFIG, concurrency=1))
    assert result.counts == {"kept": 3}


async def test_items_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    made = await whole(tmp_path)
    with pytest.raises(StageError, match="items of another run"):
        await synthesise.run(Made(made.out, Scripted(), name="other").ctx(), MIXED)


async def test_so_many_at_once_and_no_more(tmp_path: Path) -> None:
    busy, most = 0, 0

    class Counting(Scripted):
        async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            writing = await super().write(messages, sampling, key, begun)
            busy -= 1
            return writing

    await synthesise.run(Made(tmp_path / "out", Counting()).ctx(), replace(CONFIG, legacy=12, concurrency=3))
    assert most == 3


async def test_the_fake_model_is_an_author_too(tmp_path: Path) -> None:
    made = Made(tmp_path / "out", Scripted())
    ctx = made.ctx()
    from termrsi.stages.roles import PolicyWriter

    ctx.writer = lambda role: PolicyWriter(ctx.generator, ctx.chat)
    result = await synthesise.run(ctx, replace(CONFIG, legacy=12))
    assert result.counts["kept"] == 12
    assert result.counts["fault_no_end"] > 0
