"""The ledger: what each stage gained and what it cost. A table on screen, JSON and Markdown beside the run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from termrsi import durable

COLUMNS = ("stage", "kind", "result", "verdict", "episodes", "tokens out", "tokens trained", "sandbox s", "wall s")
COST = "cost"  # of models behind endpoints: a column where there is any


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished stage."""

    stage: str
    kind: str
    summary: dict[str, float | int | str | None]
    verdict: str
    counts: dict[str, int]
    costs: dict[str, float]
    outputs: dict[str, str] = field(default_factory=dict)


def read(run_dir: Path) -> list[Entry]:
    """Entries of the stages that have a manifest, in the order in which they finished."""
    manifests = sorted((json.loads(p.read_text()) for p in run_dir.glob("stages/*/manifest.json")), key=lambda m: m["finished"])
    return [Entry(**m["entry"]) for m in manifests]


def columns(entries: Sequence[Entry]) -> tuple[str, ...]:
    return (*COLUMNS, COST) if _paid(entries) else COLUMNS


def rows(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """Table rows, one per stage, in the order of `columns`."""
    paid = _paid(entries)
    return [
        (
            e.stage,
            e.kind,
            result(e),
            e.verdict,
            f"{e.costs.get('episodes', 0):.0f}",
            f"{e.costs.get('completion_tokens', 0):.0f}",
            f"{e.costs.get('trained_tokens', 0):.0f}",
            f"{e.costs.get('sandbox_s', 0):.0f}",
            f"{e.costs.get('wall_s', 0):.0f}",
            *([f"{e.costs.get('cost', 0):.4g}"] if paid else []),
        )
        for e in entries
    ]


def result(entry: Entry) -> str:
    """The stage's own figures in one cell; what its verdict says is left to that."""
    s = entry.summary
    if entry.kind == "evaluate":
        text = f"{_percent(s['mean_at_k'])} [{_percent(s['mean_low'])}, {_percent(s['mean_high'])}] Mean@{s['k']}"
        text += f", {_percent(s['pass_at_k'])} [{_percent(s['pass_low'])}, {_percent(s['pass_high'])}] pass@{s['k']}"
        text += f", progress {_percent(s['progress'])}"
        if "gain" in s:
            text += f"; {_percent(s['baseline_mean'])} -> {_percent(s['mean_at_k'])}, gain {_points(s['gain'])} "
            text += f"[{_points(s['gain_low'])}, {_points(s['gain_high'])}]"
        return text
    moved = [name.removesuffix("_before") for name in s if name.endswith("_before") and name.replace("_before", "_after") in s]
    cells = [f"{name} {_percent(s[f'{name}_before'])} -> {_percent(s[f'{name}_after'])}" for name in moved]
    told = {f"{name}_{end}" for name in moved for end in ("before", "after")} | ({"retained_step"} if entry.verdict else set())
    return ", ".join([*cells, *(f"{name.replace('_', ' ')} {_short(value)}" for name, value in s.items() if name not in told)])


def told(entry: Entry) -> str:
    """Its figures, and the verdict on it."""
    return "; ".join(filter(None, (result(entry), entry.verdict)))


def write(run_dir: Path, entries: Sequence[Entry]) -> None:
    """`ledger.json` and `ledger.md`."""
    durable.write_text(run_dir / "ledger.json", json.dumps([asdict(e) for e in entries], indent=1) + "\n")
    lines = ["| " + " | ".join(columns(entries)) + " |", "|" + " --- |" * len(columns(entries))]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows(entries)]
    durable.write_text(run_dir / "ledger.md", "# Ledger\n\n" + "\n".join(lines) + "\n\n" + _counts(entries))


def at_work(entry: Entry) -> str:
    """Shares of the stage's wall time in which each part had work; "" where nothing was counted."""
    wall_s = entry.costs.get("wall_s", 0.0)
    spent = {part: entry.costs.get(f"{part}_busy_s", 0.0) for part in ("generator", "sandboxes", "verifier")}
    if wall_s <= 0.0 or not any(spent.values()):
        return ""
    spent |= {"learner": entry.costs.get("learn_s", 0.0)}
    return ", ".join(f"{part} {100.0 * seconds / wall_s:.0f} %" for part, seconds in spent.items())


def _paid(entries: Sequence[Entry]) -> bool:
    return any(entry.costs.get("cost", 0) for entry in entries)


def _counts(entries: Sequence[Entry]) -> str:
    parts = []
    for e in entries:
        told = [", ".join(f"{k.replace('_', ' ')} {v}" for k, v in e.counts.items())] if e.counts else []
        told += [f"at work: {busy}"] if (busy := at_work(e)) else []
        if told:
            parts.append(f"**{e.stage}**: " + "; ".join(told))
    return "\n\n".join(parts) + ("\n" if parts else "")


def _percent(value: object) -> str:
    return f"{100 * value:.1f}%" if isinstance(value, int | float) else "-"


def _points(value: object) -> str:
    return f"{100 * value:+.1f}" if isinstance(value, int | float) else "-"


def _short(value: object) -> str:
    if value is None:
        return "undefined"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
