"""Shipped fakes behind every port of a stage, and what a stage wrote, for tests of stages."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from termrsi import fakes
from termrsi.config.schema import Config
from termrsi.config.stages import EvaluateConfig
from termrsi.datasets import DataSet, Row
from termrsi.fakes import FakeParts, FakePolicy, FakeSkill
from termrsi.harness.runner import Runner
from termrsi.records import EpisodeSpec, Sample, WeightsVersion
from termrsi.stages import evaluate
from termrsi.stages.base import Context, Progress, Splits
from termrsi.stages.roles import PolicyWriter


class RecordingRunner(Runner):
    """Keeps every spec that was asked for."""

    def __init__(self, made: FakeParts) -> None:
        super().__init__(made.pool, made.verifier, made.generator, made.chat)
        self.specs: list[EpisodeSpec] = []

    async def run(self, specs: Sequence[EpisodeSpec]):  # the type of its base
        self.specs += specs
        async for result in super().run(specs):
            yield result


@dataclass
class Bench:
    """The fakes of one run, a directory, and what the stages logged."""

    root: Path
    seed: int = 0
    made: FakeParts = field(default_factory=fakes.dry_parts)
    log: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    on_log: Callable[[dict[str, float]], Awaitable[None]] | None = None
    reference: FakePolicy | None = None

    def __post_init__(self) -> None:
        self.served: dict[int, str] = {}
        self.runner = RecordingRunner(self.made)

    async def sync(self) -> WeightsVersion:
        weights = await self.made.policy.publish()
        await self.made.generator.pull(weights)
        self.served = {weights.version: weights.checksum}
        return weights

    async def use(self, skill: FakeSkill) -> None:
        self.made.policy.skill = skill
        await self.sync()

    def ctx(self, name: str, **inputs: Path) -> Context:
        out, made = self.root / name, self.made
        out.mkdir(exist_ok=True)
        return Context(
            config=Config(seed=self.seed),
            name=name,
            out=out,
            tasks=Splits(*made.tasks),
            checks=made.checks,
            chat=made.chat,
            generator=made.generator,
            rollouts=self.runner,
            policy=made.policy,
            critic=made.critic,
            reference=self.reference,
            queue=made.queue,
            groups=made.groups,
            scan=made.scan,
            pool=made.pool,
            verifier=made.verifier,
            inputs=inputs,
            log=lambda stage, values: self.log.append((stage, values)),
            progress=Progress(),
            publish=self.sync,
            served=dict(self.served),
            writer=lambda role: PolicyWriter(made.generator, made.chat),
        )

    def logged(self, key: str) -> list[float]:
        return [values[key] for _, values in self.log if key in values]

    def nothing_is_held(self) -> bool:
        world = self.made.pool.world
        return world.leases == world.releases and not world.open and not world.snapshots

    async def mean(self, name: str, k: int = 10) -> float:
        """Mean@k on the held-out tasks, at temperature 1."""
        summary = (await evaluate.run(self.ctx(name), EvaluateConfig(k=k, temperature=1.0))).summary
        return float(summary["mean_at_k"] or 0.0)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_in(path: Path) -> list[Row]:
    with DataSet(path) as data:
        return list(data)


def samples_in(path: Path) -> list[Sample]:
    return [row.sample for row in rows_in(path)]
