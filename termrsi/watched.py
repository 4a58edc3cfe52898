"""What of a sandbox a verifier relies on, and an agent may have replaced: paths inside, and which of them decide a verdict.

The list is ours. Two degrees: programs and libraries that every test script runs through, whose replacement can forge any result;
and whatever was added to the places that come first in PATH, which an honest `pip install` does too, and which is only reported.
"""

from pathlib import PurePosixPath

SEARCH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
PROGRAMS = (
    *("bash", "sh", "dash", "env", "timeout", "su", "python3", "python", "awk", "grep", "sed", "find", "xargs", "diff", "cmp"),
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
REPORTED_IN = ("/usr/local/sbin", "/usr/local/bin", "/root/.local/bin")  # every name in these

_RELIED_ON = frozenset(RELIED_ON)


def relied_on(path: str) -> bool:
    """Whether a verdict is not to be trusted once this was replaced."""
    return path in _RELIED_ON


def watched(path: str) -> bool:
    """Whether a change of this path is told at all."""
    return path in _RELIED_ON or str(PurePosixPath(path).parent) in REPORTED_IN
