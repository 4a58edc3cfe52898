"""One life of a run on real actors and real sandboxes, with kills planned: `live`, in a process of its own.

Real are Ray, the pipeline and its files, the queues, the rollout workers, the pool, the sandboxes and the verification; what engine
and models compute is scripted (`chaos_parts`) unless the plan says `real`. Every process of the run tells its pid and its calls in
files, and ends itself by SIGKILL at the call of its that the plan names.
"""

import asyncio
import functools
import inspect
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PIDS, CALLS, KILLS = "pids", "calls", "kills.jsonl"
# Of an actor, and no moments: by the clock, or until its end. Their number is another one each time.
BY_THE_CLOCK = frozenset({"life", "beat", "late", "busy", "stats", "ready"})
HOSTED = ("policy", "critic", "reference")
ACTORS = {
    "GeneratorActor": "generator",
    "SandboxActor": "sandboxes",
    "RolloutActor": "rollouts",
    "RecoveryActor": "queue",
    "BufferActor": "buffer",
    "WritersActor": "writers",
}


@dataclass(frozen=True, slots=True)
class Kill:
    """The `call`-th call of a process of `role` kills it, before its body or `after` it; or the process `pid` in its stead.

    `of`: what is killed, in a word.
    """

    id: str
    role: str
    call: int
    after: bool
    pid: int = 0
    of: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """`folder`: where processes tell of themselves."""

    folder: str
    kills: tuple[Kill, ...] = ()
    real: bool = False


class Clock:
    """The calls of one process. Each kill of the plan happens once, whichever life of its actor comes to it."""

    def __init__(self, plan: Plan, role: str) -> None:
        self._plan, self._role, self._calls = plan, role, 0
        folder = Path(plan.folder)
        for name in (PIDS, CALLS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / PIDS / f"{role}.{os.getpid()}").touch()
        self._file = (folder / CALLS / f"{role}.{os.getpid()}").open("ab", buffering=0)

    def begin(self) -> int:
        self._calls += 1
        self._file.write(b".")
        self._at(self._calls, after=False)
        return self._calls

    def end(self, number: int) -> None:
        self._at(number, after=True)

    def _at(self, number: int, *, after: bool) -> None:
        for kill in self._plan.kills:
            if (kill.role, kill.call, kill.after) == (self._role, number, after):
                self._kill(kill)

    def _kill(self, kill: Kill) -> None:
        folder = Path(self._plan.folder)
        try:
            (folder / f"kill-{kill.id}").touch(exist_ok=False)
        except FileExistsError:
            return
        with (folder / KILLS).open("a") as file:
            file.write(json.dumps(asdict(kill)) + "\n")
        os.kill(kill.pid or os.getpid(), signal.SIGKILL)


def telling(base: type, role: str, plan: Plan) -> Any:  # Any: a class as `ray.remote` makes it
    """The same actor, each of its calls counted."""
    import ray

    class Telling(base):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            if not plan.real:
                from tests import chaos_parts

                chaos_parts.without_transformers()
            self.clock = Clock(plan, role)
            number = self.clock.begin()
            super().__init__(*arguments, **named)
            self.clock.end(number)

    for name, method in inspect.getmembers(base, inspect.isfunction):
        if not name.startswith("_") and name not in BY_THE_CLOCK:
            setattr(Telling, name, counted(method))
    Telling.__name__ = base.__name__
    return ray.remote(max_restarts=0)(Telling)


def behind(kind: Any) -> type:  # Any: as above
    return kind.__ray_metadata__.modified_class.__ray_actor_class__


def counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def plain(self: Any, *arguments: Any, **named: Any) -> Any:
        number = self.clock.begin()
        found = method(self, *arguments, **named)
        self.clock.end(number)
        return found

    @functools.wraps(method)
    async def awaited(self: Any, *arguments: Any, **named: Any) -> Any:
        number = self.clock.begin()
        found = await method(self, *arguments, **named)
        self.clock.end(number)
        return found

    return awaited if inspect.iscoroutinefunction(method) else plain


class With:
    """A GeneratorActor that hosts another engine."""

    def __init__(self, kind: Any, make: type) -> None:
        self._kind, self._make, self._settings = kind, make, {}

    def options(self, **settings: Any) -> "With":
        made = With(self._kind, self._make)
        made._settings = settings
        return made

    def remote(self, *arguments: Any) -> Any:  # Any: Ray's actor handles are untyped
        from dataclasses import replace

        model, options = arguments
        return self._kind.options(**self._settings).remote(model, replace(options, restart_pause_s=0.0), self._make)


def prepare(plan: Plan) -> None:
    """The run's actors tell of themselves, and so does its driver: a call of its is one that it makes of an actor."""
    import ray.actor

    from termrsi.actors import cluster
    from tests import chaos_parts

    kinds = {role: behind(cluster.CriticActor if role == "critic" else cluster.PolicyActor) for role in HOSTED}
    if not plan.real:
        chaos_parts.without_transformers()
        kinds = dict.fromkeys(HOSTED, chaos_parts.Host)
    hosts = {role: telling(kind, role, plan) for role, kind in kinds.items()}
    for name, role in ACTORS.items():
        setattr(cluster, name, telling(behind(getattr(cluster, name)), role, plan))
    if not plan.real:
        cluster.GeneratorActor = With(cluster.GeneratorActor, chaos_parts.Engine)  # pyright: ignore[reportAttributeAccessIssue]
    learners, called = cluster.Cluster._learners, ray.actor.ActorHandle._actor_method_call
    clock = Clock(plan, "driver")

    def of_role(self: Any, kind: Any, role: str) -> Any:
        return learners(self, hosts[role], role)

    def told(self: Any, method: str, *arguments: Any, **named: Any) -> Any:
        if method in BY_THE_CLOCK:
            return called(self, method, *arguments, **named)
        number = clock.begin()
        found = called(self, method, *arguments, **named)
        clock.end(number)
        return found

    cluster.Cluster._learners = of_role
    ray.actor.ActorHandle._actor_method_call = told  # pyright: ignore[reportAttributeAccessIssue]  # where all calls go through


def tell_what_is_awaited(*_: object) -> None:
    """For whoever finds that this life does not end."""
    for task in asyncio.all_tasks(asyncio.get_event_loop()):
        task.print_stack(limit=6, file=sys.stderr)


def live(plan: Plan, words: Sequence[str], environment: Mapping[str, str], said: str) -> None:
    """The target of a forked process: `termrsi WORDS` with this plan; its output goes to the file `said`."""
    os.setsid()
    os.environ.update(environment)
    tempfile.tempdir = None  # the parent may have asked for it
    with Path(said).open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGUSR1, tell_what_is_awaited)
    prepare(plan)
    from termrsi import driver

    code = driver.main(words)
    sys.stderr.flush()
    os._exit(code)  # what the parent had open is the parent's to close
