"""Runs as jobs of a local Ray of two nodes: from the manifest's entrypoint, by launch/submit.sh, stopped and taken up again."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

from termrsi.fakes import FakeGenerator, FakePolicy, FakeSkill, FakeTokenizer
from termrsi.harness.render import ChatFormat
from tests import kustomize
from tests.chat_server import HANG_UP, Answer, Asked, ChatServer, as_policy

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")
KEY = "sk-very-secret"
pytestmark = pytest.mark.ray


def _free_port() -> int:
    """An ephemeral port: Ray keeps 10002 to 19999 for its workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a head and a worker node of this test take jobs. They are ended by their handles: no other Ray is touched."""
    small: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}  # Any: Ray's node arguments
    dashboard, agent = _free_port(), _free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(RAY).parent}:{os.environ['PATH']}")  # a job's `python` is this one
        patch.setenv("PYTHONPATH", str(ROOT))  # of a job without a working directory, as an image holds the code
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        head = {"include_dashboard": True, "dashboard_port": dashboard, "dashboard_agent_listen_port": agent, **small}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**small)
            yield f"http://127.0.0.1:{dashboard}"
        finally:
            cluster.shutdown()


def submit(address: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY": RAY, **variables}
    command = ["bash", "launch/submit.sh", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)


def ray(address: str, *words: str) -> str:
    done = subprocess.run([RAY, "job", *words, "--address", address], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def result(run: Path) -> list[dict[str, Any]]:  # Any: JSON
    """What a run found, without what it took and where it lies."""
    entries = json.loads((run / "ledger.json").read_text())
    return [{key: entry[key] for key in ("stage", "kind", "summary", "verdict", "counts")} for entry in entries]


def test_the_manifests_entrypoint_is_a_job_that_succeeds(address: str, tmp_path: Path) -> None:
    (job,) = [m["spec"] for m in kustomize.render(ROOT / "k8s" / "overlays" / "small") if m["kind"] == "RayJob"]
    assert "scale=laptop" in job["entrypoint"]
    dry = job["entrypoint"].replace("scale=laptop", "scale=dry")
    entrypoint = re.sub(r"run_dir=/runs/", f"run_dir={tmp_path}/", dry)
    client = JobSubmissionClient(address)
    submission = client.submit_job(entrypoint=entrypoint)
    log = ray(address, "logs", "--follow", submission)
    assert client.get_job_status(submission) is JobStatus.SUCCEEDED, log
    assert [e["stage"] for e in result(tmp_path / "terminal_rsi")][-1] == "final_eval"


def test_submit_follows_the_log_and_has_the_runs_exit_code(address: str, tmp_path: Path) -> None:
    done = submit(address, "experiment=reterm", "scale=dry", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ledger: {tmp_path / 'run' / 'ledger.md'}" in done.stdout, "the job's own lines are shown"
    assert result(tmp_path / "run")[-1]["stage"] == "final_eval"

    wrong = submit(address, "experiment=reterm", "scale=dry", "seeed=1", f"run_dir={tmp_path / 'other'}")
    assert wrong.returncode == 2, "cannot be run as asked"
    assert "unknown key 'seeed'" in wrong.stdout
    assert not (tmp_path / "other").exists()


def test_submit_without_waiting(address: str, tmp_path: Path) -> None:
    done = submit(address, "--no-wait", "--id", "left-alone", "experiment=reterm", "scale=dry", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ledger" not in done.stdout
    ray(address, "logs", "--follow", "left-alone")  # ends with the job
    assert JobSubmissionClient(address).get_job_status("left-alone") is JobStatus.SUCCEEDED
    assert result(tmp_path / "run")[-1]["stage"] == "final_eval"


class Gate:
    """A planner that falls silent at one question, and hangs up when the test opens the gate."""

    SILENT_AT = 36

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self._answer = answer
        self._asked = 0
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, asked: Asked) -> Answer:
        self._asked += 1
        if self._asked == self.SILENT_AT:
            self.reached.set()
            self.open.wait(120)
            return Answer(HANG_UP, "")
        return self._answer(asked)


async def test_a_job_that_was_stopped_goes_on_to_the_same_result(address: str, tmp_path: Path) -> None:
    generator = FakeGenerator(sloppy=0.0)
    await generator.pull(await FakePolicy(FakeSkill(solve=50.0, half=-50.0)).publish())
    planner = as_policy(generator, ChatFormat(FakeTokenizer()))

    def words(server: ChatServer, run: Path) -> list[str]:
        settings = {"url": server.url, "model": "m", "key_env": "PLANNER_KEY", "concurrency": 1, "continues": "true"}
        return ["experiment=rsr", "scale=dry", f"run_dir={run}", *(f"roles.planner.{k}={v}" for k, v in settings.items())]

    with ChatServer(planner) as server:
        whole = submit(address, "--env", "PLANNER_KEY", *words(server, tmp_path / "whole" / "run"), PLANNER_KEY=KEY)
        assert whole.returncode == 0, whole.stdout + whole.stderr
        assert {asked.key for asked in server.asked} == {f"Bearer {KEY}"}, "the variable went with the job, by its name"
        questions = len(server.asked)
    assert questions > Gate.SILENT_AT

    gate = Gate(planner)
    with ChatServer(gate) as server:
        asked = ["--env", "PLANNER_KEY", *words(server, tmp_path / "parts" / "run")]
        stopped: list[subprocess.CompletedProcess[str]] = []
        follow = threading.Thread(target=lambda: stopped.append(submit(address, "--id", "stopped", *asked, PLANNER_KEY=KEY)))
        follow.start()
        try:
            assert gate.reached.wait(120), "it asked its planner"
            ray(address, "stop", "stopped")  # returns when it has ended
        finally:
            gate.open.set()
            follow.join()
        assert stopped[0].returncode == 143, stopped[0].stdout + stopped[0].stderr
        assert "stopped by SIGTERM" in stopped[0].stdout
        assert not (tmp_path / "parts" / "run" / "stages" / "final_eval").exists()

        again = submit(address, *asked, PLANNER_KEY=KEY)
        assert again.returncode == 0, again.stdout + again.stderr
        assert "going on in" in again.stdout
        assert questions < len(server.asked) < questions + Gate.SILENT_AT, "what it had finished is not asked again"
    parts, whole_run = tmp_path / "parts" / "run", tmp_path / "whole" / "run"
    assert result(parts) == result(whole_run)
    data = Path("stages", "rsr", "data.parquet")
    assert (parts / data).read_bytes() == (whole_run / data).read_bytes(), "and made the same rows"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing to run; give at least experiment=NAME"),
        (["--folow", "experiment=rsr"], "unknown option --folow; valid: --no-wait, --env NAME, --id ID"),
        (["--env", "sk-1", "experiment=rsr"], "--env wants the name of a variable, not its value"),
        (["--env", "TERMRSI_UNSET", "experiment=rsr"], "--env TERMRSI_UNSET: it is not set here"),
        (["--id", "a/b", "experiment=rsr"], "make a name"),
        (["experiment"], "'experiment' is no KEY=VALUE"),
        (["experiment=rsr", "run_dir=/r"], "no Ray takes jobs at http://127.0.0.1:9: "),
    ],
)
def test_submit_refuses_in_one_line(words: list[str], told: str) -> None:
    done = submit("http://127.0.0.1:9", *words, RAY_AUTH_MODE="disabled")  # the port of discard: nothing listens
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert told in done.stderr


def test_submit_wants_an_address_of_http() -> None:
    done = submit("127.0.0.1:6379", "experiment=rsr")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "RAY_ADDRESS=127.0.0.1:6379: jobs are taken at http://HOST:PORT" in done.stderr
