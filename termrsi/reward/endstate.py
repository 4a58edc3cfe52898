"""What a solution left behind: every file that was changed since, with its content. For telling mutants that change nothing (ours).

By commands in the sandbox, so on every backend alike; GNU find is needed. Times are left out, for two runs never share them, and
so is what verifiers do not look at: scratch, caches, logs, and the libraries of programs, which are many. Processes are no part of
it: they are dead before a verifier starts.
"""

import posixpath
import tempfile
from collections.abc import Mapping
from pathlib import Path

from termrsi.ports import Sandbox

State = Mapping[str, str]  # path -> type, mode, owner, link and content

ALWAYS = ("/proc", "/sys", "/dev", "/solution", "/tests", "/logs/verifier", "/logs/agent", "/.room")
UNLESS_NAMED = ("/tmp", "/var/tmp", "/var/log", "/var/cache", "/run", "/usr/lib", "/usr/share", "/usr/include", "/root/.cache")
LIMIT_S = 120.0
TRIES = 3  # a file that vanishes while it is listed ends one
_MARK, _FOUND = "/tmp/.termrsi-then", "/tmp/.termrsi-found"


async def begin(sandbox: Sandbox, *, unlike: bool = False) -> None:
    """From here on: what is changed later is newer than the mark by its change time, which nothing can set back.

    `unlike`: another second of the clock begins first, and many processes have been: what holds the time or the number of a process
    is then another than in a run before.
    """
    if unlike:
        await sandbox.run("then=$(date +%s); until [ $(date +%s) != $then ]; do :; done", LIMIT_S)
    # Times of files go by ticks of some milliseconds: the next one has begun when this returns.
    await sandbox.run(f"touch {_MARK}; while touch {_FOUND}; [ ! {_FOUND} -nt {_MARK} ]; do :; done", LIMIT_S)


async def taken(sandbox: Sandbox, instruction: str) -> dict[str, str] | None:
    """The state now; None where it cannot be had. Places that the instruction names are looked at, whatever they are for.

    Raises SandboxError.
    """
    left_out = [*ALWAYS, *(place for place in UNLESS_NAMED if place not in instruction)]
    prune = " -o ".join([f"-path {place}" for place in left_out] + ["-name __pycache__", f"-path '{_MARK[:-5]}*'"])
    names = "sed -nz 's/^{}[^\\t]*\\t//p' " + _FOUND
    listed = 'ls -A -- "$d" | grep -vx __pycache__ | sha256sum | cut -c-64'
    script = (
        f"find / \\( {prune} \\) -prune -o -cnewer {_MARK} -printf '%y %m %U:%G %l\\t%p\\0' > {_FOUND} 2> /dev/null && "
        f"{{ {names.format('f')} | xargs -0 -r sha256sum -z -- && {names.format('d')} | "
        f"while IFS= read -rd '' d; do printf '%s  %s\\0' \"$({listed})\" \"$d\"; done; }} > {_FOUND}-2 && "
        f"cat {_FOUND}-2 >> {_FOUND}"
    )
    for _ in range(TRIES):
        result = await sandbox.run(f"( set -o pipefail; {script} )", LIMIT_S)
        if result.exit_code == 0 and not result.timed_out:
            break
    else:
        return None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "found"
        await sandbox.get(_FOUND, copy)
        listing = copy.read_bytes().decode("utf-8", "surrogateescape")
    return parsed(listing)


def parsed(listing: str) -> dict[str, str]:
    """Lines `type mode owner link<TAB>path` and `sum  path`, each ended by a zero byte."""
    state: dict[str, str] = {}
    for entry in listing.split("\0"):
        attributes, tab, path = entry.partition("\t")
        if tab:
            state[path] = attributes
        elif entry:
            digest, _, path = entry.partition("  ")
            state[path] = f"{state.get(path, '')} {digest}"
    return state


def same(state: State, first: State, second: State) -> bool:
    """Whether a state is that of two runs of one submission, as far as these two are alike.

    What differs between them (times in a file, random names) must be there, and of the same type; in a directory where only one of
    them left a file, others may come and go.
    """
    loose = {posixpath.dirname(path) for path in first.keys() ^ second.keys()}
    known = first.keys() & second.keys()
    if any(path not in known and not _below(path, loose) for path in state):
        return False
    return all(
        path in state and (state[path] == first[path] if first[path] == second[path] else state[path][0] == first[path][0])
        for path in known
    )


def _below(path: str, places: set[str]) -> bool:
    return any(path.startswith(place.rstrip("/") + "/") for place in places)
