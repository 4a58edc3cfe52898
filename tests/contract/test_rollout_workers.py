"""A rollout worker that is killed, with real actors and sandboxes: its episodes run again, and its sandboxes are freed.

What the engine says is written down here.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from termrsi.actors.generator import EngineOptions, GeneratorActor
from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.rollouts import RayRollouts, RolloutActor, worker_name
from termrsi.actors.sandboxes import SandboxActor, SandboxOptions
from termrsi.errors import EngineError
from termrsi.harness.group import task_group
from termrsi.model.checkpoint import tiny_model
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import Completion, Limits, SamplingParams, ScoredRollout
from termrsi.sandbox.check import why_not
from termrsi.tasks import bundled, load_dir

pytestmark = pytest.mark.ray
SOON_S = 120.0


def sleeper() -> type:
    """An engine whose agent sleeps, and is done. Made in a function, so that it travels to the actor by value."""

    class Sleeper:
        def __init__(self, model: str, options: EngineOptions) -> None:
            from transformers import AutoTokenizer

            from termrsi.actors.busy import Busy
            from termrsi.harness.render import ChatFormat

            self.version, self.dead, self.busy, self.stats = 0, False, Busy(), {}
            self._chat = ChatFormat(AutoTokenizer.from_pretrained(model))

        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            said = "DONE" if "sleep 5" in self._chat.decode(prompt_ids) else "```bash\nsleep 5\n```"
            ids = (*self._chat.encode(said), self._chat.end_of_turn)
            return Completion(ids, (0.0,) * len(ids), "stop", 0, 0)

    return Sleeper


@pytest.fixture
def sandboxes_work() -> None:
    if missing := why_not():
        pytest.skip("; ".join(missing))


@pytest.mark.usefixtures("own_ray", "sandboxes_work")
async def test_its_episodes_run_again_and_its_sandboxes_are_freed(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "tiny"))
    (task,) = load_dir(bundled.ensure(tmp_path / "tasks", split="train", seeds=range(1), levels=[1], families=["copy"])).tasks
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    options = SandboxOptions("local", 2, 256, 64, 64, network=False, cache_dir=str(tmp_path / "c"), state_dir=str(tmp_path / "s"))
    many = {"num_cpus": 0.1, "max_concurrency": 100}
    sandboxes: Any = SandboxActor.options(**many).remote(options)  # Any: Ray's actor handles are untyped, here and below
    generator: Any = GeneratorActor.options(**many).remote(model, EngineOptions(), sleeper())
    worker: Any = RolloutActor.options(**many, max_restarts=1).remote(model, [sandboxes], [generator], 0, {}, worker_name(0))
    pool = RemotePool([sandboxes])
    played = RayRollouts([worker], pool, PrefixRouter(1, 8), 2, 0)
    limits = Limits(max_turns=3, max_context_tokens=4000, command_timeout_s=30)
    specs = task_group(task, 2, label="w", harness="react", sampling=SamplingParams(max_tokens=50), limits=limits, seed=0)

    async def kill(signal_number: int) -> None:
        """Once both of its episodes are at their commands."""
        while sum(one.turn for one, *_ in await worker.late.remote(-1.0)) < 2:  # noqa: ASYNC110  # a table that tells nobody
            await asyncio.sleep(0.1)
        pid = await worker.__ray_call__.remote(lambda _: os.getpid())
        os.kill(pid, signal_number)

    async with asyncio.timeout(SOON_S):
        killing = asyncio.ensure_future(kill(signal.SIGKILL))
        results = [result async for result in played.run(specs)]
        await killing
        assert [type(r) for r in results] == [ScoredRollout] * 2, results
        for box in [await pool.lease(task), await pool.lease(task)]:  # there are two places: none is held by the dead
            await pool.release(box)
        killing = asyncio.ensure_future(kill(signal.SIGKILL))
        with pytest.raises(EngineError, match="every rollout worker has died: rollout worker 0 for"):
            async for _ in played.run(specs):
                pass
        await killing
        for box in [await pool.lease(task), await pool.lease(task)]:
            await pool.release(box)
