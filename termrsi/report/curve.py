"""W&B behind a process of its own (`wandb_side`): a call here never waits for it.

Figures wait in a bounded queue, which a thread empties into the process; the thread waits for the pipe, and the process's end
unblocks it. What W&B cannot take is dropped and told once: `metrics.jsonl` has all of it.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from termrsi.report import wandb_side

WAITING = 10_000  # figures' lines, before they are dropped
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds: for W&B's start until it counts as out of reach, and for its end until it is ended."""

    start_s: float = wandb_side.START_S
    end_s: float = wandb_side.END_S


class Curve:
    """One run's curves. `mode`: "offline" or "online"; without a network the second becomes the first, with a warning."""

    def __init__(self, project: str, run_dir: Path, mode: str, *, bounds: Bounds = Bounds(), waiting: int = WAITING) -> None:
        self._dir, self._bounds = run_dir, bounds
        asked = {"project": project, "name": run_dir.name, "dir": str(run_dir), "mode": mode}
        asked |= {"start_s": str(bounds.start_s), "end_s": str(bounds.end_s)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", wandb_side.__name__, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the run, which then ends this in its turn
        )
        assert self._process.stdin is not None, "piped"
        assert self._process.stdout is not None, "piped"
        self._lines: queue.Queue[str | None] = queue.Queue(waiting)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write, args=(self._process.stdin,), daemon=True)
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._writer.start()
        self._reader.start()

    def log(self, figures: dict[str, float]) -> None:
        try:
            self._lines.put_nowait(json.dumps(figures) + "\n")
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                _LOG.warning("W&B does not keep up: its curves will lack points that metrics.jsonl has")

    def finish(self) -> None:
        """What waits is sent, within bounds; then the process is ended."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
        try:
            code = self._process.wait(self._bounds.start_s + self._bounds.end_s)
            if code:
                self._warn(f"ended with code {code}")
        except subprocess.TimeoutExpired:
            self._warn("has not ended, and is ended")
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for thread in (self._writer, self._reader):  # each closes its pipe: nobody else may, as long as it uses it
            thread.join(1.0)

    def _write(self, pipe: IO[str]) -> None:
        """Consumes the lines; waits for one, and for the pipe; ends with the last line, or with the process."""
        with suppress(OSError), pipe:  # the process has ended: what it said is read elsewhere
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self, pipe: IO[str]) -> None:
        """Consumes what the process tells; ends with it."""
        with suppress(ValueError, OSError), pipe:
            for line in pipe:
                told = json.loads(line)
                self._warn(f"{told['mode']}: {told['error']}")

    def _warn(self, what: str) -> None:
        kept = f"metrics.jsonl has every figure, and `wandb sync {self._dir}/wandb/*run-*` sends later what is kept there"
        _LOG.warning("W&B %s; %s", what, kept)
