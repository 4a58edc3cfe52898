"""Task directories of either format, one or a whole tree, to `TaskSpec`s."""

from dataclasses import replace
from pathlib import Path

from termrsi.errors import TaskError
from termrsi.records import LoadResult, SkippedTask, TaskSpec
from termrsi.tasks import harbor, terminal_bench


def load_dir(path: Path | str, *, strict: bool = False) -> LoadResult:
    """Every task at or below `path`, in the order of their paths; a directory inside a task is never a task.

    Two tasks of one name get their paths below `path` as ids, from the second on. What was refused is in `skipped`, what was
    repaired or ignored in `notes`. `strict`: by the rules of Harbor's and terminal-bench's own loaders. Raises TaskError if there
    is no such directory, or not one task directory in it.
    """
    root = Path(path)
    if not root.is_dir():
        raise TaskError("no such directory", str(root))
    try:
        results = [_load_one(folder, strict=strict) for folder in _task_folders(root)]
    except PermissionError as error:
        raise TaskError("may not be read", str(error.filename), "give a directory of tasks that this user can read") from error
    if not results:
        raise TaskError("no task in it", str(root), "a task directory holds task.toml (Harbor) or task.yaml (Terminal-Bench 1.x)")
    tasks: dict[str, TaskSpec] = {}
    notes = [note for result in results for note in result.notes]
    skipped: list[SkippedTask] = [item for result in results for item in result.skipped]
    for task in (task for result in results for task in result.tasks):
        if task.id in tasks:
            longer = Path(task.path).relative_to(root).as_posix()
            if longer in tasks:
                skipped.append(SkippedTask(task.path, f"second task with the id {task.id!r}"))
                continue
            notes.append(f"{task.path}: id {task.id!r} is taken by {tasks[task.id].path}: {longer!r} is used")
            task = replace(task, id=longer)
        tasks[task.id] = task
    return LoadResult(tuple(tasks.values()), tuple(skipped), tuple(notes))


def _task_folders(root: Path) -> list[Path]:
    """Task directories in path order, found without going into one."""
    if (root / "task.toml").exists() or (root / "task.yaml").exists():
        return [root]
    below = sorted(child for child in root.iterdir() if child.is_dir() and not child.is_symlink() and child.name != ".git")
    return [folder for child in below for folder in _task_folders(child)]


def _load_one(folder: Path, *, strict: bool) -> LoadResult:
    return (harbor if (folder / "task.toml").exists() else terminal_bench).load(folder, strict=strict)
