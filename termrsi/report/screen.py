"""What a person sees while a run goes on: bars on a terminal, one line per piece of work elsewhere; the ledger as a table."""

import logging
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from termrsi.report.ledger import Entry, at_work, columns, rows

_LOG = logging.getLogger(__name__)


class _Console(Console):
    """One whose reader may go away: the run goes on, unheard. rich would end the program, in the middle of whatever it does."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 a device
            os.dup2(nowhere.fileno(), self.file.fileno())


class Screen:
    """Implements the progress of `stages.base`. Lines go to stderr, the ledger to stdout; `quiet`: lines to the log, no ledger."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._err = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = None
        self._what, self._total, self._done, self._start_s = "", 0, 0, 0.0

    def say(self, text: str) -> None:
        if self._quiet:
            _LOG.info("%s", text)
        else:
            self._err.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False)

    def begin(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._start_s = what, total, 0, time.monotonic()
        if sys.stderr.isatty() and not self._quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._err, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)

    def advance(self, note: str = "") -> None:
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, description=f"{self._what} {note}".strip())
        if note.startswith("dropped:") and not self._quiet:  # the log has it from the stage
            self.say(f"{self._what}: {note}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.say(f"{self._what}: {self._done}/{self._total} in {time.monotonic() - self._start_s:.1f} s")

    def ledger(self, entries: Sequence[Entry]) -> None:
        if self._quiet:
            return
        table = Table(title="Ledger")
        for column in columns(entries):
            table.add_column(column, overflow="fold")
        for row in rows(entries):
            table.add_row(*row)
        out = _Console(width=None if sys.stdout.isatty() else 160)
        out.print(table)
        for entry in entries:
            if busy := at_work(entry):
                out.print(f"{entry.stage}, at work: {busy}", markup=False, highlight=False)
