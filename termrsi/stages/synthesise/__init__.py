"""Synthesis of tasks in Tmax's manner (arXiv 2606.23321): draw a blueprint, have it written, keep it if its smoke test holds.

Items are independent and their order plays no part: item `i` of a run has one blueprint and one directory name. A stage that was
stopped goes on item by item (`items.jsonl`); a directory without its line is made again. What a machine fault took is in no line:
it is counted, and a run that goes on tries it again. Of a written item only counts stay in memory.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from termrsi.config.choices import Author as Kind
from termrsi.config.stages import SynthesiseConfig
from termrsi.errors import SandboxError, StageError
from termrsi.harness.group import seed_of
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.journal import Journal
from termrsi.stages.synthesise.author import Author, ModelAuthor, ProceduralAuthor
from termrsi.stages.synthesise.smoke import smoke
from termrsi.tasks.synthesis import axes
from termrsi.tasks.synthesis.contamination import Benchmarks
from termrsi.tasks.synthesis.write import write

KEPT = "kept"


async def run(ctx: Context, config: SynthesiseConfig) -> StageResult:
    """Writes `tasks/`, `refused/`, `items.jsonl` and `balance.json`. Raises StageError if no task was kept."""
    benchmarks = Benchmarks(config.benchmarks)
    author = author_of(ctx, config, benchmarks)
    return await synthesise(ctx, config, author)


def author_of(ctx: Context, config: SynthesiseConfig, benchmarks: Benchmarks) -> Author:
    def admit(instruction: str) -> str:
        return "contaminated" if benchmarks.shares_a_run(instruction) else ""

    if config.author is Kind.procedural:
        return ProceduralAuthor(admit, tuple(config.families))
    sampling = ctx.sampling(config.temperature, config.top_p, config.reply_tokens)
    return ModelAuthor(ctx.writer("author"), sampling, config.rounds, config.image, admit)


async def synthesise(ctx: Context, config: SynthesiseConfig, author: Author) -> StageResult:
    """See `run`."""
    work = _Work(ctx, config, author)
    values = axes.support(config.corpora(), config.axes.weights())  # raises for weights that a corpus cannot draw from
    with work.journal:
        work.read()
        await work.all()
    drawn, kept = work.drawn.balance(values), work.kept.balance(values)
    write_json(ctx.out / "balance.json", {"drawn": drawn, "kept": kept, "values": values})
    counts = {name: work.counts[name] for name in [KEPT, *sorted(set(work.counts) - {KEPT})]}
    ctx.log(ctx.name, {k: float(v) for k, v in counts.items()})
    if not work.counts[KEPT]:
        raise StageError("no task was kept", ctx.name, f"counts: {counts}")
    summary: dict[str, float | int | str | None] = {"items": sum(config.corpora().values()), KEPT: work.counts[KEPT]}
    for name, found in (("balance_drawn", drawn), ("balance_kept", kept)):
        summary[name] = " ".join(f"{axis} {index:.3f}" for axis, index in found.items() if index is not None)
    return StageResult({"tasks": str(ctx.out / "tasks"), "balance": str(ctx.out / "balance.json")}, summary, counts=counts)


@dataclass(slots=True)
class _Work:
    """The items of one stage, done and to do."""

    ctx: Context
    config: SynthesiseConfig
    author: Author
    drawn: axes.Tally = field(default_factory=axes.Tally)
    kept: axes.Tally = field(default_factory=axes.Tally)
    counts: Counter[str] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)
    seed: int = 0
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        self.seed = seed_of(self.ctx.config.seed, self.ctx.name)
        self.journal = Journal(self.ctx.out / "items.jsonl")

    def read(self) -> None:
        """What was finished before. Raises StageError if it is of other draws."""
        for _, item in self.journal.items():
            if item["seed"] != self.seed or item["index"] in self.done:
                raise StageError("holds items of another run", str(self.ctx.out), "take it away to begin anew")
            self._count(item)
        shutil.rmtree(self.ctx.out / "drafts", ignore_errors=True)
        for name in ("tasks", "refused"):
            (self.ctx.out / name).mkdir(parents=True, exist_ok=True)
            for folder in (self.ctx.out / name).iterdir():
                if int(folder.name.rpartition("-")[2]) not in self.done:  # stopped before its line was written
                    shutil.rmtree(folder)

    async def all(self) -> None:
        """The items that are not done, so many at a time. Raises the first error of one, after the others have ended."""
        todo = self._todo()
        total = sum(self.config.corpora().values()) - len(self.done)
        self.ctx.progress.begin(f"{self.ctx.name}: write and test", total)
        width = min(self.config.concurrency or self.ctx.config.sandbox.concurrency, total)
        workers = [asyncio.create_task(self._worker(todo)) for _ in range(width)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self.ctx.progress.end()

    def _todo(self) -> Iterator[axes.Blueprint]:
        weights, index = self.config.axes.weights(), 0
        for corpus, number in self.config.corpora().items():
            for _ in range(number):
                if index not in self.done:
                    yield axes.draw(index, self.seed, corpus, weights)
                index += 1

    async def _worker(self, todo: Iterator[axes.Blueprint]) -> None:
        """Consumes `todo` with the other workers; ends with it."""
        for blueprint in todo:
            try:
                item = await self._one(blueprint)
            except SandboxError as error:
                self.counts["lost"] += 1
                self.drawn.add(blueprint.axes())
                self.ctx.progress.advance(f"lost: {error.what}")
                continue
            self.journal.add(str(item["index"]), item)
            await self.ctx.keep_costs()
            self._count(item)
            self.ctx.progress.advance("" if item["category"] == KEPT else item["category"])

    async def _one(self, blueprint: axes.Blueprint) -> dict[str, Any]:  # Any: a line of JSON
        made = await self.author.write(blueprint)
        self.ctx.costs.prompt_tokens += made.prompt_tokens
        self.ctx.costs.completion_tokens += made.completion_tokens
        self.ctx.costs.cost += made.cost
        category, detail = made.category, ""
        name = f"{self.ctx.name}-{blueprint.index:05d}"
        if made.draft is not None:
            folder = self.ctx.out / "drafts" / name
            write(folder, made.draft, {"index": blueprint.index, "seed": blueprint.seed, "corpus": blueprint.corpus, **made.axes})
            ctx = self.ctx
            category, detail = await smoke(ctx.pool, ctx.verifier, folder, retries=ctx.config.cluster.episode_retries)
            folder.rename(self.ctx.out / ("refused" if category else "tasks") / name)
        return {
            "index": blueprint.index,
            "seed": blueprint.seed,
            "name": name,
            "corpus": blueprint.corpus,
            "category": category or KEPT,
            "detail": detail,
            "drawn": blueprint.axes(),
            "axes": made.axes,
            "faults": dict(made.faults),
            "prompt_tokens": made.prompt_tokens,
            "completion_tokens": made.completion_tokens,
            "cost": made.cost,
        }

    def _count(self, item: dict[str, Any]) -> None:  # Any: see _one
        self.done.add(item["index"])
        self.counts[item["category"]] += 1
        self.counts.update({f"fault_{fault}": number for fault, number in item["faults"].items()})
        self.drawn.add(item["drawn"])
        if item["category"] == KEPT:
            self.kept.add(item["axes"])
