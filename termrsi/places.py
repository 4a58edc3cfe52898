"""Where termrsi keeps things on this machine, and what a task may take from it."""

import os
import re
from pathlib import Path

_TEMPLATE = re.compile(r"^\$\{(\w+)(?::-(.*))?\}$", re.DOTALL)


def cache_dir() -> Path:
    """$TERMRSI_CACHE, else the user's cache directory."""
    home = os.environ.get("TERMRSI_CACHE") or os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")) + "/termrsi"
    return Path(home)


def in_words(value: object) -> str:
    """A variable that an author wrote without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_host(value: str) -> str | None:
    """`${VAR}` and `${VAR:-default}`, where they are the whole value, come from this machine, as in Harbor; None: VAR is unset."""
    match = _TEMPLATE.match(value)
    return value if match is None else os.environ.get(match[1], match[2])
