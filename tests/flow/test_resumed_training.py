"""Stages that train, and are killed: by SIGKILL, at any call of any of their hosts, and taken up again until they end."""

import asyncio
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from termrsi.config.choices import Admission, RefitValueHead
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
from termrsi.errors import StageError
from termrsi.fakes import FakeCritic, FakeGenerator, FakePolicy, FakeSkill
from termrsi.records import Completion, Sample, SamplingParams, UpdateMetrics, WeightsVersion
from termrsi.stages import checkpoints, grpo, reterm, rpr, rsr, sft, warmup_critic
from termrsi.stages.base import Context, StageResult
from termrsi.stages.finished import FinishedRollouts
from termrsi.stages.rollin import GroupDraw
from tests.stage_bench import Bench, lines

KILLS = int(os.environ.get("TERMRSI_KILLS", "20"))  # of each stage
OPTIM = PolicyOptimConfig(lr=2e-7)
EVERY = RetentionConfig(every=2, k=1, temperature=1.0, max_drop=1.0)
BACK = RetentionConfig(every=1, k=1, temperature=1.0, max_drop=1.0, rollback=True)
HALF = FakeSkill(solve=0.0, half=0.0)


def grpo_config(**changes: Any) -> GrpoConfig:
    sizes: dict[str, Any] = {"steps": 5, "groups": 3, "group_size": 3, "optim": OPTIM, "retention": EVERY}
    return GrpoConfig(**sizes | changes)


def rpr_config(**changes: Any) -> RprConfig:
    sizes: dict[str, Any] = {"steps": 5, "tasks_per_step": 3, "samples_per_task": 2, "optim": OPTIM, "retention": EVERY}
    return RprConfig(critic="warmup", **sizes | changes)


def reterm_config(**changes: Any) -> RetermConfig:
    sizes: dict[str, Any] = {"steps": 5, "original_groups": 3, "recovery_groups": 2, "group_size": 2, "capacity": 4}
    return RetermConfig(**sizes | {"optim": OPTIM, "retention": EVERY} | changes)


STAGES: dict[str, Callable[[Context], Coroutine[Any, Any, StageResult]]] = {
    "sft": lambda ctx: sft.run(ctx, SftConfig(data="rsr", batch=3, validate_k=1, lr=1e-5)),
    "warmup_critic": lambda ctx: warmup_critic.run(ctx, WarmupCriticConfig(tasks_per_step=5, checks=6)),
    "rpr": lambda ctx: rpr.run(ctx, rpr_config(refit_value_head=RefitValueHead.affine)),
    "grpo": lambda ctx: grpo.run(ctx, grpo_config(replace_zero_variance=2)),
    "reterm": lambda ctx: reterm.run(ctx, reterm_config()),
    "rolled_back": lambda ctx: rpr.run(ctx, rpr_config(retention=BACK)),
    "requeued": lambda ctx: reterm.run(ctx, reterm_config(pop=False, requeue_recovery_failures=True, checkpoint_every=2)),
}
AHEAD: dict[str, Callable[[Context], Coroutine[Any, Any, StageResult]]] = {
    "rpr": lambda ctx: rpr.run(ctx, rpr_config(max_staleness=1)),
    "grpo": lambda ctx: grpo.run(ctx, grpo_config(max_staleness=2, checkpoint_every=2)),
    "reterm": lambda ctx: reterm.run(ctx, reterm_config(max_staleness=1)),
    "oversampled": lambda ctx: grpo.run(ctx, grpo_config(max_staleness=1, oversample=2)),
    "first": lambda ctx: grpo.run(ctx, grpo_config(max_staleness=2, oversample=2, admission=Admission.first)),
}
REPLACED: dict[str, Callable[[Context], Coroutine[Any, Any, StageResult]]] = {
    "replaced": lambda ctx: grpo.run(ctx, grpo_config(max_staleness=1, oversample=2, replace_zero_variance=2)),
}
TIMED = ("busy/", "step_seconds", "waiting", "prompt_cached")  # of a step: how it went, not what it did
FAMILIES = {"stages": STAGES, "ahead": AHEAD, "replaced": REPLACED}


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
            what = {name: value for name, value in figures.items() if not name.startswith(TIMED)}
            steps[figures["step"]] = steps.get(figures["step"], {}) | what
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
        if kind != "sft":  # what had finished was found again
            played_by = [(line["rollout"]["id"], *line["weights"]) for line in lines(root / kind / "rollouts.jsonl")]
            assert len(played_by) == len(set(played_by))
        assert all(spent(root)[name] >= costs[name] for name in ("completion_tokens", "episodes", "trained_tokens"))


@pytest.mark.parametrize("kind", AHEAD)
def test_ahead_of_the_learner_each_prompt_is_trained_once(kind: str, tmp_path: Path) -> None:
    """Which weights sampled a group depends on when it was sampled: the set of what is trained does not."""
    root = tmp_path / "whole"
    root.mkdir()
    assert played(root, kind, family="ahead") == 0
    calls = json.loads((root / "result.json").read_text())["calls"]

    def fixed(root: Path) -> list[str]:
        """How many points there are to draw is the policy's doing."""
        return sorted(rollout for step in trained(root, kind) for rollout in step if "point:" not in rollout)

    expected, draw = fixed(root), random.Random(f"kills ahead in {kind}")
    for number in range(max(1, KILLS // 10)):
        root = tmp_path / str(number)
        root.mkdir()
        for _ in range(4):
            assert played(root, kind, draw.randint(1, calls // 4), "ahead") == -signal.SIGKILL
        assert played(root, kind, family="ahead") == 0
        found = [rollout for step in trained(root, kind) for rollout in step]
        assert len(found) == len(set(found))
        assert fixed(root) == expected
        assert [p.name for p in (root / "snapshots").iterdir()] == []


@pytest.mark.parametrize("kind", ["grpo", "oversampled"])
def test_ahead_of_the_learner_a_step_is_of_the_prompts_that_were_drawn_for_it(kind: str, tmp_path: Path) -> None:
    """Whoever finishes first, and however often it is killed: the order is that in which groups are begun."""
    found, calls = [], 0
    for share in (0.0, 0.7, 0.35):
        root = tmp_path / str(share)
        root.mkdir()
        if share:
            assert played(root, kind, int(share * calls), "ahead") == -signal.SIGKILL
        assert played(root, kind, family="ahead") == 0
        calls = calls or json.loads((root / "result.json").read_text())["calls"]
        found.append(trained(root, kind))
    assert len(found[0]) == 5
    assert found[1:] == found[:1] * 2


def test_groups_that_were_replaced_are_consumed_once(tmp_path: Path) -> None:
    """Which are replaced is the policy's doing; all that a run looks at is the beginning of its stream of prompts."""
    calls, draw = 0, random.Random("kills of what is replaced")
    for life in range(3):
        root = tmp_path / str(life)
        root.mkdir()
        for _ in range(4 * bool(calls)):
            assert played(root, "replaced", draw.randint(1, calls // 4), "replaced") == -signal.SIGKILL
        assert played(root, "replaced", family="replaced") == 0
        calls = json.loads((root / "result.json").read_text())["calls"]
        steps = [line["value"] for line in lines(root / "replaced" / checkpoints.LINES)]
        refused = [int(slot.rpartition("/")[2]) for step in steps for slot in step["refused"]]
        assert len(refused) == len(set(refused)) > 0
        stream = asyncio.run(drawn(root / "stream", len(refused) + 15 - missing(root)))
        assert max(refused) < len(stream)
        kept = [rollout for number, group in enumerate(stream) if number not in refused for rollout in group]
        assert [rollout for step in steps for rollout in step["rollouts"]] == kept
        refusals = json.loads((root / "result.json").read_text())["summary"]["groups_without_contrast"]
        assert refusals == len(refused)


def missing(root: Path) -> int:
    return int(json.loads((root / "result.json").read_text())["summary"]["groups_missing"])


async def drawn(root: Path, groups: int) -> list[list[str]]:
    """The episodes of the first groups of the stage, in the order of the stream."""
    root.mkdir()
    draw = GroupDraw(Bench(root).ctx("replaced"), 3, 3, 1.0)
    return [[spec.id for spec in await draw(number)] for number in range(groups)]


def killed_late(root: Path, kind: str, calls: int) -> list[Path]:
    """Its checkpoints, oldest first: two."""
    at = calls * 3 // 4
    assert played(root, kind, at) == -signal.SIGKILL
    found = sorted((root / kind / checkpoints.FOLDER).glob("step-[0-9]"))
    assert len(found) == checkpoints.KEPT
    return found


@pytest.mark.parametrize("kind", ["sft", "rpr", "reterm"])
def test_a_damaged_checkpoint_costs_a_step_more(kind: str, tmp_path: Path) -> None:
    given(tmp_path, kind)
    root = tmp_path / "whole"
    root.mkdir()
    assert played(root, kind) == 0
    calls, expected = json.loads((root / "result.json").read_text())["calls"], told(root, kind)
    for name in (checkpoints.STATE, "policy/skill.json"):
        root = tmp_path / name.replace("/", "-")
        root.mkdir()
        last = killed_late(root, kind, calls)[-1]
        (last / name).write_text((last / name).read_text()[:10])
        assert played(root, kind) == 0
        assert told(root, kind) == expected
    assert [figures.get("points_lost") for figures in lines(root / "log.jsonl") if "points_lost" in figures] in ([], [0.0])


def test_with_no_checkpoint_that_can_be_read_it_says_so(tmp_path: Path) -> None:
    root = tmp_path / "whole"
    root.mkdir()
    assert played(root, "grpo") == 0
    for folder in (root / "grpo" / checkpoints.FOLDER).iterdir():
        (folder / "policy" / "skill.json").unlink()
    with pytest.raises(StageError, match="no checkpoint can be read"):
        asyncio.run(Life(root, "grpo").play(STAGES))


def test_points_whose_snapshots_are_gone_are_dropped_and_counted(tmp_path: Path) -> None:
    root = tmp_path / "whole"
    root.mkdir()
    assert played(root, "reterm") == 0
    calls, expected = json.loads((root / "result.json").read_text())["calls"], trained(root, "reterm")
    root = tmp_path / "again"
    root.mkdir()
    state = json.loads((killed_late(root, "reterm", calls)[-1] / checkpoints.STATE).read_text())
    shutil.rmtree(root / "snapshots")  # as after a restart of the machine
    assert played(root, "reterm") == 0
    (lost,) = (figures["points_lost"] for figures in lines(root / "log.jsonl") if "points_lost" in figures)
    assert lost == len(state["own"]["loop"]["queue"]) > 0
    originals = [[rollout for rollout in step if "point:" not in rollout] for step in trained(root, "reterm")]
    assert originals == [[rollout for rollout in step if "point:" not in rollout] for step in expected]
    assert [p.name for p in (root / "snapshots").iterdir()] == []


# --- the real models -----------------------------------------------------------------------------------------------


class Stopped(RuntimeError):
    """In place of a kill: what a host's process had in memory is gone with its object."""


class Follows(FakeGenerator):
    """Chooses by the weights that it serves, whatever they are."""

    async def pull(self, weights: WeightsVersion) -> None:
        assert isinstance(weights.handle, dict)
        self._served = (weights.version, FakeSkill(**weights.handle))


class OfPort:
    """A real model behind the port: its vocabulary is smaller than the fake tokenizer's."""

    def __init__(self, model: Any, stop_at: int) -> None:
        self._model, self._stop_at, self._version, self.updates = model, stop_at, 0, 0

    async def update(self, samples: Sequence[Sample], *rest: Any) -> UpdateMetrics:
        self.updates += 1
        found = self._model.update(_small(samples), *rest)
        if self.updates == self._stop_at:
            raise Stopped
        return found

    async def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._model.logp(_small(samples))

    async def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._model.values(_small(samples))

    async def refit(self, scale: float, shift: float) -> None:
        self._model.refit(scale, shift)

    async def publish(self) -> WeightsVersion:
        self._version += 1
        checksum = self._model.checksum()
        lean = int(checksum[:8], 16) / 2**32  # any function of the weights will do
        return WeightsVersion("policy", self._version, checksum, {"solve": lean - 0.5, "half": 0.5 - lean})

    async def save(self, directory: str) -> str:
        return self._model.save(directory)

    async def load(self, directory: str) -> str:
        return self._model.load(directory)

    async def save_training(self, directory: str) -> str:
        return self._model.save_training(directory)

    async def load_training(self, directory: str, version: int) -> str:
        self._version = version
        return self._model.load_training(directory)

    async def checksum(self) -> str:
        return self._model.checksum()


def _small(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(sample, ids=tuple(i % 256 for i in sample.ids)) for sample in samples]


async def real_life(root: Path, tiny: Path, stop_at: int, rank: int) -> None:
    """RPR with minibatches: old log-probabilities, two optimizers with moments, a critic, rollouts."""
    from termrsi.model.critic import CriticModel
    from termrsi.model.lora import Lora
    from termrsi.model.policy import PolicyModel

    bench = Bench(root)
    made: Any = bench.made
    made.generator = Follows()
    made.policy = OfPort(PolicyModel(tiny, compute="fp32", micro_tokens=8192, adapters=Lora(rank) if rank else None), stop_at)
    made.critic = OfPort(CriticModel(tiny, compute="fp32", micro_tokens=8192, layers=1), 0)
    bench.runner = type(bench.runner)(made)
    await bench.sync()
    ctx = bench.ctx("rpr")
    ctx.log = Life(root, "rpr").log
    ctx.finished = FinishedRollouts(ctx.out / "rollouts.jsonl")
    optim = PolicyOptimConfig(lr=1e-3, minibatches=2, tis_cap=0.0)
    await rpr.run(ctx, rpr_config(steps=4, critic_only_updates=1, optim=optim, critic_lr=1e-3))


@pytest.mark.parametrize("rank", [0, 4])
def test_real_models_go_on_bit_for_bit(tmp_path: Path, rank: int) -> None:
    """The weights themselves, or adapters of that rank."""
    from safetensors.torch import load_file

    from termrsi.model.checkpoint import tiny_model

    tiny = tiny_model(tmp_path / "tiny")
    roots = [tmp_path / "whole", tmp_path / "stopped"]
    for root in roots:
        root.mkdir()
    asyncio.run(real_life(roots[0], tiny, 0, rank))
    for stop_at in (2, 3, 4):  # in step 1, in the second step of the next life, in the second of the last
        with pytest.raises(Stopped):
            asyncio.run(real_life(roots[1], tiny, stop_at, rank))
    asyncio.run(real_life(roots[1], tiny, 0, rank))
    whole, stopped = (curve(root) for root in roots)
    assert list(whole) == [1, 2, 3, 4]
    assert len({figures["loss"] for figures in whole.values()}) == 4
    assert stopped == whole
    for host in ("policy", "critic"):
        states = [load_file(r / "rpr" / checkpoints.FOLDER / "step-4" / host / "training-00000.safetensors") for r in roots]
        assert states[0].keys() == states[1].keys()
        assert any(name.startswith("optimizer.") for name in states[0])
        assert all(bool((states[0][name] == states[1][name]).all()) for name in states[0])
    assert (roots[0] / "rpr" / "retention.json").read_text() == (roots[1] / "rpr" / "retention.json").read_text()


# --- the pipeline --------------------------------------------------------------------------------------------------


def dry(run_dir: Path, *overrides: str) -> None:
    from termrsi.config.load import load
    from termrsi.pipeline import Pipeline

    asked = ["experiment=reterm", "scale=dry", "stages.reterm.steps=4", f"run_dir={run_dir}", *overrides]
    asyncio.run(Pipeline(load(asked), asked).run())


def test_a_run_goes_on_within_a_stage_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, calls = FakePolicy.update, [0]

    async def stops(self: FakePolicy, samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        calls[0] += 1
        if calls[0] == 3:
            raise Stopped
        return await update(self, samples, loss, lr)

    dry(tmp_path / "whole")
    monkeypatch.setattr(FakePolicy, "update", stops)
    run_dir, stage = tmp_path / "run", tmp_path / "run" / "stages" / "reterm"
    with pytest.raises(Stopped):
        dry(run_dir)
    assert [p.name for p in sorted((stage / "checkpoints").iterdir())] == ["step-1", "step-2"]
    begun = trained(run_dir / "stages", "reterm")
    dry(run_dir, "stages.reterm.checkpoint_every=2")  # how often is no part of what was asked
    assert trained(run_dir / "stages", "reterm")[:2] == begun
    whole = trained(tmp_path / "whole" / "stages", "reterm")
    assert [[r for r in step if "point:" not in r] for step in trained(run_dir / "stages", "reterm")] == [
        [r for r in step if "point:" not in r] for step in whole
    ]
    assert not (stage / "checkpoints").exists()
    assert (stage / "policy").is_dir()
    assert list((run_dir / "stages").glob("*.stopped-*")) == []
    for other in ("stages.reterm.group_size=3", "stages.reterm.checkpoint_every=0"):
        calls[0] = 0
        again = tmp_path / other.replace("=", "-")
        with pytest.raises(Stopped):
            dry(again)
        dry(again, other)
        assert [p.name for p in (again / "stages").glob("*.stopped-*")] == ["reterm.stopped-1"]
