"""What a rollout costs the driver: from 10 to 1,000 episodes at once, and on one, two and four Ray nodes of this machine.

`python -m tests.bench.bench_scale [--episodes 10,100,1000] [--nodes 1,2,4] [--sandboxes scripted|local] [--rollouts N] [--turns N]`

The driver does what a step of `stages.grpo` has it do before the learner: groups are drawn and admitted, their episodes sent to
workers, each written, counted and told to the meter as it ends, groups taken from the buffer, samples made with their advantages.
All actors are a run's own. In place of vLLM the generators host an engine that says what a script has it say, at once; sandboxes
are in memory (`scripted`), or this machine's (`local`, root). Each case has a process and a Ray of its own.
"""

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from termrsi.actors.busy import Busy
from termrsi.actors.engines import Engines
from termrsi.actors.generator import EngineOptions, GeneratorActor
from termrsi.actors.metrics import RayMeter
from termrsi.actors.queues import BufferActor, RayGroupStore
from termrsi.actors.remote_pool import RemotePool
from termrsi.actors.rollouts import RayRollouts, RolloutActor
from termrsi.actors.sandboxes import SandboxActor, SandboxOptions
from termrsi.config.choices import Reward
from termrsi.config.schema import Config, LimitsConfig, SamplingConfig
from termrsi.config.stages import RewardConfig
from termrsi.fakes import FILES, FakeSandbox, FakeVerifier, FakeWorld, dry_parts, fake_scan
from termrsi.harness.episode import first_prompt
from termrsi.harness.render import ChatFormat
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import Completion, EnvironmentSpec, Flow, SamplingParams, Snapshot, TaskSpec
from termrsi.report.screen import Screen
from termrsi.report.sinks import Sinks
from termrsi.sandbox.pool import Cost
from termrsi.stages import credit
from termrsi.stages.base import ROLLOUTS, Context, Rewarder, Splits
from termrsi.stages.finished import FinishedRollouts
from termrsi.stages.roles import PolicyWriter
from termrsi.stages.rollin import GroupDraw, specs_of
from termrsi.stages.sampler import Sampler, rollouts_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing of it is fetched
os.environ.setdefault("RAY_worker_niceness", "0")  # as `actors.cluster` has it
GROUP = 5
TASKS = 240
TEST = "#!/bin/bash\n[ -f /app/all ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
THOUGHT = "The files are not there yet, as far as can be told from here: first one is made, then the other, then both are shown."


@dataclass(frozen=True, slots=True)
class Case:
    """`episodes`: at once. `rollouts`: measured, after a batch that is not. `turns`: with a command, before the last."""

    episodes: int
    nodes: int
    rollouts: int
    turns: int
    sandboxes: str = "scripted"

    @property
    def batches(self) -> int:
        return max(1, round(self.rollouts / self.episodes))


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of CPU for each rollout: the driver's, and those of each kind of process. `driver_mib`: its peak."""

    case: Case
    rollouts: int
    wall_s: float
    driver_ms: float
    others_ms: dict[str, float]
    driver_mib: float
    all_mib: float

    @property
    def rate(self) -> float:
        return self.rollouts / self.wall_s


# --- what stands in for an engine and for sandboxes ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Script:
    """Ids of a reply that makes both files, of one that makes the first, and of the last one. A prompt holds `first` ends of turns
    before any reply, and two more for each."""

    both: tuple[int, ...]
    half: tuple[int, ...]
    done: tuple[int, ...]
    end: int
    first: int
    turns: int

    def reply(self, prompt_ids: Sequence[int], seed: int) -> tuple[int, ...]:
        turn = (list(prompt_ids).count(self.end) - self.first) // 2
        if turn >= self.turns:
            return self.done
        return self.both if (seed - turn) % 2 else self.half  # an episode's seed is one more in each turn


class ScriptedEngine:
    """Has what GeneratorActor asks of an `actors.generator.Engine`."""

    def __init__(self, model: str, options: EngineOptions, *, script: Script) -> None:
        self._script = script
        self.version, self.dead = 0, False
        self.stats = Counter({"requests": 0.0, "prompt_tokens": 0.0, "cached_tokens": 0.0, "completion_tokens": 0.0})
        self.busy = Busy()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        with self.busy:
            await asyncio.sleep(0)
            ids = self._script.reply(prompt_ids, params.seed or 0)
        self.stats.update(requests=1, prompt_tokens=len(prompt_ids), completion_tokens=len(ids))
        return Completion(ids, (-0.125,) * len(ids), "stop", self.version, self.version)

    def close(self) -> None: ...


class ScriptedMachines:
    """`sandbox.machines.Machines` in memory."""

    def __init__(self) -> None:
        self._world = FakeWorld()

    async def make(self, task: TaskSpec, snapshot: Snapshot | None) -> FakeSandbox:
        return FakeSandbox(self._world)

    async def discard(self, snapshot: Snapshot) -> None: ...

    async def kept(self, snapshot: Snapshot) -> bool:
        return False

    def cost(self, task: TaskSpec) -> Cost:
        return Cost()


def in_memory() -> tuple[ScriptedMachines, FakeVerifier]:
    return ScriptedMachines(), FakeVerifier()


# --- a case -------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> Script:
    """A tokenizer's directory and a task's, and the script in the tokenizer's ids, of no turns."""
    from transformers import AutoTokenizer

    from termrsi.model.checkpoint import tiny_model

    chat = ChatFormat(AutoTokenizer.from_pretrained(tiny_model(folder / "model")))
    (folder / "task" / "tests").mkdir(parents=True)
    (folder / "task" / "tests" / "test.sh").write_text(TEST)
    (folder / "task" / "task.toml").write_text('version = "1.0"\n')
    parts = dry_parts()
    spec = specs_of(context(parts, Config(), folder, [task_of(folder, 0)]), [task_of(folder, 0)], 1, 1, 1.0)[0]
    made = [f"echo done > {path}" for path in FILES.values()]
    ids = [chat.plain(f"{THOUGHT}\n```bash\n{'; '.join([*made[:n], 'ls /app'])}\n```") for n in (2, 1)]
    both, half, done = ((*text, chat.end_of_turn) for text in (*ids, chat.plain("DONE")))
    return Script(both, half, done, chat.end_of_turn, first_prompt(spec, chat).count(chat.end_of_turn), 0)


def task_of(folder: Path, number: int) -> TaskSpec:
    text = f"Make both files of case {number}."
    return TaskSpec(f"case-{number}", "files", text, str(folder / "task"), EnvironmentSpec(workdir="/app"))


def context(parts: Any, config: Config, out: Path, tasks: list[TaskSpec], **own: Any) -> Context:  # Any: ports
    """A stage's, on `parts`: of the shipped fakes, what the case has no actor for."""
    given = {
        "generator": parts.generator, "rollouts": parts.rollouts, "groups": parts.groups, "pool": parts.pool,
        "verifier": parts.verifier, "log": lambda stage, figures: None, "progress": Screen(quiet=True),
    }  # fmt: skip
    return Context(
        config=config,
        name="scale",
        out=out,
        tasks=Splits(tasks, [], []),
        checks={},
        chat=parts.chat,
        policy=parts.policy,
        critic=None,
        reference=None,
        queue=parts.queue,
        scan=fake_scan,
        inputs={},
        publish=parts.policy.publish,
        writer=lambda role: PolicyWriter(parts.generator, parts.chat),
        **{**given, **own},
    )


def run(case: Case, folder: Path, script: Script) -> Figures:
    """In a process of its own: memory is told by its peak."""
    logging.basicConfig(level=logging.WARNING)
    return asyncio.run(_run(case, folder, script))


async def _run(case: Case, folder: Path, script: Script) -> Figures:
    import ray
    from ray.cluster_utils import Cluster as Nodes

    settings: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 96 * 2**20}  # Any: as Ray takes them
    nodes = Nodes(initialize_head=True, head_node_args={**settings, "include_dashboard": False, "resources": {"node0": 100}})
    for k in range(1, case.nodes):
        nodes.add_node(**settings, resources={f"node{k}": 100})
    ray.init(address=nodes.address, namespace="termrsi", log_to_driver=False, logging_level=logging.ERROR)
    try:
        return await _measure(case, folder, script)
    finally:
        ray.shutdown()
        nodes.shutdown()


async def _measure(case: Case, folder: Path, script: Script) -> Figures:
    many = {"num_cpus": 0.1, "max_concurrency": 1000}  # as `actors.cluster` starts them
    model, out = str(folder / "model"), Path(tempfile.mkdtemp(dir=folder))
    options = SandboxOptions(
        "local", case.episodes, 64, 16, 32, network=False, cache_dir=str(folder / "cache"), state_dir=str(out / "state"),
        host_share=1e3,  # limits of sandboxes that are idle add up to more than the machine has
    )  # fmt: skip
    parts = None if case.sandboxes == "local" else in_memory
    sandboxes: Any = SandboxActor.options(**many, resources={"node0": 0.01}).remote(options, parts)
    at = [{"resources": {f"node{k}": 0.01}} for k in range(case.nodes)]
    engine = partial(ScriptedEngine, script=script)
    generators = [GeneratorActor.options(**many, **place).remote(model, EngineOptions(), engine) for place in at]
    buffer: Any = BufferActor.options(**many, **at[0]).remote()
    workers = [RolloutActor.options(**many, **place).remote(model, [sandboxes], generators, 0, {}) for place in at]
    actors: list[Any] = [*generators, buffer, *workers]
    await asyncio.gather(*[actor.ready.remote() for actor in actors], sandboxes.busy.remote())

    pool, router = RemotePool([sandboxes]), PrefixRouter(case.nodes, slack=64)
    engines = Engines(generators, router, 0)
    engines.watch()
    meter = RayMeter("scale")
    limits = LimitsConfig(max_turns=case.turns + 1, max_context_tokens=1 << 20, wall_s=3600.0)
    config = Config(limits=limits, sampling=SamplingConfig(max_tokens=1024))
    sinks = Sinks(config, out, meter)

    async def busy() -> dict[str, float]:
        stats, found = await asyncio.gather(engines.stats(), pool.busy())
        return {"generator": stats["busy_s"], **found}

    ctx = context(
        dry_parts(), config, out, [task_of(folder, k) for k in range(TASKS)],
        generator=engines, rollouts=RayRollouts(workers, pool, router, case.episodes, 0), groups=RayGroupStore(buffer), pool=pool,
        verifier=pool, log=sinks, busy=busy, meter=meter, finished=FinishedRollouts(out / ROLLOUTS),
    )  # fmt: skip
    groups = case.episodes // GROUP
    draw = GroupDraw(ctx, groups, GROUP, 1.0)
    rewarder = Rewarder(ctx, RewardConfig(kind=Reward.binary))
    sampler = Sampler(ctx, draw, Flow(groups, batches=1 + case.batches), batch_episodes=case.episodes)
    try:
        async with sampler:
            await _step(ctx, sampler, rewarder, 1)
            began, before, start_s = time.process_time(), cpu_of(), time.perf_counter()
            for number in range(2, 2 + case.batches):
                await _step(ctx, sampler, rewarder, number)
            wall_s, driver_s, after = time.perf_counter() - start_s, time.process_time() - began, cpu_of()
    finally:
        sinks.close()
        await engines.close()
        await sandboxes.close.remote()
    count = case.batches * case.episodes
    assert ctx.costs.episodes == count + case.episodes, ctx.costs
    others = {kind: (seconds - before.get(kind, 0.0)) * 1000 / count for kind, seconds in after.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Figures(case, count, wall_s, driver_s * 1000 / count, others, peak, mib_of_all())


async def _step(ctx: Context, sampler: Sampler, rewarder: Rewarder, number: int) -> None:
    """As a step of `stages.grpo`, less the learner and new weights."""
    async with ctx.step(number):
        scored = rollouts_of((await sampler.batch(f"step {number}")).groups)
        batch = credit.batch_of(scored, rewarder, 1.0)
        samples = credit.group_advantages(batch, normalise=True, penalties={})
        ctx.log(ctx.name, {"step": number, "samples": len(samples)})
        await sampler.trained()


# --- processes ----------------------------------------------------------------------------------------------------


def _others() -> list[Any]:  # Any: psutil's processes
    import psutil

    return psutil.Process().children(recursive=True)


def cpu_of() -> dict[str, float]:
    """Seconds of CPU of all that this process started, by kind; those of ended sandboxes with the actor that held them."""
    import psutil

    found: Counter[str] = Counter()
    for process in _others():
        try:
            line, spent = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        actor = re.match(r"ray::(\w+)", line)
        kind = actor[1] if actor else "raylet, GCS" if re.search(r"raylet |gcs_server", line) else "the rest"
        ended = spent.children_user + spent.children_system if kind == "SandboxActor" else 0.0
        found[kind] += spent.user + spent.system + ended
    return dict(found)


def mib_of_all() -> float:
    """Memory of this process and all that it started, what they share counted once."""
    import psutil

    total = 0
    for process in (psutil.Process(), *_others()):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20


# --- all cases ----------------------------------------------------------------------------------------------------


def measure(cases: Sequence[Case]) -> list[Figures]:
    """One after the other."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="termrsi-scale-") as name:
        folder, found = Path(name), []
        with ProcessPoolExecutor(1, mp_context=spawn) as alone:
            script = alone.submit(prepare, folder).result()
        for case in cases:
            with ProcessPoolExecutor(1, mp_context=spawn) as alone:
                found.append(alone.submit(run, case, folder, replace(script, turns=case.turns)).result())
        return found


COLUMNS = ("driver, ms of CPU", "rollouts/s", "workers", "sandboxes", "generators", "buffer", "Ray", "driver's peak", "all")


def header() -> str:
    cells = ("episodes at once", "nodes", "sandboxes", "rollouts", *COLUMNS)
    return f"| {' | '.join(cells)} |\n|{' --- |' * len(cells)}"


def row(one: Figures) -> str:
    """Milliseconds of CPU for each rollout, MiB."""
    case, spent = one.case, one.others_ms
    ray_ms = spent.get("raylet, GCS", 0.0) + spent.get("the rest", 0.0)
    kinds = [f"{spent.get(kind, 0.0):.1f}" for kind in ("RolloutActor", "SandboxActor", "GeneratorActor", "BufferActor")]
    cells = [str(case.episodes), str(case.nodes), case.sandboxes, str(one.rollouts), f"{one.driver_ms:.2f}", f"{one.rate:.1f}"]
    return f"| {' | '.join([*cells, *kinds, f'{ray_ms:.1f}', f'{one.driver_mib:.0f}', f'{one.all_mib:.0f}'])} |"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=numbers, default=[10, 100, 1000], help="at once; multiples of 5")
    parser.add_argument("--nodes", type=numbers, default=[1])
    parser.add_argument("--sandboxes", choices=("scripted", "local"), default="scripted")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=6)
    given = parser.parse_args()
    sys.stdout.write(header() + "\n")
    for nodes, episodes in itertools.product(given.nodes, given.episodes):
        (found,) = measure([Case(episodes, nodes, given.rollouts, given.turns, given.sandboxes)])
        sys.stdout.write(f"{row(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    from tests.bench import bench_scale  # under its own name: actors take what stands here from there

    bench_scale.main()
