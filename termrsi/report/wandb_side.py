"""The process that W&B lives in: settings as its one argument, figures as lines of JSON from stdin, what went wrong to stdout.

Apart from the run, because it may hang: where it starts, where it is told and where it ends. Whoever started this process can end
it. Without a network it writes a run directory that `wandb sync` sends later. It ends with its stdin.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

END_S = 30.0  # for what has not been sent yet
START_S = 30.0


def main() -> None:
    """`{"project", "name", "dir", "mode", "start_s", "end_s"}`."""
    asked = json.loads(sys.argv[1])
    run = _start(asked)
    if run is not None:
        for line in sys.stdin:
            run.log(json.loads(line))
    last = threading.Timer(float(asked["end_s"]), _end)
    last.daemon = True
    last.start()
    if run is not None:
        run.finish()
    os._exit(0)  # W&B's own end would wait for a start that failed


def _start(asked: dict[str, Any]) -> Any:  # Any: as JSON has it, and wandb's run
    import wandb
    from wandb.errors import Error

    for mode in dict.fromkeys((asked["mode"], "offline")):
        settings = wandb.Settings(init_timeout=float(asked["start_s"]), silent=True, console="off", x_disable_stats=True)
        try:
            return wandb.init(project=asked["project"], name=asked["name"], dir=asked["dir"], mode=mode, settings=settings)
        except (Error, OSError) as error:
            _tell(mode, str(error))
    return None


def _tell(mode: str, error: str) -> None:
    line = {"mode": mode, "error": (error.splitlines() or ["no reason given"])[0]}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _end() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
