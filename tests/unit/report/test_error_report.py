"""The tables of error analysis, from what a stage left."""

import json
from pathlib import Path

import pytest

from termrsi.errors import ConfigError
from termrsi.report import errors

CELLS = {"unresolved": 1, "recovered": 3, "no_error": 5, "uncertain": 2, "rate": 0.75, "low": 0.301, "high": 0.954}
NONE = {"unresolved": 0, "recovered": 0, "no_error": 9, "uncertain": 2, "rate": None, "low": None, "high": None}
SIDE = {
    "stage": "final_eval", "judged": 11, "invalid": 2, "too_long": 1,
    "categories": {"planning": CELLS, "tool_use": NONE},
    "families": {"my_files": {"planning": CELLS, "tool_use": NONE}},
}  # fmt: skip
CHANGE = {
    "tasks": 6, "paired": 1, "recovery": 0.125, "recovery_low": -0.1, "recovery_high": 0.4,
    "unresolved": None, "unresolved_low": None, "unresolved_high": None,
}  # fmt: skip


def test_rates_with_intervals_and_what_is_undefined() -> None:
    text = errors.rates({"of": SIDE})
    assert "Errors of final_eval: 11 runs judged, 2 without a valid answer, 1 too long for the judge\n" in text
    assert "| planning | 1 | 3 | 5 | 2 | 75.0 [30.1, 95.4] |\n" in text
    assert "| tool use | 0 | 0 | 9 | 2 | undefined |\n" in text
    assert "| my_files: planning | 1 | 3 | 5 | 2 | 75.0 [30.1, 95.4] |\n" in text
    assert "my_files: tool use" not in text


def test_a_difference() -> None:
    text = errors.rates({"of": SIDE, "against": SIDE | {"stage": "base_eval"}, "difference": {"tool_use": CHANGE}})
    assert "final_eval less base_eval, paired by task" in text
    assert "| tool use | +12.5 [-10.0, +40.0] | undefined | 6 |\n" in text
    assert "so not paired" in errors.difference({"planning": CHANGE | {"paired": 0}}, "a", "b")


def test_only_finished_stages_of_this_kind_are_read(tmp_path: Path) -> None:
    for name, kind in (("errors", "analyse"), ("sft", "sft")):
        folder = tmp_path / "stages" / name
        folder.mkdir(parents=True)
        (folder / "errors.json").write_text("{}")
        outputs = {"errors": str(folder / "errors.json"), "judgements": str(folder / "judgements.jsonl")}
        entry = {"stage": name, "kind": kind, "summary": {}, "verdict": "", "counts": {}, "costs": {}, "outputs": outputs}
        (folder / "manifest.json").write_text(json.dumps({"entry": entry, "finished": 1.0}))
    assert errors.stages(tmp_path) == ["errors"]
    assert errors.read(tmp_path, "errors") == {}
    assert errors.judgements(tmp_path, "errors").name == "judgements.jsonl"
    for name in ("sft", "nothing"):
        with pytest.raises(ConfigError, match="valid: errors"):
            errors.read(tmp_path, name)
