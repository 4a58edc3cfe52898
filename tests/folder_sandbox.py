"""A folder that plays the sandbox: commands run on this machine, with the sandbox's paths moved into it. For tests of verifiers."""

import asyncio
import re
import shutil
from pathlib import Path

from termrsi.errors import SandboxError
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, Snapshot


class FolderSandbox:
    """Absolute paths of the machine become paths below `root`, in commands and in the scripts that are put there."""

    id = "folder"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[str] = []
        self.changed: list[str] = []
        self.fault: SandboxError | None = None

    def moved(self, text: str) -> str:
        return re.sub(r"(?<![\w.}])/(logs|tests|app|\.room)\b", rf"{self.root}/\1", text)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        self.events.append(command)
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", self.moved(command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        return CommandResult(process.returncode or 0, output.decode())

    async def put(self, source: Path | str, target: str) -> None:
        self.events.append(f"put {target}")
        if target == "/.room" and self.fault is not None:
            raise self.fault
        place = Path(self.moved(target))
        if Path(source).is_dir():
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)
        for path in [*place.rglob("*.sh"), *([place] if place.suffix == ".sh" else [])]:
            path.write_bytes(self.moved(path.read_bytes().decode()).encode())

    async def get(self, source: str, target: Path | str) -> None:
        place = Path(self.moved(source))
        if place.is_dir():
            shutil.copytree(place, target, symlinks=True, dirs_exist_ok=True)
        elif place.is_file():
            shutil.copy2(place, target)
        else:
            raise SandboxError(f"no such file: {source}", self.id)

    async def kill_processes(self) -> int:
        self.events.append("kill")
        return 0

    async def replaced(self) -> list[str]:
        return self.changed

    async def snapshot(self) -> Snapshot:
        raise NotImplementedError

    async def fork(self, n: int) -> list[Sandbox]:
        raise NotImplementedError
