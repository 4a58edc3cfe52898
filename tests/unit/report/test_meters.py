"""What a run tells a monitor: names and labels that exist, figures of a step, episodes by what ended them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from termrsi.config.schema import Config
from termrsi.config.stages import GrpoConfig
from termrsi.records import DroppedRollout, EpisodeSpec
from termrsi.report.meters import INSTRUMENTS, check, silent
from termrsi.report.sinks import Sinks
from termrsi.stages import grpo
from termrsi.stages.base import Context
from tests.stage_bench import Bench


class Heard:
    """A meter that keeps what it is told, and checks it as the silent one does."""

    def __init__(self) -> None:
        self.all: list[tuple[str, float, dict[str, str]]] = []

    def __call__(self, name: str, value: float = 1.0, **labels: str) -> None:
        check(name, labels)
        self.all.append((name, value, labels))

    def of(self, name: str, /, **labels: str) -> list[float]:
        return [value for n, value, given in self.all if n == name and labels.items() <= given.items()]


@pytest.mark.parametrize(
    ("name", "labels"), [("rollouts", {}), ("step", {}), ("step", {"stage": "s", "part": "p"}), ("sandbox_leases", {"stage": "s"})]
)
def test_other_names_and_labels_are_refused(name: str, labels: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is no instrument"):
        silent(name, **labels)


def test_every_instrument_can_be_used() -> None:
    for name, instrument in INSTRUMENTS.items():
        silent(name, 2.0, **dict.fromkeys(instrument.labels, "x"))


def test_a_sink_tells_each_figure_and_the_staleness(tmp_path: Path) -> None:
    heard = Heard()
    sinks = Sinks(Config(), tmp_path, heard)
    sinks("rpr_1", {"step": 2.0, "reward": 0.5, "staleness": 1.0})
    sinks("rpr_1", {"step": 3.0, "reward": 0.75, "staleness": 0.0})
    sinks.close()
    assert heard.of("figure", stage="rpr_1", figure="reward") == [0.5, 0.75]
    assert heard.of("staleness", stage="rpr_1") == [1.0, 0.0]


class Lost:
    """Rollouts of which each is lost for its own reason."""

    def __init__(self, *reasons: str) -> None:
        self._reasons = reasons

    async def run(self, specs: list[EpisodeSpec]):  # the type of its port
        for spec, reason in zip(specs, self._reasons, strict=True):
            yield DroppedRollout(spec.id, spec.group_id, spec.task.id, reason, 3)


def specs_of(ctx: Context, count: int) -> list[EpisodeSpec]:
    task = ctx.tasks.train[0]
    sampling = ctx.sampling(1.0)
    return [EpisodeSpec(f"e{i}", "g", task, "guided", sampling, ctx.limits()) for i in range(count)]


async def test_lost_episodes_are_told_by_what_the_reason_begins_with(tmp_path: Path) -> None:
    ctx, heard = Bench(tmp_path).ctx("stage"), Heard()
    ctx.meter = heard
    reasons = ("SandboxError: pool: gone", "late: not done 600 s after its start", "VerifierError: t: no report", "prompt too long")
    ctx.rollouts = Lost(*reasons)  # type: ignore[assignment]  # `discard` is not called
    assert await ctx.episodes(specs_of(ctx, 4), "what") == []
    told = [labels["reason"] for name, _, labels in heard.all if name == "rollouts_dropped"]
    assert told == ["SandboxError", "late", "VerifierError", "refused"]


async def test_finished_episodes_are_told_by_what_ended_them(tmp_path: Path) -> None:
    ctx, heard = Bench(tmp_path).ctx("stage"), Heard()
    ctx.meter = heard
    scored = await ctx.episodes(specs_of(ctx, 3), "what")
    assert len(scored) == 3
    assert [labels for name, _, labels in heard.all if name == "rollouts_finished"] == [
        {"stage": "stage", "stop": s.rollout.stop.value} for s in sorted(scored, key=lambda s: s.rollout.id)
    ]
    assert sorted(heard.of("rollout_seconds")) == sorted(s.rollout.wall_s for s in scored)


async def test_a_step_tells_its_time_its_shares_and_the_learners_rate(tmp_path: Path) -> None:
    ctx, heard = Bench(tmp_path).ctx("stage"), Heard()
    ctx.meter = heard
    told: list[tuple[str, dict[str, float]]] = []
    ctx.log = lambda stage, figures: told.append((stage, figures))
    times, busy = iter([100.0, 110.0]), iter([{"generator": 7.0}, {"generator": 15.0}])
    ctx.costs.rollout_s, ctx.costs.prompt_tokens, ctx.costs.cached_tokens = 30.0, 100, 90

    async def next_busy() -> dict[str, float]:
        return next(busy)

    ctx.clock, ctx.busy = lambda: next(times), next_busy
    ctx.costs.trained_tokens, ctx.costs.learn_s = 1000, 50.0
    async with ctx.step(4):
        ctx.costs.trained_tokens += 600
        ctx.costs.learn_s += 3.0
        ctx.costs.rollout_s += 6.5
        ctx.costs.prompt_tokens, ctx.costs.cached_tokens = 300, 240
    figures = {
        "step": 4.0,
        "step_seconds": 10.0,
        "busy/generator": 0.8,
        "busy/learner": 0.3,
        "waiting": 0.65,
        "prompt_cached": 0.75,
    }
    assert told == [("stage", figures)]
    assert heard.all == [
        ("step", 4, {"stage": "stage"}),
        ("step_seconds", 10.0, {"stage": "stage"}),
        ("learner_tokens_per_second", 200.0, {"stage": "stage"}),
        ("busy", 0.8, {"stage": "stage", "part": "generator"}),
        ("busy", 0.3, {"stage": "stage", "part": "learner"}),
    ]


async def test_a_step_that_failed_is_not_told(tmp_path: Path) -> None:
    ctx, heard = Bench(tmp_path).ctx("stage"), Heard()
    ctx.meter = heard
    with pytest.raises(asyncio.CancelledError):
        async with ctx.step(1):
            raise asyncio.CancelledError
    assert heard.all == []


async def test_a_stage_tells_every_step_it_trains(tmp_path: Path) -> None:
    ctx, heard = Bench(tmp_path).ctx("grpo"), Heard()
    ctx.meter = heard
    await grpo.run(ctx, GrpoConfig(steps=2, groups=1, group_size=2))
    assert heard.of("step", stage="grpo") == [1, 2]
    assert len(heard.of("step_seconds")) == 2
    assert sum(heard.of("rollouts_finished")) == ctx.costs.episodes
