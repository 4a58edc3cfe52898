"""The sandboxes of all nodes behind one pool. One SandboxActor a node; a client for each process that leases.

A lease goes to the node with the fewest of this client's. A node that is lost takes its sandboxes along: whoever holds one meets
SandboxError, a machine fault, and tries again on a node that is left. Ray starts its actor again, a bounded number of times, where
there is a place for it; until then it is left out, and once it answers it is taken up again, and is told what it has missed.

A snapshot lies on one node and is found by asking. While a node is away it may be there: it is gone once every node that is left
has said that it has it not, or has been away for long.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

from termrsi.actors.archives import pack, unpack
from termrsi.actors.calls import NO_END, NO_ROOM, bounded, first_line, no_room
from termrsi.errors import PoolError, SandboxError, SnapshotGone
from termrsi.ports import Sandbox
from termrsi.queues.places import Places
from termrsi.records import CommandResult, Snapshot, TaskSpec, Verdict

BACK_AFTER_S = 600.0  # at the latest a node is there again, if none is left: a new one, its image, its start
ANSWER_S = 30.0  # in which a node says that it is there, or what it has
AGAIN_S = 0.5  # before one that answers and has not said what it was asked is asked again
REMOVE_S = 120.0  # in which it ends what it is told to
RETURN_S = 180.0  # so long a node that is away may still come back with its snapshots
FRESH_S = 5.0  # so long it is not asked again
_LOG = logging.getLogger(__name__)


class _NodeLost(SandboxError):
    """A call was lost with its node."""


class _Undecided(SandboxError):
    """Whether a snapshot is there could not be told."""


class _NodeLate(SandboxError):
    """A call was given up."""


class RemotePool:
    """`ports.SandboxPool` and `ports.Verifier` over SandboxActors.

    `client`: whose leases these are, and which life of its, as NAME/LIFE. `patience_s`: how long to wait when not one answers.
    `return_s`: how long one that is away may still come back with its snapshots.
    """

    def __init__(
        self,
        actors: Sequence[Any],  # Any: Ray's actor handles are untyped
        *,
        client: str = "driver",
        patience_s: float = BACK_AFTER_S,
        return_s: float = RETURN_S,
    ) -> None:
        self._actors = list(actors)
        self._client = client
        self._patience_s, self._return_s = patience_s, return_s
        self._places = Places([f"sandbox node {i}" for i in range(len(actors))])
        self._heard_s = [float("-inf")] * len(actors)
        self._leased: dict[str, int] = {}  # by their ids: places
        self._checks: dict[str, tuple[str, ...]] = {}
        self._told: list[Counter[str]] = [Counter() for _ in actors]  # what each said last of its work
        self._before: Counter[str] = Counter()  # of lives that are over
        self._asking: dict[int, asyncio.Task[None]] = {}  # by their places: whether a lost one is there again
        self._missed: list[list[tuple[str, tuple[object, ...]]]] = [[] for _ in actors]  # what a lost one is to be told

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> "RemoteSandbox":
        """Waits for a node, and then in its turn there. Raises SnapshotGone, PoolError, and as `HostPool.lease`."""
        while True:
            request = f"{self._client}/{uuid.uuid4().hex}"
            place = await self._place(task, snapshot)
            try:
                sandbox_id = await self.call(place, "lease", request, task, snapshot, patience_s=NO_END)
            except BaseException as error:
                self._places.end(place)
                if isinstance(error, asyncio.CancelledError):
                    self._actors[place].abandon.remote(request)
                if isinstance(error, _NodeLost):  # nothing had been done there yet, or what was done is not known here
                    self.owe(place, "abandon", request)
                    continue
                if isinstance(error, SandboxError):
                    self._places.failed(place, time.monotonic())
                raise
            self._places.served(place)
            self._leased[sandbox_id] = place
            return RemoteSandbox(self, place, sandbox_id)

    async def release(self, sandbox: Sandbox) -> None:
        await sandbox.close()

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        assert isinstance(sandbox, RemoteSandbox), "one of this pool"
        return await sandbox.verify(task)

    async def discard(self, snapshot: Snapshot) -> None:
        """On every node; one that is away does it once it is there again."""
        await self._tell_all("discard", snapshot)

    async def kept(self, snapshot: Snapshot) -> bool:
        """Waits for nodes that are away, see `_holders`; where it cannot be told, it counts as there."""
        try:
            return bool(await self._holders(snapshot))
        except _Undecided as error:
            _LOG.warning("%s", error)
            return True

    async def busy(self) -> dict[str, float]:
        """As the actors count them, of all their lives: the mean over the nodes."""
        for place, one in (await self._ask_all("busy", patience_s=ANSWER_S)).items():
            if any(one[name] < seconds for name, seconds in self._told[place].items()):
                self._before.update(self._told[place])
            self._told[place] = Counter(one)
        total = Counter(self._before)
        for one in self._told:
            total.update(one)
        return {name: seconds / len(self._actors) for name, seconds in total.items()}

    async def expect(self, checks: dict[str, tuple[str, ...]]) -> None:
        """See `reward.verifiers.TaskVerifier`. A node that was started again is told by `remind`."""
        self._checks = checks
        await self._tell_all("expect", checks, patience_s=ANSWER_S)

    async def forget(self, client: str, life: str = "") -> None:
        """Ends the leases of a client that has died; `life`: but those of this life of its."""
        await self._tell_all("forget", client, life)

    async def remind(self, place: int) -> None:
        """What an actor that was started again has forgotten. Raises SandboxError if it is lost once more."""
        await self.call(place, "expect", self._checks, patience_s=ANSWER_S)

    def where(self, place: int) -> str:
        """What a place is called."""
        return self._places.name(place)

    def node_of(self, sandbox_id: str) -> str:
        """Where a leased sandbox stands; "" if there is none of that id."""
        place = self._leased.get(sandbox_id)
        return "" if place is None else self.where(place)

    def end(self, sandbox_id: str) -> None:
        """It was given back, or lost."""
        if (place := self._leased.pop(sandbox_id, None)) is not None:
            self._places.end(place)

    def heard(self, place: int, where: str) -> bool:
        """It has answered, from there, and is told what it has missed. Whether it had been lost."""
        self._heard_s[place] = time.monotonic()
        missed, self._missed[place] = self._missed[place], []
        for method, arguments in missed:
            getattr(self._actors[place], method).remote(*arguments)
        return self._places.heard(place, f"sandbox node {place} at {where}")

    def owe(self, place: int, method: str, *arguments: object) -> None:
        """A call that a lost node is to get once it is there again, in case it was only out of reach."""
        if self._places.is_gone(place):
            return
        # Of these the last one counts (a client's next life must not be forgotten with its last), and Ray keeps no order.
        same = {"expect": 0, "forget": 1}.get(method)
        kept = [one for one in self._missed[place] if same is None or (one[0], one[1][:same]) != (method, arguments[:same])]
        self._missed[place] = [*kept, (method, arguments)]

    def lost(self, place: int, error: Exception) -> bool:
        """It has not answered; whether that is news. For good, if Ray does not start its actor again."""
        self._heard_s[place] = float("-inf")
        why, now_s = first_line(error), time.monotonic()
        if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
            return self._places.gone(place, now_s, why)
        return self._places.lost(place, now_s, why)

    async def call(self, place: int, method: str, *arguments: object, patience_s: float | None = None) -> Any:
        """One call's answer (Any: what it returns); errors of ours arrive as what they are.

        Raises SandboxError if the node is lost, or too late.
        """
        name = self.where(place)
        try:
            return await bounded(name, getattr(self._actors[place], method).remote(*arguments), method, patience_s=patience_s)
        except NO_ROOM as error:
            raise no_room(name, method, error) from error
        except RayActorError as error:
            if self.lost(place, error):
                _LOG.warning("%s is lost, and the sandboxes on it: %s", name, first_line(error))
            raise _NodeLost(f"the node was lost: {first_line(error)}", name) from error
        except TimeoutError as error:
            raise _NodeLate(f"{method} was not done in time, and is given up", name) from error

    async def _place(self, task: TaskSpec, snapshot: Snapshot | None) -> int:
        """One that answers, and has the snapshot; whoever is given it says `end`."""
        while True:
            among = frozenset(self._places.up() if snapshot is None else await self._holders(snapshot))
            if snapshot is not None and not among:
                raise SnapshotGone(f"snapshot {snapshot.id} is on no node that is left", task.id)
            now_s = self._look()
            place = self._places.begin(now_s, among)
            if place is not None:
                try:
                    if await self._answers(place):
                        return place
                except asyncio.CancelledError:
                    self._places.end(place)
                    raise
                self._places.end(place)
            elif not self._places.up():
                await self._wait_for_one(now_s)

    def _look(self) -> float:
        """The time. Asks the lost whether they are there again. Raises PoolError if none is left."""
        now_s = time.monotonic()
        if self._places.none_left() or self._places.none_since_s(now_s) > self._patience_s:
            cure = "the same command goes on from what is finished once there are nodes"
            raise PoolError(f"no node for sandboxes is left: {self._places.told(now_s)}", "sandbox pool", cure)
        self._ask_the_lost(now_s)
        return now_s

    def _ask_the_lost(self, now_s: float) -> None:
        """Those whose pause is over, beside what is going on: nobody waits for them as long as there are others."""
        for place in set(self._places.open(now_s)) - set(self._places.up()) - self._asking.keys():
            task = self._asking[place] = asyncio.ensure_future(self._ask_again(place))
            task.add_done_callback(lambda done, place=place: self._asking.pop(place))

    async def _ask_again(self, place: int) -> None:
        await self._answers(place)

    async def _wait_for_one(self, now_s: float) -> None:
        """Until a lost one has said something, or is to be asked again."""
        if self._asking:
            await asyncio.wait(set(self._asking.values()), timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(min(self._places.next_s(now_s, set(self._places.away(now_s))), self._patience_s))

    async def _answers(self, place: int) -> bool:
        if time.monotonic() - self._heard_s[place] < FRESH_S:
            return True
        try:
            beat = await bounded(self.where(place), self._actors[place].beat.remote(), "beat", patience_s=ANSWER_S)
        except (RayActorError, TimeoutError) as error:
            self._left_out(place, error)
            return False
        if self.heard(place, beat.where):
            _LOG.warning("%s is there again", self.where(place))
        return True

    def _left_out(self, place: int, error: Exception) -> None:
        if self.lost(place, error):
            _LOG.warning("%s does not answer, and is left out: %s", self.where(place), first_line(error))

    async def _holders(self, snapshot: Snapshot) -> list[int]:
        """Those that have it. None: all that are left say so; one that has been away for `return_s` counts as without it, unless
        none is there. Raises _Undecided if one that answers does not say so in `patience_s`."""
        begun_s = time.monotonic()
        while True:
            told = await self._ask_all("kept", snapshot, patience_s=ANSWER_S, may_fail=True)
            if found := [place for place, has in told.items() if has]:
                return found
            now_s = self._look()
            again = [place for place in self._places.up() if place not in told]  # and not asked yet
            if not again and not self._places.away(now_s, self._return_s if self._places.up() else self._patience_s):
                return []
            if now_s - begun_s > self._patience_s:
                raise _Undecided(f"no node said in {self._patience_s:.0f} s whether it has it", f"snapshot {snapshot.id}")
            if again:
                await asyncio.sleep(AGAIN_S)
            else:
                await self._wait_for_one(now_s)

    async def _tell_all(self, method: str, *arguments: object, patience_s: float = REMOVE_S) -> None:
        """Those that are not there are told once they are."""
        told = await self._ask_all(method, *arguments, patience_s=patience_s)
        for place in range(len(self._actors)):
            if place not in told:
                self.owe(place, method, *arguments)

    async def _ask_all(
        self, method: str, *arguments: object, patience_s: float | None = None, may_fail: bool = False
    ) -> dict[int, Any]:
        """What those say that answer (Any: as the method does). One that does not in ANSWER_S is left out.

        `may_fail`: one that answers with a machine fault has said nothing.
        """

        async def one(place: int) -> tuple[int, Any] | None:  # Any: as above
            try:
                return place, await self.call(place, method, *arguments, patience_s=patience_s)
            except _NodeLost:
                return None
            except _NodeLate as error:
                if patience_s is not None and patience_s <= ANSWER_S:
                    self._left_out(place, error)
                return None
            except SandboxError as error:
                if not may_fail:
                    raise
                self._places.failed(place, time.monotonic())
                _LOG.warning("%s: %s failed: %s", self.where(place), method, first_line(error))
                return None

        return dict(told for told in await asyncio.gather(*map(one, self._places.up())) if told is not None)


class RemoteSandbox:
    """`ports.Sandbox` over a sandbox in a SandboxActor. `forked`: of another, whose place in the pool it shares."""

    def __init__(self, pool: RemotePool, place: int, sandbox_id: str, *, forked: bool = False) -> None:
        self._pool, self.place = pool, place
        self._id = sandbox_id
        self._forked = forked

    @property
    def id(self) -> str:
        return self._id

    async def start(self) -> None:
        """A leased sandbox is started."""

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        return await self._call("run", command, timeout_s)

    async def snapshot(self) -> Snapshot:
        return await self._call("snapshot")

    async def fork(self, n: int) -> list[Sandbox]:
        return [RemoteSandbox(self._pool, self.place, fork, forked=True) for fork in await self._call("fork", n)]

    async def put(self, source: Path | str, target: str) -> None:
        await self._call("put", pack(Path(source)), target)

    async def get(self, source: str, target: Path | str) -> None:
        tar = await self._call("get", source)
        with tempfile.TemporaryDirectory(prefix=f"termrsi-copy-{os.getpid()}-") as folder:
            found = unpack(tar, Path(folder))
            if found.is_dir() and not found.is_symlink():
                shutil.copytree(found, target, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(found, target, follow_symlinks=False)

    async def kill_processes(self) -> int:
        return await self._call("kill_processes")

    async def replaced(self) -> list[str]:
        return await self._call("replaced")

    async def verify(self, task: TaskSpec) -> Verdict:
        """See `ports.Verifier`."""
        return await self._call("verify", task)

    async def close(self) -> None:
        """One that was lost with its node is closed: what was learned of it before stands."""
        self._pool.end(self._id)
        method = "close_fork" if self._forked else "release"
        try:
            await self._call(method)
        except _NodeLost:
            self._pool.owe(self.place, method, self._id)

    async def _call(self, method: str, *arguments: object) -> Any:  # Any: what it returns
        return await self._pool.call(self.place, method, self._id, *arguments)
