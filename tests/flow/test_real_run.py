"""The real thing, small: Ray, vLLM, torch and local sandboxes behind one stage; then a signal in the middle of it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from termrsi.sandbox import cgroups, layers

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


def _left_behind() -> set[str]:
    """What a run makes outside of its directory and the processes below it: sandboxes, their groups and files, weights."""
    found = {f"group {g}" for parent in cgroups.parents() if parent.is_dir() for g in parent.iterdir() if g.is_dir()}
    found |= {f"shared {p}" for p in Path("/dev/shm").glob("termrsi-*")}
    found |= {f"state {p}" for kind in ("layers", "snapshots") for p in (layers.state_dir(None) / kind).glob("*")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if "sandbox/init.py" in command or "ray::" in command or "raylet" in command or "gcs_server" in command:
            found.add(f"process {process.name} {command}")
    return found


def _wait_until_gone(before: set[str], below: set[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while (_alive(below) or _left_behind() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _alive(below)
    assert not _left_behind() - before


@pytest.mark.engine
@pytest.mark.ray
def test_stopped_in_the_middle_of_a_stage_and_resumed(tmp_path: Path) -> None:
    """SIGTERM while episodes run leaves nothing behind; the same command then goes on, and what was stopped is kept beside."""
    before = _left_behind()
    run = tmp_path / "run"
    process = _start(run)
    rollouts = run / "stages" / "base_eval" / "rollouts.jsonl"
    deadline = time.monotonic() + 300
    while not rollouts.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    below = _descendants(process.pid)
    assert len(below) > 5, "Ray's processes are there"
    assert _left_behind() - before, "and so are sandboxes: this test would see them"
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert "stopped by SIGTERM" in text
    _wait_until_gone(before, below, 30.0)  # the helper of the sandboxes lingers for ten seconds
    assert not (run / "stages" / "base_eval" / "manifest.json").exists()

    process = _start(run)
    _, text = process.communicate(timeout=420)
    assert process.returncode == 0, text
    (entry,) = json.loads((run / "ledger.json").read_text())
    assert entry["summary"]["tasks"] == 3
    assert entry["costs"]["completion_tokens"] > 0
    assert entry["costs"]["dropped"] == 0
    assert [p.name for p in (run / "stages").iterdir() if p.name != "base_eval"] == ["base_eval.stopped-1"]
    _wait_until_gone(before, set(), 30.0)


@pytest.mark.engine
@pytest.mark.ray
def test_stopped_while_the_parts_start(tmp_path: Path) -> None:
    """Ctrl-C before the engine stands: Ray has handlers of its own then, and ours must be back."""
    before = _left_behind()
    process = _start(tmp_path / "run")
    deadline = time.monotonic() + 120
    while len(_descendants(process.pid)) < 6 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2.0)  # the actors are being made: nothing tells from outside
    below = _descendants(process.pid)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # an impatient second one changes nothing
    _, text = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, text
    _wait_until_gone(before, below, 30.0)
