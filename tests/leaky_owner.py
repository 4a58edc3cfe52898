"""Uses sandboxes of one backend until it is killed: `python -m tests.leaky_owner BACKEND OPTIONS SEED`, options as JSON.

Says "round N" before each round of commands, copies, snapshots and forks; a sandbox that is lost meanwhile is told and closed.
"""

import asyncio
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from termrsi import sandbox
from termrsi.errors import SandboxError
from termrsi.ports import Sandbox
from termrsi.sandbox import docker_engine, gvisor, keeper, local, runsc


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def use(box: Sandbox, rng: random.Random, folder: Path) -> None:
    await box.start()
    say("started")
    for _ in range(rng.randint(1, 4)):
        match rng.randint(0, 5):
            case 0:
                await box.run("sleep 100 & setsid sleep 101 & dd if=/dev/zero of=/tmp/x bs=1M count=4", 5.0)
            case 1:
                await box.put(folder / "file", "/app/file")
                await box.get("/app", folder / "back")
            case 2:
                await box.run("while :; do :; done", 0.1)
            case 3:
                snapshot = await box.snapshot()
                discard(box, snapshot)
            case 4:
                copies = await box.fork(2)
                try:
                    await asyncio.gather(*(copy.run("echo copy", 10.0) for copy in copies))
                finally:
                    await asyncio.gather(*(copy.close() for copy in copies))
            case _:
                await box.kill_processes()


def discard(box: Sandbox, snapshot: Any) -> None:
    options = box._options  # pyright: ignore[reportAttributeAccessIssue]  # of every backend
    match snapshot.backend:
        case "local":
            local.discard(snapshot, options.state_dir)
        case "gvisor":
            gvisor.discard(snapshot)
        case _:
            docker_engine.discard(snapshot, options.engine)


async def main(backend: str, options: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    # A gVisor that lost one of its own processes may answer nothing: this owner does not wait for it as long as others do.
    runsc.CALL_S = keeper.ANSWER_S = 5.0
    with tempfile.TemporaryDirectory(dir=options.pop("scratch")) as name:
        folder = Path(name)
        (folder / "file").write_text("x" * 1000)
        for number in itertools.count():
            say(f"round {number}")
            box = sandbox.make(backend, **options)
            try:
                await use(box, rng, folder)
            except SandboxError as error:
                say(f"lost: {error}")
            finally:
                await box.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
