"""What an audit has found, item by item, as lines of JSON: `{"key", "part", "task", "found", "finished"}`.

`key` is of the task's content and of how it was looked at, `part` is "gates" or one judge. A line is on the disk before the next
item begins. One process writes at a time.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from termrsi.errors import ConfigError


class AuditLog:
    """To be entered: reads what is there, without a last line that was not written to its end, and goes on behind it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str], Any] = {}  # Any: parsed JSON

    def __enter__(self) -> "AuditLog":
        """Raises ConfigError if another process has it, or if a line is no JSON."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError("another audit writes there", str(self._path), "wait for it, or give another out=DIR") from error
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def found(self, key: str, part: str) -> Any:  # Any: parsed JSON
        """What was found before of a finished item, else None."""
        return self._found.get((key, part))

    def add(self, key: str, part: str, task: str, found: object, *, finished: bool = True) -> None:
        """`finished`: False for what a machine kept from its end: it is told, and looked for again the next time."""
        line = {"key": key, "part": part, "task": task, "found": found, "finished": finished}
        self._file.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())
        if finished:
            self._found[key, part] = found

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                entry = json.loads(line)
                if entry["finished"]:
                    self._found[entry["key"], entry["part"]] = entry["found"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"line {number} is none of an audit", str(self._path), "give another out=DIR") from error
