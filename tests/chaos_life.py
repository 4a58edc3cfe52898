"""One life of a run on real actors and real sandboxes, with kills planned: `python -m tests.chaos_life PLAN KEY=VALUE ...`.

Real are Ray, the model hosts with torch on a tiny model, the queues, the rollout workers and the sandboxes; what the engine
computes is scripted (`Scripted`) unless the plan says `real`. Every process of the run tells its pid and its calls in files, and
ends itself by SIGKILL at the call of its that the plan names: no clock decides when.
"""

import asyncio
import functools
import hashlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from termrsi.records import Completion, SamplingParams

PIDS, CALLS, KILLS = "pids", "calls", "kills.jsonl"
ENDLESS = frozenset({"life"})  # of an actor: it waits for its end
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
    """The `call`-th call of a process of `role` kills it, before its body or `after` it. `pid`: kills that one in its stead."""

    id: str
    role: str
    call: int
    after: bool
    pid: int = 0
    of: str = ""  # what is killed, where that is not the role


@dataclass(frozen=True, slots=True)
class Plan:
    """`folder`: where processes tell of themselves."""

    folder: str
    kills: tuple[Kill, ...] = ()
    real: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))


def read(text: str) -> Plan:
    found = json.loads(text)
    return Plan(found["folder"], tuple(Kill(**kill) for kill in found["kills"]), found["real"])


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


def telling(kind: Any, role: str, plan: Plan) -> Any:  # Any: a class as `ray.remote` makes it
    """The same actor, each of its calls counted."""
    import ray

    base = kind.__ray_metadata__.modified_class.__ray_actor_class__

    class Telling(base):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.clock = Clock(plan, role)
            number = self.clock.begin()
            super().__init__(*arguments, **named)
            self.clock.end(number)

    for name, method in inspect.getmembers(base, inspect.isfunction):
        if not name.startswith("_") and name not in ENDLESS:
            setattr(Telling, name, counted(method))
    Telling.__name__ = base.__name__
    return ray.remote(max_restarts=0)(Telling)


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


def scripted() -> type:
    """Made in a function, so that it travels to the actors by value."""

    class Scripted:
        """In place of vLLM: a reply depends on its prompt, its seed and the bytes of the weights, and on nothing else.

        Where the prompt shows no command yet, the one that solves the task, or one that does not; then DONE.
        """

        def __init__(self, model: str, options: Any) -> None:
            from tokenizers import Tokenizer

            from termrsi.actors.busy import Busy

            self._tokens = Tokenizer.from_file(f"{model}/tokenizer.json")
            self._end = self._tokens.token_to_id("<|im_end|>")
            self._weights = "first"
            self.version, self.dead, self.busy = 0, False, Busy()
            self.stats = {"requests": 0.0, "prompt_tokens": 0.0, "cached_tokens": 0.0, "completion_tokens": 0.0}
            self._gate = asyncio.Event()
            self._gate.set()

        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            import re

            await self._gate.wait()
            text = self._tokens.decode(list(prompt_ids), skip_special_tokens=False)
            drawn = hashlib.sha256(repr((tuple(prompt_ids), params.seed, self._weights)).encode()).digest()
            word = (re.findall(r"Write the word (\w+) ", text) or ["none"])[-1]
            asked = text.rpartition("Write the word")[2]
            said = f"```bash\necho {word if drawn[0] % 2 else 'nothing'} > /app/out\n```" if "echo" not in asked else "DONE"
            ids = [*self._tokens.encode(said, add_special_tokens=False).ids, self._end]
            self.stats["requests"] += 1
            self.stats["prompt_tokens"] += len(prompt_ids)
            self.stats["completion_tokens"] += len(ids)
            logprobs = tuple(-0.5 - drawn[1 + i % 30] / 512 for i in range(len(ids)))
            return Completion(tuple(ids), logprobs, "stop", self.version, self.version)

        async def load(self, packed: dict[str, Any], version: int) -> dict[str, float]:
            from termrsi import weights

            self._weights, self.version = weights.checksum(packed), version
            self._gate.set()
            return {}

        def hold(self) -> None:
            self._gate.clear()

        def go_on(self) -> None:
            self._gate.set()

        def close(self) -> None: ...

    return Scripted


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

    from termrsi.actors import cluster, model_host

    hosts = {role: telling(getattr(cluster, "CriticActor" if role == "critic" else "PolicyActor"), role, plan) for role in HOSTED}
    for name, role in ACTORS.items():
        setattr(cluster, name, telling(getattr(cluster, name), role, plan))
    if not plan.real:
        cluster.GeneratorActor = With(cluster.GeneratorActor, scripted())
    learners, called = cluster.Cluster._learners, ray.actor.ActorHandle._actor_method_call
    clock = Clock(plan, "driver")

    def of_role(self: Any, kind: Any, role: str) -> Any:
        return learners(self, hosts[role], role)

    def told(self: Any, *arguments: Any, **named: Any) -> Any:
        number = clock.begin()
        found = called(self, *arguments, **named)
        clock.end(number)
        return found

    cluster.Cluster._learners = of_role
    ray.actor.ActorHandle._actor_method_call = told  # pyright: ignore[reportAttributeAccessIssue]  # where all calls go through
    del model_host


def tell_what_is_awaited(*_: object) -> None:
    """For whoever finds that this life does not end."""
    for task in asyncio.all_tasks(asyncio.get_event_loop()):
        task.print_stack(limit=6, file=sys.stderr)


def main() -> int:
    plan = read(sys.argv[1])
    signal.signal(signal.SIGUSR1, tell_what_is_awaited)
    from termrsi import driver

    prepare(plan)
    return driver.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
