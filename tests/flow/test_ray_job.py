"""Ray as users run it: a head with its job server, a dry pipeline submitted as a job, its result read."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")


def _environment(**more: str) -> dict[str, str]:
    """With the virtual environment first on PATH: a job's `python` is the head's."""
    return {**os.environ, "RAY_AUTH_MODE": "disabled", "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}", **more}


def _free_port() -> int:
    """An ephemeral port: Ray keeps 10002 to 19999 for its workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def head() -> Iterator[str]:
    """A Ray head on ports of its own, ended by its process: no other Ray on this machine is touched."""
    port, dashboard, agent = (_free_port() for _ in range(3))
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command = [RAY, "start", "--head", *ports, "--num-cpus=2", "--disable-usage-stats", "--block"]
    environment = _environment()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "Ray runtime started" in line:
                break
        assert process.poll() is None, said
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
