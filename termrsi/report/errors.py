"""Error analysis in Markdown: what a stage of kind `analyse` wrote, per category, per family, and one evaluation beside another."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from termrsi.errors import ConfigError
from termrsi.report import ledger

STATES = ("unresolved", "recovered", "no_error", "uncertain")
COLUMNS = ("category", "unresolved", "recovered", "no error", "uncertain", "recovery rate, %")
CHANGES = ("category", "recovery rate, points", "runs with an unresolved error, points", "tasks")

Cells = Mapping[str, float | int | None]


def stages(run_dir: Path) -> list[str]:
    """The finished stages of kind `analyse`."""
    return [entry.stage for entry in ledger.read(run_dir) if entry.kind == "analyse"]


def read(run_dir: Path, stage: str) -> dict[str, Any]:  # Any: parsed JSON
    """Its `errors.json`. Raises ConfigError if it is no finished stage of this kind."""
    return json.loads(_output(run_dir, stage, "errors").read_text(encoding="utf-8"))


def judgements(run_dir: Path, stage: str) -> Path:
    """Its judged runs, one a line. Raises ConfigError as `read` does."""
    return _output(run_dir, stage, "judgements")


def rates(found: Mapping[str, Any]) -> str:  # Any: parsed JSON
    """All that the stage found; intervals are 95 %. What nobody could tell is said to be undefined."""
    lines: list[str] = []
    for source in ("of", "against"):
        if source not in found:
            continue
        side = found[source]
        lines += [f"Errors of {side['stage']}: {side['judged']} runs judged, {side['invalid']} without a valid answer, "]
        lines[-1] += f"{side['too_long']} too long for the judge"
        lines += ["", *_table(COLUMNS, {_words(name): _rates(cells) for name, cells in side["categories"].items()}), ""]
        by_family = {
            f"{family}: {_words(category)}": _rates(cells)
            for family, categories in side["families"].items()
            for category, cells in categories.items()
            if cells["unresolved"] or cells["recovered"]
        }
        if by_family:
            lines += ["Families with errors:", "", *_table(COLUMNS, by_family), ""]
    text = "\n".join(lines) + "\n"
    return (
        text + difference(found["difference"], found["of"]["stage"], found["against"]["stage"]) if "difference" in found else text
    )


def difference(changes: Mapping[str, Cells], after: str, before: str) -> str:
    """`after` less `before`, with intervals, by category."""
    paired = all(cells["paired"] for cells in changes.values())
    how = "paired by task" if paired else "of other tasks, so not paired"
    rows = {
        _words(name): (
            _interval(cells, "recovery", "recovery_low", "recovery_high", "{:+.1f}"),
            _interval(cells, "unresolved", "unresolved_low", "unresolved_high", "{:+.1f}"),
            str(cells["tasks"]),
        )
        for name, cells in changes.items()
    }
    return "\n".join([f"{after} less {before}, {how}", "", *_table(CHANGES, rows), ""]) + "\n"


def _output(run_dir: Path, stage: str, what: str) -> Path:
    entries = {entry.stage: entry for entry in ledger.read(run_dir) if entry.kind == "analyse"}
    if stage not in entries:
        valid = ", ".join(entries) or "none is finished"
        raise ConfigError(f"no finished stage {stage!r} of kind analyse", str(run_dir), f"valid: {valid}")
    return Path(entries[stage].outputs[what])


def _table(columns: tuple[str, ...], rows: Mapping[str, tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join((name, *cells)) + " |" for name, cells in rows.items()]


def _words(category: str) -> str:
    return category.replace("_", " ")


def _rates(cells: Cells) -> tuple[str, ...]:
    return (*(str(cells[state]) for state in STATES), _interval(cells, "rate", "low", "high", "{:.1f}"))


def _interval(cells: Cells, name: str, low: str, high: str, form: str) -> str:
    values = [cells[key] for key in (name, low, high)]
    if None in values:
        return "undefined"
    said = [form.format(100.0 * value) for value in values if value is not None]
    return f"{said[0]} [{said[1]}, {said[2]}]"
