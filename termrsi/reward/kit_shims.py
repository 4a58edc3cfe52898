#!/usr/bin/env python3
"""Stand-ins for installers, for a verifier without a network: one program under the names of all of them. Standard library only.

What an installation would bring lies beside it already, in `site`, and `provided.txt` names it; asked for anything else it fails
and says what is missing, so that the verifier is seen not to have run. No interpreter is chosen: whatever `-p` says, python3 runs.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
# Options of uv, uvx and pip that take a value, so that the value is not taken for a package.
VALUED = {
    *(
        "-p",
        "--python",
        "-i",
        "--index-url",
        "--extra-index-url",
        "--index",
        "--default-index",
        "-f",
        "--find-links",
        "-t",
        "--target",
    ),
    *("--prefix", "-c", "--constraint", "--python-version", "--directory", "--project", "--cache-dir", "--timeout", "--retries"),
    *("--trusted-host", "--root", "--link-mode", "--color", "--env-file", "--group", "--extra"),
}
# Debian packages without which a verifier gets on here, as what they bring is this program's work, or the image's.
HARMLESS = {"curl", "wget", "ca-certificates", "python3", "python3-pip", "python3-venv", "python-is-python3", "gnupg", "apt-utils"}
INSTALLER = """mkdir -p "$HOME/.local/bin"
printf 'export PATH="{bin}:$PATH"\\n' > "$HOME/.local/bin/env"
for name in uv uvx; do ln -sf "{bin}/$name" "$HOME/.local/bin/$name"; done
"""
# The image's pip, which the kit's `pip` would hide; the kit's packages stay importable for a build.
_IMAGES_PIP = """import runpy, sys
kit = sys.path.pop(sys.path.index(next(p for p in sys.path if p.endswith('/site'))))
sys.modules.pop('pip', None)
import pip
sys.path.append(kit)
sys.argv[0] = 'pip'
runpy.run_module('pip', run_name='__main__')
"""
ACTIVATE = 'export PATH="{bin}:$PATH"\ndeactivate() {{ :; }}\n'


def main(argv: list[str]) -> int:
    name, rest = Path(argv[0]).name, argv[1:]
    if name in ("curl", "wget"):
        return fetch(name, rest)
    if name in ("apt", "apt-get"):
        return apt(rest)
    if name in ("pip", "pip3"):
        return pip(rest)
    return uvx(rest) if name == "uvx" else uv(rest)


def key_of(requirement: str) -> tuple[str, str]:
    """(normal name, version or "") of `Name[extra]==1.2 ; marker`."""
    text = requirement.split(";")[0].split("#")[0].strip()
    found = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*(?:==\s*([^\s,]+))?", text)
    return (re.sub(r"[-_.]+", "-", found[1]).lower(), found[2] or "") if found else ("", "")


def missing(requirements: list[str]) -> list[str]:
    """Those that are not provided in the version asked for. A version that is not pinned is any."""
    there = dict(line.split("==", 1) for line in (HOME / "provided.txt").read_text().split())
    lacks = []
    for requirement in requirements:
        name, version = key_of(requirement)
        if name and (name not in there or (version and version != there[name])):
            lacks.append(requirement)
    return lacks


def told(requirements: list[str], who: str) -> int:
    """0 if all is provided, else 1 and a line that says what is not."""
    if lacks := missing(requirements):
        sys.stderr.write(f"{who}: the verification kit lacks {', '.join(lacks)}: no network, build it again with this task\n")
        return 1
    return 0


def words_of(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(words, requirements of -r files): options left out, with their values."""
    words: list[str] = []
    listed: list[str] = []
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word in ("-r", "--requirement", "--requirements") and at + 1 < len(arguments):
            lines = Path(arguments[at + 1]).read_text().splitlines() if Path(arguments[at + 1]).is_file() else []
            listed += [line for line in lines if line.strip() and not line.strip().startswith(("#", "-"))]
            at += 1
        elif word in VALUED:
            at += 1
        elif not word.startswith("-"):
            words.append(word)
        at += 1
    return words, listed


def pip(arguments: list[str]) -> int:
    words, listed = words_of(arguments)
    if words[:1] in (["install"], ["download"]):
        return told([*packages_of(words[1:]), *listed], "pip") or projects(words[1:])
    if words[:1] in (["list"], ["freeze"]):
        sys.stdout.write((HOME / "provided.txt").read_text())
        return 0
    if "--version" in arguments or words[:1] in (["check"], ["cache"], ["config"]):
        sys.stdout.write("pip 0 (verification kit)\n")
        return 0
    sys.stderr.write(f"pip: {' '.join(arguments)}: not something the verification kit can do\n")
    return 1


def packages_of(words: list[str]) -> list[str]:
    return [word for word in words if not is_project(word)]


def is_project(word: str) -> bool:
    """A directory to install, as pip takes it: `.`, `./x[extra]`, `/app`."""
    return word.startswith((".", "/"))


def projects(words: list[str]) -> int:
    """Installs directories with the image's own pip, and with what is there: 0 if all could be."""
    for word in words:
        if is_project(word):
            here = {**os.environ, "PATH": others_path(), "PYTHONPATH": str(HOME / "site")}
            argv = ["python3", "-c", _IMAGES_PIP, "install", "--no-index", "--no-deps", "--no-build-isolation", word]
            if code := subprocess.run(argv, env={**here, "PIP_BREAK_SYSTEM_PACKAGES": "1"}, check=False).returncode:
                sys.stderr.write(f"pip: {word} could not be installed with what is in the image: no network\n")
                return code
    return 0


def others_path() -> str:
    """PATH without the kit's own programs."""
    return ":".join(p for p in os.environ.get("PATH", "").split(":") if Path(p).resolve() != HOME / "bin")


def uv(arguments: list[str]) -> int:
    words, listed = words_of(arguments)
    match words:
        case ["pip", "install", *packages]:
            return told([*packages_of(packages), *listed], "uv") or projects(packages)
        case ["add", *packages] | ["tool", "install", *packages]:
            return told([*packages, *listed], "uv")
        case ["venv", *places]:
            return venv(Path(places[0] if places else ".venv"))
        case ["tool", "run", *_]:
            return uvx(arguments[arguments.index("run") + 1 :])
        case ["run", *_]:
            return uvx(arguments[arguments.index("run") + 1 :])
        case ["init" | "sync" | "lock" | "python" | "self" | "cache" | "pip", *_] | []:
            if "--version" in arguments or "-V" in arguments:
                sys.stdout.write("uv 0 (verification kit)\n")
            return 0
        case _:
            sys.stderr.write(f"uv: {' '.join(arguments)}: not something the verification kit can do\n")
            return 1


def uvx(arguments: list[str]) -> int:
    """Runs a program with packages: `[-p V] [-w PACKAGE] [--from PACKAGE] PROGRAM ARGUMENT ...`."""
    packages: list[str] = []
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        option, given, value = arguments[at].partition("=")
        takes = option in ("-w", "--with", "--from", "--with-requirements", *VALUED)
        if takes and not given:
            at += 1
            value = arguments[at] if at < len(arguments) else ""
        if option in ("-w", "--with", "--from"):
            packages += [one for one in re.split(r",(?=\s*[A-Za-z])", value) if one.strip()]
        at += 1
    if at >= len(arguments):
        sys.stderr.write("uvx: no program to run\n")
        return 2
    program, *rest = arguments[at:]
    if at_version := re.fullmatch(r"([A-Za-z][\w.-]*)@([\w.]+)", program):
        program = at_version[1]
        packages += [program if at_version[2] == "latest" else f"{program}=={at_version[2]}"]
    if program in ("-m",):
        program, rest = "python3", ["-m", *rest]
    if lacks := told(packages, "uvx"):
        return lacks
    if program.endswith(".py") and Path(program).is_file():
        program, rest = "python3", [program, *rest]
    found = shutil.which("python3" if program == "python" else program)
    if found is None:
        sys.stderr.write(f"uvx: there is no {program} in the verification kit or the image\n")
        return 127
    return subprocess.run([found, *rest], check=False).returncode


def venv(place: Path) -> int:
    """A directory that can be activated: its programs are the kit's."""
    (place / "bin").mkdir(parents=True, exist_ok=True)
    (place / "bin" / "activate").write_text(ACTIVATE.format(bin=HOME / "bin"))
    for name in ("python", "python3"):
        target = shutil.which("python3")
        if target and not (place / "bin" / name).exists():
            (place / "bin" / name).symlink_to(target)
    return 0


def fetch(name: str, arguments: list[str]) -> int:
    """uv's installer, whose work is done; else the image's own program, which will find no network."""
    if any("astral.sh/uv" in word or "github.com/astral-sh/uv" in word for word in arguments):
        target = next((arguments[at + 1] for at, word in enumerate(arguments[:-1]) if word in ("-o", "-O", "--output")), "")
        text = INSTALLER.format(bin=HOME / "bin")
        if target and not (name == "wget" and target == "-"):
            Path(target).write_text(text)
        else:
            sys.stdout.write(text)
        return 0
    real = shutil.which(name, path=others_path())
    if real is not None:
        return subprocess.run([real, *arguments], check=False).returncode
    sys.stderr.write(f"{name}: no network, and the verification kit has nothing of {' '.join(arguments)}\n")
    return 6


def apt(arguments: list[str]) -> int:
    words, _ = words_of(arguments)
    if words[:1] != ["install"]:
        return 0
    lacks = [word for word in words[1:] if word.split("=")[0] not in HARMLESS and shutil.which(word.split("=")[0]) is None]
    if lacks:
        sys.stderr.write(f"E: Unable to locate package {lacks[0]}: no network, and it is neither in the image nor in the kit\n")
        return 100
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
