"""The ledger reads manifests in the order the stages finished, and says what each gained."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from termrsi.report import ledger
from termrsi.report.screen import Screen

EVALUATION = {
    "tasks": 4, "k": 2, "mean_at_k": 0.5, "mean_low": 0.25, "mean_high": 0.75, "pass_at_k": 0.6,
    "pass_low": 0.4, "pass_high": 0.8, "progress": 0.7,
    "baseline_mean": 0.1, "gain": 0.4, "gain_low": 0.2, "gain_high": 0.6,
}  # fmt: skip


def _entry(stage: str, kind: str, summary: dict) -> ledger.Entry:
    return ledger.Entry(stage, kind, summary, "retained step 2", {"kept": 3}, {"episodes": 8, "wall_s": 12.4})


def test_stages_come_in_the_order_they_finished(tmp_path: Path) -> None:
    for finished, stage in ((2.0, "a"), (1.0, "b")):
        folder = tmp_path / "stages" / stage
        folder.mkdir(parents=True)
        entry = asdict(_entry(stage, "sft", {"steps": 3}))
        (folder / "manifest.json").write_text(json.dumps({"entry": entry, "finished": finished}))
    (tmp_path / "stages" / "unfinished").mkdir()
    assert [e.stage for e in ledger.read(tmp_path)] == ["b", "a"]


def test_an_evaluation_shows_before_after_and_interval() -> None:
    text = ledger.result(_entry("final", "evaluate", EVALUATION))
    assert (
        text
        == "50.0% [25.0%, 75.0%] Mean@2, 60.0% [40.0%, 80.0%] pass@2, progress 70.0%; 10.0% -> 50.0%, gain +40.0 [+20.0, +60.0]"
    )


def test_shares_of_the_wall_time_in_which_each_part_was_at_work() -> None:
    costs = {"wall_s": 200.0, "generator_busy_s": 170.0, "sandboxes_busy_s": 31.0, "verifier_busy_s": 9.0, "learn_s": 20.0}
    assert (
        ledger.at_work(ledger.Entry("a", "rpr", {}, "", {}, costs)) == "generator 85 %, sandboxes 16 %, verifier 4 %, learner 10 %"
    )
    assert ledger.at_work(ledger.Entry("a", "rpr", {}, "", {}, {"wall_s": 200.0})) == ""


def test_the_table_on_screen_has_the_shares_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    costs = {"wall_s": 200.0, "generator_busy_s": 170.0, "learn_s": 20.0}
    Screen().ledger([ledger.Entry("a", "rpr", {}, "", {}, costs), ledger.Entry("b", "sft", {}, "", {}, {"wall_s": 9.0})])
    told = [line for line in capsys.readouterr().out.splitlines() if "at work" in line]
    assert told == ["a, at work: generator 85 %, sandboxes 0 %, verifier 0 %, learner 10 %"]


def test_undefined_is_not_a_number() -> None:
    assert ledger.result(_entry("warmup", "warmup_critic", {"last_ev": None})) == "last ev undefined"


def test_markdown_has_a_row_per_stage_and_the_counts(tmp_path: Path) -> None:
    ledger.write(tmp_path, [_entry("final", "evaluate", EVALUATION)])
    text = (tmp_path / "ledger.md").read_text()
    assert "| final | evaluate |" in text
    assert "**final**: kept 3" in text
    assert json.loads((tmp_path / "ledger.json").read_text())[0]["stage"] == "final"


def test_what_endpoints_cost_is_a_column_where_there_is_any(tmp_path: Path) -> None:
    free, paid = (_entry(name, "rsr", {}) for name in ("free", "paid"))
    assert ledger.columns([free]) == ledger.COLUMNS
    assert len(ledger.rows([free])[0]) == len(ledger.COLUMNS)
    paid.costs["cost"] = 0.01234567
    assert ledger.columns([free, paid])[-1] == "cost"
    assert [row[-1] for row in ledger.rows([free, paid])] == ["0", "0.01235"]
    ledger.write(tmp_path, [free, paid])
    head, rule, *_ = (line for line in (tmp_path / "ledger.md").read_text().splitlines() if line.startswith("|"))
    assert head.endswith("| cost |")
    assert head.count("|") == rule.count("|")


def test_a_stage_that_measured_both_sides_shows_before_and_after_first() -> None:
    summary: dict[str, float | int | str | None] = {"steps": 4, "validation_before": 0.25, "validation_after": 0.5}
    entry = ledger.Entry("sft_1", "sft", summary, "", {}, {})
    assert ledger.result(entry) == "validation 25.0% -> 50.0%, steps 4"
