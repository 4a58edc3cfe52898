"""Episodes that a stage had finished before it was stopped, by id: they are not run again."""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from termrsi.records import ScoredRollout
from termrsi.stages.journal import drop_half_line


class FinishedRollouts:
    """An index of a file that `Context.episodes` wrote: where each scored rollout lies, nothing of what it holds.

    Of an item that was stopped and done again, the file has lines of both times; the last one of an id counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, int] = {}
        self._adapter: TypeAdapter[ScoredRollout] = TypeAdapter(ScoredRollout)
        drop_half_line(path)
        if not path.is_file():
            return
        at = 0
        with path.open("rb") as file:
            for line in file:
                entry = json.loads(line)
                if "verdict" in entry and _stands_alone(entry["rollout"]):
                    self._places[entry["rollout"]["id"]] = at
                at += len(line)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def of(self, rollout_id: str) -> ScoredRollout:
        """As it was, less what a line does not hold: records of routing and files that were kept."""
        with self._path.open("rb") as file:
            file.seek(self._places[rollout_id])
            entry = json.loads(file.readline())
        for chunk in entry["rollout"]["chunks"]:
            chunk["routing"] = None
        return self._adapter.validate_python({"rollout": entry["rollout"], "verdict": _without_files(entry["verdict"])})


def _stands_alone(rollout: dict[str, Any]) -> bool:  # Any: JSON
    """Not one whose state was kept, which ended with its run; nor what began from such a state, which will be another."""
    return rollout["snapshot"] is None and not rollout["recovery_id"]


def _without_files(verdict: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    return verdict | {"kept": None, "parts": [_without_files(part) for part in verdict["parts"]]}
