"""Stages that train, and are killed: by SIGKILL, at any call of any of their hosts, and taken up again until they end."""

import asyncio
import json
import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from termrsi.config.choices import RefitValueHead
from termrsi.config.stages import (
    GrpoConfig,
    PolicyOptimConfig,
    RetentionConfig,
    RetermConfig,
    RprConfig,
    RsrConfig,
    SftConfig,
    WarmupCriticConfig,
)
from termrsi.fakes import FakeCritic, FakeGenerator, FakePolicy, FakeSkill
from termrsi.records import Completion, Sample, SamplingParams, UpdateMetrics, WeightsVersion
from termrsi.stages import checkpoints, grpo, reterm, rpr, rsr, sft, warmup_critic
from termrsi.stages.base import Context, StageResult
from termrsi.stages.finished import FinishedRollouts
from tests.stage_bench import Bench, lines

KILLS = int(os.environ.get("TERMRSI_KILLS", "20"))  # of each stage
OPTIM = PolicyOptimConfig(lr=2e-7)
EVERY = RetentionConfig(every=2, k=1, temperature=1.0, max_drop=1.0)
BACK = RetentionConfig(every=1, k=1, temperature=1.0, max_drop=1.0, rollback=True)
HALF = FakeSkill(solve=0.0, half=0.0)


def grpo_config(**changes: Any) -> GrpoConfig:
    return GrpoConfig(**{"steps": 5, "groups": 3, "group_size": 3, "optim": OPTIM, "retention": EVERY} | changes)


def rpr_config(**changes: Any) -> RprConfig:
    sizes = {"steps": 5, "tasks_per_step": 3, "samples_per_task": 2, "optim": OPTIM, "retention": EVERY, "critic": "w"}
    return RprConfig(**sizes | changes)


def reterm_config(**changes: Any) -> RetermConfig:
    sizes = {"steps": 5, "original_groups": 3, "recovery_groups": 2, "group_size": 2, "optim": OPTIM, "retention": EVERY}
    return RetermConfig(**sizes | {"capacity": 4} | changes)


STAGES: dict[str, Callable[[Context], Coroutine[Any, Any, StageResult]]] = {
    "sft": lambda ctx: sft.run(ctx, SftConfig(data="rsr", batch=3, validate_k=1, lr=1e-5)),
    "warmup_critic": lambda ctx: warmup_critic.run(ctx, WarmupCriticConfig(tasks_per_step=5, checks=6)),
    "rpr": lambda ctx: rpr.run(ctx, rpr_config(refit_value_head=RefitValueHead.affine)),
    "grpo": lambda ctx: grpo.run(ctx, grpo_config(only_contrast=True)),
    "reterm": lambda ctx: reterm.run(ctx, reterm_config()),
    "rolled_back": lambda ctx: rpr.run(ctx, rpr_config(retention=BACK)),
    "requeued": lambda ctx: reterm.run(ctx, reterm_config(pop=False, requeue_recovery_failures=True, checkpoint_every=2)),
}
AHEAD: dict[str, Callable[[Context], Coroutine[Any, Any, StageResult]]] = {
    "rpr": lambda ctx: rpr.run(ctx, rpr_config(max_staleness=1)),
    "grpo": lambda ctx: grpo.run(ctx, grpo_config(max_staleness=2, checkpoint_every=2)),
    "reterm": lambda ctx: reterm.run(ctx, reterm_config(max_staleness=1)),
}
FAMILIES = {"stages": STAGES, "ahead": AHEAD}


@dataclass
class Clock:
    """Counts calls, of whichever host, and kills the process at one of them."""

    at: int
    calls: int = 0

    def tick(self) -> bool:
        """Whether the process dies in this call."""
        self.calls += 1
        return self.calls == self.at

    def tock(self) -> None:
        if self.tick():
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Generator(FakeGenerator):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        self._clock.tock()
        return await super().generate(prompt_ids, params, prefix_key)

    async def pull(self, weights: WeightsVersion) -> None:
        self._clock.tock()
        await super().pull(weights)


class Policy(FakePolicy):
    """Dies before an update is told, and in the middle of writing."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(HALF)
        self._clock = clock

    async def update(self, samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        found = await super().update(samples, loss, lr)
        self._clock.tock()
        return found

    async def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        self._clock.tock()
        return await super().fit(samples, lr)

    async def save(self, directory: str) -> str:
        torn(self._clock, directory)
        return await super().save(directory)

    async def save_training(self, directory: str) -> str:
        torn(self._clock, directory)
        return await super().save_training(directory)


class Critic(FakeCritic):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    async def update(self, samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        self._clock.tock()
        return await super().update(samples, lr, value_clip)

    async def save(self, directory: str) -> str:
        torn(self._clock, directory)
        return await super().save(directory)

    async def save_training(self, directory: str) -> str:
        torn(self._clock, directory)
        return await super().save_training(directory)


def torn(clock: Clock, directory: str) -> None:
    if clock.tick():
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "skill.json.part").write_text('{"sol')
        die()


class OnDisk(dict):
    """The snapshots of a world, which outlive its process."""

    def __init__(self, root: Path, keep: frozenset[str]) -> None:
        self._root = root
        root.mkdir(exist_ok=True)
        for path in root.iterdir():
            if path.name in keep:
                super().__setitem__(path.name, pickle.loads(path.read_bytes()))
            else:  # as `sandbox.reap` does
                path.unlink()

    def __setitem__(self, handle: str, machine: Any) -> None:
        (self._root / handle).write_bytes(pickle.dumps(machine))
        super().__setitem__(handle, machine)

    def pop(self, handle: str, default: Any = None) -> Any:
        (self._root / handle).unlink(missing_ok=True)
        return super().pop(handle, default)


@dataclass
class Life:
    """One process's attempt at a stage, in the directory where earlier ones left it."""

    root: Path
    kind: str
    clock: Clock = field(default_factory=lambda: Clock(0))
    losses: list[dict[str, float]] = field(default_factory=list)

    async def context(self) -> Context:
        bench = Bench(self.root)
        made = bench.made
        inputs = {"data": self.root.parent / "rsr" / "data.parquet"} if self.kind == "sft" else {}
        made.generator, made.policy, made.critic = Generator(self.clock), Policy(self.clock), Critic(self.clock)
        world = made.pool.world
        world.snapshots = OnDisk(self.root / "snapshots", checkpoints.snapshots(self.root / self.kind))
        world.taken = 1000 * sum(1 for _ in self.root.glob("life-*"))
        (self.root / f"life-{world.taken}").touch()
        bench.runner = type(bench.runner)(made)
        await bench.sync()
        ctx = bench.ctx(self.kind, **inputs)
        ctx.log = self.log
        ctx.finished = FinishedRollouts(ctx.out / "rollouts.jsonl")
        ctx.take_up_costs()
        return ctx

    def log(self, stage: str, figures: dict[str, float]) -> None:
        with (self.root / "log.jsonl").open("a") as file:
            file.write(json.dumps(figures) + "\n")

    async def play(self, stages: dict[str, Callable[[Context], Coroutine[Any, Any, StageResult]]]) -> None:
        ctx = await self.context()
        result = await stages[self.kind](ctx)
        assert ctx.critic is not None
        told = {
            "policy": await ctx.policy.checksum(),
            "critic": await ctx.critic.checksum(),
            "summary": result.summary,
            "version": ctx.version,
            "costs": asdict(await ctx.spent()),
            "calls": self.clock.calls,
        }
        (self.root / "result.json").write_text(json.dumps(told))


def run(root: Path, kind: str, at: int, family: str) -> None:
    asyncio.run(Life(root, kind, Clock(at)).play(FAMILIES[family]))


def played(root: Path, kind: str, at: int = 0, family: str = "stages") -> int:
    """In a process of its own; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=run, args=(root, kind, at, family))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def given(root: Path, kind: str) -> None:
    """What the stage reads."""
    if kind == "sft":
        asyncio.run(rsr.run(Bench(root).ctx("rsr"), RsrConfig(attempts=4)))


def trained(root: Path, kind: str) -> list[list[Any]]:
    """What each step was trained on."""
    found = lines(root / kind / checkpoints.LINES)
    assert [line["key"] for line in found] == [str(number + 1) for number in range(len(found))]
    return [line["value"].get("rollouts", line["value"].get("rows")) for line in found]


def curve(root: Path) -> dict[float, dict[str, float]]:
    """The figures of each step as it was done last."""
    steps: dict[float, dict[str, float]] = {}
    for figures in lines(root / "log.jsonl"):
        if "step" in figures and "validation" not in figures:
            steps[figures["step"]] = steps.get(figures["step"], {}) | figures
    return steps


def told(root: Path, kind: str) -> dict[str, Any]:
    """What must not depend on how often it was killed."""
    result = json.loads((root / "result.json").read_text())
    weights = {str(p.relative_to(root)): p.read_text() for p in sorted((root / kind).glob("[pc]*i*c*/*.json"))}
    retention, steps = root / kind / "retention.json", root / kind / "steps.json"
    return {
        **{name: result[name] for name in ("policy", "critic", "summary", "version")},
        "trained": trained(root, kind),
        "curve": curve(root),
        "weights": weights,
        "retention": json.loads(retention.read_text()) if retention.exists() else None,
        "steps": json.loads(steps.read_text()) if steps.exists() else None,
        "snapshots": sorted(p.name for p in (root / "snapshots").iterdir()),
        "checkpoints": sorted(p.name for p in (root / kind / checkpoints.FOLDER).iterdir()),
    }


def spent(root: Path) -> dict[str, float]:
    return json.loads((root / "result.json").read_text())["costs"]


@pytest.mark.parametrize("kind", STAGES)
def test_killed_at_random_points_it_ends_as_if_it_had_not_been(kind: str, tmp_path: Path) -> None:
    given(tmp_path, kind)
    root = tmp_path / "whole"
    root.mkdir()
    assert played(root, kind) == 0
    calls, expected, costs = json.loads((root / "result.json").read_text())["calls"], told(root, kind), spent(root)
    assert len(expected["trained"]) == len(expected["curve"]) > 3
    assert expected["weights"]
    assert expected["snapshots"] == []
    assert len(expected["checkpoints"]) == checkpoints.KEPT
    draw, killed = random.Random(f"kills of {kind}"), 0
    while killed < KILLS or not (root / "result.json").exists():
        if (root / "result.json").exists():  # that life ended: the rest of the kills are another's
            root = tmp_path / f"life after {killed}"
            root.mkdir()
        at = draw.randint(1, max(2, calls // 3)) if killed < KILLS else 0
        code = played(root, kind, at)
        assert code == (0 if (root / "result.json").exists() else -signal.SIGKILL)
        if code:
            killed += 1
            continue
        assert told(root, kind) == expected
        assert all(spent(root)[name] >= costs[name] for name in ("completion_tokens", "episodes", "trained_tokens"))
