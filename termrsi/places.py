"""Where termrsi keeps things on this machine."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$TERMRSI_CACHE, else the user's cache directory."""
    home = os.environ.get("TERMRSI_CACHE") or os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")) + "/termrsi"
    return Path(home)
