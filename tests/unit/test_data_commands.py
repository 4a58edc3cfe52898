"""`termrsi data`: options, refusals, and what is said of rows of which little is known."""

from pathlib import Path

import pytest

from termrsi import data_commands
from termrsi.data_commands import Options
from termrsi.datasets import Kind, Lineage, Row, write
from termrsi.errors import ConfigError
from termrsi.records import Sample


def test_options() -> None:
    assert Options.of("show", []) == Options(rows=3)
    assert Options.of("show", ["rows=5", "text=true", "tokenizer=a=b"]) == Options(rows=5, text=True, tokenizer="a=b")
    assert Options.of("export", ["tokenizer=d"]) == Options(tokenizer="d")


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        ("show", ["row=1"], "unknown option 'row=1'; nearest: rows="),
        ("show", ["zzz=1"], "it takes rows=, text=, tokenizer="),
        ("show", ["rows=0"], "valid: a whole number from 1 on"),
        ("show", ["text=maybe"], "valid: true or false"),
        ("show", ["text=true"], "termrsi data show: needs a tokenizer; tokenizer=DIR"),
        ("show", ["tokenizer=d"], "tokenizer has no effect; text=true"),
        ("stats", ["rows=1"], "termrsi data stats: rows= is an option of data show; it takes no options"),
        ("export", [], "needs a tokenizer"),
        ("import", ["rows=1"], "rows= is an option of data show; it takes tokenizer="),
    ],
)
def test_bad_options_are_one_line(verb: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options.of(verb, words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [[], ["show"], ["shwo", "a"], ["show", "rows=1"], ["export", "a"], ["export", "a", "tokenizer=d"], ["import", "a=b", "c"]],
)
def test_bad_commands_name_the_good_ones(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="needs show, stats, export or import"):
        data_commands.run(arguments)


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    target.write_text("x")
    with pytest.raises(ConfigError, match="is there already"):
        data_commands.run(["import", "in.jsonl", str(target), "tokenizer=d"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no tokenizer in"):
        data_commands.run(["import", "in.jsonl", str(tmp_path / "new"), f"tokenizer={tmp_path / 'empty'}"])
    assert target.read_text() == "x"


def rows() -> list[Row]:
    lengths = [(1, 4), (2, 4), (10, 100), (4, 4)]  # trained, all
    return [
        Row(
            Sample((7,) * n, (*(0,) * (n - trained), *(1,) * trained), (0,) * n, f"r{i}", f"t{i % 2}"),
            "[files]",
            None if i == 3 else i / 2,
            None if i == 3 else i == 2,
            Lineage(Kind.recovery, stage="a" if i else "\x1b[31mb"),
        )
        for i, (trained, n) in enumerate(lengths)
    ]


def test_stats_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "d.parquet", rows())
    assert data_commands.run(["stats", str(tmp_path / "d.parquet")]) == 0
    out = capsys.readouterr().out
    assert "4 rows of 2 tasks in 1 file\n" in out
    assert "reward: known of 3, mean 0.500, 1 strict\n" in out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert ["trained tokens", "17", "1", "1", "2", "4", "10", "10"] in cells
    assert ["context tokens", "95", "0", "0", "2", "3", "90", "90"] in cells
    assert ["turns", "4", *["1"] * 6] in cells
    assert ["family", "[files]", "4"] in cells
    assert ["stage", "a", "3"] in cells
    assert ["stage", r"\x1b[31mb", "1"] in cells
    assert ["runbook", "not known", "4"] in cells


def test_show_tells_what_is_not_known_and_obeys_no_control_character(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "d.parquet", [*rows(), Row(Sample((1,), (1,), (0,)))])
    assert data_commands.run(["show", str(tmp_path / "d.parquet"), "rows=9"]) == 0
    out = capsys.readouterr().out
    assert "d.parquet: 5 rows\n" in out
    assert [f"row {i}" in out for i in range(6)] == [True] * 5 + [False]
    assert "\x1b" not in out
    assert r"\x1b[31mb" in out
    last = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.split("row 4")[1].splitlines()]
    for name in ("rollout", "task, family", "reward", "run, stage", "harness", "made by", "parent"):
        assert [name, "not known"] in last
    assert ["kind", "imported"] in last


def test_an_empty_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "d.parquet", [])
    assert data_commands.run(["stats", str(tmp_path / "d.parquet")]) == 0
    assert capsys.readouterr().out == "0 rows of 0 tasks in 1 file\n"
