"""What Prometheus reads of a run, scraped from a local Ray: a dry pipeline, a real sandbox; and what a worker logs."""

import asyncio
import json
import logging
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from termrsi import setup
from termrsi.actors.metrics import RayMeter
from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.sandboxes import SandboxActor, SandboxOptions
from termrsi.config.load import load
from termrsi.errors import SandboxError
from termrsi.pipeline import Pipeline
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.report import logs

pytestmark = pytest.mark.ray
TASK = TaskSpec(id="t", family="f", instruction="", path="", environment=EnvironmentSpec())
SOON_S = 90.0
Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        runtime_env=logs.worker_environment("json", "seen"),
        _metrics_export_port=number,
        _system_config={"metrics_report_interval_ms": 500},
    )
    yield number
    ray.shutdown()


def scrape(port: int) -> Samples:
    """Ours, by name without the prefix."""
    found: Samples = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        for line in page.read().decode().splitlines():
            match = re.fullmatch(r"ray_termrsi_(\w+)\{(.*)\} (\S+)(?: \d+)?", line)
            if match:
                found.setdefault(match[1], []).append((dict(re.findall(r'(\w+)="([^"]*)"', match[2])), float(match[3])))
    return found


async def until(port: int, *names: str) -> Samples:
    """Metrics come in reports: asked again until all are there. Raises TimeoutError."""
    async with asyncio.timeout(SOON_S):
        while True:
            found = await asyncio.to_thread(scrape, port)
            if all(any(name in told for told in found) for name in names):
                return found
            await asyncio.sleep(0.5)


def total(found: Samples, name: str, **labels: str) -> float:
    """Over the samples with these labels; a counter may be told with a suffix."""
    samples = found.get(name) or found[f"{name}_total"]
    return sum(value for given, value in samples if labels.items() <= given.items())


async def test_a_run_is_told_to_prometheus(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "silent", RayMeter("seen"))  # a dry run has no Ray of its own
    words = ["experiment=tmax", "scale=dry", f"run_dir={tmp_path / 'seen'}"]
    await Pipeline(load(words), words).run()
    entries = {entry["stage"]: entry for entry in json.loads((tmp_path / "seen" / "ledger.json").read_text())}
    found = await until(port, "rollouts_finished", "step_seconds_count", "figure", "busy", "staleness")
    episodes = entries["dppo"]["costs"]["episodes"]
    async with asyncio.timeout(SOON_S):
        while total(found, "rollouts_finished", stage="dppo", run="seen") < episodes:
            await asyncio.sleep(0.5)
            found = await asyncio.to_thread(scrape, port)
    assert total(found, "rollouts_finished", stage="dppo", run="seen") == episodes
    assert total(found, "rollout_seconds_count", stage="dppo") == episodes
    assert total(found, "step_seconds_count", stage="dppo") == entries["dppo"]["summary"]["steps"] == 2
    assert total(found, "step", stage="dppo") == 2
    logged = [json.loads(line) for line in (tmp_path / "seen" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in logged if line["stage"] == "dppo" and "reward" in line][-1]
    assert total(found, "figure", stage="dppo", figure="reward") == pytest.approx(last["reward"])
    assert total(found, "staleness", stage="dppo") == last["staleness"]


async def test_sandboxes_are_told_to_prometheus(port: int, tmp_path: Path) -> None:
    cache, state = str(tmp_path / "cache"), str(tmp_path / "state")
    options = SandboxOptions("local", 2, 256, 64, 64, network=False, run="seen", cache_dir=cache, state_dir=state)
    actor: Any = SandboxActor.options(num_cpus=0.1, max_concurrency=10).remote(options)  # Any: Ray's handles are untyped
    pool = RemotePool([actor])
    async with asyncio.timeout(SOON_S):
        first, second = await asyncio.gather(pool.lease(TASK), pool.lease(TASK))
        assert (await first.run("echo x")).output == "x\n"
        await pool.release(second)
        with pytest.raises(SandboxError):
            await second.run("echo y")
    found = await until(port, "sandbox_leases", "sandbox_faults", "sandboxes_leased")
    assert total(found, "sandbox_leases", run="seen") == 2
    assert total(found, "sandbox_lease_wait_seconds_count") == 2
    assert total(found, "sandboxes_leased") == 1
    assert total(found, "sandbox_faults", call="run") == 1
    await pool.release(first)
    await actor.close.remote()

    node: Any = ray._private.worker.global_worker.node  # pyright: ignore  # no public name tells the place of a session's logs
    log = Path(node.get_logs_dir_path())  # where a collector reads
    lines = [line for file in log.glob("worker-*.err") for line in file.read_text().splitlines() if '"termrsi.' in line]
    (fault,) = [line for line in map(json.loads, lines) if line["logger"] == "termrsi.actors.sandboxes"]
    assert (fault["level"], fault["run"]) == ("warning", "seen")
    assert fault["message"].startswith("run failed: ")
    assert logging.getLogger("termrsi").level == logging.NOTSET, "the driver's own log was left alone"
