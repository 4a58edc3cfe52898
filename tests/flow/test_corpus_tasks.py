"""The whole tasks of the corpus, run: an empty submission and the task's own solution, as `termrsi tasks check` does it.

Skipped where there is no corpus. Needs the package registries: for the verification kit and for what Dockerfiles install.
"""

import csv
import os
import shutil
from pathlib import Path

import pytest

from termrsi import task_commands

CORPUS = Path(os.environ.get("TERMRSI_CORPUS", Path(__file__).resolve().parents[3] / "shared" / "corpus"))
# Checks in the reports; a script that only writes its reward has none.
CHECKS = dict.fromkeys(
    [
        "legacy-client-and-server",
        "legacy-difficulty-4",
        "legacy-instruction-is-a-key",
        "legacy-no-summary",
        "legacy-task-dir-mounted",
    ],
    1,
)
# By their authors' doing: a report where the reward belongs; no reward but for success.
UNFIT = {"offline-task-online-verifier": "reward.txt holds", "reward-lost-on-failure": "no reward file"}


@pytest.mark.skipif(not (CORPUS / "index.tsv").is_file(), reason="no corpus")
def test_solution_and_empty_submission_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (CORPUS / "index.tsv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if row["source"].startswith("invented")]
    for row in rows:
        shutil.copytree(CORPUS / row["kind"] / row["id"], tmp_path / "tasks" / row["id"])
    accepted = [row["id"] for row in rows if not row["expected"].startswith("refuse")]
    assert len(accepted) > 15
    assert task_commands.run(["kit", str(tmp_path / "tasks"), f"out={tmp_path / 'kit'}"]) == 0
    capsys.readouterr()
    arguments = ["check", str(tmp_path / "tasks"), f"kit={tmp_path / 'kit'}", "build_network=host", "jobs=2"]
    assert task_commands.run(arguments) == 1
    out = capsys.readouterr().out
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    rows_of = [row for row in table if len(row) == 5]  # not those of the list that comes first
    assert len(rows_of) == len(accepted)
    for name, solved, empty, checks, unfit_word in rows_of:
        if not unfit_word:
            found = next((count for known, count in CHECKS.items() if known.startswith(name.rstrip("…"))), 0)
            assert (solved, empty, checks) == ("1/1", "0/1", str(found)), name
    unfit = {line.split(":")[0].removeprefix("unfit "): line for line in out.splitlines() if line.startswith("unfit ")}
    assert unfit.keys() == UNFIT.keys(), out
    assert all(words in unfit[name] for name, words in UNFIT.items()), out
    assert f"{len(accepted) - len(UNFIT)} of {len(accepted)} pass with their solution and fail without" in out
