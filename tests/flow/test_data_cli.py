"""`termrsi data` as a user runs it: what a run left is shown and counted, exported, and imported again to the same rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from termrsi.datasets import DataSet, Kind, Lineage, Row, write
from termrsi.harness.render import ChatFormat
from termrsi.records import Message, Sample
from tests.families import qwen


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "termrsi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"})


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    place = tmp_path / "policy"
    qwen().save_pretrained(str(place))
    return place


def sample(chat: ChatFormat, number: int) -> Sample:
    prompt = chat.prompt([Message("user", f"go {number}")])
    said = [*(i for c in "ls -l" for i in chat.encode(c)), chat.end_of_turn]  # as a sampler may, not as the text is encoded
    mask = (*(0,) * len(prompt), *(1,) * len(said))
    return Sample((*prompt, *said), mask, (0,) * len(mask), rollout_id=f"r/{number}", group_id=f"t{number % 2}")


def test_a_runs_data_sets_are_shown_and_counted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = _run("experiment=terminal_rsi", "scale=dry", f"run_dir={run}")
    assert done.returncode == 0, done.stderr
    stats = _run("data", "stats", str(run))
    assert stats.returncode == 0, stats.stderr
    entries = json.loads((run / "ledger.json").read_text())
    kept = {entry["stage"]: entry["summary"]["kept"] for entry in entries if entry["stage"].startswith("rsr_")}
    assert f"{sum(kept.values())} rows of " in stats.stdout
    assert "in 2 files" in stats.stdout
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in stats.stdout.splitlines()]
    for name, rows in kept.items():
        assert ["stage", name, str(rows)] in cells
    assert ["kind", "rsr", str(sum(kept.values()))] in cells
    shown = _run("data", "show", str(run), "rows=1")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("row 0") == 2
    for word in ("rsr_1/execute", "1, strict", "tokens trained", "react", "rsr_1/fewshot"):
        assert word in shown.stdout


def test_export_and_import_give_the_same_rows(tmp_path: Path, tokenizer: Path) -> None:
    chat = ChatFormat(qwen())
    rows = [Row(sample(chat, i), "files", 1.0, True, Lineage(Kind.rsr, "run", runbook=i)) for i in range(70)]
    first, lines, second = tmp_path / "a.parquet", tmp_path / "a.jsonl", tmp_path / "b.parquet"
    write(first, rows)
    done = _run("data", "export", str(first), str(lines), f"tokenizer={tokenizer}")
    assert (done.returncode, done.stdout) == (0, f"{lines}: 70 lines\n"), done.stderr
    assert json.loads(lines.read_text().splitlines()[3])["messages"] == [
        {"role": "user", "content": "go 3"},
        {"role": "assistant", "content": "ls -l"},
    ]
    done = _run("data", "import", str(lines), str(second), f"tokenizer={tokenizer}")
    assert (done.returncode, done.stdout) == (0, f"{second}: 70 rows\n"), done.stderr
    with DataSet(second) as data:
        assert list(data) == rows
    shown = _run("data", "show", str(second), "rows=1", "text=true", f"tokenizer={tokenizer}")
    assert "<|im_start|>user\ngo 0<|im_end|>\n<|im_start|>assistant\n⟦ls -l<|im_end|>⟧" in shown.stdout


def test_malformed_lines_are_all_named_and_nothing_is_written(tmp_path: Path, tokenizer: Path) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ls"}]})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_bytes(b"\xef\xbb\xbf" + f"{good}\n\n{{\n{good}\n[]\n".encode() + b"\xff\n")
    done = _run("data", "import", str(source), str(target), f"tokenizer={tokenizer}")
    assert done.returncode == 2
    assert done.stderr == f"termrsi: ConfigError: {source}: 3 of 5 lines are malformed, so nothing was written\n"
    told = done.stdout.splitlines()
    assert [line.split(":")[0] for line in told] == ["line 3", "line 5", "line 6"]
    assert told[1:] == ['line 5: has no list "messages"', "line 6: is no UTF-8"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "policy"]
    source.write_text(good)
    assert _run("data", "import", str(source), str(target), f"tokenizer={tokenizer}").returncode == 0
    with DataSet(target) as data:
        assert [row.lineage for row in data] == [Lineage()]


def test_rows_of_another_tokenizer_are_left_out(tmp_path: Path, tokenizer: Path) -> None:
    chat = ChatFormat(qwen())
    write(tmp_path / "a.parquet", [Row(sample(chat, 0)), Row(Sample((5, 6), (0, 1), (0, 0)))])
    done = _run("data", "export", str(tmp_path / "a.parquet"), str(tmp_path / "a.jsonl"), f"tokenizer={tokenizer}")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith("left out row 1: tokenizer: the chat template did not write these tokens")
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1
    write(tmp_path / "b.parquet", [Row(Sample((5, 6), (0, 1), (0, 0)))])
    done = _run("data", "export", str(tmp_path / "b.parquet"), str(tmp_path / "b.jsonl"), f"tokenizer={tokenizer}")
    assert done.returncode == 2
    assert "no row could be written" in done.stderr
    assert not list(tmp_path.glob("*b.jsonl*"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["data"], "needs show, stats, export or import"),
        (["data", "show", "/nowhere.parquet"], "/nowhere.parquet: no such data set"),
        (["data", "stats", "/"], "no stage of it has written a data set"),
        (["data", "stats", __file__], "is no Parquet file"),
        (["data", "import", "/nowhere.jsonl", "/nowhere/out.parquet", "tokenizer=/nowhere"], "/nowhere: no such directory"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], part: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
