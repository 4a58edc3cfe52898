"""Logs as lines of JSON, each with the run, stage, step and rollout that it is of.

The ids travel with the task that works on them (contextvars): whatever it calls, and whatever it starts, logs with them.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime

Ids = Mapping[str, str | int]  # of run, stage, step, rollout: those that are known

_IDS: ContextVar[Ids] = ContextVar("termrsi_ids")
LINES, RUN = "TERMRSI_LINES", "TERMRSI_RUN"  # how a process that Ray starts learns of it


@contextmanager
def ids(**known: str | int) -> Iterator[None]:
    """What is logged inside is of these."""
    token = _IDS.set({**current(), **known})
    try:
        yield
    finally:
        _IDS.reset(token)


def current() -> Ids:
    """To hand on to another process, which takes them up with `ids(**...)`.

    A process that Ray started knows its run from the environment: an actor's methods see no context of its start.
    """
    run = os.environ.get(RUN)
    return _IDS.get({"run": run} if run else {})


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, the ids, and `error` with its traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **current(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _ToStderr(logging.Handler):
    """To whatever stderr is when the line is written; a reader that went away stops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def setup(lines: str) -> None:
    """`json`: this process logs lines of JSON to stderr, ours from INFO on, others' from WARNING on. `text`: as Python does."""
    root, ours = logging.getLogger(), logging.getLogger("termrsi")
    for handler in [h for h in root.handlers if isinstance(h, _ToStderr)]:
        root.removeHandler(handler)
    if lines == "json":
        root.addHandler(_ToStderr())
    ours.setLevel(logging.INFO if lines == "json" else logging.NOTSET)


def worker_environment(lines: str, run: str) -> dict[str, object]:
    """For `ray.init`: each process that Ray starts for the run sets itself up with `in_worker`. Nothing for text."""
    if lines != "json":
        return {}
    return {"env_vars": {LINES: lines, RUN: run}, "worker_process_setup_hook": f"{__name__}.{in_worker.__name__}"}


def in_worker() -> None:
    """In a process that Ray started."""
    setup(os.environ.get(LINES, "text"))
