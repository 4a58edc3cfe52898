"""Everything of a task as text, its secrets too: for a judge of the task itself, and for nothing that plans, screens or acts."""

from dataclasses import dataclass
from pathlib import Path

from termrsi.records import TaskSpec
from termrsi.reward.secret_files import SOLUTION, TRUTH, VERIFIER, texts

FILE_CHARS, PART_CHARS = 12_000, 40_000  # shown of one file, and of one part of the task
OLDER_ENVIRONMENT = ("Dockerfile", "docker-compose.yaml")  # of the older format, whose further files may be anything


@dataclass(frozen=True, slots=True)
class Document:
    """One part of a task: what it is, and its files' texts with their names before them."""

    part: str
    text: str


def dossier(task: TaskSpec) -> tuple[Document, ...]:
    """Instruction, environment, verifier and solution, each cut to a bound; what is cut or left out is told in its place."""
    root = Path(task.path)
    older = (root / "task.yaml").is_file() and not (root / "task.toml").is_file()
    parts = {"environment": OLDER_ENVIRONMENT if older else ("environment",), "verifier": VERIFIER, "solution": SOLUTION + TRUTH}
    texts_of = [Document(part, _joined(list(texts(root, names)))) for part, names in parts.items()]
    return (Document("instruction", task.instruction), *texts_of)


def _joined(files: list[tuple[str, str]]) -> str:
    shown, room = [], PART_CHARS
    for name, text in files:
        part = text[: min(FILE_CHARS, room)]
        room -= len(part)
        cut = f" (its first {len(part)} of {len(text)} characters)" if len(part) < len(text) else ""
        shown.append(f"--- {name}{cut}\n{part}")
    return "\n".join(shown) or "(nothing)"
