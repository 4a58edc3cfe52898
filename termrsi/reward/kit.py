"""An offline verification kit: what verifiers install at test time, fetched once, and stand-ins for the installers.

Most published verifiers fetch uv, pytest and pytest-json-ctrf from the network before they test. `build` reads which packages the
test scripts of a collection ask for, has pip fetch each distinct set once, and lays beside it programs under the names of curl, uv,
uvx, pip and apt-get (`kit_shims`). A verifier is given the set of its own task, under `PLACE`, after the agent has ended; an agent
never sees it. What is asked for and not in the kit fails by name: the verifier has not run then, and nothing is scored.

    KIT/kit.json               the Python version it is for, and which set each script needs
    KIT/sets/<hash>/site       packages, importable
    KIT/sets/<hash>/bin        their programs, and the stand-ins
    KIT/sets/<hash>/provided.txt
"""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from termrsi.errors import ConfigError, TaskError
from termrsi.reward import kit_shims

PLACE = "/opt/termrsi-kit"
ALWAYS = (
    "pytest==8.4.1",
    "pytest-json-ctrf==0.3.5",
)  # of a set that pins neither: what 81 and 82 of Terminal-Bench 2's 89 tasks pin
NAMES = ("curl", "wget", "uv", "uvx", "pip", "pip3", "apt", "apt-get")
SCRIPTS = ("tests/test.sh", "run-tests.sh")
FETCH_S = 900.0
_PIP = (
    '"""Stands for `python3 -m pip`."""\n'
    'import runpy, sys\nsys.argv[0] = "{bin}/pip"\nrunpy.run_path("{bin}/pip", run_name="__main__")\n'
)
_ENDS = {";", "&&", "||", "|", "&", "(", ")", "{", "}", "then", "do", "else", "fi", "done"}


@dataclass(frozen=True, slots=True)
class Kit:
    """A kit that was built."""

    root: Path

    def part(self, task_path: Path | str) -> Path | None:
        """The directory for a task's verifier; None if its script installs nothing. Raises TaskError if the kit lacks its set."""
        needs = requirements(Path(task_path))
        if needs is None:
            return None
        part = self.root / "sets" / _key(needs)
        if not part.is_dir():
            raise TaskError(f"the verification kit lacks {', '.join(needs)}", str(task_path), "termrsi tasks kit PATH out=DIR")
        return part


def opened(root: Path | str) -> Kit:
    """Raises ConfigError if there is no kit."""
    if not (Path(root) / "kit.json").is_file():
        raise ConfigError(f"no verification kit at {str(root)!r}", "tasks.kit", "termrsi tasks kit PATH out=DIR builds one")
    return Kit(Path(root))


def requirements(task: Path) -> tuple[str, ...] | None:
    """What a task's test scripts install, those of its steps and those that they name too, sorted, with pytest where they name
    none; None if they fetch neither packages nor uv."""
    scripts = [path for name in SCRIPTS if (path := task / name).is_file()][:1] + sorted(task.glob("steps/*/tests/test.sh"))
    others = [path for place in ("tests", "steps/*/tests") for path in sorted(task.glob(f"{place}/**/*.sh")) if path.is_file()]
    found: dict[str, str] = {}
    installs = False
    for script in scripts:  # grows meanwhile
        text = script.read_text(encoding="utf-8", errors="replace")
        scripts += [path for path in others if path not in scripts and path.name in text]
        for command in _commands(text):
            asked = _asked(command, script.parent)
            installs = installs or asked is not None
            for one in asked or ():
                found.setdefault(kit_shims.key_of(one)[0], one)
    if not installs:
        return None
    for one in ALWAYS:
        found.setdefault(kit_shims.key_of(one)[0], one)
    return tuple(sorted(found.values()))


def build(root: Path, tasks: list[Path], *, python: str, say: Callable[[str], None] = lambda _: None) -> Kit:
    """Fetches what is not there yet. `python`: the version that runs in the sandboxes, like 3.11. Raises ConfigError.

    A set that cannot be fetched is told and left out: verifiers that need it are refused by name.
    """
    if not re.fullmatch(r"3\.\d+", python):
        raise ConfigError(f"python is {python!r}", "termrsi tasks kit", "valid: a version like 3.11")
    (root / "sets").mkdir(parents=True, exist_ok=True)
    scripts: dict[str, str] = {}
    for task in tasks:
        needs = requirements(task)
        if needs is None:
            continue
        key = _key(needs)
        scripts[str(task)] = key
        if not (root / "sets" / key).is_dir():
            say(f"fetching {', '.join(needs)}")
            if problem := _fetch(root / "sets" / key, needs, python):
                say(f"left out, for {task}: {problem}")
    (root / "kit.json").write_text(json.dumps({"python": python, "scripts": scripts}, indent=1) + "\n")
    return Kit(root)


def _fetch(part: Path, needs: tuple[str, ...], python: str) -> str:
    """One set, whole or not at all. Why not, else ""."""
    draft = part.with_name(f"{part.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "bin").mkdir(parents=True)
    target = ["--target", str(draft / "site"), "--python-version", python, "--only-binary", ":all:"]
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *target, *needs]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pip took longer than {FETCH_S:.0f} s"
    if done.returncode != 0:
        shutil.rmtree(draft, ignore_errors=True)
        return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    programs = draft / "site" / "bin"
    for program in sorted(programs.iterdir()) if programs.is_dir() else []:
        lines = program.read_text(encoding="utf-8", errors="replace").split("\n")
        (draft / "bin" / program.name).write_text("\n".join(["#!/usr/bin/env python3", *lines[1:]]))
        (draft / "bin" / program.name).chmod(0o755)
    shutil.rmtree(programs, ignore_errors=True)
    for name in NAMES:
        shutil.copyfile(Path(kit_shims.__file__), draft / "bin" / name)
        (draft / "bin" / name).chmod(0o755)
    (draft / "site" / "pip").mkdir(exist_ok=True)
    (draft / "site" / "pip" / "__init__.py").write_text("")
    (draft / "site" / "pip" / "__main__.py").write_text(_PIP.format(bin=f"{PLACE}/bin"))
    there = {kit_shims.key_of(d.metadata["Name"])[0]: d.version for d in metadata.distributions(path=[str(draft / "site")])}
    (draft / "provided.txt").write_text("".join(f"{name}=={version}\n" for name, version in sorted(there.items())))
    draft.rename(part)
    return ""


def _key(needs: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(needs).encode()).hexdigest()[:16]


def _commands(script: str) -> Iterator[list[str]]:
    """Simple commands of a shell script, as words. What the shell would expand stays as it is written."""
    for line in script.replace("\r\n", "\n").replace("\\\n", " ").split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            for word in lexer:
                if word in _ENDS or set(word) <= set(";&|()"):
                    yield words
                    words = []
                else:
                    words.append(word)
        except ValueError:  # a quote that is closed on another line: a here-document, most likely
            words = []
        yield words


def _asked(words: list[str], folder: Path) -> list[str] | None:
    """The packages that one command installs; None if it is no command of that sort."""
    while words and (
        "=" in words[0] or words[0] in ("sudo", "env", "exec", "if", "!", "time", "timeout", "-E", "&&") or words[0].isdigit()
    ):
        words = words[1:]
    match words:
        case ["uvx", *rest] | ["uv", "tool", "run", *rest] | ["uv", "run", *rest]:
            return _with(rest)
        case ["curl" | "wget", *rest] if any("astral.sh/uv" in word or "github.com/astral-sh/uv" in word for word in rest):
            return []
        case ["uv", "pip", "install", *rest] | ["uv", "add", *rest] | ["uv", "tool", "install", *rest]:
            return _listed(rest, folder)
        case ["pip" | "pip3" | "uv", "install", *rest] | ["python" | "python3", "-m", "pip", "install", *rest]:
            return _listed(rest, folder)
    return None


def _with(words: list[str]) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-"):
        option, given, value = words[at].partition("=")
        if option in ("-w", "--with", "--from", *kit_shims.VALUED) and not given:
            at += 1
            value = words[at] if at < len(words) else ""
        if option in ("-w", "--with", "--from"):
            found += [one for one in re.split(r",(?=\s*[A-Za-z])", value) if one.strip()]
        at += 1
    if at < len(words) and (pinned := re.fullmatch(r"([A-Za-z][\w.-]*)@([\w.]+)", words[at])):
        found.append(pinned[1] if pinned[2] == "latest" else f"{pinned[1]}=={pinned[2]}")
    return [one for one in found if kit_shims.key_of(one)[0] and "$" not in one]


def _listed(words: list[str], folder: Path) -> list[str]:
    """Packages of an install command, those of a requirements file among the tests included."""
    plain, _ = kit_shims.words_of([word for at, word in enumerate(words) if not _of_file(words, at)])
    files = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("-r", "--requirement", "--requirements")]
    for name in files:
        path = folder / Path(name).name
        if path.is_file():
            lines = (line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
            plain += [line for line in lines if line and not line.startswith(("#", "-"))]
    return [
        one for one in plain if kit_shims.key_of(one)[0] and "$" not in one and "/" not in one and one not in (".", "pip", "uv")
    ]


def _of_file(words: list[str], at: int) -> bool:
    flags = ("-r", "--requirement", "--requirements")
    return words[at] in flags or (at > 0 and words[at - 1] in flags)
