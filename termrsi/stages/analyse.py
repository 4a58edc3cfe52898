"""Analyse: a judge says of each run of an evaluation which errors it had and what became of them (`error_rules`, `error_rates`).

Each judged run is one line of `judgements.jsonl`, written when it is there. The stage goes on where it was stopped: a line that
broke off is dropped, and a run that has a line is not judged again. Rollouts are read one by one, and few are held at a time.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from termrsi import answers
from termrsi.config.stages import AnalyseConfig
from termrsi.durable import Lines
from termrsi.errors import StageError
from termrsi.harness.group import seed_of
from termrsi.harness.runner import as_finished
from termrsi.records import Turn
from termrsi.stages import error_rates, error_rules, judging
from termrsi.stages.base import Context, StageResult, write_json
from termrsi.stages.error_rates import JudgedRun

FILE = "judgements.jsonl"
SOURCES = ("against", "of")  # in the order in which they are judged
OUTCOMES = ("judged", "invalid", "too_long")


@dataclass(frozen=True, slots=True)
class Run:
    """One rollout of an evaluation, as far as it is judged. `digest`: of its line."""

    source: str  # one of SOURCES
    id: str
    digest: str
    task_id: str
    family: str
    turns: tuple[Turn, ...]
    strict: bool
    passed: tuple[str, ...]
    failed: tuple[str, ...]


async def run(ctx: Context, config: AnalyseConfig) -> StageResult:
    """Writes `judgements.jsonl` and, of all of it, `errors.json`."""
    path = ctx.out / FILE
    wanted = {digest for file in _files(ctx).values() for digest in _digests(file)}
    done = finished(path, wanted)
    todo = (found for found in _runs(ctx) if found.digest not in done)
    instructions = {task.id: task.instruction for split in ("train", "validation", "heldout") for task in ctx.tasks.of(split)}
    ctx.progress.begin(f"{ctx.name}: judge", len(wanted) - len(done))
    with Lines(path) as sink:

        async def work() -> None:
            """Takes the next run until there is none."""
            for found in todo:
                if found.task_id not in instructions:
                    raise StageError(f"a rollout of task {found.task_id!r}, which this run does not have", ctx.name)
                await _judge(ctx, config, found, instructions[found.task_id], sink)
                await ctx.keep_costs()
                ctx.progress.advance()

        async with aclosing(as_finished([work() for _ in range(config.concurrency)])) as workers:
            async for _ in workers:
                pass
    ctx.progress.end()
    return _result(ctx, config, path)


def finished(path: Path, wanted: Set[str]) -> set[str]:
    """Digests of the rollouts that have a line. A line that broke off, or is of a rollout that is not `wanted`, is taken out."""
    done: set[str] = set()
    if not path.is_file():
        return done
    draft = path.with_suffix(".part")
    with path.open("rb") as lines, draft.open("wb") as kept:
        for line in lines:
            try:
                digest = json.loads(line)["digest"]
            except ValueError:  # as the end of a machine leaves it
                continue
            if line.endswith(b"\n") and digest in wanted and digest not in done:
                done.add(digest)
                kept.write(line)
    draft.replace(path)
    return done


def judged_runs(path: Path, source: str = "of") -> list[JudgedRun]:
    """The validly judged runs of one evaluation, from `judgements.jsonl`."""
    with path.open(encoding="utf-8") as lines:
        judged = (line for line in map(json.loads, lines) if line["source"] == source and line["outcome"] == "judged")
        return [
            JudgedRun(line["task"], line["family"], {name: finding["state"] for name, finding in line["findings"].items()})
            for line in judged
        ]


def _files(ctx: Context) -> dict[str, Path]:
    """The rollouts of each evaluation lie beside its scores."""
    return {source: ctx.inputs[source].with_name("rollouts.jsonl") for source in SOURCES if source in ctx.inputs}


def _digests(path: Path) -> Iterator[str]:
    """Of each rollout. Inside a text of JSON the quotes of this key would be escaped."""
    with path.open("rb") as lines:
        yield from (_digest(line) for line in lines if b'"rollout"' in line)


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=16).hexdigest()


def _runs(ctx: Context) -> Iterator[Run]:
    """Line by line; episodes that were lost to a machine have no rollout, and are none."""
    for source, path in _files(ctx).items():
        with path.open("rb") as lines:
            for line in lines:
                found = json.loads(line)
                if "rollout" not in found:
                    continue
                rollout, verdict = found["rollout"], found["verdict"]
                yield Run(
                    source,
                    rollout["id"],
                    _digest(line),
                    rollout["task_id"],
                    rollout["family"],
                    tuple(Turn(**turn) for turn in rollout["turns"]),
                    verdict["strict"],
                    tuple(verdict["passed"]),
                    tuple(verdict["failed"]),
                )


async def _judge(ctx: Context, config: AnalyseConfig, found: Run, instruction: str, sink: Lines) -> None:
    """Writes one line. A run that does not fit the judge even with its texts cut short is told as too_long."""
    sampling = ctx.sampling(config.temperature, max_tokens=config.max_tokens)
    sampling = replace(sampling, seed=seed_of(ctx.config.seed, ctx.name, found.id))
    told = {"strict": found.strict, "passed": found.passed, "failed": found.failed}
    room = config.room(ctx.config.model.max_model_len)
    transcript = judging.fitted(
        found.turns,
        chars=config.text_chars,
        fits=lambda text: len(ctx.chat.prompt(error_rules.question(instruction, text, **told))) <= room,
    )
    line = {"source": found.source, "id": found.id, "digest": found.digest, "task": found.task_id, "family": found.family}
    line |= {"strict": found.strict, "outcome": "too_long", "findings": None, "faults": ()}
    line |= {"prompt_tokens": 0, "completion_tokens": 0, "cost": 0.0}
    if transcript is not None:
        asked = await answers.ask(
            ctx.writer("judge"),
            error_rules.question(instruction, transcript, **told),
            sampling,
            lambda text: error_rules.read(text, turns=len(found.turns), strict=found.strict),
            rounds=config.rounds,
            key=f"{ctx.name}/judge",
        )
        findings = None if asked.answer is None else {name: f.model_dump() for name, f in asked.answer.items()}
        line |= {"outcome": "invalid" if findings is None else "judged", "findings": findings, "faults": asked.faults}
        line |= {"prompt_tokens": asked.prompt_tokens, "completion_tokens": asked.completion_tokens, "cost": asked.cost}
    sink.add(json.dumps(line))  # ASCII: a model's text may hold half a character


def _result(ctx: Context, config: AnalyseConfig, path: Path) -> StageResult:
    """From the lines alone, so that it is the same whether the stage was stopped or not."""
    outcomes, faults, cost = Counter(), Counter(), 0.0
    with path.open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            outcomes[line["source"], line["outcome"]] += 1
            faults.update(line["faults"])
            cost += line["cost"]
            ctx.costs.prompt_tokens += line["prompt_tokens"]
            ctx.costs.completion_tokens += line["completion_tokens"]
    ctx.costs.cost += cost
    seed = ctx.config.seed
    sides = {source: judged_runs(path, source) for source in SOURCES if source in ctx.inputs}
    told = {
        source: {
            "stage": getattr(config, source),
            **{outcome: outcomes[source, outcome] for outcome in OUTCOMES},
            "categories": error_rates.rates(runs, seed=seed),
            "families": error_rates.families(runs, seed=seed),
        }
        for source, runs in sides.items()
    }
    if "against" in sides:
        told["difference"] = error_rates.compare(sides["against"], sides["of"], seed=seed)
    write_json(ctx.out / "errors.json", told)
    counts = {f"{outcome}_{source}": n for (source, outcome), n in sorted(outcomes.items())}
    counts |= {f"fault_{fault}": n for fault, n in sorted(faults.items())}
    summary: dict[str, float | int | str | None] = {"judged": len(sides["of"]), "invalid": outcomes["of", "invalid"]}
    summary |= {f"{category}_recovery": rate["rate"] for category, rate in told["of"]["categories"].items()}
    summary |= {"cost": cost} if cost else {}
    ctx.log(ctx.name, {name: float(value) for name, value in summary.items() if isinstance(value, int | float)})
    return StageResult({"errors": str(ctx.out / "errors.json"), "judgements": str(path)}, summary, counts=counts)
