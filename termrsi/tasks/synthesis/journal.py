"""One JSON line per finished item, so that a run that was stopped goes on with those that are not there."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from termrsi.errors import StageError


class Journal:
    """A file of lines that only grows. A last line without its end is cut off at the first reading."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Iterator[dict[str, Any]]:  # Any: parsed JSON
        """Line by line, so that not all of them are in memory. Raises StageError for a whole line that is not an item."""
        if not self._path.is_file():
            return
        whole = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    item = json.loads(line)
                except ValueError as error:
                    raise StageError(f"line {number} is no JSON", str(self._path), "take the file away to begin anew") from error
                whole += len(line)
                yield item
        if whole < self._path.stat().st_size:
            os.truncate(self._path, whole)

    def add(self, item: dict[str, Any]) -> None:  # Any: see `read`
        """On disk on return."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(item, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
