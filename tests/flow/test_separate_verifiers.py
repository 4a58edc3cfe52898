"""Verifiers in a container of their own, on real sandboxes: what crosses over, what does not, and what a forger gets."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrsi.errors import SandboxError
from termrsi.ports import Sandbox
from termrsi.records import TaskSpec, Verdict
from termrsi.reward.checks import attempt, by_solution, measure
from termrsi.reward.verifiers import TaskVerifier
from termrsi.sandbox.host_pool import HostPool
from termrsi.tasks import load_dir

JUDGE = '[ "$(cat /app/answer 2> /dev/null)" = 42 ] && [ ! -e /app/undeclared ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt'
FILES = {
    "instruction.md": "Write 42 to /app/answer.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "solution/solve.sh": "echo 42 > /app/answer; touch /app/undeclared\n",
}
FRESH = {
    **FILES,
    "task.toml": 'artifacts = ["/app/answer"]\n[verifier]\nenvironment_mode = "separate"\n[environment]\nworkdir = "/app"\n',
    "tests/test.sh": f"#!/bin/bash\n{JUDGE}\n",
}
BUNDLED = {
    **FILES,
    "task.toml": 'artifacts = ["/app/answer"]\n[verifier]\nenvironment_mode = "separate"\n',
    "tests/Dockerfile": f"FROM debian:12\nCOPY <<'END' /tests/test.sh\n#!/bin/bash\n{JUDGE}\nEND\nRUN chmod +x /tests/test.sh\n",
}
COLLECTED = {
    **FILES,
    "task.toml": """[environment]
workdir = "/app"
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "cp answer $(cat /app/none) /logs/artifacts/copy; (exec 3< running) && echo yes > /logs/artifacts/running"
""",
    "tests/test.sh": "#!/bin/bash\n[ $(cat /logs/artifacts/copy) = 42 ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n",
}
KINDS = {"fresh": FRESH, "bundled": BUNDLED, "collected": COLLECTED}


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[HostPool]:
    """Of one place: a verifier's container does not wait for one."""
    pool = HostPool(size=1, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state", owner="apart")
    yield pool
    await pool.close()


def written(root: Path, files: dict[str, str]) -> TaskSpec:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (task,) = load_dir(root).tasks
    return task


async def judged(pool: HostPool, task: TaskSpec, command: str) -> Verdict:
    box: Sandbox = await pool.lease(task)
    try:
        await box.run(command, 10.0)
        return await TaskVerifier(beside=pool.beside).verify(box, task)
    finally:
        await pool.release(box)


@pytest.mark.parametrize("mode", ["shared", "separate"])
async def test_what_the_task_publishes_and_the_verifier_wrote_is_kept(tmp_path: Path, pool: HostPool, mode: str) -> None:
    task = written(tmp_path / "task", FRESH | {"task.toml": FRESH["task.toml"].replace("separate", mode)})
    box: Sandbox = await pool.lease(task)
    try:
        await box.run("echo 42 > /app/answer; ln -s /etc/passwd /logs/artifacts/link; echo seen > /logs/artifacts/log", 10.0)
        verdict = await TaskVerifier(beside=pool.beside, keep_bytes=1 << 20).verify(box, task)
    finally:
        await pool.release(box)
    assert verdict.strict
    assert verdict.kept is not None
    assert dict(verdict.kept.artifacts) == {"app/answer": b"42\n", "logs/artifacts/log": b"seen\n"}
    assert dict(verdict.kept.logs) == {"reward.txt": b"1\n", "test-stdout.txt": b""}
    assert [entry.status for entry in verdict.kept.manifest] == ["ok", "ok"]


@pytest.mark.parametrize("kind", KINDS)
async def test_oracle_and_empty_submission(tmp_path: Path, pool: HostPool, kind: str) -> None:
    task = written(tmp_path / "task", KINDS[kind])
    verifier = TaskVerifier(beside=pool.beside)
    assert (await attempt(pool, verifier, task, by_solution)).reward == 1.0
    assert (await attempt(pool, verifier, task)).reward == 0.0
    await measure(pool, verifier, task)


async def test_what_a_forger_leaves_does_not_cross_over(tmp_path: Path, pool: HostPool) -> None:
    win = "echo 1 > /logs/verifier/reward.txt"
    forge = f"mkdir -p /logs/verifier /tests; {win}; echo '{win}' > /tests/test.sh"
    for number, files in enumerate((FRESH, BUNDLED)):
        task = written(tmp_path / str(number), files)
        verdict = await judged(pool, task, f"(while :; do {forge}; done) & {forge}; touch /conftest.py; echo 41 > /app/answer")
        assert (verdict.strict, verdict.reward) == (False, 0.0)


async def test_hooks_see_what_the_agent_left_running(tmp_path: Path, pool: HostPool) -> None:
    files = dict(COLLECTED)
    files["tests/test.sh"] = "#!/bin/bash\n[ -e /logs/artifacts/state ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n"
    files["task.toml"] = files["task.toml"].partition("[[verifier")[0] + (
        '[[verifier.collect]]\ncommand = "[ -e /proc/$(cat /app/pid)/stat ] && touch /logs/artifacts/state"\n'
    )
    task = written(tmp_path / "task", files)
    assert (await judged(pool, task, "sleep 600 & echo $! > /app/pid")).strict
    assert not (await judged(pool, task, "echo 9999 > /app/pid")).strict


async def test_steps_may_be_judged_apart_too(tmp_path: Path, pool: HostPool) -> None:
    config = 'artifacts = ["/app/answer"]\n[environment]\nworkdir = "/app"\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    files = {
        "task.toml": config + '[steps.verifier]\nenvironment_mode = "separate"\n',
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/test.sh": f"#!/bin/bash\n{JUDGE}\n",
        **{f"steps/{name}/instruction.md": "Do it.\n" for name in ("one", "two")},
        "steps/one/solution/solve.sh": "echo 42 > /app/answer\n",
        "steps/two/solution/solve.sh": "touch /app/undeclared\n",
    }
    task = written(tmp_path / "task", files)
    verdict = await attempt(pool, TaskVerifier(beside=pool.beside), task, by_solution)
    assert (verdict.strict, verdict.reward) == (True, 1.0)


async def test_an_environment_that_is_not_healthy_is_not_leased(tmp_path: Path, pool: HostPool) -> None:
    files = dict(FRESH)
    files["task.toml"] += '[environment.healthcheck]\ncommand = "test -e /app/ready"\nretries = 1\n'
    task = written(tmp_path / "task", files)
    with pytest.raises(SandboxError, match="its healthcheck fails"):
        await pool.lease(task)
    assert not list((tmp_path / "state" / "layers").glob("*"))
    files["environment/Dockerfile"] += "RUN touch /app/ready\n"
    box = await pool.lease(written(tmp_path / "task", files))
    await pool.release(box)


@pytest.mark.skipif(os.geteuid() != 0, reason="a user's sandbox knows no other user")
@pytest.mark.parametrize(("user", "number"), [("1234", 1234), ('"nobody"', 65534), ("0", 0)])
async def test_tests_and_hooks_run_as_the_user_that_they_ask_for(tmp_path: Path, pool: HostPool, user: str, number: int) -> None:
    """By number, too, where nobody has that name."""
    test = f"[ $(id -u)$(cat /app/who) = {number}{number} ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    hook = f'[[verifier.collect]]\ncommand = "id -u > /app/who"\nuser = {user}\n'
    config = f'[environment]\nworkdir = "/app"\n[verifier]\nuser = {user}\n{hook}'
    files = {**FILES, "tests/test.sh": f"#!/bin/bash\n{test}\n", "task.toml": config}
    task = written(tmp_path / "task", files)
    assert (await judged(pool, task, "touch /app/who; chmod 666 /app/who")).strict
