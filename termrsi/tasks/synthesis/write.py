"""A draft becomes a Harbor task directory. What is the synthesis's own, and Harbor never uploads: `truth.md`, `initial/test.sh`.

instruction.md · task.toml (blueprint under [metadata.blueprint]) · environment/ · tests/test.sh · solution/ · initial/ · truth.md
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from termrsi.tasks.bundled.write import put, test_script

INITIAL = "initial/test.sh"
VERIFIER_TIMEOUT_S = 300.0
BUILD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Draft:
    """All the text of one task. `checks`: name -> bash, see `bundled.recipe.Recipe`; `scripts`: files that they may run.

    `files` lie in /app, where agent, checks and solution run. `solution` may be empty.
    """

    instruction: str
    initial_test: str
    checks: Mapping[str, str]
    dockerfile: str
    family: str
    level: int
    agent_timeout_s: float
    truth: str = ""
    scripts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    compose: str = ""
    solution: str = ""


def dockerfile(image: str, *, files: bool, setup: bool) -> str:
    """For an author who wrote none."""
    lines = [f"FROM {image}", "WORKDIR /app"]
    lines += ["COPY files/ /app/"] * files
    lines += ["COPY setup.sh /tmp/setup.sh", "RUN bash /tmp/setup.sh && rm /tmp/setup.sh"] * setup
    return "\n".join(lines) + "\n"


def write(folder: Path, draft: Draft, metadata: Mapping[str, str | int | tuple[str, ...]]) -> None:
    """Into a directory that is not there yet. `metadata`: what stands under [metadata.blueprint]."""
    put(folder / "instruction.md", draft.instruction.strip("\n") + "\n")
    put(folder / "task.toml", _config(draft, metadata))
    if draft.truth:
        put(folder / "truth.md", draft.truth)
    put(folder / INITIAL, draft.initial_test, mode=0o755)
    environment = folder / "environment"
    put(environment / "Dockerfile", draft.dockerfile)
    for name, text in (("setup.sh", draft.setup), ("docker-compose.yaml", draft.compose)):
        if text:
            put(environment / name, text)
    for name, text in draft.files.items():
        put(environment / "files" / name, text, mode=0o755 if text.startswith("#!") else 0o644)
    (environment / "files").mkdir(exist_ok=True)
    put(folder / "tests" / "test.sh", test_script(draft.checks), mode=0o755)
    for name, text in draft.scripts.items():
        put(folder / "tests" / name, text, mode=0o755)
    if draft.solution:
        put(folder / "solution" / "solve.sh", f"#!/bin/bash\nset -e\ncd /app\n{draft.solution}", mode=0o755)


def _config(draft: Draft, metadata: Mapping[str, str | int | tuple[str, ...]]) -> str:
    rows = "".join(f"{key} = {_toml(value)}\n" for key, value in metadata.items())
    return f"""schema_version = "1.2"

[metadata]
family = {_toml(draft.family)}
level = {draft.level}
split = "train"

[metadata.blueprint]
{rows}
[agent]
timeout_sec = {draft.agent_timeout_s}

[verifier]
timeout_sec = {VERIFIER_TIMEOUT_S}

[environment]
allow_internet = false
build_timeout_sec = {BUILD_TIMEOUT_S}
"""


def _toml(value: str | int | tuple[str, ...]) -> str:
    """JSON's strings, numbers and lists are TOML's, but for one character."""
    plain = list(value) if isinstance(value, tuple) else value
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")
