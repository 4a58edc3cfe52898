"""The driver's core: stages in order, each a directory with a manifest written last; a ledger; a clean end whatever happens.

A run directory belongs to one process at a time. A stage without a manifest is begun again, or goes on: item by item if it makes or
judges data, from its last checkpoint if it trains; a finished one is never run twice.
The critic's weights go from stage to stage as an object of the Ray store that the driver owns; after a restart they come from disk.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from termrsi import durable, setup
from termrsi.claim import Claim
from termrsi.config import load as configuration
from termrsi.config import settings
from termrsi.config.schema import Config
from termrsi.config.stages import PLAYS, READS, AuditConfig, PolicyOptimConfig, RprConfig, SftConfig, StageConfig
from termrsi.errors import ConfigError, StageError
from termrsi.interop.trials import RecordedRollouts
from termrsi.ports import Critic, Policy
from termrsi.records import WeightsVersion
from termrsi.report import ledger, logs
from termrsi.report.screen import Screen
from termrsi.report.sinks import Sinks
from termrsi.reward.checks import TaskChecks
from termrsi.reward.shaping import pool_digest
from termrsi.setup import Parts
from termrsi.stages import (
    analyse,
    audit,
    checkpoints,
    collect_recovery,
    evaluate,
    grpo,
    reterm,
    rpr,
    rsr,
    sft,
    synthesise,
    warmup_critic,
)
from termrsi.stages.base import ROLLOUTS, Context, Splits, StageResult
from termrsi.stages.finished import FinishedRollouts

STAGES: dict[str, Callable[..., Any]] = {  # Any: each takes its own configuration and returns a coroutine of StageResult
    "audit": audit.run,
    "evaluate": evaluate.run,
    "rsr": rsr.run,
    "sft": sft.run,
    "warmup_critic": warmup_critic.run,
    "rpr": rpr.run,
    "collect_recovery": collect_recovery.run,
    "reterm": reterm.run,
    "grpo": grpo.run,
    "analyse": analyse.run,
    "synthesise": synthesise.run,
}
WITH_CRITIC = frozenset({"warmup_critic", "rpr"})
RESUMES = frozenset({"rsr", "collect_recovery", "analyse", "synthesise", "audit"})  # go on within, item by item
INPUTS = ("data", "baseline", "of", "against")  # of READS, what a stage reads as files
TRAINS = frozenset({"sft", "rpr", "reterm", "grpo"})  # leave other weights in the policy host than they found
_LOG = logging.getLogger(__name__)


class Pipeline:
    """One run. `on_connected` is called when Ray stands, which takes over the signal handlers."""

    def __init__(self, config: Config, overrides: list[str]) -> None:
        self._config = config
        self._overrides = overrides
        name = f"{config.experiment or 'run'}-{config.scale}-{config.seed}"
        self.run_dir = Path(config.run_dir or Path("runs") / name).absolute()
        self.on_connected: Callable[[], None] = lambda: None
        self.closing = False
        self._screen = Screen(quiet=config.logger.lines == "json")
        self._critics: dict[str, WeightsVersion] = {}
        self._loaded = ""  # the directory whose weights policy and generator both hold
        self._served = WeightsVersion("policy", 0, "")  # what the pipeline itself had the generator pull last

    async def run(self) -> None:
        """Raises what stopped it, after everything it started has ended."""
        with logs.ids(run=self._config.run_name):
            try:
                await self._run()
            except OSError as error:
                if full := _full_disk(error, self.run_dir):
                    raise full from error
                raise

    async def _run(self) -> None:
        config = self._config
        await setup.preflight(config, self.run_dir, self._screen.say)
        with Claim(self.run_dir) as claim:
            names = [n for n in config.pipeline if not config.only or n == config.only]
            self._adopt(names)
            todo = [n for n in names if not self._finished(n)]
            for name in set(names) - set(todo):  # it was killed before it could
                checkpoints.forget(self._dir(name))
            self._check_inputs(todo)
            if not todo:
                # It may have been killed while it ended.
                setup.reap(config, "a crashed run", self._screen.say, frozenset())
                self._screen.say(f"every stage is finished in {self.run_dir}")
                self._show()
                return
            if len(todo) < len(names):
                self._screen.say(f"going on in {self.run_dir}; finished before: {', '.join(n for n in names if n not in todo)}")
            parts = setup.parts(config, self._screen.say, self._kept(todo))
            claim.keep()
            configuration.record(config, self._overrides, self.run_dir)
            sinks = Sinks(config, self.run_dir, parts.meter)
            try:
                await parts.start(self.on_connected)
                self._keep_pool(parts)
                for name in todo:
                    with logs.ids(stage=name):
                        await self._stage(name, config.stages[name], parts, sinks)
            finally:
                self.closing = True  # from here on a signal changes nothing: what was started is being ended
                try:
                    await parts.close(self._kept(name for name in todo if not self._finished(name)))
                finally:
                    sinks.close()
            self._show()

    def _kept(self, names: Iterable[str]) -> frozenset[str]:
        """Ids of the snapshots that these stages may go on from."""
        return frozenset(snapshot for name in names for snapshot in checkpoints.snapshots(self._dir(name)))

    def _show(self) -> None:
        self._screen.ledger(ledger.read(self.run_dir))
        self._screen.say(f"ledger: {self.run_dir / 'ledger.md'}")

    def _keep_pool(self, parts: Parts) -> None:
        """Rewards are calibrated on the task pool: a run that goes on must find the one it began with. Raises ConfigError."""
        pool = {split: sorted(task.id for task in parts.tasks.of(split)) for split in ("train", "validation", "heldout")}
        found = {"checks": pool_digest(parts.checks.values()), **pool}
        path = self.run_dir / "pool.json"
        if not path.is_file():
            durable.write_text(path, json.dumps(found, indent=1) + "\n")
        elif (before := json.loads(path.read_text())) != found:
            changed = [key for key in found if before.get(key) != found[key]]
            raise ConfigError(
                f"the task pool is not the one this run began with (differs in: {', '.join(changed)})",
                str(path),
                "restore the tasks, or take another run_dir",
            )

    def _adopt(self, names: list[str]) -> None:
        """Takes what another run has finished on the same settings: the manifests; the files that these name stay there.

        From the first stage on, up to one that is not there: what stands behind it would be of another line. Raises ConfigError if
        the two runs have other task pools.
        """
        if not self._config.reuse:
            return
        other, taken = Path(self._config.reuse).absolute(), []
        pool, theirs = self.run_dir / "pool.json", other / "pool.json"
        if pool.is_file() and theirs.is_file() and pool.read_bytes() != theirs.read_bytes():
            raise ConfigError(f"{other} began with another task pool", "reuse", "a run on the same tasks")
        for name in names:
            source, place = other / "stages" / name / "manifest.json", self._dir(name)
            if not source.is_file() or json.loads(source.read_text())["fingerprint"] != self._fingerprint(name):
                break
            if place.exists():
                if (place / "manifest.json").is_file() and (place / "manifest.json").read_bytes() == source.read_bytes():
                    continue  # taken before
                break
            draft = place.with_name(f"{name}.taking")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            shutil.copy(source, draft)
            draft.rename(place)
            taken.append(name)
        if taken:
            if not pool.exists() and theirs.is_file():
                shutil.copy(theirs, pool)  # what they were calibrated on
            configuration.record(self._config, self._overrides, self.run_dir)
            ledger.write(self.run_dir, ledger.read(self.run_dir))
            if (before := _revision(other)) != (now := _revision(self.run_dir)):
                self._screen.say(f"note: {other} was run at revision {before}, this is {now}")
        self._screen.say(f"taken from {other}: {', '.join(taken) or 'nothing more'}")

    # Which stages are finished, and on what they stand

    def _dir(self, name: str) -> Path:
        return self.run_dir / "stages" / name

    def _manifest(self, name: str) -> dict[str, Any] | None:  # Any: parsed JSON
        path = self._dir(name) / "manifest.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def _finished(self, name: str) -> bool:
        manifest = self._manifest(name)
        if manifest is None:
            return False
        if manifest["fingerprint"] != self._fingerprint(name):
            changed = settings.differences(manifest.get("settings", {}), self._settings(name))
            raise ConfigError(
                f"stage {name!r} in {self.run_dir} was run with another configuration" + (f": {changed}" if changed else ""),
                "run_dir",
                "take another run_dir, or the old settings",
            )
        return True

    def _fingerprint(self, name: str) -> str:
        """Of what a stage is asked to do, the stages that it reads included: its settings, tasks, sampling, limits, model, seed.

        Not of how the machine does it (checkpoints, `sandbox`, `cluster`, the model's arithmetic and engine, where the
        endpoint of a role is and what it takes), nor of the code.
        """
        what = [value for _, value in self._asked(name)]
        what.append({source: self._fingerprint(source) for source in self._read(name)})
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def _read(self, name: str) -> list[str]:
        """The stages that one reads."""
        stages = self._config.stages
        return sorted({getattr(stages[name], key, "") for key in READS} & set(stages))

    def _asked(self, name: str) -> list[tuple[str, Any]]:  # Any: as JSON has it
        """Where each part of what a stage is asked to do is set, and its value."""
        c, kind = self._config, self._config.stages[name].kind
        own = {key: value for key, value in asdict(c.stages[name]).items() if key != "checkpoint_every"}
        what: list[tuple[str, Any]] = [(f"stages.{name}", own)]
        what += [("tasks", asdict(c.tasks)), ("sampling", asdict(c.sampling)), ("limits", asdict(c.limits))]
        what += [("seed", c.seed), ("dry", c.dry), ("model.path", c.model.path)]
        if kind in WITH_CRITIC:
            what.append(("model", {"critic_layers": c.model.critic_layers}))
        if kind in TRAINS and c.model.lora_rank:
            own = {"lora_rank": c.model.lora_rank, "lora_alpha": c.model.lora_alpha, "lora_targets": sorted(c.model.lora_targets)}
            what.append(("model", own))
        if roles := {role: c.roles[role] for role in PLAYS[kind] if role in c.roles}:
            what.append(("roles", {role: [m.model, m.continues, m.extra] for role, m in roles.items()}))
        return what

    def _settings(self, name: str) -> dict[str, Any]:  # Any: as JSON has it
        """All of that by key, with what the stages that it reads were asked."""
        found = settings.flat(self._asked(name))
        for source in self._read(name):
            found |= self._settings(source)
        return found

    def _check_inputs(self, todo: list[str]) -> None:
        for name in todo:
            for key in READS:
                source = getattr(self._config.stages[name], key, "")
                if source and source != "base" and source not in todo and not self._finished(source):
                    raise ConfigError(
                        f"stage {name!r} reads {source!r}, which has not been run in {self.run_dir}", f"stages.{name}.{key}"
                    )

    def _output(self, source: str, what: str) -> Path:
        manifest = self._manifest(source)
        if manifest is None or what not in manifest["entry"]["outputs"]:
            raise StageError(f"stage {source!r} left no {what}", str(self._dir(source)))
        return Path(manifest["entry"]["outputs"][what])

    # One stage

    async def _stage(self, name: str, config: StageConfig, parts: Parts, sinks: Sinks) -> None:
        out, start_s = self._dir(name), time.monotonic()
        goes_on = self._place(name, config)
        self._screen.say(f"stage {name} ({config.kind})" + (", going on from what it had finished" if goes_on else ""))
        policy_dir = parts.model if config.policy == "base" else str(self._output(config.policy, "policy"))
        wanted = READS | ({"data": "source_data"} if isinstance(config, SftConfig) and config.sources else {})
        inputs = {key: self._output(getattr(config, key), wanted[key]) for key in INPUTS if getattr(config, key, "")}
        tasks, checks = await self._tasks(config, parts)
        await self._use_policy(parts, policy_dir)
        critic = await self._open_critic(config, parts, policy_dir)
        recorded = RecordedRollouts(parts.rollouts, out / "trials", model=policy_dir) if self._config.trials else None
        ctx = Context(
            config=self._config,
            name=name,
            out=out,
            tasks=tasks,
            checks=checks,
            chat=parts.chat,
            generator=parts.generator,
            rollouts=recorded or parts.rollouts,
            policy=parts.policy,
            critic=critic,
            reference=await self._open_reference(config, parts, policy_dir),
            queue=parts.queue,
            groups=parts.groups,
            scan=parts.scan,
            pool=parts.pool,
            verifier=parts.verifier,
            inputs=inputs,
            log=sinks,
            progress=self._screen,  # type: ignore[arg-type]  # the same three methods
            publish=lambda: _publish(parts),
            writer=parts.writer,
            busy=parts.busy,
            meter=parts.meter,
            started_s=start_s,
            auditor=parts.auditor(config, out) if isinstance(config, AuditConfig) else None,
            finished=FinishedRollouts(out / ROLLOUTS) if _resumes(config) else None,
            served={self._served.version: self._served.checksum},
        )
        ctx.take_up_costs()
        ctx.busy_before = await parts.busy()
        if config.kind in TRAINS:
            self._loaded = ""
        try:
            result: StageResult = await STAGES[config.kind](ctx, config)
        finally:
            if recorded is not None:
                recorded.close()
        if critic is not None:
            await self._hand_on_critic(name, result, critic, parts)
        if ctx.reference is not None:
            await parts.close_reference()
        self._finish(name, config, result, asdict(await ctx.spent()))

    def _place(self, name: str, config: StageConfig) -> bool:
        """Makes the stage's directory; whether it goes on in one that was there.

        What a stopped stage left is kept beside, unless its kind can go on and it was asked for the same.
        """
        out = self._dir(name)
        ends = {
            source: (self._manifest(source) or {}).get("finished") for source in self._read(name)
        }  # of what it reads: when it was made
        asked = json.dumps({"settings": self._fingerprint(name), "reads": ends})
        begun = out / "begun"
        if _resumes(config) and begun.is_file() and begun.read_text() == asked:
            return True
        if out.exists():
            number = 1 + sum(1 for _ in out.parent.glob(f"{name}.stopped-*"))
            out.rename(out.with_name(f"{name}.stopped-{number}"))
        out.mkdir(parents=True)
        durable.write_text(begun, asked)
        return False

    async def _tasks(self, config: StageConfig, parts: Parts) -> tuple[Splits, dict[str, TaskChecks]]:
        """What a stage takes tasks from, and their checks: for the train split, where it names a stage, what that left."""
        source = getattr(config, "tasks_from", "")
        if not source:
            return parts.tasks, parts.checks
        return await setup.tasks_of(self._output(source, READS["tasks_from"]), parts, self._config, self._screen.say)

    async def _use_policy(self, parts: Parts, directory: str) -> None:
        if self._loaded != directory:
            await parts.policy.load(directory)
            self._served = await _publish(parts)
            self._loaded = directory

    async def _open_critic(self, config: StageConfig, parts: Parts, policy_dir: str) -> Critic | None:
        """A fresh host: weights of an earlier stage (object store, else disk), or a new head on the policy's own body."""
        if config.kind not in WITH_CRITIC:
            return None
        critic = await parts.open_critic()
        source = config.critic if isinstance(config, RprConfig) and config.critic_init.value == "inherit" else ""
        if source in self._critics:
            await critic.pull(self._critics[source])
        else:
            await critic.load(str(self._output(source, "critic")) if source else policy_dir)
        return critic

    async def _open_reference(self, config: StageConfig, parts: Parts, policy_dir: str) -> Policy | None:
        """The policy that the stage begins with, on a host of its own, for a loss that holds the trained one near it."""
        optim = getattr(config, "optim", None)
        if not isinstance(optim, PolicyOptimConfig) or optim.kl <= 0.0:
            return None
        reference = await parts.open_reference()
        await reference.load(policy_dir)
        return reference

    async def _hand_on_critic(self, name: str, result: StageResult, critic: Critic, parts: Parts) -> None:
        """The retained critic (which may be of an earlier step than the host's) into the object store; its host ends."""
        await critic.load(result.outputs["critic"])
        self._critics[name] = await critic.publish()
        await parts.close_critic()

    def _finish(self, name: str, config: StageConfig, result: StageResult, costs: dict[str, float]) -> None:
        entry = ledger.Entry(name, config.kind, result.summary, result.verdict, result.counts, costs, result.outputs)
        manifest = {
            "entry": asdict(entry),
            "finished": time.time(),
            "fingerprint": self._fingerprint(name),
            "settings": self._settings(name),
            "config": asdict(config),
        }
        durable.write_text(self._dir(name) / "manifest.json", json.dumps(manifest, indent=1))
        checkpoints.forget(self._dir(name))
        ledger.write(self.run_dir, ledger.read(self.run_dir))
        self._screen.say(f"stage {name} done: {ledger.told(entry)}")


def _revision(run_dir: Path) -> str:
    path = run_dir / "versions.json"
    return json.loads(path.read_text())["revision"] if path.is_file() else "unknown"


def _resumes(config: StageConfig) -> bool:
    """Whether it goes on within."""
    return config.kind in RESUMES or getattr(config, "checkpoint_every", 0) > 0


async def _publish(parts: Parts) -> WeightsVersion:
    """The policy's present weights to the generator; raises WeightsError if they differ after the pull."""
    weights = await parts.policy.publish()
    await parts.generator.pull(weights)
    return weights


def _full_disk(error: OSError, where: Path) -> StageError | None:
    """A disk that is full is told with its cure. An actor's error comes wrapped, without number and file of its own."""
    cause = getattr(error, "cause", error)
    if getattr(cause, "errno", None) not in durable.FULL:
        return None
    place = f"{where} ({cause.filename})" if getattr(cause, "filename", None) else str(where)
    free = f"{shutil.disk_usage(where).free / 2**20:.0f} MiB are free" if where.exists() else "there is no room for its directory"
    what = (cause.strerror or "").partition(", ")[2]
    told = ", ".join(["the disk is full", free, *([what] if what else [])])
    return StageError(told, place, "free some and give the same command again")
