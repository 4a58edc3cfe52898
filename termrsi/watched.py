"""What of a sandbox a verifier relies on, and an agent may have replaced: paths inside, and which of them decide a verdict.

The list is ours. Three degrees: programs and libraries that every test script runs through, whose replacement can forge any result;
files that can be set aside; and whatever was added to the places that come first in PATH, which an honest `pip install` does too,
and which is only reported.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

SEARCH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
PROGRAMS = (
    *(
        "bash",
        "sh",
        "dash",
        "env",
        "timeout",
        "su",
        "setpriv",
        "python3",
        "python",
        "awk",
        "grep",
        "sed",
        "find",
        "xargs",
        "diff",
        "cmp",
    ),
    *("cat", "chmod", "cp", "cut", "date", "false", "head", "id", "ls", "mkdir", "mv", "printf", "pwd", "readlink", "rm"),
    *("seq", "sha256sum", "sleep", "sort", "stat", "tail", "tee", "test", "touch", "tr", "true", "uniq", "wc"),
)
LOADER = (
    "/etc/ld.so.preload",
    *(f"{top}/{arch}-linux-gnu/libc.so.6" for top in ("/lib", "/usr/lib") for arch in ("x86_64", "aarch64")),
    *("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"),
)
_PACKAGES = (
    "/usr/lib/python3/dist-packages",
    *(
        place
        for minor in range(8, 16)
        for place in (
            f"/usr/lib/python3.{minor}",
            f"/usr/local/lib/python3.{minor}/dist-packages",
            f"/usr/local/lib/python3.{minor}/site-packages",
            f"/root/.local/lib/python3.{minor}/site-packages",
        )
    ),
)
CUSTOMISATIONS = tuple(f"{place}/{name}customize.py" for place in _PACKAGES for name in ("site", "user"))
RELIED_ON = (*(f"{place}/{name}" for place in SEARCH for name in PROGRAMS), *LOADER, *CUSTOMISATIONS)
# From these pytest takes orders, whatever directory its tests lie in, and a verifier's installer the programs that it runs: what an
# agent put there is removed before the tests, unless the task's own solution puts it there too.
SET_ASIDE = (
    *(f"/{name}" for name in ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "setup.cfg", "setup.py", "tox.ini")),
    *(f"/root/.local/bin/{name}" for name in ("env", "uv", "uvx")),
)
# Told, and no more: an honest agent installs them too.
REPORTED = (
    *(f"{place}/{name}" for place in SEARCH for name in ("pytest", "uv", "uvx", "pip", "pip3", "curl", "git", "tar", "node")),
    *("/etc/ld.so.cache", *SET_ASIDE),
)
EVERYTHING = "*"  # among what a task touches: whatever it is
REPORTED_IN = ("/usr/local/sbin", "/usr/local/bin", "/root/.local/bin")  # every name in these
PATH_FILES_IN = _PACKAGES  # every *.pth in these: Python runs what stands in them
# Where a link in place of the directory would stand for all that is found through it.
DIRECTORIES = (
    *("/bin", "/sbin", "/lib", "/lib64", "/usr", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/local", "/usr/local/bin"),
    *("/usr/local/sbin", "/etc", "/etc/alternatives", "/usr/lib/python3", "/usr/lib/python3/dist-packages"),
    *(f"{top}/{arch}-linux-gnu" for top in ("/lib", "/usr/lib") for arch in ("x86_64", "aarch64")),
)

_RELIED_ON = frozenset((*RELIED_ON, *DIRECTORIES))
_REPORTED = frozenset(REPORTED)
# The files that names in RELIED_ON lead to, for a backend that tells of files and not of names.
_REAL = re.compile(
    r"^(/usr)?(/local)?/s?bin/(python3?(\.\d+)?|[mg]awk|original-awk|busybox)$|^/etc/alternatives/(awk|python3?|sh)$"
    r"|/(ld-linux[^/]*\.so\.\d+|ld-[\d.]+\.so|libc\.so\.6|libc-[\d.]+\.so)$"
    r"|/(site|dist)-packages/(site|user)customize\.py$|^/usr/(local/)?lib/python3[^/]*/(site|user)customize\.py$"
)


def relied_on(path: str) -> bool:
    """Whether a verdict is not to be trusted once this was replaced."""
    return path in _RELIED_ON or _REAL.search(path) is not None


def watched(path: str) -> bool:
    """Whether a change of this path is told at all."""
    parent, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    told = path in _REPORTED or parent in REPORTED_IN or (name.endswith(".pth") and parent in PATH_FILES_IN)
    return told or (path not in DIRECTORIES and relied_on(path))


def differing(reference: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Paths whose signature is not the image's. A new name for a file of the image (`python` for its `python3`) is none."""
    known = frozenset(reference.values())
    differ = (path for path in found.keys() | reference.keys() if found.get(path) != reference.get(path))
    return sorted(path for path in differ if path in reference or found[path] not in known)
