"""A task of several steps on real sandboxes: one machine, a conversation and a verification for each step."""

from pathlib import Path

import pytest

from termrsi.errors import TaskError
from termrsi.harness.group import task_group
from termrsi.harness.runner import Runner
from termrsi.records import DroppedRollout, Limits, SamplingParams, ScoredRollout, TaskSpec
from termrsi.reward.checks import measure
from termrsi.reward.verifiers import TaskVerifier
from termrsi.sandbox.host_pool import HostPool
from termrsi.stages.points import is_start, point_of
from termrsi.tasks import load_dir
from tests.written import CHAT, Answering, bash

CONFIG = """schema_version = "1.1"
[[steps]]
name = "write"
min_reward = 0.5
[[steps]]
name = "extend"
[steps.verifier]
timeout_sec = 30
env = {WANTED = "more"}
[environment]
workdir = "/app"
"""
# What the task's own tests bring, a step's use; a step's file stands before the task's of the same name.
FILES = {
    "task.toml": CONFIG,
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "tests/helper.sh": "say() { echo $1 > /logs/verifier/reward.txt; }\n",
    "tests/test.sh": "#!/bin/bash\nexit 1\n",
    "steps/write/instruction.md": "Write hello to /app/a.\n",
    "steps/write/tests/test.sh": '#!/bin/bash\n. /tests/helper.sh\n[ "$(cat /app/a)" = hello ] && say 1 || say 0.25\n',
    "steps/write/solution/solve.sh": "echo hello > /app/a\n",
    "steps/extend/instruction.md": "Now write more to /app/b.\n",
    "steps/extend/workdir/setup.sh": "#!/bin/bash\r\ncat given.txt a > seen\r\n",
    "steps/extend/workdir/given.txt": "given\n",
    "steps/extend/tests/test.sh": '#!/bin/bash\n. /tests/helper.sh\n[ "$(cat /app/b)" = "$WANTED" ] && say 1 || say 0\n',
    "steps/extend/solution/solve.sh": "echo more > /app/b\n",
}


@pytest.fixture
def task(tmp_path: Path) -> TaskSpec:
    for name, text in FILES.items():
        path = tmp_path / "tasks" / "two" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (found,) = load_dir(tmp_path / "tasks").tasks
    return found


async def played(tmp_path: Path, task: TaskSpec, first: str, second: str) -> tuple[ScoredRollout, HostPool]:
    pool = HostPool(size=2, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state", owner="steps")
    agent = Answering(by_word={"Write hello": [bash(first)], "Now write": [bash(second)]})
    runner = Runner(pool, TaskVerifier(), agent, CHAT)
    (spec,) = task_group(
        task, 1, label="x", harness="react", sampling=SamplingParams(), limits=Limits(max_turns=3), seed=0, keep_snapshot=True
    )
    (result,) = [one async for one in runner.run([spec])]
    assert isinstance(result, ScoredRollout), result
    return result, pool


async def test_both_steps(tmp_path: Path, task: TaskSpec) -> None:
    look = "cat seen; ls -d /tests /logs/verifier/* /solution 2>&1; echo more > b"
    scored, pool = await played(tmp_path, task, "echo hello > a", look)
    await pool.close()
    rollout, verdict = scored.rollout, scored.verdict
    assert (verdict.strict, verdict.reward) == (True, 1.0)
    assert (rollout.step, rollout.step_chunk, len(rollout.chunks), len(rollout.turns)) == ("extend", 1, 2, 4)
    seen = rollout.turns[2].observation
    assert "given\nhello\n" in seen, "its setup.sh ran on the machine as the first step left it"
    assert "test.sh" not in seen
    assert "reward.txt" not in seen, "nothing of the first step's verification is there"
    one, two = rollout.chunks
    assert "Now write" not in CHAT.decode(one.ids)
    assert "Write hello" not in CHAT.decode(two.ids)
    assert (set(one.turn_ids), set(two.turn_ids)) == ({0, 1}, {2, 3})
    assert rollout.completion_tokens == sum(one.mask) + sum(two.mask) == len(one.logprobs) + len(two.logprobs)
    assert rollout.snapshot is None


async def test_a_step_below_its_least_reward_is_the_last(tmp_path: Path, task: TaskSpec) -> None:
    scored, pool = await played(tmp_path, task, "echo no > a", "")
    try:
        assert (scored.verdict.strict, scored.verdict.reward) == (False, 0.25)
        assert (scored.rollout.step, len(scored.rollout.chunks)) == ("write", 1)
        assert is_start(scored)
        assert point_of(scored, task, 0).task.instruction == "Write hello to /app/a."
    finally:
        await pool.close()


async def test_a_failure_of_the_last_step_can_be_started_from(tmp_path: Path, task: TaskSpec) -> None:
    scored, pool = await played(tmp_path, task, "echo hello > a", "echo half > b")
    try:
        assert (scored.verdict.strict, scored.verdict.reward) == (False, 0.5)
        assert is_start(scored)
        point = point_of(scored, task, 0)
        assert (point.task.step, point.history_ids) == ("extend", scored.rollout.chunks[1].ids)
        again = await pool.lease(point.task, point.snapshot)
        assert (await again.run("cat a b")).output == "hello\nhalf\n"
        await again.run("echo more > b")
        assert (await TaskVerifier().verify(again, point.task)).strict
        await pool.release(again)
        await pool.discard(point.snapshot)
    finally:
        await pool.close()
    assert not list((tmp_path / "state" / "snapshots").glob("*"))


async def test_its_solutions_pass_and_nothing_does_not(tmp_path: Path, task: TaskSpec) -> None:
    pool = HostPool(size=2, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state", owner="steps")
    try:
        assert (await measure(pool, TaskVerifier(), task)).id == "two"
        with pytest.raises(TaskError, match="verified one by one"):
            TaskVerifier().suite(task)
        (Path(task.path) / "steps/extend/workdir/setup.sh").write_text("exit 3\n")
        with pytest.raises(TaskError, match=r"setup\.sh or the healthcheck of its step extend fails"):
            await measure(pool, TaskVerifier(), task)
    finally:
        await pool.close()


async def test_a_first_step_that_cannot_be_set_up_is_no_failure_of_the_agent(tmp_path: Path, task: TaskSpec) -> None:
    folder = Path(task.path) / "steps/write/workdir"
    folder.mkdir()
    (folder / "setup.sh").write_text("exit 3\n")
    pool = HostPool(size=2, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state", owner="steps")
    specs = task_group(task, 1, label="x", harness="react", sampling=SamplingParams(), limits=Limits(), seed=0)
    try:
        (result,) = [one async for one in Runner(pool, TaskVerifier(), Answering(), CHAT, retries=0).run(specs)]
    finally:
        await pool.close()
    assert isinstance(result, DroppedRollout)
    assert "setup.sh of its first step write failed" in result.reason
