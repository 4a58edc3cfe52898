"""One draw from independent axes: a blueprint of a task (Tmax, arXiv 2606.23321), and how balanced many draws are.

Corpus kinds set, on an axis that has new values, new against old: a multiplier M gives P(new) = M / (1 + M).
"""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from termrsi.errors import ConfigError
from termrsi.tasks.synthesis.domains import DOMAINS

Weights = Mapping[str, Mapping[str, float]]  # axis -> value -> relative weight

ANY = "any"  # in place of a value: the author cannot express this axis
PRIMITIVES = (3, 5)  # fewest and most primitive skills of a task
AXES = ("domain", "skill", "primitives", "persona", "language", "complexity", "commands", "fixture", "verifier")
OLD = {"complexity": ("short", "moderate", "complex"), "fixture": ("text_only",), "verifier": ("exact_text",)}
CORPORA: dict[str, dict[str, float]] = {
    "legacy": {"complexity": 0.0, "fixture": 0.0, "verifier": 0.0},
    "sft_v2": {"complexity": 2.0, "fixture": 2.0, "verifier": 2.0},
    "rl_v2": {"complexity": 3.0, "fixture": math.inf, "verifier": math.inf},
}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a task shall be. `index` and `seed` give all the rest, with the weights."""

    index: int
    seed: int
    corpus: str
    domain: str
    skill: str
    primitives: tuple[str, ...]
    persona: str
    language: str
    complexity: str
    commands: str
    fixture: str
    verifier: str

    def axes(self) -> dict[str, str | tuple[str, ...]]:
        """The values by axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def draw(index: int, seed: int, corpus: str, weights: Weights) -> Blueprint:
    """The same arguments give the same blueprint; each axis has a stream of its own, so that weights of one move no other.

    Raises ConfigError if the corpus kind may draw nothing on an axis, see `shares`.
    """

    def pick(axis: str) -> str:
        chances = shares(axis, corpus, weights)
        return _stream(seed, index, axis).choices(list(chances), list(chances.values()))[0]

    domain = pick("domain")
    hangs = DOMAINS[domain]
    stream = _stream(seed, index, "primitives")
    return Blueprint(
        index=index,
        seed=seed,
        corpus=corpus,
        domain=domain,
        skill=f"{domain}/{_stream(seed, index, 'skill').choice(list(hangs.skills))}",
        primitives=tuple(stream.sample(hangs.primitives, stream.randint(*PRIMITIVES))),
        persona=_stream(seed, index, "persona").choice(hangs.personas),
        language=pick("language"),
        complexity=pick("complexity"),
        commands=pick("commands"),
        fixture=pick("fixture"),
        verifier=pick("verifier"),
    )


def shares(axis: str, corpus: str, weights: Weights) -> dict[str, float]:
    """Probability of each value that this corpus kind draws, without those of 0.

    Raises ConfigError where new values or old ones have a share, and every one of them the weight 0.
    """
    given = {name: weight for name, weight in weights[axis].items() if weight > 0.0}
    if axis not in OLD:
        return {name: weight / sum(given.values()) for name, weight in given.items()}
    multiplier = CORPORA[corpus][axis]
    new = 1.0 if math.isinf(multiplier) else multiplier / (1.0 + multiplier)
    found: dict[str, float] = {}
    for share, is_old in ((1.0 - new, True), (new, False)):
        group = {name: weight for name, weight in given.items() if (name in OLD[axis]) is is_old}
        if share > 0.0 and not group:
            word = "old" if is_old else "new"
            raise ConfigError(
                f"no {word} value has a weight, and {corpus} draws them", f"axes.{axis}", f"old: {', '.join(OLD[axis])}"
            )
        if share > 0.0:
            found |= {name: share * weight / sum(group.values()) for name, weight in group.items()}
    return found


def support(corpora: Iterable[str], weights: Weights) -> dict[str, int]:
    """How many values of each axis these corpus kinds can draw."""
    kinds = list(corpora)
    found = {axis: len({name for corpus in kinds for name in shares(axis, corpus, weights)}) for axis in weights}
    domains = [DOMAINS[name] for name in {name for corpus in kinds for name in shares("domain", corpus, weights)}]
    found["skill"] = sum(len(domain.skills) for domain in domains)
    found["primitives"] = len({skill for domain in domains for skill in domain.primitives})
    found["persona"] = len({persona for domain in domains for persona in domain.personas})
    return found


def balance_index(counts: Mapping[str, int], values: int) -> float | None:
    """exp(entropy) / N of the shares in `counts`: 1 if all N = `values` are equally frequent, 1/N if one alone is; None of none."""
    total = sum(counts.values())
    if total == 0:
        return None
    entropy = -sum(count / total * math.log(count / total) for count in counts.values() if count > 0)
    return math.exp(entropy) / values


@dataclass(slots=True)
class Tally:
    """Counts by axis; what is `any` is left out of its axis."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {axis: Counter() for axis in AXES})

    def add(self, axes: Mapping[str, str | Iterable[str]]) -> None:
        for axis in AXES:
            value = axes[axis]
            self.counts[axis].update(one for one in ([value] if isinstance(value, str) else value) if one != ANY)

    def balance(self, values: Mapping[str, int]) -> dict[str, float | None]:
        """The balance index of each axis."""
        return {axis: balance_index(self.counts[axis], values[axis]) for axis in AXES}


def _stream(seed: int, index: int, axis: str) -> random.Random:
    return random.Random(int.from_bytes(hashlib.sha256(f"{seed}/{index}/{axis}".encode()).digest()[:8], "big"))
