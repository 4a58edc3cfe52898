"""Real and odd task directories against what their index expects. Skipped where the corpus is not there.

It is looked for in TERMRSI_CORPUS, else beside the repository.
"""

import csv
import os
import shutil
from pathlib import Path

import pytest

from termrsi import tasks
from termrsi.records import LoadResult

ROOT = Path(os.environ.get("TERMRSI_CORPUS", Path(__file__).resolve().parents[3].parent / "shared" / "corpus"))


def rows() -> list[dict[str, str]]:
    index = ROOT / "index.tsv"
    if not index.is_file():
        return []
    with index.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


ROWS = rows()
pytestmark = pytest.mark.skipif(not ROWS, reason="no task corpus (TERMRSI_CORPUS)")

# What the note or the reason must say, per odd task.
SAYS = {
    "parallel-tfidf-search": "directory name",
    "l3-l2-orderbook-steps-dir": "instruction.md",
    "skill-finder-template": "instruction.md and environment/",
    "ironfleet": "environment",
    "coco-custom-compose": "environment/ is missing and environment.docker_image is unset",
    "openagora-multi-reward": "tests/test.sh is missing",
    "benchflow-run-single-task": "environment/ and tests/test.sh",
    "legacy-uriel-hello-world": "docker-compose.yaml and run-tests.sh",
    "no-test-script": "tests/test.sh is missing",
    "foreign-sandbox-grading": "[task].name is missing",
    "memory-gb-disk-gb": "storage_mb 4096",
    "bom-config": "byte-order mark removed",
    "version-is-a-number": 'version read as "1.0"',
    "memory-2gb": '"2GB" -> memory_mb 2048',
    "memory-bare-number": "memory_mb 4096",
    "network-mode-none": "public, no-network or allowlist",
    "mcp-header-literal": "environment.mcp_servers[0].headers.X-Token",
    "env-value-integer": 'environment.env.PORT read as "8080"',
    "crlf-test-script": "CRLF -> LF in tests/test.sh",
    "separate-without-tests": "tests/test.sh",
    "legacy-empty-yaml": "task.yaml is empty",
    "legacy-difficulty-4": "difficulty 4 -> unknown",
    "legacy-instruction-is-a-key": "descriptions[base]",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_row(row: dict[str, str]) -> None:
    result: LoadResult = tasks.load_dir(ROOT / row["kind"] / row["id"])
    kind = row["expected"].split(":")[0]
    assert bool(result.skipped) == (kind == "refuse"), (row["expected"], result.skipped)
    assert len(result.tasks) + len(result.skipped) == 1
    said = "\n".join([*result.notes, *(item.reason for item in result.skipped)])
    assert SAYS.get(row["id"], "") in said, said
    if kind == "repair":
        assert result.notes
    for task in result.tasks:
        assert task.instruction
        assert task.environment.context or task.environment.docker_image


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_strict_agrees_with_the_formats_own_loader(row: dict[str, str], tmp_path: Path) -> None:
    folder = ROOT / row["kind"] / row["id"]
    if "no environment definition" in row["reference"]:  # it has an environment/, which is empty, and so not in every copy
        folder = Path(shutil.copytree(folder, tmp_path / row["id"]))
        (folder / "environment").mkdir(exist_ok=True)
    result = tasks.load_dir(folder, strict=True)
    assert bool(result.tasks) == (" rejects" not in row["reference"]), (row["reference"], result.skipped)
    assert len(result.tasks) + len(result.skipped) == 1


def test_the_whole_tree_loses_nothing() -> None:
    result = tasks.load_dir(ROOT)
    assert len(result.tasks) + len(result.skipped) == len(ROWS)
