"""Runs compared: arms by what was asked for, means over seeds with Student's interval, what is missing said."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from termrsi.errors import ConfigError
from termrsi.report import compare
from termrsi.report.ledger import Entry


def entry(stage: str, kind: str, **summary: float | str | None) -> Entry:
    return Entry(stage, kind, dict(summary), "", {}, {}, {})


def write(root: Path, name: str, overrides: list[str], *entries: Entry) -> Path:
    run = root / name
    for number, one in enumerate(entries):
        place = run / "stages" / one.stage
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(json.dumps({"entry": asdict(one), "finished": number}))
    run.mkdir(exist_ok=True)
    (run / "overrides.json").write_text(json.dumps(overrides))
    return run


def branches(root: Path, seed: int, *means: float) -> Path:
    """Evaluations whose gains are over the one before."""
    entries = [
        entry(f"eval_{i}", "evaluate", mean_at_k=mean, **({"gain": mean - means[i - 1]} if i else {}))
        for i, mean in enumerate(means)
    ]
    directory = write(root, f"branches-{seed}", ["experiment=x", f"seed={seed}"], *entries)
    for i in range(1, len(means)):
        path = directory / "stages" / f"eval_{i}" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"config": {"baseline": f"eval_{i - 1}"}}))
    return directory


def test_branches_are_told_each_with_its_seeds(tmp_path: Path) -> None:
    runs = [compare.read(branches(tmp_path, 0, 0.4, 0.5, 0.52)), compare.read(branches(tmp_path, 1, 0.4, 0.6, 0.58))]
    text = compare.table(runs)
    assert "| eval_0 | 2 | 40.0 [40.0, 40.0] | 40.0 40.0 |  |  |  |" in text
    assert "| eval_1 | 2 | 55.0 [-8.5, 118.5] | 50.0 60.0 | eval_0 | +15.0 [-48.5, +78.5] | +10.0 +20.0 |" in text
    assert "| eval_2 | 2 | 55.0 [16.9, 93.1] | 52.0 58.0 | eval_1 | +0.0 [-25.4, +25.4] | +2.0 -2.0 |" in text


def run(root: Path, seed: int, mean: float, *words: str, ev: float | None = 0.25) -> Path:
    scores = {"mean_at_k": mean, "mean_low": mean - 0.1, "mean_high": mean + 0.1, "gain": mean - 0.1}
    return write(
        root,
        f"{'-'.join(words)}-{seed}",
        ["experiment=terminal_rsi", f"seed={seed}", f"run_dir=/x/{seed}", *words],
        entry("base_eval", "evaluate", mean_at_k=0.1),
        entry("rpr_1", "rpr", retained_step=2, validation_before=0.2, validation_after=mean, ev_last=ev),
        entry("final_eval", "evaluate", **scores, gain_low=mean - 0.2, gain_high=mean),
    )


def test_arms_are_rows_and_seeds_are_averaged(tmp_path: Path) -> None:
    made = [run(tmp_path, seed, mean) for seed, mean in enumerate((0.4, 0.5, 0.6))]
    made += [run(tmp_path, seed, mean, "credit=skip", ev=None) for seed, mean in enumerate((0.3, 0.3))]
    lines = compare.table([compare.read(one) for one in made]).splitlines()
    assert lines[0] == "Of all: experiment=terminal_rsi"
    assert lines[4] == "| as it is | 3 | 50.0 [25.2, 74.8] | +40.0 [+15.2, +64.8] | rpr_1 20.0 → 50.0 | 0.25 |"
    assert lines[5] == "| credit=skip | 2 | 30.0 [30.0, 30.0] | +20.0 [+20.0, +20.0] | rpr_1 20.0 → 30.0 | undefined |"


def test_one_seed_has_its_own_interval(tmp_path: Path) -> None:
    made = [run(tmp_path, 0, 0.4), run(tmp_path, 0, 0.5, "reward=fdr")]
    lines = compare.table([compare.read(one) for one in made]).splitlines()
    assert lines[4] == "| as it is | 1 | 40.0 [30.0, 50.0] | +30.0 [+20.0, +40.0] | rpr_1 20.0 → 40.0 | 0.25 |"
    assert lines[5].startswith("| reward=fdr | 1 | 50.0 [40.0, 60.0] |")


def test_a_run_without_its_last_evaluation_is_counted_and_left_out(tmp_path: Path) -> None:
    whole = run(tmp_path, 0, 0.4)
    half = write(tmp_path, "half", ["experiment=terminal_rsi", "seed=1"], entry("base_eval", "evaluate", mean_at_k=0.1))
    lines = compare.table([compare.read(one) for one in (whole, half)]).splitlines()
    assert lines[4].startswith("| as it is | 1 of 2 | 40.0 [30.0, 50.0] |")
    assert compare.table([compare.read(half)]).splitlines()[4] == "| as it is | 0 of 1 | none | none | none | undefined |"


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished stage there"):
        compare.read(tmp_path)


def test_intervals_over_seeds() -> None:
    """Three runs: 4.303 standard errors."""
    assert compare.over_seeds([0.4, 0.5, 0.6]) == pytest.approx([0.5 - 4.303 * 0.1 / 3**0.5, 0.5 + 4.303 * 0.1 / 3**0.5])
    assert compare.over_seeds([0.5]) == compare.over_seeds([0.5] * 17) == []
