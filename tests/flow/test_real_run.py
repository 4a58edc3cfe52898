"""The real thing, small: Ray, vLLM, torch and local sandboxes behind one stage; then a signal in the middle of it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = (
    "experiment=reterm",
    "scale=laptop",
    "stage=base_eval",
    "tasks.families=[create,delete,directories]",
    "tasks.train=1",
    "tasks.validation=1",
    "tasks.heldout=1",
    "stages.base_eval.k=1",
    "sampling.max_tokens=16",
    "limits.max_turns=2",
    "model.kv_cache_gib=1",
    "min_free_gib=1",
)


def _start(run: Path, *more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "termrsi", *SMALL, f"run_dir={run}", *more],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def _descendants(pid: int) -> set[int]:
    """Processes below `pid`, as /proc has them now."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    grown = {pid}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown and child not in found}
        found |= grown
    return found


def _alive(pids: set[int]) -> set[int]:
    return {
        p for p in pids if (Path("/proc") / str(p)).is_dir() and "Z" not in (Path("/proc") / str(p) / "stat").read_text().split()[2]
    }


@pytest.mark.engine
@pytest.mark.ray
def test_one_stage_on_real_parts_then_a_signal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _start(run)
    _, text = process.communicate(timeout=420)
    assert process.returncode == 0, text
    entry = json.loads((run / "ledger.json").read_text())[0]
    assert entry["summary"]["tasks"] == 3
    assert entry["costs"]["completion_tokens"] > 0
    assert entry["costs"]["dropped"] == 0

    mounts = Path("/proc/self/mountinfo").read_text()
    process = _start(tmp_path / "other")
    rollouts = tmp_path / "other" / "stages" / "base_eval"
    deadline = time.monotonic() + 300
    while not rollouts.is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    below = _descendants(process.pid)
    assert len(below) > 5, "Ray's processes are there"
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, text
    deadline = time.monotonic() + 20
    while _alive(below) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _alive(below), [(Path("/proc") / str(p) / "cmdline").read_text() for p in _alive(below)]
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not (rollouts / "manifest.json").exists()
