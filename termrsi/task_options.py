"""The words of `termrsi tasks`."""

import difflib
from dataclasses import dataclass, fields

from termrsi.errors import ConfigError

VALID = (
    "termrsi tasks list|show|check|kit|audit PATH [strict=true] [backend=local|docker|gvisor] [attempts=N] [jobs=N] [run=false]"
    " [kit=DIR] [build_network=none|host] [network=none|host] [out=DIR] [python=3.N] [mutants=N]"
    " [judge=URL judge_model=NAME judge_key_env=VAR] [levels=1,2 families=NAME,... seeds=N]"
)


@dataclass(slots=True, kw_only=True)
class Options:
    """`python` is of kit, `attempts` and `run` of check, `mutants`, `network` and the judge of audit, `strict` of all."""

    strict: bool = False  # by Harbor's and terminal-bench's own rules
    backend: str = "local"
    attempts: int = 1  # solutions and empty submissions of each task
    jobs: int = 1  # sandboxes at the same time
    run: bool = True  # False: only what loading tells
    kit: str = ""  # an offline verification kit to verify with
    build_network: str = "none"  # or "host": of a Dockerfile's RUN steps
    out: str = ""  # where a kit is built, and what an audit found is kept; "": in the cache
    python: str = ""  # of the sandboxes; "": the version of this machine's own python3

    network: str = "none"  # or "host": sandboxes with one, to tell which tasks need it
    mutants: int = 8  # of each solution
    judge: str = ""  # an OpenAI-compatible server
    judge_model: str = ""
    judge_key_env: str = ""  # the variable that holds its key
    levels: str = ""  # of the bundled suite, with commas; "": 1
    families: str = ""  # likewise; "": all
    seeds: int = 4  # of each family and level

    @classmethod
    def of(cls, words: list[str]) -> "Options":
        """From `key=value`. Raises ConfigError that names the nearest key, or what a value must be."""
        known = {field.name: field.type for field in fields(cls)}
        options = cls()
        for word in words:
            key, given, value = word.partition("=")
            if not given or key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise ConfigError(f"unknown option {word!r}", "termrsi tasks", f"nearest: {near[0]}=" if near else VALID)
            if isinstance(getattr(options, key), bool):
                if value.lower() not in ("true", "false"):
                    raise ConfigError(f"{key} is {value!r}", "termrsi tasks", "valid: true or false")
                setattr(options, key, value.lower() == "true")
            elif isinstance(getattr(options, key), int):
                if not value.isdigit() or int(value) < 1:
                    raise ConfigError(f"{key} is {value!r}", "termrsi tasks", "valid: a whole number from 1 on")
                setattr(options, key, int(value))
            else:
                setattr(options, key, value)
        for key in ("build_network", "network"):
            if getattr(options, key) not in ("none", "host"):
                raise ConfigError(f"{key} is {getattr(options, key)!r}", "termrsi tasks", "valid: none or host")
        if options.network == "host" and options.backend == "gvisor":
            raise ConfigError("the gvisor backend has no network", "termrsi tasks", "valid: network=none, or another backend")
        if not all(level.isdigit() for level in options.levels.split(",") if options.levels):
            raise ConfigError(f"levels is {options.levels!r}", "termrsi tasks", "valid: whole numbers with commas between")
        return options
