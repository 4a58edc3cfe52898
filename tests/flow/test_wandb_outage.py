"""W&B out of reach, with the real package: the run goes on, its figures are kept, one line says so, and nothing waits for it."""

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrsi.config.schema import Config, LoggerConfig
from termrsi.report import sinks as sinks_module
from termrsi.report.curve import Bounds, Curve
from termrsi.report.sinks import Sinks

QUICK = Bounds(start_s=3.0, end_s=120.0)
PATIENT = Bounds(start_s=10.0, end_s=120.0)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Takes connections, and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("fault", ["closed_port", "silent_server"])
def test_without_a_network_the_curves_are_kept_for_later(
    tmp_path: Path, fault: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", request.getfixturevalue(fault))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(sinks_module, "Curve", lambda *given: Curve(*given, bounds=PATIENT))
    start_s = time.monotonic()
    sinks = Sinks(Config(logger=LoggerConfig(wandb="online")), tmp_path)
    for step in range(50):
        sinks("grpo", {"step": step, "reward": 0.5})
    assert time.monotonic() - start_s < PATIENT.start_s / 2, "neither the run's start nor a step waits for it"
    start_s = time.monotonic()
    sinks.close()
    assert time.monotonic() - start_s < PATIENT.start_s + PATIENT.end_s + 5.0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1, warned
    assert f"wandb sync {tmp_path}/wandb/" in warned[0]
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert kept.stat().st_size > 0


def test_a_process_that_stands_still_blocks_no_step_and_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    curve = Curve("p", tmp_path, "offline", bounds=Bounds(start_s=1.0, end_s=1.0), waiting=20)
    os.kill(curve._process.pid, signal.SIGSTOP)
    start_s = time.monotonic()
    for step in range(5000):  # more than its pipe and the queue hold
        curve.log({"x" * 1000: float(step)})
    assert time.monotonic() - start_s < 5.0
    curve.finish()
    assert curve._process.returncode == -signal.SIGKILL
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == [
        "W&B does not keep up: its curves will lack points that metrics.jsonl has",
        "W&B has not ended, and is ended",
    ]


def test_one_that_died_costs_its_curves_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    curve = Curve("p", tmp_path, "offline", bounds=QUICK)
    curve.log({"a": 1.0})
    curve._process.kill()
    curve._process.wait()
    for step in range(100):
        curve.log({"a": float(step)})
    curve.finish()
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == ["W&B ended with code -9"]


def test_offline_what_was_told_is_in_its_file(tmp_path: Path) -> None:
    curve = Curve("p", tmp_path, "offline", bounds=Bounds(start_s=60.0, end_s=60.0))
    curve.log(json.loads('{"grpo/reward": 0.625, "grpo/odd": NaN}'))
    curve.finish()
    assert curve._process.returncode == 0
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"grpo/reward" in kept.read_bytes()
