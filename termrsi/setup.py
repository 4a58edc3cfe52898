"""What a run stands on: pre-flight checks, tasks and their measured checks, and the ports, real or fake."""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from termrsi.claim import check_place
from termrsi.config import window
from termrsi.config.schema import Config
from termrsi.config.stages import USES, AuditConfig, CollectRecoveryConfig, EvaluateConfig, SynthesiseConfig
from termrsi.errors import ConfigError, SandboxError, TaskError, VerifierError
from termrsi.harness import variants
from termrsi.harness.render import ChatFormat
from termrsi.places import cache_dir
from termrsi.ports import (
    Auditor,
    Critic,
    Generator,
    GroupStore,
    Meter,
    Policy,
    RecoveryStore,
    Rollouts,
    SandboxPool,
    Scan,
    Verifier,
    Writer,
)
from termrsi.records import TaskSpec
from termrsi.report.meters import silent
from termrsi.reward.checks import TaskChecks, content_key, measure
from termrsi.reward.oracle import solution
from termrsi.sizing import layout
from termrsi.stages.base import Splits
from termrsi.stages.roles import PolicyWriter

Say = Callable[[str], None]

FOR_GPUS = ("node", "full")
NOTES = 20  # told at the start of a run


def _check_workflow(name: str, stage: CollectRecoveryConfig) -> None:
    """Raises ConfigError for a workflow that no prompt would hold."""
    if stage.workflow is not CollectRecoveryConfig().workflow and variants.get(stage.teacher_harness).assisting:
        raise ConfigError(
            f"workflow={stage.workflow.value} has no effect: {stage.teacher_harness!r} has a prompt of its own",
            f"stages.{name}.workflow",
            "take it away, or give a teacher_harness that does not assist",
        )


def check_gpus(config: Config, say: Say) -> None:
    """Raises ConfigError, with what to choose, if the roles ask for more GPUs than are here. A large scale without any is told."""
    asked = layout.gpus(config)
    if asked:
        import torch  # the build that would use them

        there = torch.cuda.device_count()
        if asked > there:
            raise ConfigError(
                f"{layout.asked(config)}, and this machine has {there}",
                "cluster",
                "valid: cluster=local scale=laptop here, or cluster.address=HOST:PORT of a Ray cluster that has them",
            )
    elif config.scale in FOR_GPUS:
        say(f"note: scale={config.scale} is meant for GPUs and `cluster` asks for none: cluster=node does, scale=laptop needs none")


async def preflight(config: Config, run_dir: Path, say: Say) -> None:
    """Raises ConfigError, with the cure, for what would stop the run later: unknown harness, no key, no room, no namespaces.

    Writes nothing but the cache's directory.
    """
    for name, stage in config.stages.items():
        named = [
            getattr(stage, "harness", None),
            getattr(stage, "teacher_harness", None),
            getattr(stage, "execute_harness", None),
            *getattr(stage, "harnesses", []),
        ]
        for harness in filter(None, named):
            variant = variants.get(harness)
            key = next((k for k in ("execute_harness", "teacher_harness") if getattr(stage, k, None) == harness), "")
            if key and variant.checks_on_done:
                raise ConfigError(
                    f"{harness!r} lets the verifier speak, and its words would be trained on",
                    f"stages.{name}.{key}",
                    "valid: one without checks",
                )
        if isinstance(stage, CollectRecoveryConfig):
            _check_workflow(name, stage)
    if any(c.key_env for c in config.roles.values()):
        from termrsi.interop.chat_endpoint import key_of

        for role, c in config.roles.items():
            if c.key_env:
                key_of(c.key_env, f"roles.{role}.key_env")
    if not config.dry:
        window.check(config.model)
        layout.check(config)
    needed = 0 if config.dry else int(config.min_free_gib * 2**30)
    for place, cure in ((run_dir, "give run_dir=DIR"), (cache_dir(), "set TERMRSI_CACHE")):
        free = shutil.disk_usage(check_place(place, f"{cure}, where this user may write")).free
        if free < needed:
            raise ConfigError(
                f"disk full: {free / 2**30:.1f} GiB free, {needed / 2**30:.1f} needed", str(place), f"free some, or {cure}"
            )
    cache_dir().mkdir(parents=True, exist_ok=True)
    if not config.dry and config.cluster.address == "local":
        check_gpus(config, say)
    if config.dry or config.cluster.address != "local":
        return  # elsewhere the sandbox actor looks at its own node
    from termrsi.sandbox.check import probe

    if missing := await probe(backend=config.sandbox.backend):
        raise ConfigError("; ".join(missing), f"sandbox.backend={config.sandbox.backend}", "termrsi doctor says more")


class Parts(Protocol):
    """The ports of a run and their life."""

    @property
    def model(self) -> str: ...

    @property
    def tasks(self) -> Splits: ...

    @property
    def checks(self) -> dict[str, TaskChecks]: ...

    @property
    def chat(self) -> ChatFormat: ...

    @property
    def meter(self) -> Meter: ...

    @property
    def generator(self) -> Generator: ...

    @property
    def rollouts(self) -> Rollouts: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def queue(self) -> RecoveryStore: ...

    @property
    def groups(self) -> GroupStore: ...

    @property
    def scan(self) -> Scan: ...

    def writer(self, role: str) -> Writer:
        """The model that plays a role: one that is configured for it, or the policy."""
        ...

    @property
    def pool(self) -> SandboxPool: ...

    @property
    def verifier(self) -> Verifier: ...

    async def expect(self, checks: Mapping[str, TaskChecks]) -> None:
        """What a full reward of these tasks must come with, see `reward.verifiers.TaskVerifier`."""
        ...

    async def start(self, on_connected: Callable[[], None]) -> None: ...

    async def open_critic(self) -> Critic: ...

    async def close_critic(self) -> None: ...

    async def open_reference(self) -> Policy: ...

    async def close_reference(self) -> None: ...

    async def busy(self) -> dict[str, float]:
        """Seconds since the start in which each of generator, sandboxes and verifier had work; empty where nobody counts."""
        ...

    def auditor(self, stage: AuditConfig, folder: Path) -> Auditor: ...

    async def close(self, kept: frozenset[str] = frozenset()) -> None:
        """Ends everything. `kept`: ids of snapshots that stay, because another life of the run goes on from them."""
        ...


def parts(config: Config, say: Say, kept: frozenset[str] = frozenset()) -> Parts:
    """Fakes for `dry`, else Ray actors. Heavy imports happen here, after everything cheap was checked.

    `kept`: ids of snapshots that an earlier life of the run left, and that it goes on from.
    """
    return DryParts(config) if config.dry else RealParts(config, say, kept)


class DryParts:
    """Shipped fakes behind every port: the real stages, the real harness, in seconds."""

    def __init__(self, config: Config) -> None:
        from termrsi import fakes
        from termrsi.interop.chat_endpoint import open_writers

        self.meter: Meter = silent
        self._writers = open_writers(config.roles)
        made = fakes.dry_parts(config.seed, self._writers)
        self.model = made.model
        self.tasks = Splits(list(made.tasks.train), list(made.tasks.validation), list(made.tasks.heldout))
        self.checks, self.chat, self.scan = made.checks, made.chat, made.scan
        self.generator, self.rollouts, self.policy, self.queue = made.generator, made.rollouts, made.policy, made.queue
        self.groups, self.pool, self.verifier = made.groups, made.pool, made.verifier
        self._critic = made.critic

    def writer(self, role: str) -> Writer:
        return self._writers.get(role) or PolicyWriter(self.generator, self.chat)

    async def start(self, on_connected: Callable[[], None]) -> None:
        on_connected()

    async def expect(self, checks: Mapping[str, TaskChecks]) -> None: ...

    async def open_critic(self) -> Critic:
        return self._critic

    async def close_critic(self) -> None: ...

    async def open_reference(self) -> Policy:
        from termrsi.fakes import FakePolicy

        return FakePolicy()

    async def close_reference(self) -> None: ...

    async def busy(self) -> dict[str, float]:
        return {}

    def auditor(self, stage: AuditConfig, folder: Path) -> Auditor:
        from termrsi.fakes import FakeAuditor

        return FakeAuditor(rejected=frozenset({self.tasks.train[-1].id}))

    async def close(self, kept: frozenset[str] = frozenset()) -> None:
        for writer in self._writers.values():
            await writer.close()


@dataclass
class RealParts:
    """Ray, vLLM, torch, sandboxes, tasks."""

    config: Config
    say: Say
    kept: frozenset[str] = frozenset()  # snapshots of dead processes that are not removed
    model: str = ""
    tasks: Splits = field(default_factory=lambda: Splits([], [], []))
    checks: dict[str, TaskChecks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from termrsi.actors.cluster import Cluster
        from termrsi.actors.metrics import RayMeter
        from termrsi.interop.chat_endpoint import key_of, open_writers
        from termrsi.model import checkpoint
        from termrsi.reward import leakage
        from termrsi.sandbox import layers

        config, cache = self.config, cache_dir()
        self.tasks = load_tasks(config, cache, self.say)
        self.model = str(checkpoint.embedded_model(cache / "models")) if config.model.path == "embedded" else config.model.path
        self.scan = leakage.scan
        state = layers.state_dir(None)
        reap(config, "a crashed run", self.say, self.kept, before=True)
        keys = {c.key_env: key_of(c.key_env) for c in config.roles.values() if c.key_env}
        self.meter: Meter = RayMeter(config.run_name)
        tasks = (*self.tasks.train, *self.tasks.validation, *self.tasks.heldout)
        steps = max((len(task.steps) for task in tasks), default=1)
        self._cluster = Cluster(config, self.model, cache, state, partial(open_writers, config.roles), keys, self.kept, steps)

    def writer(self, role: str) -> Writer:
        return self._cluster.writers.get(role) or PolicyWriter(self.generator, self.chat)

    async def start(self, on_connected: Callable[[], None]) -> None:
        from transformers import AutoTokenizer

        self.say("starting Ray, the engine and the learner")
        self._cluster.connect()
        on_connected()
        await self._cluster.start()
        self.chat = ChatFormat(AutoTokenizer.from_pretrained(self.model))
        self.generator, self.rollouts = self._cluster.generator, self._cluster.rollouts
        self.policy, self.queue, self.groups = self._cluster.policy, self._cluster.queue, self._cluster.groups
        self.pool = self.verifier = self._cluster.pool
        self.checks = await measure_all(self.tasks, self.pool, self.verifier, self.config, self.say)
        await self.expect(self.checks)

    async def expect(self, checks: Mapping[str, TaskChecks]) -> None:
        await self._cluster.pool.expect({task: one.solved for task, one in checks.items()})

    async def open_critic(self) -> Critic:
        return await self._cluster.open_critic()

    async def close_critic(self) -> None:
        await self._cluster.close_critic()

    async def open_reference(self) -> Policy:
        return await self._cluster.open_reference()

    async def close_reference(self) -> None:
        await self._cluster.close_reference()

    async def busy(self) -> dict[str, float]:
        return await self._cluster.busy()

    def auditor(self, stage: AuditConfig, folder: Path) -> Auditor:
        """In the run's own sandboxes; what it finds is kept in `folder`."""
        from termrsi.reward.audit import Auditor as TaskAuditor
        from termrsi.reward.inspection import Bench

        c, pool = self.config, self._cluster.pool
        room = stage.room(c.model.max_model_len)
        return TaskAuditor(
            bench=Bench(pool, pool),
            log=folder / "audit.jsonl",
            mutants=stage.mutants,
            jobs=c.sandbox.concurrency,
            salt=(c.sandbox.backend, c.sandbox.network, c.sandbox.build_network, c.tasks.kit),
            judge=self.writer("judge") if stage.judge else None,
            judge_name=(c.roles["judge"].model if "judge" in c.roles else stage.policy) if stage.judge else "",
            judge_tokens=stage.answer_tokens(c.model.max_model_len),
            judge_fits=lambda messages: len(self.chat.prompt(messages)) <= room,
        )

    async def close(self, kept: frozenset[str] = frozenset()) -> None:
        await self._cluster.close()
        whose = "a process that died on the way"
        await asyncio.to_thread(reap, self.config, whose, self.say, kept)


def reap(config: Config, whose: str, say: Say, kept: frozenset[str], *, before: bool = False) -> None:
    """Removes what dead processes of this run left on this host, but the snapshots `kept`; `before` it starts those of others too,
    but for their snapshots. Fakes leave nothing."""
    if config.dry:
        return
    from termrsi.actors import buckets
    from termrsi.sandbox import layers
    from termrsi.sandbox import reap as sandboxes

    docker = config.sandbox.backend == "docker"
    named = {"docker": docker, "cache_dir": cache_dir(), "keep": kept}
    state = layers.state_dir(None)
    found = sandboxes.before(config.owner, state, **named) if before else sandboxes.everything(state, owner=config.owner, **named)
    for name in [*found, *buckets.reap()]:
        say(f"removed what {whose} left: {name}")


def load_tasks(config: Config, cache: Path, say: Say) -> Splits:
    """Raises ConfigError if a split that the pipeline needs is empty. What was refused is said, with the reason."""
    from termrsi.tasks.split import split

    c = config.tasks
    if c.path == "bundled":
        from termrsi.tasks import bundled

        folders = [
            bundled.ensure(cache / "tasks", split=name, seeds=range(n), levels=c.levels, families=c.families or None)
            for name, n in (("train", c.train), ("validation", c.validation), ("heldout", c.heldout))
        ]
    else:
        folders = [Path(c.path)]
    found = _loaded(folders, config, say)
    if not found:
        raise ConfigError("no task could be loaded", c.path, "termrsi tasks list PATH says why")
    parted = split(found, seed=config.seed)
    caps = (0, 0, 0) if c.path == "bundled" else (c.train, c.validation, c.heldout)
    lists = [list(part)[: cap or None] for part, cap in zip((parted.train, parted.validation, parted.heldout), caps, strict=True)]
    splits = Splits(*lists)
    require(splits, config, "give more tasks, or say `split` in their task.toml")
    return splits


def _loaded(folders: Iterable[Path], config: Config, say: Say) -> list[TaskSpec]:
    """The tasks of some trees that can be verified. What was refused is said, with the reason."""
    from termrsi import tasks
    from termrsi.reward import steps
    from termrsi.reward.verifiers import TaskVerifier

    verifier = TaskVerifier(kit=config.tasks.kit or None)
    found: list[TaskSpec] = []
    for folder in folders:
        result = tasks.load_dir(folder, strict=config.tasks.strict)
        for task in result.tasks:
            try:
                for part in steps.parts(task):
                    verifier.suite(part)
            except (TaskError, VerifierError) as error:
                say(f"refused {task.path}: {error}")
            else:
                found.append(task)
        for refused in result.skipped:
            say(f"refused {refused.path}: {refused.reason}")
        for note in result.notes[:NOTES]:
            say(f"note: {note}")
        if len(result.notes) > NOTES:
            say(f"{len(result.notes) - NOTES} more notes: termrsi tasks list {folder}")
    return found


async def tasks_of(source: Path, parts: Parts, config: Config, say: Say) -> tuple[Splits, dict[str, TaskChecks]]:
    """The splits of a stage that takes its train tasks from an earlier one, and the checks of all of them.

    `source`: a directory of tasks, all of them to train on, or an audit's list of those that stay; the other splits stay. Raises
    ConfigError if none can be used.
    """
    if source.is_file():
        entries = {entry["task"]: Path(entry["path"]) for entry in json.loads(source.read_text())}
        own = [task for task in parts.tasks.train if task.id in entries]
        if len(own) == len(entries):
            return Splits(own, parts.tasks.validation, parts.tasks.heldout), parts.checks
        folders = list(entries.values())
    else:
        folders = [source]
    made = [replace(task, split="train") for task in _loaded(folders, config, say)]
    splits = Splits(made, list(parts.tasks.validation), list(parts.tasks.heldout))
    checks = parts.checks | await measure_all(splits, parts.pool, parts.verifier, config, say)
    if not splits.train:
        raise ConfigError("no task of it can be used", str(source), "see the lines above")
    await parts.expect(checks)
    return splits, checks


async def measure_all(splits: Splits, pool: SandboxPool, verifier: Verifier, config: Config, say: Say) -> dict[str, TaskChecks]:
    """Checks of every task that has a solution, measured once and cached by content; unfit tasks leave their split, with a word."""
    every = [*splits.train, *splits.validation, *splits.heldout]
    slots = asyncio.Semaphore(config.sandbox.concurrency)
    folder = cache_dir() / "checks"
    folder.mkdir(parents=True, exist_ok=True)

    async def one(task: TaskSpec) -> TaskChecks | None:
        if solution(task) is None:
            return None
        cached = folder / f"{checks_key(task, 'dry' if config.dry else config.sandbox.backend, config.tasks.kit)}.json"
        if cached.is_file():
            with contextlib.suppress(KeyError):  # of an older version: measured again
                return TaskChecks.from_dict(json.loads(cached.read_text()))
        async with slots:
            checks = await _measured(pool, verifier, task, config.cluster.episode_retries)
        draft = cached.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(checks.to_dict()))
        draft.rename(cached)
        return checks

    results = await asyncio.gather(*[one(t) for t in every], return_exceptions=True)
    unfit = set()
    found: dict[str, TaskChecks] = {}
    for task, result in zip(every, results, strict=True):
        if isinstance(result, (TaskError, SandboxError, VerifierError)):
            unfit.add(task.id)
            say(f"left out {task.id}: {result.what}")
        elif isinstance(result, BaseException):
            raise result
        elif result is not None:
            found[task.id] = result
    for part in (splits.train, splits.validation, splits.heldout):
        part[:] = [replace(t, touches=found[t.id].touches) if t.id in found else t for t in part if t.id not in unfit]
    require(splits, config, "every one of them is unfit: see the lines above")
    say(f"tasks: {len(splits.train)} train, {len(splits.validation)} validation, {len(splits.heldout)} held-out")
    return found


async def _measured(pool: SandboxPool, verifier: Verifier, task: TaskSpec, retries: int) -> TaskChecks:
    """What the machine lost is measured again, in fresh sandboxes."""
    for _ in range(retries):
        try:
            return await measure(pool, verifier, task)
        except (SandboxError, VerifierError):
            continue
    return await measure(pool, verifier, task)


def require(splits: Splits, config: Config, cure: str) -> None:
    """Raises ConfigError if a split is empty that a stage of the pipeline needs."""
    for name in config.pipeline:
        stage = config.stages[name]
        made = isinstance(config.stages.get(getattr(stage, "tasks_from", "")), SynthesiseConfig)  # train tasks of its own
        for split in [stage.split] if isinstance(stage, EvaluateConfig) else USES[stage.kind]:
            if not splits.of(split) and not (made and split == "train"):
                raise ConfigError(f"stage {name!r} needs {split} tasks and there are none", config.tasks.path, cure)


def checks_key(task: TaskSpec, backend: str, kit: str) -> str:
    """Of every file of the task directory, and of what its checks may depend on beside: the backend, and the kit they come from."""
    return content_key(task.path, "checks-4", backend, str(kit and Path(kit).absolute()))
