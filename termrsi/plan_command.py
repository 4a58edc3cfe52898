"""`termrsi plan experiment=NAME ...`: memory of each role, seconds of a step, cost by stage, before anything is started.

Words that are options of the plan are its own, all others are those of a run. What is assumed is told with its source beside every
estimate; nothing here was measured on the cluster that is asked about.
"""

import difflib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from termrsi.config.load import load
from termrsi.config.schema import Config
from termrsi.errors import ConfigError
from termrsi.options import FLAG, NUMBER, Option, Verb
from termrsi.sizing import estimate, known, layout, memory, rates, work
from termrsi.sizing.estimate import StageTime
from termrsi.sizing.memory import GIB
from termrsi.sizing.rates import Rates
from termrsi.sizing.shapes import ModelShape
from termrsi.sizing.work import Assumed

_OUT = Console(highlight=False, soft_wrap=True)
# Options whose names are keys of a run, too.
_RENAMED = {"train_tasks": "tasks", "validation_tasks": "validation", "heldout_tasks": "heldout"}
_OPTIONS = ("json", "price")
PARTS = {
    "generation": "generate", "learning": "learn", "weights": "weights", "sandboxes": "a sandbox", "commands": "commands",
    "verification": "verify",
}  # fmt: skip


@dataclass(slots=True)
class Options:
    """`price`: of a GPU for an hour, in whichever currency; 0: not told."""

    json: bool = False
    price: float = 0.0
    figures: Rates = field(default_factory=Rates)
    assumed: Assumed = field(default_factory=Assumed)
    given: set[str] = field(default_factory=set)  # names of assumptions that the user set
    fixed: dict[str, str] = field(default_factory=dict)  # of those that the configuration or its tasks say: where from


def split(words: list[str]) -> tuple[Options, list[str]]:
    """Options of the plan, and the words of the run. Raises ConfigError for a value that is no number above 0."""
    options, rest = Options(), []
    figures, names = {one.name for one in fields(Rates)}, [option.name for option in verb().options]
    for word in words:
        key, given, value = word.partition("=")
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
            if not given or near:
                valid = f"nearest: {near[0]}=" if near else "termrsi plan --help lists what it takes"
                raise ConfigError(f"unknown option {word!r}", "termrsi plan", valid)
            rest.append(word)
        elif key == "json":
            if value.lower() not in ("true", "false"):
                raise ConfigError(f"json is {value!r}", "termrsi plan", "valid: true or false")
            options.json = value.lower() == "true"
        elif key == "price":
            options.price = _number(key, value)
        elif key in figures:
            options.figures = replace(options.figures, **{key: _number(key, value)})
            options.given.add(key)
        else:
            name = _RENAMED.get(key, key)
            whole = isinstance(getattr(options.assumed, name), int)
            options.assumed = replace(options.assumed, **{name: _whole(key, value) if whole else _number(key, value)})
            options.given.add(key)
    if options.assumed.solved > 1.0:
        raise ConfigError(f"solved is {options.assumed.solved:g}", "termrsi plan", "valid: a share, above 0 and at most 1")
    return options, rest


def verb() -> Verb:
    """The options: what is told, then every figure that may be given."""
    shown = {field: option for option, field in _RENAMED.items()}
    told = (
        Option("price", "NUMBER", "of a GPU for an hour, in whichever currency: what the run would cost is told"),
        Option("json", FLAG, "true: for programs"),
    )
    rates_of = [Option(one.name, "NUMBER", f"{one.default:g}: {rates.SOURCES[one.name]}") for one in fields(Rates)]
    assumed = [_assumption(shown.get(name, name), default) for name, default in asdict(Assumed()).items()]
    what = "memory of each role, its time and cost: estimated"
    return Verb("plan", "experiment=NAME [key=value ...]", what, (*told, *rates_of, *assumed))


def _assumption(name: str, default: float) -> Option:
    return Option(name, NUMBER if isinstance(default, int) else "NUMBER", f"{default:g}: assumed")


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise ConfigError(f"{key} is {value!r}", "termrsi plan", "valid: a number above 0")
    return number


def _whole(key: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{key} is {value!r}", "termrsi plan", "valid: a whole number from 1 on")
    return int(value)


def run(arguments: list[str]) -> int:
    """Raises ConfigError for what cannot be run as asked: after the memory of the roles was told, where that is why."""
    options, words = split(arguments)
    config = load(words)
    _fix(options, config)
    shape = layout.shape_of(config)
    roles = _roles(config, shape)
    if not options.json:
        _memory(config, shape, roles)
    layout.check(config)
    timed = bool(config.cluster.nodes and config.cluster.gpus_generator and config.cluster.gpus_learner)
    todo = work.of(config, options.assumed)
    times = estimate.stages(config, shape, options.figures, options.assumed, todo) if timed else []
    if options.json:
        _OUT.print(json.dumps(_plain(config, shape, roles, options, times), indent=1), markup=False)
        return 0
    if not timed:
        _OUT.print(
            "no time is estimated: `cluster` names no GPUs for both generator and learner, and no speed is assumed of processors"
        )
        return 0
    _assumptions(options)
    _steps(times)
    _costs(config, options, times)
    for line in estimate.uncounted(config):
        _OUT.print(f"not counted: {line}", markup=False)
    return 0


# What is known


def _fix(options: Options, config: Config) -> None:
    """What the configuration says is not assumed; what the user gave stands. Raises ConfigError for what cannot be given."""
    names = {field: option for option, field in _RENAMED.items()}
    counts = [option for option in _RENAMED if option in options.given]
    if counts and config.tasks.path == "bundled":
        what = f"{counts[0]} has no effect on the bundled suite"
        raise ConfigError(what, "termrsi plan", "valid: tasks.train=N, tasks.levels=[...]")
    said = known.of(config, options.assumed)
    found = {name: one for name, one in said.items() if names.get(name, name) not in options.given}
    options.assumed = known.applied(options.assumed, found)
    options.fixed = {names.get(name, name): source for name, (_, source) in found.items()}


@dataclass(frozen=True, slots=True)
class _Role:
    """`given`: bytes of a device for one process; 0 where it has none."""

    need: memory.Need
    processes: int
    gpus: float
    given: float


def _roles(config: Config, shape: ModelShape) -> list[_Role]:
    c, found = config.cluster, []
    for role, need in layout.needs(config, shape).items():
        engine = role == "generator"
        gpus = c.gpus_generator if engine else c.gpus_learner
        share = layout.engine(config).share if engine else min(1.0, gpus)
        given = share * c.gpu_memory_gib * GIB if gpus else 0.0
        found.append(_Role(need, c.generators if engine else c.learner_processes, gpus, given))
    return found


def _memory(config: Config, shape: ModelShape, roles: list[_Role]) -> None:
    _OUT.print(
        f"{config.model.path}: {shape.parameters / 1e9:.2f}e9 parameters ({shape.active / 1e9:.2f}e9 for a token),"
        f" {shape.kv_bytes / 1024:g} KiB of cache a token; samples of up to {layout.learning(config).longest} tokens",
        markup=False,
    )
    table = _table("Memory of a device", "role", "processes", "GPUs each", "needs (GiB)", "of (GiB)")
    for one in roles:
        of = f"{one.given / GIB:.1f}" if one.given else "the node's"
        table.add_row(one.need.role, str(one.processes), f"{one.gpus:g}", f"{one.need.total / GIB:.1f}", of)
    _OUT.print(table)
    for one in roles:
        _OUT.print(f"{one.need.role}: {one.need.arithmetic()}", markup=False)
    held = _cache(config, shape)
    if held:
        longest = config.limits.max_context_tokens
        _OUT.print(f"an engine's cache holds {held} tokens: {held / longest:.1f} of the longest contexts", markup=False)
    host = layout.host_need(config, shape)
    _OUT.print(f"a node's own memory: {host.arithmetic()}, beside what sandboxes take", markup=False)


def _cache(config: Config, shape: ModelShape) -> int:
    c = config.cluster
    if not c.gpus_generator or not c.gpu_memory_gib:
        return 0
    return memory.cache_tokens(shape, layout.engine(config), int(c.gpu_memory_gib * GIB))


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))


# What is estimated


def _sources(options: Options) -> dict[str, tuple[float, str]]:
    """Value and source of every figure that the estimate rests on."""
    found = {one.name: (getattr(options.figures, one.name), rates.SOURCES[one.name]) for one in fields(Rates)}
    names = {name: key for key, name in _RENAMED.items()}
    for one in fields(Assumed):
        found[names.get(one.name, one.name)] = (getattr(options.assumed, one.name), "assumed")
    said = options.fixed | dict.fromkeys(options.given, "given")
    return {name: (value, said.get(name, source)) for name, (value, source) in found.items()}


def _assumptions(options: Options) -> None:
    table = _table("Nothing below was measured on this cluster", "assumption", "value", "source")
    for name, (value, source) in _sources(options).items():
        table.add_row(name, f"{value:g}", source)
    _OUT.print(table)


def _steps(times: list[StageTime]) -> None:
    title = "Seconds of a step in which each part is at work (simulated; parts overlap)"
    table = _table(title, "stage", "step", *PARTS.values(), "bound by")
    for one in times:
        if (step := one.step) is None:
            continue
        table.add_row(one.work.name, f"{step.step_s:.0f}", *[f"{one.parts[name]:.0f}" for name in PARTS], one.bottleneck)
    if table.row_count:
        _OUT.print(table)
        _OUT.print(
            "generate: the mean of the engines; a sandbox: the mean of those in use; commands, verify: added up over them;"
            f" bound by sandboxes: they take most of a step, or with one for each episode it were {1 - estimate.SHORT:.0%} shorter",
            markup=False,
        )


def _costs(config: Config, options: Options, times: list[StageTime]) -> None:
    gpus, price = estimate.gpus(config), options.price
    table = _table("Estimated", "stage", "episodes", "hours", "GPU hours", *(["cost"] if price else []))
    for one in times:
        hours = one.seconds / 3600
        cost = [f"{hours * gpus * price:.0f}"] if price else []
        table.add_row(one.work.name, f"{_episodes(one):.0f}", f"{hours:.2f}", f"{hours * gpus:.1f}", *cost)
    hours = sum(one.seconds for one in times) / 3600
    cost = [f"{hours * gpus * price:.0f}"] if price else []
    table.add_row("all", f"{sum(map(_episodes, times)):.0f}", f"{hours:.2f}", f"{hours * gpus:.1f}", *cost)
    _OUT.print(table)


def _episodes(one: StageTime) -> float:
    loop = one.work.updates
    return one.work.episodes + (loop.steps * loop.groups * loop.size if loop else 0)


def _plain(
    config: Config, shape: ModelShape, roles: list[_Role], options: Options, times: list[StageTime]
) -> dict[str, Any]:  # Any: JSON
    gpus = estimate.gpus(config)
    stages = [
        {
            "stage": one.work.name,
            "kind": one.work.kind,
            "episodes": _episodes(one),
            "seconds": one.seconds,
            "gpu_hours": one.seconds / 3600 * gpus,
            "cost": one.seconds / 3600 * gpus * options.price,
            "step_s": one.step.step_s if one.step else None,
            "tokens_s": one.step.tokens_s if one.step else None,
            "parts_s": one.parts,
            "bottleneck": one.bottleneck,
            "sandboxes": one.sandboxes,
            "with_a_sandbox_for_each_s": one.unbound_s if one.step else None,
        }
        for one in times
    ]
    return {
        "model": {"path": config.model.path, "parameters": shape.parameters, "active": shape.active, "kv_bytes": shape.kv_bytes},
        "memory": [
            {
                "role": one.need.role,
                "processes": one.processes,
                "gpus": one.gpus,
                "bytes": one.need.total,
                "of_bytes": one.given,
                "parts": dict(one.need.parts),
            }
            for one in roles
        ],
        "cache_tokens": _cache(config, shape),
        "node_bytes": dict(layout.host_need(config, shape).parts),
        "assumptions": {name: {"value": value, "source": source} for name, (value, source) in _sources(options).items()},
        "stages": stages,
        "uncounted": estimate.uncounted(config),
        "gpus": gpus,
        "gpu_hours": sum(one["gpu_hours"] for one in stages),
        "cost": sum(one["cost"] for one in stages),
    }
