"""Everything of a task as text, its secrets too: for a judge of the task itself, and for nothing that plans, screens or acts."""

from dataclasses import dataclass
from pathlib import Path

from termrsi.records import TaskSpec
from termrsi.reward.leakage import texts

FILE_CHARS, PART_CHARS = 12_000, 40_000  # shown of one file, and of one part of the task


@dataclass(frozen=True, slots=True)
class Document:
    """One part of a task: what it is, and its files' texts with their names before them."""

    part: str
    text: str


def dossier(task: TaskSpec) -> tuple[Document, ...]:
    """Instruction, environment, verifier and solution, each cut to a bound; what is cut or left out is told in its place."""
    root = Path(task.path)
    parts = {"environment": ["environment"], "verifier": ["tests"], "solution": ["solution"]}
    if (root / "task.yaml").is_file() and not (root / "task.toml").is_file():
        parts = {"environment": [], "verifier": ["tests"], "solution": []}
    documents = [Document("instruction", task.instruction)]
    for part, folders in parts.items():
        found = [pair for folder in folders for pair in texts(root, folder)]
        found += [(name, (root / name).read_text(errors="replace")) for name in _OLDER[part] if (root / name).is_file()]
        documents.append(Document(part, _joined(found)))
    return tuple(documents)


_OLDER = {  # of the older format, beside its folders
    "environment": ("Dockerfile", "docker-compose.yaml"),
    "verifier": ("run-tests.sh",),
    "solution": ("solution.sh", "solution.yaml"),
}


def _joined(files: list[tuple[str, str]]) -> str:
    shown, room = [], PART_CHARS
    for name, text in files:
        part = text[: min(FILE_CHARS, room)]
        room -= len(part)
        cut = f" (its first {len(part)} of {len(text)} characters)" if len(part) < len(text) else ""
        shown.append(f"--- {name}{cut}\n{part}")
    return "\n".join(shown) or "(nothing)"
