"""What `termrsi tasks` is pointed at: a directory, or the word `bundled` for the procedural suite."""

from pathlib import Path

from termrsi import tasks
from termrsi.errors import ConfigError, TaskError
from termrsi.places import cache_dir
from termrsi.records import LoadResult
from termrsi.task_options import Options


def loaded(path: str, options: Options) -> LoadResult:
    """Raises ConfigError if there is no such directory, or no task in it."""
    try:
        return tasks.load_dir(_folder(path, options), strict=options.strict)
    except TaskError as error:
        raise ConfigError(error.what, error.where, error.valid) from error


def _folder(path: str, options: Options) -> Path:
    if path == "bundled":
        from termrsi.tasks import bundled

        levels = [int(level) for level in options.levels.split(",")] if options.levels else [1]
        families = options.families.split(",") if options.families else None
        return bundled.ensure(cache_dir() / "tasks", seeds=range(options.seeds), levels=levels, families=families)
    if not Path(path).is_dir():
        raise ConfigError(f"no task directory at {path!r}", "tasks", "valid: a task directory, a tree of them, or bundled")
    return Path(path)
