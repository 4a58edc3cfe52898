"""Several runs in one table: an arm is what was asked for beside seed and place, its figures are means over seeds."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from termrsi.errors import ConfigError
from termrsi.report import ledger
from termrsi.report.ledger import Entry

PLACES = ("seed", "run_dir", "reuse", "logger", "logger.project", "min_free_gib")
BRANCHES = 3  # evaluations of a run, from which on each is told and not the last alone
COLUMNS = ("arm", "seeds", "Mean@k %", "gain, points", "validation % per phase", "last EV")

# Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, slots=True)
class Run:
    """One run directory: what was asked for, and its finished stages."""

    arm: str
    entries: list[Entry]
    baselines: dict[str, str]  # of each evaluation: the one that its gain is over

    @property
    def final(self) -> Entry | None:
        """Its last evaluation."""
        return next((entry for entry in reversed(self.entries) if entry.kind == "evaluate"), None)


def read(run_dir: Path) -> Run:
    """Raises ConfigError for a directory without a finished stage."""
    asked, entries = run_dir / "overrides.json", ledger.read(run_dir)
    if not entries or not asked.is_file():
        raise ConfigError("no finished stage there", str(run_dir), "valid: run directories")
    own = [word for word in json.loads(asked.read_text()) if word.partition("=")[0] not in PLACES]
    manifests = [json.loads(path.read_text()) for path in run_dir.glob("stages/*/manifest.json")]
    baselines = {m["entry"]["stage"]: m.get("config", {}).get("baseline", "") for m in manifests}
    return Run(" ".join(own), entries, baselines)


def table(runs: Sequence[Run]) -> str:
    """Markdown, one row per arm in the order given; intervals are 95 %, over seeds (Student's t), of one seed over its tasks.

    What the arms have in common is said once, above. A run whose last evaluation is missing is counted, and left out of the means.
    """
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    common = set.intersection(*(set(arm.split()) for arm in arms))
    lines = [f"Of all: {' '.join(word for word in runs[0].arm.split() if word in common) or 'nothing'}", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for arm, members in arms.items():
        label = " ".join(word for word in arm.split() if word not in common) or "as it is"
        lines.append("| " + " | ".join((label, *_cells(members))) + " |")
    return "\n".join(lines) + "\n" + "".join(_evaluations(members) for members in arms.values())


def _evaluations(members: Sequence[Run]) -> str:
    """Of runs with several branches: each evaluation and its gain over its baseline, mean over seeds, with every seed's figure."""
    names = [entry.stage for entry in members[0].entries if entry.kind == "evaluate"]
    if len(names) < BRANCHES:
        return ""
    lines = ["", "| evaluation | seeds | Mean@k % | each | gain over | points | each |", "|" + " --- |" * 7]
    for name in names:
        entries = [entry for run in members for entry in run.entries if entry.stage == name]
        means = [100.0 * float(entry.summary["mean_at_k"] or 0.0) for entry in entries]
        gains = [100.0 * float(entry.summary["gain"] or 0.0) for entry in entries if "gain" in entry.summary]
        cells = [name, str(len(means)), _mean(means, "{:.1f}"), " ".join(f"{mean:.1f}" for mean in means)]
        cells += [members[0].baselines.get(name, ""), _mean(gains, "{:+.1f}"), " ".join(f"{gain:+.1f}" for gain in gains)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float], form: str) -> str:
    """With its interval over seeds, where there are several."""
    if not values:
        return ""
    said, bounds = form.format(statistics.fmean(values)), over_seeds(values)
    return f"{said} [{form.format(bounds[0])}, {form.format(bounds[1])}]" if bounds else said


def _cells(members: Sequence[Run]) -> tuple[str, ...]:
    ended = [run for run in members if (final := run.final) is not None and "gain" in final.summary]
    seeds = f"{len(ended)}" if len(ended) == len(members) else f"{len(ended)} of {len(members)}"
    return (
        seeds,
        _figure(ended, "mean_at_k", "mean_low", "mean_high", "{:.1f}"),
        _figure(ended, "gain", "gain_low", "gain_high", "{:+.1f}"),
        _phases(members),
        _last_ev(members),
    )


def _figure(ended: Sequence[Run], name: str, low: str, high: str, form: str) -> str:
    summaries = [run.final.summary for run in ended if run.final is not None]
    values = [100.0 * float(summary[name] or 0.0) for summary in summaries]
    if not values:
        return "none"
    bounds = [100.0 * float(summaries[0][end] or 0.0) for end in (low, high)] if len(values) == 1 else over_seeds(values)
    said = form.format(statistics.fmean(values))
    return f"{said} [{form.format(bounds[0])}, {form.format(bounds[1])}]" if bounds else said


def over_seeds(values: Sequence[float]) -> list[float]:
    """Bounds of the 95 % interval of the mean of two to sixteen independent runs (Student's t); empty for any other number."""
    if not 1 <= len(values) - 1 <= len(STUDENT):
        return []
    mean, half = statistics.fmean(values), STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return [mean - half, mean + half]


def _phases(members: Sequence[Run]) -> str:
    """Of each stage that retains by validation: before and after, mean over seeds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in members:
        for entry in run.entries:
            if "retained_step" in entry.summary:
                before, after = (float(entry.summary[f"validation_{end}"] or 0.0) for end in ("before", "after"))
                found.setdefault(entry.stage, []).append((100.0 * before, 100.0 * after))
    means = {stage: [sum(column) / len(pairs) for column in zip(*pairs, strict=True)] for stage, pairs in found.items()}
    return ", ".join(f"{stage} {before:.1f} → {after:.1f}" for stage, (before, after) in means.items()) or "none"


def _last_ev(members: Sequence[Run]) -> str:
    """Of the last stage with a critic, where it is defined."""
    values = []
    for run in members:
        critics = [entry.summary["ev_last"] for entry in run.entries if "ev_last" in entry.summary]
        if critics and critics[-1] is not None:
            values.append(float(critics[-1]))
    return f"{sum(values) / len(values):.2f}" if values else "undefined"
