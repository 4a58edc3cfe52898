"""Ray as users run it: a head with its job server, a dry pipeline submitted as a job, its result read."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")


@pytest.fixture
def head() -> Iterator[str]:
    """A Ray head on ports of its own; stopped by its address, so that no other Ray here is touched."""
    port, dashboard = "16379", "18265"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [RAY, "start", "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2", "--block"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "--block" in line or "Ray runtime started" in line:
                break
        yield f"http://127.0.0.1:{dashboard}"
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.ray
def test_a_dry_pipeline_runs_as_a_submitted_job(head: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    environment = {
        **os.environ,
        "RAY_ADDRESS": head,
        "RAY_AUTH_MODE": "disabled",
        "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "launch/submit.sh", "experiment=reterm", "scale=dry", f"run_dir={run}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((run / "ledger.json").read_text())
    assert entries[-1]["stage"] == "final_eval"
