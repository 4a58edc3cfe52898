"""`termrsi tasks list|show|check|kit|audit PATH|bundled`: what is in a collection, what was repaired, what its tasks do."""

import asyncio
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from termrsi.errors import ConfigError, TermrsiError
from termrsi.records import LoadResult, StepSpec, TaskSpec, Verdict
from termrsi.task_folders import loaded
from termrsi.task_options import Options

_OUT = Console(highlight=False, soft_wrap=True)


@dataclass(slots=True)
class Outcome:
    """Of one task's runs. `fault`: why one of them gave no verdict."""

    task: TaskSpec
    solved: list[Verdict]
    empty: list[Verdict]
    fault: str = ""

    @property
    def fit(self) -> bool:
        """Its solution passes each time, an empty submission never."""
        return not self.fault and all(one.strict for one in self.solved) and not any(one.strict for one in self.empty)

    @property
    def checks(self) -> int:
        return max((len(one.passed) + len(one.failed) + len(one.skipped) for one in self.solved), default=0)


def run(arguments: list[str]) -> int:
    """1 if a task was refused or, where they are run, is unfit; an audit has run once it is over. Raises ConfigError."""
    match arguments:
        case ["list" | "show" | "check" | "kit" | "audit" as verb, path, *words] if "=" not in path:
            options = Options.of(verb, path, words)
        case _:
            what = "needs list, show, check, kit or audit, and the path of a directory of tasks"
            raise ConfigError(what, "termrsi tasks", "termrsi tasks --help lists what each takes")
    if verb == "audit":
        from termrsi import audit_command

        return audit_command.run(path, options)
    result = loaded(path, options)
    if verb == "kit":
        return _kit(result, options)
    if verb == "show":
        for task in result.tasks:
            _show(task)
    else:
        _table(result)
    _remarks(result)
    refused = 1 if result.skipped else 0
    return max(refused, _check(result.tasks, options)) if verb == "check" and options.run else refused


def _table(result: LoadResult) -> None:
    table = Table("task", "family", "level", "split", "image", "memory", "network")
    for task in result.tasks:
        environment = task.environment
        image = environment.docker_image or ("Dockerfile" if environment.context else "")
        memory = f"{environment.memory_mb} MiB" if environment.memory_mb else ""
        table.add_row(task.id, task.family, str(task.level), task.split, image, memory, "yes" if environment.network else "no")
    _OUT.print(table)


def _remarks(result: LoadResult) -> None:
    for note in result.notes:
        _OUT.print(f"note: {note}", markup=False)
    for refused in result.skipped:
        _OUT.print(f"refused {refused.path}: {refused.reason}", markup=False)
    _OUT.print(f"{len(result.tasks)} tasks, {len(result.skipped)} refused", markup=False)


def _show(task: TaskSpec) -> None:
    """All that is known of one task, the verifier's contract included: for its author, not for an agent."""
    environment = task.environment
    table = Table(title=task.id, show_header=False, title_justify="left")
    rows: list[tuple[str, object]] = [
        ("path", task.path),
        ("family", task.family),
        ("level, split", f"{task.level}, {task.split or 'none given'}"),
        ("image", environment.docker_image or f"{environment.context}/Dockerfile"),
        ("working directory", environment.workdir or "the image's"),
        ("cpus, memory, disk", f"{environment.cpus or 'no limit'}, {_mib(environment.memory_mb)}, {_mib(environment.storage_mb)}"),
        ("network", "yes" if environment.network else "no"),
        ("environment", ", ".join(environment.env) or "none"),
        ("agent's time", f"{task.agent_timeout_s:g} s" if task.agent_timeout_s else "no limit"),
        ("verifier", _verifier(task)),
        ("steps", "\n".join(map(_step, task.steps)) or "one"),
        ("files", ", ".join(f"{name}: {count}" for name, count in sorted(_files(Path(task.path)).items()))),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    _OUT.print(table)
    _OUT.print(task.instruction, markup=False)
    _OUT.print("")


def _step(step: StepSpec) -> str:
    return step.name + (f", the next one from reward {step.min_reward:g}" if step.min_reward is not None else "")


def _verifier(task: TaskSpec) -> str:
    from termrsi.reward import steps
    from termrsi.reward.verifiers import TaskVerifier

    said = []
    for part in steps.parts(task):
        try:
            suite = TaskVerifier().suite(part)
        except TermrsiError as error:
            return f"cannot be run: {error}"
        step = f"{part.step}: " if part.step else ""
        said.append(f"{step}{suite.script}, {suite.timeout_s:g} s" + (f", as {suite.user}" if suite.user else ""))
    return "\n".join(said)


def _files(root: Path) -> Counter[str]:
    paths = (path.relative_to(root).parts for path in root.rglob("*") if path.is_file())
    return Counter(parts[0] for parts in paths)


def _mib(value: int | None) -> str:
    return f"{value} MiB" if value else "no limit"


def _kit(result: LoadResult, options: Options) -> int:
    """Builds an offline verification kit for a collection; non-zero if a set of packages could not be fetched."""
    from termrsi.places import cache_dir
    from termrsi.reward import kit

    python = options.python
    if not python:
        own = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")  # what a local sandbox runs
        argv = [own or sys.executable, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        python = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    out = Path(options.out) if options.out else cache_dir() / "kit"
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        _OUT.print(text, markup=False)

    kit.build(out, [Path(task.path) for task in result.tasks], python=python, say=say)
    _OUT.print(f"kit for Python {python} in {out}: give tasks.kit={out} to a run, or kit={out} to tasks check", markup=False)
    return 1 if any(text.startswith("left out") for text in told) else 0


def _check(found: tuple[TaskSpec, ...], options: Options) -> int:
    """Solution and empty submission of each task, as often as asked; non-zero if one is unfit."""
    outcomes = asyncio.run(_run_all(found, options))
    table = Table("task", f"solution pass@{options.attempts}", f"empty pass@{options.attempts}", "checks", "")
    for one in outcomes:
        solved, empty = (f"{sum(v.strict for v in runs)}/{len(runs)}" for runs in (one.solved, one.empty))
        table.add_row(one.task.id, solved, empty, str(one.checks), "" if one.fit else "unfit")
    _OUT.print(table)
    for one in outcomes:
        if not one.fit:
            failed = dict.fromkeys(check for verdict in one.solved for check in verdict.failed)
            why = one.fault or (
                f"its solution fails: {', '.join(failed)}" if failed else "its solution fails, or an empty one passes"
            )
            _OUT.print(f"unfit {one.task.id}: {why}", markup=False)
    fit = sum(one.fit for one in outcomes)
    _OUT.print(f"{fit} of {len(outcomes)} pass with their solution and fail without", markup=False)
    return 0 if fit == len(outcomes) else 1


async def _run_all(found: tuple[TaskSpec, ...], options: Options) -> list[Outcome]:
    from termrsi.places import cache_dir
    from termrsi.reward.verifiers import TaskVerifier
    from termrsi.sandbox.host_pool import HostPool
    from termrsi.sandbox.machines import Limits

    slots = asyncio.Semaphore(options.jobs)
    limits = Limits(build_network=options.build_network == "host")
    pool = HostPool(size=options.jobs, cache_dir=cache_dir(), backend=options.backend, owner="check", limits=limits)
    verifier = TaskVerifier(kit=options.kit or None, beside=pool.beside)
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=2 * options.attempts * len(found))

        async def one(task: TaskSpec) -> Outcome:
            from termrsi.reward.checks import attempt, by_solution

            outcome = Outcome(task, [], [])
            async with slots:
                for runs, act in ((outcome.empty, None), (outcome.solved, by_solution)):
                    fault = ""
                    for _ in range(options.attempts):
                        try:
                            if not fault:
                                runs.append(await attempt(pool, verifier, task, act))
                        except TermrsiError as error:
                            fault = f"{'its solution' if act else 'an empty submission'} could not be judged: {error}"
                        progress.advance(bar)
                    outcome.fault = outcome.fault or fault
            return outcome

        try:
            return list(await asyncio.gather(*(one(task) for task in found)))
        finally:
            await pool.close()
