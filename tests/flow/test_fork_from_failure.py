"""Fork from failure on real sandboxes and the real verifier: what the failed attempt left is there, and the verifier left nothing.

The replies are written down here, so that the test says exactly what the agent did; the engine has tests of its own.
"""

from collections.abc import Sequence
from pathlib import Path

from termrsi.harness.group import recovery_group, task_group
from termrsi.harness.runner import Runner
from termrsi.records import Limits, RecoveryPoint, SamplingParams, ScoredRollout
from termrsi.reward.verifier import HarborVerifier
from termrsi.sandbox.host_pool import HostPool
from termrsi.tasks import bundled, load_dir
from tests.written import CHAT, Written, bash


async def test_recovery_starts_from_the_failure_state_itself(tmp_path: Path) -> None:
    (task,) = load_dir(bundled.ensure(tmp_path / "tasks", split="train", seeds=range(1), levels=[1], families=["copy"])).tasks
    pool = HostPool(size=4, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state", owner="recovery")
    options = {"harness": "react", "sampling": SamplingParams(), "limits": Limits(max_turns=4), "seed": 0}

    async def play(specs: list, replies: Sequence[str]) -> list[ScoredRollout]:
        runner = Runner(pool, HarborVerifier(), Written(replies), CHAT, concurrency=4)
        results = [result async for result in runner.run(specs)]
        assert all(isinstance(r, ScoredRollout) for r in results), results
        return results  # type: ignore[return-value]  # none was dropped

    try:
        made = "mkdir -p deep/er; cd deep/er; half=42; export KIND=failed; twice() { echo $1$1; }; umask 027; echo part > left.txt"
        (failed,) = await play(task_group(task, 1, label="first", keep_snapshot=True, **options), [bash(made)])  # pyright: ignore[reportArgumentType]
        assert not failed.verdict.strict
        assert failed.verdict.failed, "the verifier ran, after the snapshot"
        snapshot = failed.rollout.snapshot
        assert snapshot is not None
        point = RecoveryPoint("point", task, snapshot, failed.rollout.chunks[0].ids, 2, 1)
        look = "pwd; echo $half $KIND; twice a; umask; cat left.txt; ls /tests /logs/verifier 2>&1 | head -3"
        # The task's own words name the two files: the recovery ends in a success that the first attempt was not.
        solve = (Path(task.path) / "solution" / "solve.sh").read_text().splitlines()[-1]
        results = await play(
            recovery_group(point, 4, label="second", **options),  # pyright: ignore[reportArgumentType]
            [bash(look), bash(f"cd /app && {solve}")],
        )
        for result in results:
            seen = result.rollout.turns[0].observation
            assert "/app/deep/er\n42 failed\naa\n0027\npart\n" in seen
            assert "test.sh" not in seen, "no trace of the verifier"
            assert result.verdict.strict
            assert result.rollout.recovery_id == "point"
            chunk = result.rollout.chunks[0]
            assert chunk.ids[: len(point.history_ids)] == point.history_ids
            assert not any(chunk.mask[: len(point.history_ids)]), "the failed history is read, not trained on"
        await pool.discard(snapshot)
    finally:
        await pool.close()
    assert not list((tmp_path / "state" / "snapshots").glob("*"))
