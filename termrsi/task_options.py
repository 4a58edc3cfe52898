"""The verbs of `termrsi tasks` and their options."""

from dataclasses import dataclass

from termrsi.errors import ConfigError
from termrsi.options import FLAG, NUMBER, Option, Verb

_STRICT = Option("strict", FLAG, "by Harbor's and terminal-bench's own rules: nothing is repaired")
_SUITE = (
    Option("levels", "1,2", "of the bundled suite; 1 if not given"),
    Option("families", "NAME,...", "of the bundled suite; all if not given"),
    Option("seeds", NUMBER, "of each family and level of the bundled suite; 4 if not given"),
)
_SANDBOXES = (
    Option("backend", "local|docker|gvisor", "what the sandboxes are; local if not given"),
    Option("jobs", NUMBER, "sandboxes at the same time; 1 if not given"),
    Option("kit", "DIR", "an offline verification kit to verify with"),
    Option("build_network", "none|host", "of a Dockerfile's RUN steps; none if not given"),
)
VERBS = (
    Verb("tasks list", "PATH|bundled", "tasks of a directory, and what was refused and why", (_STRICT, *_SUITE)),
    Verb("tasks show", "PATH|bundled", "all that is known of each, its verifier's contract too", (_STRICT, *_SUITE)),
    Verb(
        "tasks check",
        "PATH|bundled",
        "run each task's solution and an empty submission",
        (
            _STRICT,
            *_SANDBOXES,
            Option("attempts", NUMBER, "solutions and empty submissions of each task; 1 if not given"),
            Option("run", FLAG, "false: only what loading tells"),
            *_SUITE,
        ),
    ),
    Verb(
        "tasks audit",
        "PATH|bundled",
        "which tasks are fit to be trained on: gates in sandboxes, and judges",
        (
            _STRICT,
            *_SANDBOXES,
            Option("network", "none|host", "host: also in sandboxes with one, to tell which tasks need it"),
            Option("mutants", NUMBER, "broken copies of each solution; 8 if not given"),
            Option("out", "DIR", "where what was found is kept, and gone on from; in the cache if not given"),
            Option("judge", "URL", "an OpenAI-compatible server"),
            Option("judge_model", "NAME", "its model"),
            Option("judge_key_env", "VAR", "the variable that holds its key"),
            *_SUITE,
        ),
    ),
    Verb(
        "tasks kit",
        "PATH|bundled",
        "fetch once what their verifiers install, to verify without a network",
        (
            _STRICT,
            Option("out", "DIR", "where it is built; in the cache if not given"),
            Option("python", "3.N", "of the sandboxes; this machine's own python3 if not given"),
            *_SUITE,
        ),
    ),
)


@dataclass(slots=True, kw_only=True)
class Options:
    """What was given to one of the verbs; what it does not take stays as it is here."""

    strict: bool = False
    backend: str = "local"
    attempts: int = 1
    jobs: int = 1
    run: bool = True
    kit: str = ""
    build_network: str = "none"
    out: str = ""
    python: str = ""
    network: str = "none"
    mutants: int = 8
    judge: str = ""
    judge_model: str = ""
    judge_key_env: str = ""
    levels: str = ""
    families: str = ""
    seeds: int = 4

    @classmethod
    def of(cls, verb: str, path: str, words: list[str]) -> "Options":
        """From `key=value`. Raises ConfigError for an option that this verb, or these tasks, do not take."""
        entry = next(one for one in VERBS if one.name == f"tasks {verb}")
        given, where = entry.read(words, VERBS), f"termrsi {entry.name}"
        options = cls(**given)
        if path != "bundled" and (idle := next((option.name for option in _SUITE if option.name in given), "")):
            raise ConfigError(f"{idle}= chooses among the bundled suite, and has no effect on {path!r}", where, "take it away")
        if options.network == "host" and options.backend == "gvisor":
            raise ConfigError("the gvisor backend has no network", where, "valid: network=none, or another backend")
        if not all(level.isdigit() for level in options.levels.split(",") if options.levels):
            raise ConfigError(f"levels is {options.levels!r}", where, "valid: whole numbers with commas between")
        return options
