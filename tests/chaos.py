"""Chaos over whole runs: kills drawn by a seed, lives until the run has ended, and what must not depend on them.

A run is `chaos_life` with three stages: a critic's warm-up, PPO with it, ReTerm with a reference. Its moments are calls: of an
actor (before or after the body), or of the driver, but for heartbeats and statistics; a seed draws them. Calls that go on at the
same time may come in another order, so that a number may be another of them. `launch/soak.sh` is its long form.

With real parts it is one stage of GRPO on vLLM, whose sampling depends on what is in a batch: then the set of what is trained, each
once, and the numbers of steps are what must not change.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from termrsi.sandbox import cgroups
from tests import chaos_life, chaos_nodes
from tests.chaos_life import CALLS, KILLS, PIDS, Kill, Plan

ROOT = Path(__file__).resolve().parents[1]
LIFE_S = 300.0  # of one life: what takes longer hangs
TELLING_S = 5.0  # for one that hangs to say what it waits for
GONE_S = 60.0  # for the processes of a life that has ended
LIVES = 12  # of one run: each kill costs one at most
AT_ONCE = 4  # kills planned for one life, of different roles: most roles' death does not end it
CONCURRENCY = 4
MARK = "TERMRSI_CHAOS"  # in the environment of every process of a run
ALWAYS = (
    *("scale=dry", "dry=false", "model.compute=fp32", "model.threads=1", "min_free_gib=0.5"),
    *(f"sandbox.concurrency={CONCURRENCY}", "sandbox.memory_mb=64", "sandbox.disk_mb=16"),
    "cluster.rollout_workers=2",
)
OWN_RAY = ("cluster.num_cpus=4", "cluster.object_store_mb=80")
SCRIPTED = (
    *(f"cluster.sandbox_nodes={chaos_nodes.NODES}", "cluster.generators=2"),
    *("+stage@stages.warmup=dry/warmup_critic", "+stage@stages.ppo=dry/rpr", "+stage@stages.reterm=dry/reterm"),
    *("pipeline=[warmup,ppo,reterm]", "stages.ppo.critic=warmup"),
    *("stages.warmup.tasks_per_step=2", "stages.ppo.tasks_per_step=2", "stages.ppo.critic_only_updates=1"),
    *("stages.ppo.optim.lr=1e-3", "stages.ppo.retention.k=1"),
    *("stages.reterm.steps=3", "stages.reterm.group_size=2", "stages.reterm.optim.kl=0.01", "stages.reterm.optim.lr=1e-3"),
    *("stages.reterm.retention.every=3", "stages.reterm.retention.k=1"),
)
REAL = (
    *("+stage@stages.grpo=dry/grpo", "pipeline=[grpo]", "stages.grpo.steps=4", "stages.grpo.group_size=2"),
    *("stages.grpo.retention.every=4", "stages.grpo.retention.k=1", "stages.grpo.checkpoint_every=1"),
    *(
        "sampling.max_tokens=16",
        "limits.max_turns=2",
        "model.kv_cache_gib=1",
        "model.max_num_seqs=8",
        "+model.engine.enforce_eager=true",
    ),
)
NAMES = ("amber", "basalt", "cobalt", "dahlia", "ebony", "fennel")
TEST = """#!/bin/bash
[ "$(cat /app/out 2>/dev/null)" = {word} ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""
# An end of the driver takes the run's own Ray with it.
ROLES = ("generator", "policy", "critic", "reference", "rollouts", "sandboxes", "queue", "buffer", "driver", "node")
WENT = ("busy/", "step_seconds", "waiting", "prompt_cached")  # of a step: how it went, not what it did
# In what its processes are called.
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "raylet", "gcs_server", "/ray/", "ray::IDLE", "default_worker.py")
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


class ChaosError(AssertionError):
    """A count that is not zero, with the seed and the kills that led to it."""


@dataclass(slots=True)
class Place:
    """What runs share: tasks, a model, a cache, and with scripted parts Ray's nodes. What they make here bears a mark."""

    root: Path
    real: bool = False
    words: tuple[str, ...] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    address: str = "local"
    raylet: int = 0  # of the node with sandboxes that may be lost
    _nodes: Any = None  # Any: the process that holds them, and a connection to it

    @classmethod
    def made(cls, root: Path, *, real: bool = False, words: Sequence[str] = ()) -> "Place":
        root.mkdir(parents=True, exist_ok=True)
        if real and not (root / "model").is_dir():
            from termrsi.model.checkpoint import tiny_model

            tiny_model(root / "model")
        elif not real:
            (root / "model").mkdir(exist_ok=True)
            (root / "model" / "config.json").write_text("{}\n")  # a directory that looks like a model's: nobody reads it
        for number, word in enumerate(NAMES):
            split = ("train", "train", "train", "train", "validation", "heldout")[number]
            files = {
                "instruction.md": f"Write the word {word} into the file out.",
                "environment/Dockerfile": "FROM a\nWORKDIR /app\n",
                "task.toml": f'version = "1.0"\n[metadata]\nsplit = "{split}"\n',
                "tests/test.sh": TEST.format(word=word),
                "solution/solve.sh": f"echo {word} > /app/out\n",
            }
            for name, text in files.items():
                path = root / "tasks" / word / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return cls(root, real, tuple(words))

    def run(self, name: str) -> "Run":
        return Run(self, self.root / name)

    def __enter__(self) -> "Place":
        self._ray_dir().mkdir()
        for name in ("state", "tmp"):
            (self.root / name).mkdir(exist_ok=True)
        if not self.real:
            ours, theirs = multiprocessing.Pipe()
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=chaos_nodes.serve, args=(theirs, ours, self.environment(), CONCURRENCY))
            process.start()
            theirs.close()
            self._nodes = process, ours
            self._hear()
        return self

    def __exit__(self, *_: object) -> None:
        if self._nodes is not None:
            process, ours = self._nodes
            ours.send(chaos_nodes.END)
            process.join(GONE_S)
            self._nodes = None
        shutil.rmtree(self._ray_dir(), ignore_errors=True)

    def mend(self) -> None:
        """Another node in place of one that was killed, as a cluster that scales would have it."""
        if self._nodes is not None and not runs(self.raylet):
            self._nodes[1].send(chaos_nodes.AGAIN)
            self._hear()

    def _hear(self) -> None:
        if not self._nodes[1].poll(LIFE_S):
            raise ChaosError(f"no Ray nodes after {LIFE_S:.0f} s")
        self.address, self.raylet = self._nodes[1].recv()

    def _ray_dir(self) -> Path:
        """For Ray's files: its sockets take no long name, and what else runs Ray here is not to find this one's."""
        return Path("/tmp", f"chaos-{self.mark[:8]}")

    def environment(self) -> dict[str, str]:
        own = {"XDG_RUNTIME_DIR": str(self.root / "state"), "TMPDIR": str(self.root / "tmp"), MARK: self.mark}
        return {
            **own,
            **RAY,
            "RAY_TMPDIR": str(self._ray_dir()),
            "TERMRSI_CACHE": str(self.root / "cache"),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
        }


def warm() -> Any:  # Any: a context of multiprocessing
    """Lives are forked from a server of its own: whoever runs this has threads, which no fork takes along.

    Ray reads its settings as it is imported, there, and leaves some in the environment of whoever used it before, here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos_warm"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


@dataclass(slots=True)
class Run:
    """One run directory, and all lives that it took. `folder/run` is the run's, what stands beside it the machine's."""

    place: Place
    folder: Path
    lives: int = 0

    @property
    def dir(self) -> Path:
        return self.folder / f"chaos-{self.folder.name}"

    def live(self, kills: Sequence[Kill] = ()) -> tuple[int, str]:
        """One life: its exit code and what it said. Raises ChaosError if it hangs, with what it waits for."""
        plan = Plan(str(self.folder / f"life-{self.lives}"), tuple(kills), self.place.real)
        self.lives += 1
        self.folder.mkdir(exist_ok=True)
        place = self.place
        ray = OWN_RAY if place.real else (f"cluster.address={place.address}", f"cluster.sandbox_resource={chaos_nodes.SANDBOXES}")
        words = [
            *ALWAYS,
            *ray,
            *(REAL if place.real else SCRIPTED),
            f"tasks.path={place.root / 'tasks'}",
            f"model.path={place.root / 'model'}",
            *place.words,
        ]
        said = self.folder / "said"
        said.touch()
        begin = said.stat().st_size
        context = warm()
        what = (plan, [*words, f"run_dir={self.dir}"], place.environment(), str(said))
        process = context.Process(target=chaos_life.live, args=what)
        process.start()
        deadline = time.monotonic() + LIFE_S
        while process.exitcode is None and time.monotonic() < deadline:
            process.join(0.2)
            place.mend()
        if process.exitcode is None:
            assert process.pid is not None, "it was started"
            os.kill(process.pid, signal.SIGUSR1)
            process.join(TELLING_S)
            process.kill()
            process.join()
            raise ChaosError(f"a life did not end in {LIFE_S:.0f} s\n{self._said(begin)[-6000:]}")
        return process.exitcode, self._said(begin)

    def _said(self, begin: int) -> str:
        with (self.folder / "said").open(errors="replace") as file:
            file.seek(begin)
            return file.read()

    # What a life leaves

    def told(self, life: int, what: str) -> list[Path]:
        folder = self.folder / f"life-{life}" / what
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def calls(self, life: int) -> Counter[str]:
        """The most calls that a process of each role came to."""
        found: Counter[str] = Counter()
        for path in self.told(life, CALLS):
            role = path.name.partition(".")[0]
            found[role] = max(found[role], path.stat().st_size)
        return found

    def killed(self, life: int) -> list[Kill]:
        path = self.folder / f"life-{life}" / KILLS
        return [Kill(**entry) for entry in lines(path)] if path.is_file() else []

    def processes(self) -> dict[int, str]:
        """Those of this run that are there, by the mark in their environment: not Ray's own, where it outlasts the run."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.place.mark}".encode() not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            own = not self.place.real and any(name in command for name in RAYS_OWN)
            if runs(int(process.name)) and not own:
                found[int(process.name)] = command[:120]
        return found

    def wait_until_gone(self) -> dict[int, str]:
        """The processes that are there still when that is over."""
        deadline = time.monotonic() + GONE_S
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def left(self) -> list[str]:
        """Of a run that has ended: processes, groups, mounts, layers, snapshots, scratch, shared memory."""
        found = [f"process {pid} {command}" for pid, command in self.wait_until_gone().items()]
        found += [str(g) for parent in cgroups.parents() if parent.is_dir() for g in parent.glob(f"{self.dir.name}-*")]
        found += [f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.place.root) in line]
        state = self.place.root / "state" / "termrsi"
        found += [str(path) for kind in ("layers", "snapshots") for path in (state / kind).glob("*")]
        found += [str(path) for path in (self.place.root / "tmp").glob("termrsi-*")]
        pids = {path.name.partition(".")[2] for life in range(self.lives) for path in self.told(life, PIDS)}
        shared = [(path, path.name.split("-")) for path in Path("/dev/shm").glob("termrsi-*")]
        return found + [str(path) for path, words in shared if len(words) > 2 and words[2] in pids]

    # What the run found

    def result(self) -> dict[str, Any]:  # Any: JSON
        """What must not depend on how often it was killed."""
        stages = sorted(path.name for path in (self.dir / "stages").iterdir())
        entries = json.loads((self.dir / "ledger.json").read_text())
        kept = ("stage", "kind", "summary", "verdict", "counts")
        return {
            "stages": stages,
            "ledger": [{key: entry[key] for key in kept} for entry in entries],
            "trained": {stage: self.trained(stage) for stage in stages},
            "verdicts": {stage: verdicts(self.dir / "stages" / stage) for stage in stages},
            "curve": curve(self.dir / "metrics.jsonl"),
        }

    def trained(self, stage: str) -> list[list[str]]:
        """What each step was trained on."""
        path = self.dir / "stages" / stage / "trained.jsonl"
        return [line["value"].get("rollouts", []) for line in lines(path)] if path.is_file() else []

    def costs(self) -> dict[str, dict[str, float]]:
        return {entry["stage"]: entry["costs"] for entry in json.loads((self.dir / "ledger.json").read_text())}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines(path: Path) -> list[dict[str, Any]]:  # Any: JSON
    return [json.loads(line) for line in path.read_text().splitlines()]


def verdicts(stage: Path) -> dict[str, dict[str, bool | None]]:
    """Of each file of rollouts: strict success by id, None where one was dropped."""
    found = {}
    for path in sorted(stage.glob("*.jsonl")):
        entries = lines(path)
        if entries and ("rollout" in entries[0] or "reason" in entries[0]):
            found[path.name] = {
                entry["rollout"]["id"] if "rollout" in entry else entry["id"]: entry["verdict"]["strict"]
                if "verdict" in entry
                else None
                for entry in entries
            }
    return found


def curve(path: Path) -> dict[str, dict[str, float]]:
    """The figures of each step as it was done last, without means over the steps of one life, and without how it went."""
    steps: dict[str, dict[str, float]] = {}
    for figures in lines(path):
        if "step" in figures:
            kept = [k for k in figures if "/mean" not in k and k not in {"time", "stage"} and not k.startswith(WENT)]
            own = {k: figures[k] for k in kept if not k.endswith("_s")}
            key = f"{figures['stage']} {figures['step']:.0f}"
            steps[key] = steps.get(key, {}) | own
    return dict(sorted(steps.items()))


# --- kills -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Of one role: kills, and what became of the runs."""

    kills: int = 0
    by_itself: int = 0
    same_command: int = 0


@dataclass(slots=True)
class Counts:
    """Of all runs. Whatever is not in `roles` must be zero."""

    roles: dict[str, Tally] = field(default_factory=dict)
    lost: int = 0
    twice: int = 0
    left: int = 0
    failed: int = 0  # attempts that the machine lost, scored as the agent's failures
    other: int = 0  # figures of the curve or the ledger that differ
    scores: bool = True  # compared: of a real engine they depend on what else is in its batch

    @property
    def kills(self) -> int:
        return sum(tally.kills for tally in self.roles.values())

    def of(self, kill: Kill) -> Tally:
        return self.roles.setdefault(kill.of, Tally())

    def table(self) -> str:
        rows = [("killed", "kills", "went on by itself", "same command went on")]
        rows += [(role, *map(str, (t.kills, t.by_itself, t.same_command))) for role, t in sorted(self.roles.items())]
        both = (sum(t.by_itself for t in self.roles.values()), sum(t.same_command for t in self.roles.values()))
        rows.append(("all", str(self.kills), *map(str, both)))
        failed = f"{self.failed}" if self.scores else "not compared"
        told = f"prompts lost {self.lost}, trained twice {self.twice}, scored as failures {failed}"
        return (
            "\n".join(f"| {' | '.join(row)} |" for row in rows)
            + f"\n{told}, left behind {self.left}, other differences {self.other}"
        )


def drawn(draw: random.Random, calls: Counter[str], place: Place) -> list[Kill]:
    """`AT_ONCE` kills of different roles, at calls that an undisturbed run comes to. A node dies at a call of its sandboxes."""
    found = []
    known = [role for role in ROLES if calls[role] or (role == "node" and place.raylet)]
    for role in draw.sample(known, min(AT_ONCE, len(known))):
        at = "sandboxes" if role == "node" else role
        name = f"{draw.getrandbits(32):08x}"
        found.append(Kill(name, at, draw.randint(1, calls[at]), draw.random() < 0.5, place.raylet if at != role else 0, role))
    return found


def play(place: Place, whole: Run, name: str, seed: str, counts: Counts) -> Iterator[str]:
    """One run from its first life to its end, killed as the seed says; a line for each life. Raises ChaosError."""
    draw, run = random.Random(seed), place.run(name)
    calls, expected, costs = whole.calls(0), whole.result(), whole.costs()
    history: list[str] = []
    code = 1
    while code:
        if run.lives >= LIVES:
            raise ChaosError(f"seed {seed!r}: no end after {LIVES} lives: {history}")
        kills = drawn(draw, calls, place) if run.lives < LIVES // 2 else []
        try:
            code, said = run.live(kills)
        except ChaosError as error:
            raise ChaosError(f"seed {seed!r}, {run.killed(run.lives - 1)}: {error}") from None
        done = run.killed(run.lives - 1)
        for number, kill in enumerate(done):
            tally = counts.of(kill)
            tally.kills += 1
            ended = code != 0 and number == len(done) - 1
            tally.same_command += ended
            tally.by_itself += not ended
        sentence = said.strip().splitlines()[-1] if code > 0 and said.strip() else ""
        killed = " ".join(f"{kill.of}@{kill.call}{'+' if kill.after else '-'}" for kill in done)
        history.append(f"life {run.lives}: killed {killed or 'nothing'}; exit {code} {sentence}")
        yield f"{name} {history[-1]}"
        if code and not done:
            raise ChaosError(f"seed {seed!r}: ended without a kill: {history}\n{said[-3000:]}")
        if code not in (0, -signal.SIGKILL) and not sentence.startswith("termrsi: "):
            raise ChaosError(f"seed {seed!r}: its end is no sentence: {history}\n{said[-3000:]}")
        if still := run.wait_until_gone():
            counts.left += len(still)
            raise ChaosError(f"seed {seed!r}: processes are left: {still}; {history}")
    if left := run.left():
        counts.left += len(left)
        raise ChaosError(f"seed {seed!r}: left behind: {left}; {history}")
    judge(expected, run.result(), counts, f"seed {seed!r}: {history}", exact=not place.real)
    for stage, spent in run.costs().items():
        counted = ("episodes", "completion_tokens") if not place.real else ("episodes",)
        less = {key: (spent[key], costs[stage][key]) for key in counted if spent[key] < costs[stage][key]}
        if less or spent["dropped"]:
            counts.other += 1
            raise ChaosError(f"seed {seed!r}: costs of {stage}: {less or spent['dropped']}; {history}")


def judge(expected: dict[str, Any], found: dict[str, Any], counts: Counts, where: str, *, exact: bool = True) -> None:
    """Raises ChaosError with all that differs. `exact`: what was sampled, and so every figure, must be the same as well."""
    wrong: list[str] = []
    for stage, steps in expected["trained"].items():
        once = Counter(rollout for step in steps for rollout in step)
        now = Counter(rollout for step in found["trained"].get(stage, []) for rollout in step)
        lost, twice = set(once) - set(now), {rollout for rollout, times in now.items() if times > 1}
        counts.lost += len(lost)
        counts.twice += len(twice)
        wrong += [f"{stage}: lost {sorted(lost)}"] if lost else []
        wrong += [f"{stage}: trained twice {sorted(twice)}"] if twice else []
    for stage, files in expected["verdicts"].items() if exact else ():
        for file, scores in files.items():
            other = found["verdicts"].get(stage, {}).get(file, {})
            failed = [rollout for rollout, strict in scores.items() if strict and other.get(rollout) is False]
            counts.failed += len(failed)
            wrong += [f"{stage}/{file}: scored as failures {failed}"] if failed else []
    for key, value in expected.items() if exact else [("trained", expected["trained"])]:
        if found[key] != value:
            counts.other += 1
            wrong.append(f"{key} differs: {difference(value, found[key])}")
    if wrong:
        raise ChaosError(f"{where}: {'; '.join(wrong)}")


def difference(one: Any, other: Any, place: str = "") -> str:  # Any: JSON
    """The first place where they differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if one.get(key) != other.get(key):
                return difference(one.get(key), other.get(key), f"{place}/{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return difference(a, b, f"{place}/{number}")
    return f"{place}: {str(one)[:200]} became {str(other)[:200]}"


# --- the long form -----------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """`dir=DIR seed=N kills=N | hours=N [parts=real] KEY=VALUE ...`: 1 if a count is not zero, 0 else. One table at the end."""
    known, settings = {"dir": "", "seed": "0", "kills": "100", "hours": "", "parts": "scripted"}, []
    for word in words:
        key, _, value = word.partition("=")
        if key in known:
            known[key] = value
        else:
            settings.append(word)
    real = known["parts"] == "real"
    place = Place.made(Path(known["dir"]).absolute(), real=real, words=settings)
    deadline = time.monotonic() + 3600 * float(known["hours"]) if known["hours"] else float("inf")
    wanted = sys.maxsize if known["hours"] else int(known["kills"])
    with place:
        return soak(place, known["seed"], wanted, deadline)


def soak(place: Place, base: str, wanted: int, deadline: float) -> int:
    counts, faults, number = Counts(scores=not place.real), [], 0
    whole = place.run(fresh(place, "whole"))
    code, said = whole.live()
    if code:
        sys.stderr.write(f"{said}\nthe run does not end where nothing is killed\n")
        return 1
    while counts.kills < wanted and time.monotonic() < deadline:
        seed = f"{base}/{number}"
        number += 1
        try:
            for line in play(place, whole, fresh(place, f"run-{number}"), seed, counts):
                sys.stderr.write(f"{line}\n")
        except ChaosError as error:
            faults.append(str(error))
            sys.stderr.write(f"FAULT {error}\n")
    sys.stdout.write(f"{counts.table()}\nruns {number}, with a fault {len(faults)}\n")
    return 1 if faults else 0


def fresh(place: Place, name: str) -> str:
    """A name of a run that an earlier soak in the same place has not taken."""
    taken = sum(1 for path in place.root.glob(f"{name}*") if path.is_dir() and path.name.partition("+")[0] == name)
    return f"{name}+{taken}" if taken else name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
