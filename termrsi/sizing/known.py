"""What a plan would assume, and its configuration and tasks already say: tasks, the first prompt, what limits cut."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from termrsi.config.schema import Config
from termrsi.errors import TaskError
from termrsi.harness import variants
from termrsi.records import TaskSpec
from termrsi.sizing import work
from termrsi.sizing.work import Assumed
from termrsi.tasks import bundled, load_dir
from termrsi.tasks.bundled.write import Label
from termrsi.tasks.split import SPLITS, split

CHARS_PER_TOKEN = 4  # assumed
HARNESS = "react"  # of the stages that train
_COUNTS = dict(zip(SPLITS, ("tasks", "validation", "heldout"), strict=True))  # of a split: the field of Assumed
Known = dict[str, tuple[float, str]]  # of a field of Assumed: value and source


def of(config: Config, assumed: Assumed) -> Known:
    """A limit counts where it is below what is assumed; tasks where they can be read here, a directory's too."""
    limits, found = config.limits, _tasks(config)
    bounds = {
        "turns": (limits.max_turns, "limits.max_turns"),
        "reply": (config.sampling.max_tokens, "sampling.max_tokens"),
        "observation": (limits.observation_chars / CHARS_PER_TOKEN, "limits.observation_chars"),
        "command_s": (limits.command_timeout_s, "limits.command_timeout_s"),
    }
    return found | {name: (float(value), source) for name, (value, source) in bounds.items() if value < getattr(assumed, name)}


def applied(assumed: Assumed, known: Known) -> Assumed:
    return replace(assumed, **{name: type(getattr(assumed, name))(value) for name, (value, _) in known.items()})


def _tasks(config: Config) -> Known:
    c = config.tasks
    if c.path == "bundled":
        counts = {field: work.tasks(config, name, Assumed()) for name, field in _COUNTS.items()}
        families = c.families or sorted(bundled.RECIPES)
        texts = [_wording(Label(family, level, "train", 0)) for family in families for level in c.levels]
        source = "the bundled suite"
    else:
        try:
            parts = split(load_dir(c.path, strict=config.tasks.strict).tasks, seed=config.seed)
        except TaskError:  # none that this machine can read: a run elsewhere may
            return {}
        caps = {"train": c.train, "validation": c.validation, "heldout": c.heldout}
        lists: dict[str, tuple[TaskSpec, ...]] = {name: getattr(parts, name)[: caps[name] or None] for name in SPLITS}
        counts = {field: len(lists[name]) for name, field in _COUNTS.items()}
        texts = [task.instruction for task in lists["train"]]
        source = f"the tasks in {Path(c.path).name}"
    found: Known = {field: (float(count), source) for field, count in counts.items() if count}
    if texts:
        chars = fmean(_chars(text) for text in texts)
        found["prompt"] = (max(1.0, round(chars / CHARS_PER_TOKEN)), f"{source}: mean, at {CHARS_PER_TOKEN} characters a token")
    return found


def _wording(label: Label) -> str:
    recipe, number = bundled.draw(label)
    return recipe.wordings[number]


def _chars(instruction: str) -> int:
    return sum(len(message.content) for message in variants.get(HARNESS).messages(instruction))
