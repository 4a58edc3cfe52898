"""Generated tokens a second of the rollout path, against the same engine asked directly for the same.

`python -m tests.bench.bench_rollout [--groups N] [--group-size N] [--at-once N] [--rounds N]`: the embedded model on bundled tasks.

Ours: episodes through `actors.rollouts`, a worker, the engine's actor, sandboxes and verification, as in a run. Raw: in the
actor's process, vLLM's own `generate` on the token ids that our episodes sent, a reply as long as theirs was (`ignore_eos`,
`max_tokens`), no log-probabilities and no seeds; as many conversations at once, each turn after the reply before it. Arms alternate
on one engine, and each begins with an empty prefix cache.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from termrsi.actors.generator import Engine, EngineOptions, GeneratorActor
from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.rollouts import RayRollouts, RolloutActor
from termrsi.actors.sandboxes import SandboxActor, SandboxOptions
from termrsi.config.load import load
from termrsi.config.schema import Config
from termrsi.harness.group import task_group
from termrsi.places import cache_dir
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import Chunk, Limits, Rollout, SamplingParams, ScoredRollout, TaskSpec

os.environ.setdefault("HF_HUB_OFFLINE", "1")
Request = tuple[tuple[int, ...], int]  # a prompt, and the length of its reply
TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Arm:
    seconds: float
    tokens: int  # generated

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Round:
    """`turns` of `episodes`."""

    ours: Arm
    raw: Arm
    episodes: int
    turns: int

    @property
    def ratio(self) -> float:
        return self.ours.rate / self.raw.rate


def requests(rollout: Rollout) -> list[Request]:
    """What an episode asked its generator for, call by call."""
    return [request for chunk in rollout.chunks for request in _calls(chunk)]


def _calls(chunk: Chunk) -> list[Request]:
    found, at = [], 0
    while at < len(chunk.ids):
        end = at
        while end < len(chunk.ids) and chunk.mask[end] and chunk.turn_ids[end] == chunk.turn_ids[at]:
            end += 1
        if end > at:
            found.append((chunk.ids[:at], end - at))
        at = max(end, at + 1)
    return found


class _Both(GeneratorActor.__ray_metadata__.modified_class):  # type: ignore[name-defined,misc]  # Ray makes it at run time
    """A run's engine actor, which a caller may also have ask its engine directly."""

    async def forget(self) -> None:
        await self._engine._llm.reset_prefix_cache()

    async def raw(self, episodes: Sequence[Sequence[Request]], at_once: int) -> tuple[float, int]:
        """Seconds, and tokens generated."""
        from vllm import SamplingParams as EngineSampling
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        llm, slots, tokens = self._engine._llm, asyncio.Semaphore(at_once), 0

        async def one(number: int, calls: Sequence[Request]) -> None:
            nonlocal tokens
            async with slots:
                for turn, (prompt, length) in enumerate(calls):
                    sampling = EngineSampling(
                        temperature=TEMPERATURE,
                        max_tokens=length,
                        ignore_eos=True,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                    async for output in llm.generate(TokensPrompt(prompt_token_ids=list(prompt)), sampling, f"raw-{number}-{turn}"):
                        tokens += len(output.outputs[0].token_ids)

        start_s = time.perf_counter()
        await asyncio.gather(*[one(number, calls) for number, calls in enumerate(episodes)])
        return time.perf_counter() - start_s, tokens


async def measure(
    model: Path,
    tasks: Sequence[TaskSpec],
    config: Config,
    *,
    group_size: int,
    at_once: int,
    rounds: int,
    kv_cache_gib: int = 1,
    make: Callable[[str, EngineOptions], Any] = Engine,  # Any: an Engine, or what stands in for one
) -> list[Round]:
    """After a round that is not counted. Ray stands."""
    import ray

    heavy = {"max_concurrency": 1000}
    with tempfile.TemporaryDirectory(prefix="termrsi-rollout-") as folder:
        sandboxes: Any = SandboxActor.options(num_cpus=0.1, **heavy).remote(
            SandboxOptions(
                backend=config.sandbox.backend,
                concurrency=at_once,
                memory_mb=config.sandbox.memory_mb,
                disk_mb=config.sandbox.disk_mb,
                pids=config.sandbox.pids,
                network=False,
                cache_dir=str(cache_dir()),
                state_dir=str(Path(folder) / "state"),
            )
        )
        options = EngineOptions(
            max_model_len=config.model.max_model_len,
            max_num_seqs=max(at_once, 2),
            kv_cache_gib=kv_cache_gib,
            threads=config.model.threads,
        )
        engine: Any = ray.remote(_Both).options(num_cpus=1, **heavy).remote(str(model), options, make)
        worker: Any = RolloutActor.options(num_cpus=0.1, **heavy).remote(str(model), [sandboxes], [engine], 2, {})
        await asyncio.gather(*[actor.ready.remote() for actor in (sandboxes, engine, worker)])
        rollouts = RayRollouts([worker], RemotePool([sandboxes]), PrefixRouter(1, slack=8), at_once, 2)
        try:
            found = [await _round(k, engine, rollouts, tasks, config, group_size, at_once) for k in range(rounds + 1)]
        finally:
            await sandboxes.close.remote()
            await engine.close.remote()
    return found[1:]


async def _round(
    number: int, engine: Any, rollouts: RayRollouts, tasks: Sequence[TaskSpec], config: Config, group_size: int, at_once: int
) -> Round:  # Any: Ray's actor handles are untyped
    limits = Limits(max_turns=config.limits.max_turns, max_context_tokens=config.limits.max_context_tokens)
    sampling = SamplingParams(TEMPERATURE, 1.0, config.sampling.max_tokens)
    groups = [
        task_group(task, group_size, label=f"round-{number}", harness="react", sampling=sampling, limits=limits, seed=number)
        for task in tasks
    ]
    specs = [spec for group in groups for spec in group]
    await engine.forget.remote()
    start_s, played = time.perf_counter(), []
    async for result in rollouts.run(specs):
        assert isinstance(result, ScoredRollout), result
        played.append(result.rollout)
    seconds = time.perf_counter() - start_s
    order = {spec.id: place for place, spec in enumerate(specs)}
    asked = [requests(rollout) for rollout in sorted(played, key=lambda rollout: order[rollout.id])]
    ours = Arm(seconds, sum(rollout.completion_tokens for rollout in played))
    assert ours.tokens == sum(length for calls in asked for _, length in calls)
    await engine.forget.remote()
    raw = Arm(*await engine.raw.remote(asked, at_once))
    assert raw.tokens == ours.tokens, "the same lengths"
    return Round(ours, raw, len(played), sum(len(calls) for calls in asked))


def table(found: Sequence[Round]) -> str:
    rows = [
        f"| {one.episodes} | {one.turns} | {one.ours.tokens} | {one.ours.rate:.1f} | {one.raw.rate:.1f} | {one.ratio:.3f} |"
        for one in found
    ]
    head = "| episodes | turns | tokens generated | ours, tokens/s | raw, tokens/s | ratio |\n| --- | --- | --- | --- | --- | --- |"
    middle = statistics.median(one.ratio for one in found)
    return "\n".join([head, *rows, f"\nmedian ratio {middle:.3f}"])


def main() -> None:
    import ray

    from termrsi import setup
    from termrsi.model import checkpoint

    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    config = load(["experiment=tmax"])
    tasks = setup.load_tasks(config, cache_dir(), lambda line: None).train[: given.groups]
    model = checkpoint.embedded_model(cache_dir() / "models")
    ray.init(
        address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20,
        namespace="termrsi",
    )  # fmt: skip
    try:
        found = asyncio.run(measure(model, tasks, config, group_size=given.group_size, at_once=given.at_once, rounds=given.rounds))
    finally:
        ray.shutdown()
    sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    from tests.bench import bench_rollout  # under its own name: actors take what stands here from there

    bench_rollout.main()
