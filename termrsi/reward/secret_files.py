"""Which files of a task hold its secrets, in both task formats; names are relative to the task, or to one of its steps.

`initial/` of a synthesised task is none: it says how the machine begins, which whoever works there sees.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_FILE_BYTES = 1_000_000

SCRIPTS = ("solution/solve.sh", "solution.sh", "solution.yaml")  # what runs a solution: Harbor's, Terminal-Bench's two
VERIFIER = ("tests", "run-tests.sh")
SOLUTION = ("solution", *SCRIPTS[1:])
TRUTH = ("truth.md",)  # what the author of a synthesised task knows of its answer


def texts(root: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and text of the files of a task that `names` are or lie in, and of its steps.

    A binary file and one of more than MAX_FILE_BYTES have no text, but a name that must not be told either.
    """
    places = [place / name for place in (root, *sorted(root.glob("steps/*"))) for name in names]
    for place in places:
        for path in (place, *sorted(place.rglob("*"))):
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else b"\0"
                yield str(path.relative_to(root)), "" if b"\0" in content else content.decode("utf-8", "replace")
