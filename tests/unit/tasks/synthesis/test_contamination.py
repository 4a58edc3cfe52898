"""Runs of 13 words: exact at 12 against 13, whatever the benchmark's form."""

import json
from pathlib import Path

import pytest

from termrsi.errors import ConfigError
from termrsi.tasks.synthesis.contamination import Benchmarks, grams, texts

WORDS = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima", "mike"]
RUN = " ".join(WORDS)


def index(tmp_path: Path, text: str = f"Before. {RUN} and after.") -> Benchmarks:
    (tmp_path / "bench.txt").write_text(text)
    return Benchmarks([tmp_path / "bench.txt"])


def test_thirteen_words_in_a_row_are_found_and_twelve_are_not(tmp_path: Path) -> None:
    found = index(tmp_path)
    assert found.shares_a_run(f"Please: {RUN}!")
    assert not found.shares_a_run(f"Please: {' '.join(WORDS[:12])} november")
    assert not found.shares_a_run(f"Please: {' '.join(WORDS[1:])} november")


def test_case_and_punctuation_play_no_part_and_order_does(tmp_path: Path) -> None:
    found = index(tmp_path)
    assert found.shares_a_run(", ".join(word.upper() for word in WORDS))
    assert not found.shares_a_run(" ".join(reversed(WORDS)))
    assert not found.shares_a_run(" ".join([*WORDS[:6], "between", *WORDS[6:]]))


def test_how_many_runs_a_text_has() -> None:
    assert [len(list(grams(" ".join(WORDS[:12] + ["x"] * n)))) for n in (0, 1, 3)] == [0, 1, 3]


def test_of_a_short_text_or_of_no_benchmark_nothing_is_known(tmp_path: Path) -> None:
    assert len(index(tmp_path, "Only a few words.")) == 0
    assert not Benchmarks().shares_a_run(RUN)


def task(folder: Path, instruction: str) -> None:
    for name, text in {
        "instruction.md": instruction,
        "task.toml": 'version = "1.0"\n',
        "environment/Dockerfile": "FROM a\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_tree_of_tasks_is_its_instructions(tmp_path: Path) -> None:
    task(tmp_path / "one", RUN)
    (tmp_path / "one" / "environment" / "notes.txt").write_text("never compared with")
    task(tmp_path / "broken", "An instruction that cannot be run but copied.")
    (tmp_path / "broken" / "task.toml").write_text("= no TOML")
    older = tmp_path / "older"
    older.mkdir()
    (older / "task.yaml").write_text("instruction: An older one.\ndifficulty: easy\n")
    (older / "Dockerfile").write_text("FROM a\n")
    (older / "run-tests.sh").write_text("true\n")
    (older / "docker-compose.yaml").write_text("services:\n  client:\n    build: .\n")
    assert sorted(texts(tmp_path)) == ["An instruction that cannot be run but copied.", "An older one.", RUN]
    assert Benchmarks([tmp_path]).shares_a_run(RUN)


def test_a_tree_without_tasks_is_its_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "second", "n": 3, "more": [{"text": "third"}]}) + '\n\n"fourth"\n')
    (tmp_path / "c.md").write_text("not read")
    assert list(texts(tmp_path)) == ["first", "second", "third", "fourth"]


def test_what_cannot_be_compared_with_is_said(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('"fine"\n{broken\n')
    with pytest.raises(ConfigError, match="line 2 is no JSON"):
        Benchmarks([tmp_path / "bad.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no text to compare with"):
        Benchmarks([tmp_path / "empty"])
    (tmp_path / "long.txt").write_text(" ".join(map(str, range(40))))
    with pytest.raises(ConfigError, match="more than 20 runs"):
        Benchmarks([tmp_path / "long.txt"], limit=20)
