"""What makes a Harbor task directory unusable, which keys mean something, and what in its build context deserves a note."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path

from termrsi.errors import TaskError
from termrsi.tasks import harbor_schema

ROOT = frozenset(harbor_schema.Task.model_fields)
_MACHINE = ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir")
_OURS = ("environment.memory_gb", "environment.disk_gb")  # not Harbor's, but read
# What lenient loading repairs, or reads for itself, with a note.
_REPAIRED = re.compile(
    r"schema_version$|task(?:\.|$)|metadata|environment(?:$|\.(?:env|memory|storage|docker_image|cpus|allow_internet)\b)"
    r"|(?:verifier|solution|steps\.\d+\.verifier)\.env\b"
)
_HOST_VARIABLE = re.compile(r"\$\{(\w+)")


def unknown_keys(data: Mapping[str, object], *, strict: bool = False) -> Iterator[str]:
    """Dotted names of keys that have no meaning, in file order."""
    yield from (name for name in harbor_schema.unknown(data) if strict or name not in _OURS)


def not_done(data: Mapping[str, object]) -> Iterator[str]:
    """Keys with a meaning that nothing here carries out, as dotted names."""
    verifier = _sub(data, "verifier")
    yield from _not_done_of_phases(data, "")
    yield from (f"environment.{key}" for key in _MACHINE if _sub(data, "environment").get(key))
    yield from (f"verifier.environment.{key}" for key in (*_MACHINE, "healthcheck") if _sub(verifier, "environment").get(key))
    found = (name for step in steps(data) for name in _not_done_of_phases(step, "steps[]."))
    yield from dict.fromkeys(found)


def _not_done_of_phases(table: Mapping[str, object], place: str) -> Iterator[str]:
    agent, verifier = _sub(table, "agent"), _sub(table, "verifier")
    if agent.get("user") not in (None, "root", "0", 0):
        yield f"{place}agent.user"
    if place and agent.get("network_mode") is not None:
        yield f"{place}agent.network_mode"
    yield from (
        f"{place}{name}.allowed_hosts" for name, one in (("agent", agent), ("verifier", verifier)) if one.get("allowed_hosts")
    )
    if verifier.get("network_mode") is not None and not _is_separate(verifier):
        yield f"{place}verifier.network_mode"  # of the agent's own machine, which keeps what it has


def _is_separate(verifier: Mapping[str, object]) -> bool:
    return verifier.get("environment_mode") == "separate" or (
        verifier.get("environment_mode") is None and "environment" in verifier
    )


def check(root: Path, data: Mapping[str, object], *, strict: bool = False) -> None:
    """Raises TaskError, with all missing files in one line, or with the first key that has an impossible value.

    `strict`: whatever Harbor rejects; a task without any image is one, as there, where its start fails.
    """
    if strict and (line := harbor_schema.fault(data)):
        raise TaskError(line)
    environment = _sub(data, "environment")
    if "task" in data and not isinstance(_sub(data, "task").get("name"), str):
        return  # a file of another tool: the caller says so, which tells more than what is missing
    given = steps(data)
    if not strict:
        _check_keys(environment, "environment")
        _check_keys(_sub(data, "agent"), "agent")
        _check_verifier(_sub(data, "verifier"))
        _check_artifacts(data.get("artifacts"))
        if str(environment.get("os") or "linux").lower() != "linux":
            raise TaskError(f"task.toml: environment.os is {environment['os']!r}: only linux is run here")
        if wrong := next((line for place, line in harbor_schema.faults(data) if not _REPAIRED.match(place)), ""):
            raise TaskError(wrong)
    missing = [*_missing_files(root, environment, given, strict=strict), *_missing_tests(root, data, given)]
    if missing:
        unset = " and environment.docker_image is unset" if "environment/" in missing else ""
        raise TaskError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{unset}")
    if not strict and not _has_image(root, environment):
        raise TaskError(
            "no image: environment/ has neither Dockerfile nor docker-compose.yaml and environment.docker_image is unset"
        )
    _check_links(root)


def context_notes(folder: Path) -> Iterator[str]:
    """Remarks on the build context: a compose file that does not count or needs the host, sources that are not there."""
    if not (folder / "docker-compose.yaml").is_file():
        if odd := [name for name in ("docker-compose.yml", "compose.yaml", "compose.yml") if (folder / name).is_file()]:
            yield f"environment/{odd[0]} is ignored: only docker-compose.yaml counts"
    else:
        text = (folder / "docker-compose.yaml").read_text(encoding="utf-8", errors="replace")
        if not re.search(r"^\s+main:", text, re.MULTILINE):
            yield "environment/docker-compose.yaml has no service main"
        own = {"MAIN_IMAGE_NAME", "CONTEXT_DIR", "PREBUILT_IMAGE_NAME", "CPUS", "MEMORY"}
        if names := sorted(set(_HOST_VARIABLE.findall(text)) - own):
            yield f"environment/docker-compose.yaml uses variables of the host: {', '.join(names)}"
    if (folder / "Dockerfile").is_file():
        for source in _copy_sources((folder / "Dockerfile").read_text(encoding="utf-8", errors="replace")):
            if not any(folder.glob(source.strip("/") or "*")):
                yield f"environment/Dockerfile copies {source}, which is not there"


def _copy_sources(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split()
        if not words or words[0].upper() not in ("COPY", "ADD") or any(sign in line for sign in "[<$"):
            continue
        options = [word for word in words if word.startswith("--")]
        if not any(option.startswith("--from") for option in options):
            names = [word for word in words[1:] if not word.startswith("--")][:-1]
            yield from (
                re.sub(r"^\./", "", name) for name in names if "://" not in name and name not in (".", "./") and ".." not in name
            )


def _sub(data: Mapping[str, object], key: str) -> dict[str, object]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def steps(data: Mapping[str, object]) -> list[dict[str, object]]:
    """The `[[steps]]` tables. Raises TaskError for something else, and for names that are missing, equal or no folder's."""
    found = data.get("steps", [])
    if not isinstance(found, list) or not all(isinstance(step, dict) for step in found):
        raise TaskError("task.toml: steps is not an array of tables")
    names = [str(step.get("name", "")) for step in found]
    if len({unicodedata.normalize("NFC", name).casefold() for name in names}) < len(names):
        raise TaskError("task.toml: two steps have the same name")
    if bad := [name for name in names if name in ("", ".", "..") or "/" in name or len(name.encode()) > 255]:
        raise TaskError(f"task.toml: a step has the name {bad[0]!r}, which no folder can have")
    return found


def _missing_files(root: Path, environment: Mapping[str, object], steps: list[dict[str, object]], *, strict: bool) -> Iterator[str]:
    if not steps and not (root / "instruction.md").is_file():
        yield "instruction.md"
    gone = [name for step in steps if not (root / "steps" / (name := str(step.get("name"))) / "instruction.md").is_file()]
    if gone:
        yield f"steps/<name>/instruction.md (steps {', '.join(gone)})"
    image = environment.get("docker_image") or (environment.get("image") and not strict)
    if not (root / "environment").is_dir() and not image:
        yield "environment/"


def _missing_tests(root: Path, data: Mapping[str, object], steps: list[dict[str, object]]) -> Iterator[str]:
    """Of each step, or of the task: an image that bundles the tests, a script of its own, or the task's."""
    task = _sub(data, "verifier")
    for step in steps or [{}]:
        own = _sub(step, "verifier")
        folders = [root / "steps" / str(step.get("name")) / "tests"] if steps else []
        separate = _is_separate(own if own.get("environment_mode") or "environment" in own else task)
        levels = [*zip([own] if steps else [], folders, strict=True), (task, root / "tests")]
        if separate and any(_bundles(verifier, folder) for verifier, folder in levels):
            continue
        machine = (_sub(own, "environment") or _sub(task, "environment")) if separate else {}
        system = str(machine.get("os") or _sub(data, "environment").get("os") or "linux").lower()
        script = "test.bat" if system == "windows" else "test.sh"
        if not any((folder / script).is_file() for folder in (*folders, root / "tests")):
            yield f"tests/{script}" + (" (which no verifier image bundles)" if separate else "")
            return


def _bundles(verifier: Mapping[str, object], folder: Path) -> bool:
    files = any((folder / name).is_file() for name in ("Dockerfile", "docker-compose.yaml"))
    return files or bool(_sub(verifier, "environment").get("docker_image"))


def _has_image(root: Path, environment: Mapping[str, object]) -> bool:
    folder = root / "environment"
    files = (folder / "Dockerfile").is_file() or (folder / "docker-compose.yaml").is_file()
    return files or bool(environment.get("docker_image") or environment.get("image"))


def _check_keys(table: Mapping[str, object], where: str) -> None:
    mode, hosts = table.get("network_mode"), table.get("allowed_hosts")
    if mode is not None and mode not in ("public", "no-network", "allowlist"):
        raise TaskError(f"task.toml: {where}.network_mode is {mode!r}; it must be public, no-network or allowlist")
    if hosts is not None and mode != "allowlist":
        raise TaskError(f"task.toml: {where}.allowed_hosts needs network_mode allowlist")
    if isinstance(hosts, list) and (bad := [host for host in hosts if "://" in str(host)]):
        raise TaskError(f"task.toml: {where}.allowed_hosts has a URL, {bad[0]!r}; host names only")
    servers = table.get("mcp_servers", [])
    for i, server in enumerate(servers if isinstance(servers, list) else []):
        try:
            harbor_schema.checked_headers({key: str(value) for key, value in _sub(server, "headers").items()})
        except ValueError as error:
            raise TaskError(f"task.toml: {where}.mcp_servers[{i}].headers.{error}") from error


def _check_verifier(verifier: Mapping[str, object]) -> None:
    _check_keys(verifier, "verifier")
    _check_keys(_sub(verifier, "environment"), "verifier.environment")
    if verifier.get("environment_mode") == "shared" and "environment" in verifier:
        raise TaskError("task.toml: verifier.environment_mode is shared, so verifier.environment has no place")


def _check_artifacts(artifacts: object) -> None:
    for entry in artifacts if isinstance(artifacts, list) else []:
        target = entry.get("destination", "") if isinstance(entry, dict) else entry
        if ".." in Path(str(target)).parts:
            raise TaskError(f"task.toml: artifacts: {target!r} leaves its directory")


def _check_links(root: Path) -> None:
    base = root.resolve()
    for folder in ("tests", "solution", "steps"):
        for path in (root / folder, *sorted((root / folder).rglob("*"))):
            if path.is_symlink() and not path.resolve().is_relative_to(base):
                raise TaskError(f"{path.relative_to(root).as_posix()} is a link that leaves the task")
