"""What sandboxes of every backend are made from: the fields they share, how these are checked, the environment they start with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from termrsi.errors import ConfigError
from termrsi.records import Snapshot

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "DEBIAN_FRONTEND": "noninteractive",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Limits of one sandbox and what it starts from. `owner` labels what it holds, for `reap`. Raises ConfigError."""

    snapshot: Snapshot | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None  # where the shell starts; the image's, or /app, if None
    memory_mb: int = 2048
    pids: int = 256
    cpus: float | None = None  # None: no limit
    disk_mb: int = 1024
    network: bool = False
    output_limit_bytes: int = 1 << 20
    owner: str = "none"
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        where = f"sandbox.{type(self).__name__}"
        for name in ("memory_mb", "pids", "disk_mb", "output_limit_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", where, "must be at least 1")
        if self.cpus is not None and self.cpus < 0.01:
            raise ConfigError(f"cpus is {self.cpus}", where, "must be at least 0.01, or None for no limit")
        if not self.owner or not all(c.isalnum() or c in "_.-" for c in self.owner):
            raise ConfigError(f"owner is {self.owner!r}", where, "letters, digits, `_`, `.` and `-`")
