"""The axes of a synthesised task and their weights (Tmax, arXiv 2606.23321).

The names of the values are those of the paper and its code, and so are the weights of `language`; other weights are not stated
and equal here (of `domain` the paper says that its balance index is 0.998). Skills and personas hang on the domain:
`tasks.synthesis.domains`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from termrsi.errors import ConfigError

DOMAINS = (
    "security",
    "software_engineering",
    "file_operations",
    "data_querying",
    "data_science",
    "debugging",
    "scientific_computing",
    "data_processing",
    "system_administration",
)
# Python to "any" in the paper's words; here `any` says that an author could not express an axis.
LANGUAGES = {
    "python": 0.35,
    "c": 0.15,
    "bash": 0.15,
    "cpp": 0.10,
    "rust": 0.07,
    "go": 0.07,
    "mixed": 0.06,
    "unspecified": 0.05,
}
COMPLEXITIES = ("short", "moderate", "complex", "intricate")
COMMANDS = ("bash", "bash_code", "bash_code_services")
FIXTURES = ("text_only", "image", "audio", "video", "stripped_binary", "vendored_package", "multi_service_compose")
VERIFIERS = ("exact_text", "metric_threshold", "adversarial_corpus", "fuzz_equivalence", "multi_protocol")


def _equal(values: Iterable[str]) -> dict[str, float]:
    return dict.fromkeys(values, 1.0)


@dataclass(slots=True, kw_only=True)
class AxesConfig:
    """Weights, relative within an axis; 0 takes a value out. A corpus kind sets old values against new: `tasks.synthesis.axes`."""

    domain: dict[str, float] = field(default_factory=lambda: _equal(DOMAINS))
    language: dict[str, float] = field(default_factory=lambda: dict(LANGUAGES))
    complexity: dict[str, float] = field(default_factory=lambda: _equal(COMPLEXITIES))
    commands: dict[str, float] = field(default_factory=lambda: _equal(COMMANDS))
    fixture: dict[str, float] = field(default_factory=lambda: _equal(FIXTURES))
    verifier: dict[str, float] = field(default_factory=lambda: _equal(VERIFIERS))

    def __post_init__(self) -> None:
        valid = {
            "domain": DOMAINS,
            "language": LANGUAGES,
            "complexity": COMPLEXITIES,
            "commands": COMMANDS,
            "fixture": FIXTURES,
            "verifier": VERIFIERS,
        }
        for axis, weights in self.weights().items():
            if unknown := [name for name in weights if name not in valid[axis]]:
                raise ConfigError(f"unknown {axis} {unknown[0]!r}", f"axes.{axis}", f"valid: {', '.join(valid[axis])}")
            if low := [name for name, weight in weights.items() if not 0.0 <= weight < float("inf")]:
                raise ConfigError(f"{low[0]}={weights[low[0]]}", f"axes.{axis}", "valid: 0 or more")
            if not sum(weights.values()) > 0.0:
                raise ConfigError("every weight is 0", f"axes.{axis}", "one above 0 is needed")

    def weights(self) -> dict[str, dict[str, float]]:
        """By axis."""
        return {one.name: dict(getattr(self, one.name)) for one in fields(self)}
