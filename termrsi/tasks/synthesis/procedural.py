"""An author without a model: a blueprint becomes a task of the bundled suite that fits it, as far as it can express it.

It expresses two axes. domain: by the families below; three domains have none, and a restricted choice of families may leave more
without. complexity: short, moderate and complex are levels 1, 2 and 3; intricate has no level, and level 3 stands in. An axis that
is not expressed is `any`.
"""

import hashlib
import random
import shlex
from collections.abc import Sequence

from termrsi.tasks import bundled
from termrsi.tasks.bundled.recipe import Recipe
from termrsi.tasks.bundled.write import AGENT_TIMEOUT_S, Label, dockerfile
from termrsi.tasks.synthesis.axes import ANY, AXES, Blueprint
from termrsi.tasks.synthesis.write import Draft

FAMILIES: dict[str, tuple[str, ...]] = {
    "file_operations": ("create", "copy", "move", "delete", "directories", "symlinks", "redirect", "archive"),
    "data_processing": ("sort", "count", "lines", "csv", "json"),
    "data_querying": ("search", "logs"),
    "system_administration": ("permissions", "processes", "environment", "config"),
    "software_engineering": ("git", "arguments"),
    "debugging": ("shell_repair", "python_repair"),
}
LEVELS = {"short": 1, "moderate": 2, "complex": 3}
FIRST_SEED = 100_000  # those before are the suite's own, which a run may train on or be measured with


def compose(blueprint: Blueprint, families: Sequence[str] = ()) -> tuple[Draft, dict[str, str | tuple[str, ...]]]:
    """The draft, and the value that it has on each axis. `families`: what may be drawn; empty: all."""
    allowed = tuple(families) or bundled.families()
    fitting = [family for family in FAMILIES.get(blueprint.domain, ()) if family in allowed]
    digest = hashlib.sha256(f"{blueprint.seed}/{blueprint.index}/procedural".encode()).digest()
    family = random.Random(int.from_bytes(digest[:8], "big")).choice(fitting or allowed)
    level = LEVELS.get(blueprint.complexity, max(bundled.LEVELS))
    # Counted on from a start that differs by run: no two items of a run have the same seed.
    seed = FIRST_SEED + (blueprint.seed + blueprint.index) % (bundled.SEEDS_PER_SPLIT - FIRST_SEED)
    recipe, template = bundled.draw(Label(family, level, "train", seed))
    expressed: dict[str, str | tuple[str, ...]] = dict.fromkeys(AXES, ANY)
    if fitting:
        expressed["domain"] = blueprint.domain
    if blueprint.complexity in LEVELS:
        expressed["complexity"] = blueprint.complexity
    draft = Draft(
        instruction=recipe.wordings[template],
        initial_test=_initial_test(recipe),
        checks=recipe.checks,
        dockerfile=dockerfile(family, recipe),
        family=family,
        level=level,
        agent_timeout_s=AGENT_TIMEOUT_S[level - 1],
        files=recipe.files,
        solution=f"{recipe.solution}\n",
    )
    return draft, expressed


def _initial_test(recipe: Recipe) -> str:
    """The files are there as they were given, unless RUN lines may have changed them."""
    lines = ["#!/bin/bash", "cd /app || exit 1"]
    if not recipe.setup:
        lines += [f'[ "$(cat {path})" = {shlex.quote(text.rstrip(chr(10)))} ] || exit 1' for path, text in recipe.files.items()]
    return "\n".join([*lines, "exit 0"]) + "\n"
