"""Task files of every sort of damage: a task, or one line of reason, never a traceback and never silence."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from termrsi.errors import TaskError, VerifierError
from termrsi.reward import steps
from termrsi.reward.verifiers import TaskVerifier
from termrsi.tasks import harbor, terminal_bench

TOML = """schema_version = "1.4"
artifacts = ["/app/out", { source = "/app/x", destination = "x", exclude = ["a"] }]
[task]
name = "org/name"
authors = [{ name = "a", email = "b" }]
[metadata]
difficulty = "hard"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 60
env = { A = "${B:-c}" }
collect = [{ command = "true", timeout_sec = 5 }]
environment = { cpus = 1, memory = "1G", env = { A = "b" } }
user = 1000
[environment]
docker_image = "debian:12"
cpus = 1.5
memory = "2G"
storage_mb = 10
network_mode = "allowlist"
allowed_hosts = ["a.b"]
env = { C = "d" }
mcp_servers = [{ name = "m", transport = "http", url = "u", headers = { X = "${T}" } }]
healthcheck = { command = "true" }
[[steps]]
name = "one"
min_reward = 0.5
"""
YAML = """instruction: |-
  Do it.
difficulty: easy
tags: [a, b]
parser_name: pytest
max_agent_timeout_sec: 60
descriptions:
- key: base
  description: x
"""
VALUES = (
    "true",
    "-1",
    "1e400",
    "nan",
    "'x'",
    '"2GB"',
    "[]",
    "{}",
    "[1, {a = 2}]",
    "1979-05-27",
    "''",
    "\ufeff",
    "\0",
    "é",
    "=",
    "[[",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    ours, older = tmp_path_factory.mktemp("fuzz") / "t", tmp_path_factory.mktemp("fuzz") / "o"
    for name in ("instruction.md", "environment/Dockerfile", "tests/test.sh", "steps/one/instruction.md"):
        (ours / name).parent.mkdir(parents=True, exist_ok=True)
        (ours / name).write_text("x\n")
    older.mkdir()
    for name in ("docker-compose.yaml", "run-tests.sh", "Dockerfile"):
        (older / name).write_text("x\n")
    return ours, older


def damaged(text: str, seed: int) -> Iterator[bytes]:
    """Values replaced, lines dropped, doubled and swapped, bytes changed, ends cut off."""
    rng = random.Random(seed)
    lines = text.splitlines()
    for _ in range(6):
        changed = list(lines)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(changed))
            match rng.randrange(5):
                case 0 if "=" in changed[at] or ":" in changed[at]:
                    sign = "=" if "=" in changed[at] else ":"
                    changed[at] = f"{changed[at].partition(sign)[0]}{sign} {rng.choice(VALUES)}"
                case 1:
                    changed[at : at + 1] = []
                    changed = changed or ["x"]
                case 2:
                    changed.insert(at, changed[at])
                case 3:
                    other = rng.randrange(len(changed))
                    changed[at], changed[other] = changed[other], changed[at]
                case _:
                    changed[at] = changed[at][: rng.randrange(len(changed[at]) + 1)]
        raw = bytearray("\n".join(changed).encode())
        if raw and rng.random() < 0.3:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        yield bytes(raw)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.booleans())
def test_a_damaged_task_is_a_task_or_a_reason(folders: tuple[Path, Path], seed: int, strict: bool) -> None:
    ours, older = folders
    for (root, name, load), text in (
        ((ours, "task.toml", harbor.load), TOML),
        ((older, "task.yaml", terminal_bench.load), YAML),
    ):
        for raw in damaged(text, seed):
            (root / name).write_bytes(raw)
            result = load(root, strict=strict)
            assert len(result.tasks) + len(result.skipped) == 1
            assert all(item.reason and "\n" not in item.reason for item in result.skipped)
            for task in result.tasks:
                assert isinstance(task.instruction, str)
                assert task.environment.memory_mb is None or isinstance(task.environment.memory_mb, int)
                for part in steps.parts(task):
                    with contextlib.suppress(TaskError, VerifierError):
                        assert TaskVerifier().suite(part).timeout_s > 0 or strict
