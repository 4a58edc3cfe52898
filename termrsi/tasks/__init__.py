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
    lost: list[SkippedTask] = []
    results = [_load_one(folder, strict=strict) for folder in _task_folders(root, lost)]
    if not results and lost:
        raise TaskError(lost[0].reason, lost[0].path, "give a directory of tasks that this user can read")
    if not results:
        raise TaskError("no task in it", str(root), "a task directory holds task.toml (Harbor) or task.yaml (Terminal-Bench 1.x)")
    tasks: dict[str, TaskSpec] = {}
    notes = [note for result in results for note in result.notes]
    skipped: list[SkippedTask] = [*lost, *(item for result in results for item in result.skipped)]
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


def _task_folders(root: Path, lost: list[SkippedTask]) -> list[Path]:
    """Task directories in path order, found without going into one; what may not be looked into is added to `lost`.

    A link is followed to a task, and not to a tree, which may hold the link itself.
    """
    try:
        if _is_task(root):
            return [root]
        children = sorted(child for child in root.iterdir() if child.name != ".git")
    except PermissionError:
        lost.append(SkippedTask(str(root), "may not be read"))
        return []
    found: list[Path] = []
    for child in children:
        try:
            if not child.is_dir():
                continue
            if not child.is_symlink():
                found += _task_folders(child, lost)
            elif _is_task(child):
                found.append(child)
            else:
                lost.append(SkippedTask(str(child), "a link to a directory that is no task is not followed"))
        except PermissionError:
            lost.append(SkippedTask(str(child), "may not be read"))
    return found


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").exists() or (folder / "task.yaml").exists()


def _load_one(folder: Path, *, strict: bool) -> LoadResult:
    try:
        result = (harbor if (folder / "task.toml").exists() else terminal_bench).load(folder, strict=strict)
    except PermissionError:
        return LoadResult((), (SkippedTask(str(folder), "may not be read"),))
    if (folder / "task.toml").exists() and (folder / "task.yaml").exists():
        return replace(result, notes=(*result.notes, f"{folder}: task.yaml is passed over: there is a task.toml"))
    return result
