"""A real vLLM engine is killed between two requests: it comes back, and with the weights that were pulled, not its first ones."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from termrsi import weights
from termrsi.actors.engines import Engines
from termrsi.actors.generator import EngineOptions, GeneratorActor
from termrsi.model.policy import PolicyModel
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import SamplingParams, WeightsVersion

pytestmark = [pytest.mark.engine, pytest.mark.ray]
BACK_S = 400.0


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


async def _core(pid: int) -> int:
    """The engine's own process. What the kernel lists of a process with many threads may lack a child for a moment."""
    while not (found := [c for c in _children(pid) if "EngineCor" in Path(f"/proc/{c}/comm").read_text()]):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return found[0]


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


async def test_a_killed_engine_comes_back_with_the_newest_weights(embedded: Path, own_ray: None) -> None:
    """First the engine's own process, then the actor that hosts it; neither leaves an engine behind."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=700 * 2**20)
    options = EngineOptions(max_model_len=256, max_num_seqs=4, kv_cache_gib=1, enforce_eager=True, restart_pause_s=0.0)
    settings = {"num_cpus": 1, "max_concurrency": 100, "max_restarts": 2, "max_task_retries": 0}
    actor: Any = GeneratorActor.options(**settings).remote(str(embedded), options)  # Any: Ray's actor handles are untyped
    engines = Engines([actor], PrefixRouter(1, slack=4), restarts=2)
    state = {name: tensor.clone() for name, tensor in PolicyModel(embedded).state().items()}
    for name, tensor in state.items():
        if name.endswith("layers.0.mlp.down_proj.weight"):
            tensor.zero_()  # so that other tokens are the likeliest
    packed = weights.pack(state)
    facts = weights.facts_of(packed)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    prompt = [5 + (7 * k) % 4000 for k in range(20)]
    async with asyncio.timeout(BACK_S):
        first = await engines.generate(prompt, greedy)
        engines.watch()
        stored = weights.merge(facts, [(ray.put(packed), list(packed))], None)
        await engines.pull(WeightsVersion("policy", 3, weights.checksum(facts), stored, stored.size_bytes))
        before = await engines.generate(prompt, greedy)
        assert before.ids != first.ids
        for victim in ("engine", "actor"):
            process = await actor.__ray_call__.remote(lambda host: os.getpid())
            core = await _core(process)
            os.kill(core if victim == "engine" else process, signal.SIGKILL)
            after = await engines.generate(prompt, greedy)
            assert (after.ids, after.version_low) == (before.ids, 3), victim
            while _runs(core):  # noqa: ASYNC110  # it notices by itself that its host is gone
                await asyncio.sleep(0.1)
    await engines.close()
