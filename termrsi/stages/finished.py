"""Episodes that a stage had finished before it was stopped, by id: they are not run again."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from termrsi.durable import drop_half_line
from termrsi.records import EpisodeSpec, ScoredRollout, Snapshot


@dataclass(frozen=True, slots=True)
class _Line:
    """Where a rollout lies, and what decides whether it counts."""

    at: int
    weights: tuple[str, ...]  # checksums of those that sampled it; none: not known
    began: str  # the id of the snapshot that it began from; "" for the task's initial state
    recovery: bool
    snapshot: Snapshot | None
    routed: bool


class FinishedRollouts:
    """An index of a file that `Context.episodes` wrote: where each scored rollout lies, nothing of what it holds.

    Of an item that was stopped and done again, the file has lines of both times; the last one of an id counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, _Line] = {}
        self._snapshots: list[Snapshot] = []
        self._adapter: TypeAdapter[ScoredRollout] = TypeAdapter(ScoredRollout)
        drop_half_line(path)
        if not path.is_file():
            return
        at = 0
        with path.open("rb") as file:
            for line in file:
                entry = json.loads(line)
                if "verdict" in entry:
                    self._lines[entry["rollout"]["id"]] = made = _line(at, entry)
                    self._snapshots += [made.snapshot] if made.snapshot is not None else []
                at += len(line)

    def __contains__(self, rollout_id: str) -> bool:
        """Not one whose state was kept, which ended with its run; nor what began from such a state, which will be another."""
        line = self._lines.get(rollout_id)
        return line is not None and line.snapshot is None and not line.recovery

    def __len__(self) -> int:
        return sum(name in self for name in self._lines)

    def counts(self, spec: EpisodeSpec, served: Collection[str]) -> bool:
        """Whether it is an episode of `spec` that weights of these checksums sampled, with all that a learner needs of it."""
        line = self._lines.get(spec.id)
        began = spec.recovery.snapshot.id if spec.recovery is not None else ""
        if line is None or line.began != began or line.routed:
            return False
        return bool(line.weights) and all(checksum in served for checksum in line.weights)

    def snapshot(self, rollout_id: str) -> Snapshot | None:
        return self._lines[rollout_id].snapshot

    def snapshots(self) -> Iterator[Snapshot]:
        """All that were ever taken and written here, whether they are still there or not."""
        yield from self._snapshots

    def of(self, rollout_id: str) -> ScoredRollout:
        """As it was, less what a line does not hold: records of routing and files that were kept."""
        with self._path.open("rb") as file:
            file.seek(self._lines[rollout_id].at)
            entry = json.loads(file.readline())
        for chunk in entry["rollout"]["chunks"]:
            chunk["routing"] = None
        return self._adapter.validate_python({"rollout": entry["rollout"], "verdict": _without_files(entry["verdict"])})


def _line(at: int, entry: dict[str, Any]) -> _Line:  # Any: JSON
    rollout = entry["rollout"]
    taken = rollout["snapshot"]
    snapshot = Snapshot(**taken | {"lost_processes": tuple(taken["lost_processes"])}) if taken else None
    routed = any(chunk["routing"] for chunk in rollout["chunks"])
    return _Line(at, tuple(entry.get("weights", ())), entry.get("began", ""), bool(rollout["recovery_id"]), snapshot, routed)


def _without_files(verdict: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    return verdict | {"kept": None, "parts": [_without_files(part) for part in verdict["parts"]]}
