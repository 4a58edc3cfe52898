"""The bundled suite: generated Harbor tasks that need no network, no image registry and nothing but bash and coreutils.

Every (family, level) has one recipe with five wordings or more. Splits share no wording, no word pool and no seed. Level 1 is one
natural command, level 2 two or three or a small pipeline, level 3 four and more steps, or a look before the act.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from termrsi.errors import ConfigError
from termrsi.tasks.bundled import data, files, folders, repair, system, text
from termrsi.tasks.bundled.recipe import Draw, Maker, Recipe
from termrsi.tasks.bundled.words import SPLITS
from termrsi.tasks.bundled.write import Label, write

LEVELS = (1, 2, 3)
SEEDS_PER_SPLIT = 1_000_000
OF_FIVE = ("train", "train", "train", "validation", "heldout")  # whose each wording of a recipe is, again and again
RECIPES: dict[str, tuple[Maker, Maker, Maker]] = {
    family: makers for part in (files, folders, text, data, system, repair) for family, makers in part.RECIPES.items()
}


def families() -> tuple[str, ...]:
    return tuple(RECIPES)


def generate(
    out_dir: Path | str,
    *,
    split: str = "train",
    seeds: Iterable[int],
    families: Iterable[str] | None = None,
    levels: Iterable[int] = LEVELS,
) -> list[Path]:
    """Write one task directory per family, level and seed under `out_dir`; the same arguments give the same bytes.

    `seeds` count from 0 in every split; the seed recorded in task.toml is offset per split, so none is shared.

    Raises ConfigError for an unknown split, family or level, or a seed out of range.
    """
    chosen = tuple(RECIPES if families is None else families)
    chosen_levels, chosen_seeds = tuple(levels), tuple(seeds)
    _check(split, chosen, chosen_levels, chosen_seeds)
    root = Path(out_dir)
    labels = [Label(family, level, split, seed) for family in chosen for level in chosen_levels for seed in chosen_seeds]
    return [_write_one(root, label) for label in labels]


def ensure(
    cache_dir: Path | str,
    *,
    split: str = "train",
    seeds: Iterable[int],
    families: Iterable[str] | None = None,
    levels: Iterable[int] = LEVELS,
) -> Path:
    """The folder under `cache_dir` that holds this suite, generated if it is not there.

    Its name is a hash of the request and of the generator's source, so a changed recipe never meets an old folder. A half
    written suite is never seen: it is made elsewhere and renamed. Of two at once, the second finds the first's.
    """
    chosen = tuple(RECIPES if families is None else families)
    chosen_levels, chosen_seeds = tuple(levels), tuple(seeds)
    digest = hashlib.sha256(repr((split, chosen, chosen_levels, chosen_seeds)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    target = Path(cache_dir) / f"bundled-{split}-{digest.hexdigest()[:16]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".bundled-", dir=target.parent))
    try:
        generate(made, split=split, seeds=chosen_seeds, families=chosen, levels=chosen_levels)
        made.chmod(0o755)
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def draw(label: Label) -> tuple[Recipe, int]:
    """The task of this label, and the number of the wording that is its instruction."""
    recipe = RECIPES[label.family][label.level - 1](Draw(label.family, label.level, label.split, label.seed))
    own = [i for i in range(len(recipe.wordings)) if OF_FIVE[i % 5] == label.split]
    return recipe, own[label.seed % len(own)]


def _write_one(root: Path, label: Label) -> Path:
    recipe, template = draw(label)
    recorded = SPLITS.index(label.split) * SEEDS_PER_SPLIT + label.seed
    return write(root, label, recipe, template=template, recorded_seed=recorded)


def _check(split: str, chosen: tuple[str, ...], levels: tuple[int, ...], seeds: tuple[int, ...]) -> None:
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}", "bundled tasks", f"valid: {', '.join(SPLITS)}")
    if unknown := [family for family in chosen if family not in RECIPES]:
        raise ConfigError(f"unknown family {unknown[0]!r}", "bundled tasks", f"valid: {', '.join(RECIPES)}")
    if wrong := [level for level in levels if level not in LEVELS]:
        raise ConfigError(f"unknown level {wrong[0]!r}", "bundled tasks", "valid: 1, 2, 3")
    if wrong := [seed for seed in seeds if not 0 <= seed < SEEDS_PER_SPLIT]:
        raise ConfigError(f"seed {wrong[0]} out of range", "bundled tasks", f"valid: 0 to {SEEDS_PER_SPLIT - 1}")
