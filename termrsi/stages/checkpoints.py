"""Checkpoints of a stage that trains: all that it goes on from at the end of an optimizer step. A kill costs the step in flight.

    <stage>/checkpoints/step-<n>/<host>/      what `save_training` of policy or critic left
                                 retained/    the incumbent's `policy/` and `critic/`, as links to the same files
                                 state.json   what the stage adds, the checksums of the hosts, the versions of weights served
    <stage>/trained.jsonl                     a line for each step that is done (`journal`), with what it was trained on

A step is done when its line is there. A checkpoint is written beside and renamed, and its line comes after that; so one that was
being written counts for nothing. The newest `KEPT` stay: if a file of the last one cannot be read, the one before is gone on from.

A full disk ends the stage (`errors.StageError` in the pipeline's words), and is not passed over: the rollouts need the same disk
and would be lost next, while the same command goes on from the checkpoint before, which is whole.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from termrsi import durable
from termrsi.errors import CheckpointError, StageError
from termrsi.stages.base import ROLLOUTS, Context
from termrsi.stages.finished import FinishedRollouts
from termrsi.stages.journal import Journal

FOLDER, LINES, STATE, RETAINED = "checkpoints", "trained.jsonl", "state.json", "retained"
KEPT = 2
State = dict[str, Any]  # Any: JSON
_LOG = logging.getLogger(__name__)


class Host(Protocol):
    """A policy or a critic: the part of either port that matters here."""

    async def save_training(self, directory: str) -> str: ...

    async def load_training(self, directory: str, version: int) -> str: ...


class Checkpoints:
    """Use as `with`. `every`: steps between two, and one after the last step; 0: none, and no lines.

    A context without `finished` is of a stage that is not gone on with: nothing is written either. `hosts`: those that learn here.
    """

    def __init__(self, ctx: Context, every: int, steps: int, hosts: Mapping[str, Host]) -> None:
        self.on = every > 0 and ctx.finished is not None
        self._ctx, self._every, self._steps, self._hosts = ctx, every, steps, hosts
        self._folder = ctx.out / FOLDER
        self._journal = Journal(ctx.out / LINES) if self.on else None
        self._whole: list[int] = []  # steps, oldest first

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._journal.__exit__()

    def due(self, step: int) -> bool:
        """Whether this step ends with one."""
        return self.on and (step % self._every == 0 or step == self._steps)

    def oldest(self, step: int) -> int:
        """The first step that the stage may still be taken back to after `step`."""
        if not self.on:
            return step
        return self._whole[0] if len(self._whole) >= KEPT else 0

    async def take_up(self) -> tuple[int, State | None]:
        """The step that the stage goes on from, with hosts and generator as they were then, and what it had added; (0, None): none.

        Raises StageError if there were some, none can be read, and a host has been changed by trying.
        """
        if self._journal is None:
            return 0, None
        touched = False
        lines = [(int(key), value["checkpoint"]) for key, value in self._journal.items()]
        self._whole = sorted(step for step, written in lines if written and (self._folder / f"step-{step}").is_dir())
        while self._whole:
            step = self._whole[-1]
            try:
                found = _read(self._folder / f"step-{step}")
                touched = True
                await self._restore(self._folder / f"step-{step}", found)
            except CheckpointError as error:
                _LOG.warning("%s: the checkpoint of step %d cannot be read, the one before counts: %s", self._ctx.name, step, error)
                self._whole.pop()
                continue
            self._keep_only(step)
            return step, found["own"]
        if touched:
            raise StageError("no checkpoint can be read", str(self._folder), "move the stage's directory away: it begins again")
        self._keep_only(0)
        return 0, None

    async def add(self, step: int, trained: State, own: State | None) -> None:
        """The step is done: its checkpoint, if one is due (`own`: what the stage adds), and its line. Raises OSError."""
        if self._journal is None:
            return
        if own is not None:
            await self._write(step, own)
        await self._ctx.keep_costs()  # before its line: what is not done again is counted
        self._journal.add(str(step), {**trained, "checkpoint": own is not None})
        if own is not None:
            self._whole.append(step)
            for old in self._whole[:-KEPT]:
                shutil.rmtree(self._folder / f"step-{old}")
            del self._whole[:-KEPT]

    async def _write(self, step: int, own: State) -> None:
        self._check_room()
        final, draft = self._folder / f"step-{step}", self._folder / f"step-{step}.part"
        draft.mkdir(parents=True)
        try:
            weights = {name: await host.save_training(str(draft / name)) for name, host in self._hosts.items()}
            for name in ("policy", "critic"):
                if (self._ctx.out / name).is_dir():
                    _link(self._ctx.out / name, draft / RETAINED / name)
            state = {"own": own, "weights": weights, "served": list(self._ctx.served.items())}
            durable.write_text(draft / STATE, json.dumps(state))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        draft.rename(final)
        _sync(self._folder)

    def _check_room(self) -> None:
        """The next one is as large as the last: a disk that has no room for it is told before it is full."""
        if not self._whole:
            return
        last = self._folder / f"step-{self._whole[-1]}"
        files = [path for part in (STATE, *self._hosts) for path in (last / part, *(last / part).rglob("*")) if path.is_file()]
        needed = sum(path.stat().st_size for path in files)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            told = f"the disk is full: {free / 2**30:.1f} GiB free, a checkpoint takes {needed / 2**30:.1f}"
            raise StageError(told, str(self._folder), "free some and give the same command again")

    async def _restore(self, folder: Path, found: State) -> None:
        ctx = self._ctx
        if "policy" in self._hosts:  # else it is what it was when the stage began, and is served
            ctx.served = {int(version): checksum for version, checksum in found["served"]}
        serving = ctx.served.get(ctx.version) == found["weights"].get("policy", "")
        for name, host in self._hosts.items():
            loaded = await host.load_training(str(folder / name), ctx.version - serving)
            if loaded != found["weights"][name]:
                raise CheckpointError(f"weights {loaded}, and {found['weights'][name]} were written", str(folder / name))
        for name in ("policy", "critic"):
            if (folder / RETAINED / name).is_dir():
                draft = ctx.out / f"{name}.part"
                shutil.rmtree(draft, ignore_errors=True)
                _link(folder / RETAINED / name, draft)
                shutil.rmtree(ctx.out / name, ignore_errors=True)
                draft.rename(ctx.out / name)
        if serving:  # under the same number
            await ctx.sync()

    def _keep_only(self, step: int) -> None:
        """What was done after `step` is undone: its lines go, then everything that no line names."""
        assert self._journal is not None, "called by take_up"
        self._journal.keep([key for key, _ in self._journal.items() if int(key) <= step])
        wanted = {f"step-{one}" for one in self._whole[-KEPT:]}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in wanted:
                shutil.rmtree(path)
        del self._whole[:-KEPT]


def forget(out: Path) -> None:
    """Of a stage that is finished: nothing goes on from them. Its lines stay."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)


def snapshots(out: Path) -> frozenset[str]:
    """Ids of all states of sandboxes that the stage in `out` may go on from: named by its checkpoints, or left by its rollouts."""
    if not (out / LINES).is_file():
        return frozenset()
    found = {snapshot.id for snapshot in FinishedRollouts(out / ROLLOUTS).snapshots()}
    for path in (out / FOLDER).glob(f"step-*/{STATE}"):
        try:
            found |= set(_named(json.loads(path.read_text())))
        except ValueError:  # half-written: nothing goes on from it
            continue
    return frozenset(found)


def _named(value: Any) -> Iterator[str]:  # Any: JSON
    """Ids of the snapshots in it, wherever they stand."""
    if isinstance(value, dict):
        if {"id", "backend", "handle", "digest"} <= value.keys():
            yield value["id"]
        for one in value.values():
            yield from _named(one)
    elif isinstance(value, list):
        for one in value:
            yield from _named(one)


def _read(folder: Path) -> State:
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no readable state: {error}", str(folder)) from error
    return found


def _link(source: Path, target: Path) -> None:
    """The same tree of the same files: whoever writes weights replaces files. Copies where the file system has no links."""

    def one(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            shutil.copy2(file, to)

    shutil.copytree(source, target, copy_function=one)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
