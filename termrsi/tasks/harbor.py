"""One Harbor task directory to a `TaskSpec` (schemas 1.0 to 1.4). The verifier's side is left to `reward.verifier`.

Lenient: what authors get wrong and can be read without guessing is repaired, with a note; a directory that could not run is
refused with one line that names the file and the key. Keys without a meaning are noted, never dropped without a word.

Strict: as Harbor 0.26 does it. What it rejects is refused, what it passes over (a size that is a bare number, keys of others) is
passed over, and what it opens, though it could never start, is a task. One thing more is refused: a number that is read here and is
`true`, infinite or none, which Harbor takes and cannot keep.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from termrsi.errors import TaskError
from termrsi.places import in_words
from termrsi.records import EnvironmentSpec, Healthcheck, LoadResult, SkippedTask, StepSpec, TaskSpec
from termrsi.tasks import harbor_rules

LEVELS = {"easy": 1, "medium": 2, "hard": 3}
DEFAULT_BUILD_TIMEOUT_S = 600.0

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*$", re.IGNORECASE)
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
_IMAGE = re.compile(r"^[a-z0-9][a-z0-9._\-/:]*(?:@sha256:[0-9a-f]{64}|:[\w.\-]+)?$")
_PLACEHOLDERS = {"local-build", "placeholder", "todo", "none"}


@dataclass(slots=True)
class Notes:
    """Collects what was repaired or ignored in one task directory; in strict mode a repair is a refusal."""

    where: str
    strict: bool = False
    lines: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.lines.append(f"{self.where}: {text}")

    def repair(self, text: str) -> None:
        """Of what the format's own loader rejects. Raises TaskError in strict mode."""
        if self.strict:
            raise TaskError(f"strict: {text}")
        self.add(text)


def load(path: Path | str, *, strict: bool = False) -> LoadResult:
    """The task of one directory: one `TaskSpec`, or one `SkippedTask` with the reason."""
    root = Path(path)
    notes = Notes(str(root), strict)
    try:
        task = _task(root, notes)
    except TaskError as error:
        return LoadResult((), (SkippedTask(str(root), str(error)),), tuple(notes.lines))
    except Exception as error:  # noqa: BLE001 what authors write knows no bounds: one directory must not take a collection with it
        return LoadResult((), (SkippedTask(str(root), unforeseen(error)),), tuple(notes.lines))
    return LoadResult((task,), (), tuple(notes.lines))


def unforeseen(error: Exception) -> str:
    """A reason of one line."""
    return f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def read_config(root: Path, notes: Notes) -> dict[str, object]:
    """task.toml as a table. Raises TaskError if it is missing, not UTF-8 or not TOML."""
    file = root / "task.toml"
    if not file.is_file():
        raise TaskError("task.toml is missing")
    raw = file.read_bytes()
    if raw.startswith(b"\xef\xbb\xbf"):
        raw = raw[3:]
        notes.repair("task.toml: byte-order mark removed")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TaskError(f"task.toml is not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"task.toml: {error}") from error


def table(data: Mapping[str, object], key: str) -> dict[str, object]:
    """A table that may be absent. Raises TaskError if it is something else."""
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise TaskError(f"task.toml: {key} is not a table")
    return value


def number(data: Mapping[str, object], key: str, where: str) -> float | None:
    """A finite number, also written as a string; None if absent. Raises TaskError for anything else."""
    value = data.get(key)
    if value is None:
        return None
    try:
        found = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise TaskError(f"task.toml: {where}.{key} is {value!r}, not a number")
    return found


def _task(root: Path, notes: Notes) -> TaskSpec:
    data = read_config(root, notes)
    for key in ("task", "metadata", "agent", "verifier", "environment", "solution"):
        table(data, key)
    harbor_rules.check(root, data, strict=notes.strict)
    for key in harbor_rules.unknown_keys(data, strict=notes.strict):
        notes.add(f"task.toml: unknown key {key}")
    for key in harbor_rules.not_done(data):
        notes.add(f"task.toml: not carried out: {key}")
    version = data.get("schema_version", data.get("version"))
    if version is not None and not isinstance(version, str):
        notes.repair(f'task.toml: version read as "{version}"')
    metadata, agent = table(data, "metadata"), table(data, "agent")
    if not notes.strict:
        for where in ("agent", "verifier"):
            seconds = number(table(data, where), "timeout_sec", where)
            if seconds is not None and seconds <= 0:
                raise TaskError(f"task.toml: {where}.timeout_sec is {seconds:g}; it must be more than 0")
    for script in sorted({*root.glob("tests/*.sh"), *root.glob("solution/*.sh"), *root.glob("steps/*/*/*.sh")}):
        if b"\r\n" in script.read_bytes():
            notes.add(f"CRLF {'stays' if notes.strict else '-> LF'} in {script.relative_to(root).as_posix()}")
    for where in ("verifier", "solution"):
        _variables(table(data, where), where, notes)
    for name in ("trajectory.json", ".harborignore"):
        if (root / name).is_file():
            notes.add(f"not carried out: {name}")
    name = _id(root, data, notes)  # first: it tells files of other tools
    steps = _steps(root, data, notes)
    return TaskSpec(
        id=name,
        family=str(metadata.get("family") or metadata.get("category") or "default"),
        instruction="\n\n".join(step.instruction for step in steps) or without_canary(_text(root / "instruction.md")),
        path=str(root),
        environment=_environment(root, data, notes, str(version)),
        level=_level(metadata),
        split=str(metadata.get("split", "")),
        agent_timeout_s=number(agent, "timeout_sec", "agent"),
        steps=steps,
        last_step_counts=data.get("multi_step_reward_strategy") == "final",
    )


def _id(root: Path, data: Mapping[str, object], notes: Notes) -> str:
    directory = root.resolve().name
    if "task" not in data:
        return directory
    name = table(data, "task").get("name")
    if not isinstance(name, str):
        odd = [f"[{key}]" for key in data if key not in harbor_rules.ROOT]
        raise TaskError(
            "task.toml: [task].name is missing" + (f" (not a Harbor task: {', '.join(odd)} are unknown)" if odd else "")
        )
    if _NAME.match(name) and ".." not in name:
        return name
    notes.repair(f"task.toml: [task].name {name!r} is not org/name: the directory name is used")
    return directory


def _level(metadata: Mapping[str, object]) -> int:
    level = metadata.get("level")
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    return LEVELS.get(str(metadata.get("difficulty", "")).lower(), 1)


def _steps(root: Path, data: Mapping[str, object], notes: Notes) -> tuple[StepSpec, ...]:
    found = []
    for table_ in harbor_rules.steps(data):
        name = str(table_.get("name"))
        where = f"steps[{name}]"
        agent = table_.get("agent", {})
        if not isinstance(agent, dict):
            raise TaskError(f"task.toml: {where}.agent is not a table")
        least = table_.get("min_reward")
        if isinstance(least, dict):
            if odd := [key for key in least if key != "reward"]:
                notes.add(f"task.toml: {where}.min_reward of {', '.join(odd)} is not compared: only that of reward is")
            least = least.get("reward")
        found.append(
            StepSpec(
                name=name,
                instruction=without_canary(_text(root / "steps" / name / "instruction.md")),
                agent_timeout_s=number(agent, "timeout_sec", f"{where}.agent"),
                min_reward=number({"min_reward": least}, "min_reward", where),
                healthcheck=_healthcheck(table_, where),
            )
        )
    return tuple(found)


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise TaskError(f"{file.name} is not UTF-8 at byte {error.start}") from error


def without_canary(text: str) -> str:
    """Leading canary lines (HTML comments or `#` lines that say so) and the blank lines after them are removed."""
    lines = text.split("\n")
    while lines and "canary" in lines[0].lower() and lines[0].strip().startswith(("<!--", "#")):
        lines.pop(0)
        while lines and not lines[0].strip():
            lines.pop(0)
    return "\n".join(lines).strip("\n")


def _environment(root: Path, data: Mapping[str, object], notes: Notes, version: str) -> EnvironmentSpec:
    env, agent = table(data, "environment"), table(data, "agent")
    folder = root / "environment"
    # Authors up to schema 1.1 relied on these defaults; later ones, and those who say none, meant "no limit".
    limited = not notes.strict and bool(re.match(r"^(?:0|1\.[01])(?:\.|$)|^1$", version))
    memory, storage = _size(env, "memory", notes), _size(env, "storage", notes)
    memory = _first(memory, _gigabytes(env, "memory_gb", "memory_mb", notes), 2048 if limited else None)
    storage = _first(storage, _gigabytes(env, "disk_gb", "storage_mb", notes), 10240 if limited else None)
    cpus = number(env, "cpus", "environment")
    for line in harbor_rules.context_notes(folder):
        notes.add(line)
    return EnvironmentSpec(
        context=str(folder) if folder.is_dir() else "",
        docker_image=_image(env, folder, notes),
        workdir=str(env["workdir"]) if env.get("workdir") else None,
        cpus=cpus if cpus is not None else (1.0 if limited else None),
        memory_mb=memory,
        storage_mb=storage,
        network=_network(env, notes) if agent.get("network_mode") is None else agent["network_mode"] == "public",
        env=_variables(env, "environment", notes),
        build_timeout_s=number(env, "build_timeout_sec", "environment") or DEFAULT_BUILD_TIMEOUT_S,
        healthcheck=_healthcheck(env, "environment"),
    )


def _healthcheck(data: Mapping[str, object], place: str) -> Healthcheck | None:
    given, where = data.get("healthcheck"), f"{place}.healthcheck"
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("command"), str):
        raise TaskError(f"task.toml: {where} has no command")
    known = {"interval_s": "interval_sec", "timeout_s": "timeout_sec", "start_period_s": "start_period_sec"}
    known["start_interval_s"] = "start_interval_sec"
    seconds = {name: found for name, key in known.items() if (found := number(given, key, where)) is not None}
    retries = number(given, "retries", where)
    return Healthcheck(given["command"], **seconds, retries=3 if retries is None else int(retries))


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _size(env: Mapping[str, object], key: str, notes: Notes) -> int | None:
    """`memory_mb`, or the older `memory` as text. A bare number of `memory` is read as MB."""
    exact = number(env, f"{key}_mb", "environment")
    value = env.get(key)
    if notes.strict and value is not None and not isinstance(value, str):
        notes.add(f"task.toml: environment.{key} {value!r} is not text: it is passed over")
        value = None
    if value is None:
        return None if exact is None else int(exact)
    match = _SIZE.match(str(value))
    if match is None or isinstance(value, bool):
        raise TaskError(f"task.toml: environment.{key} is {value!r}, not a size like 2G")
    factor = {"k": 1 / 1024, "m": 1.0, "": 1.0, "g": 1024.0, "t": 1024.0**2}[match[2].lower()]
    size = int(float(match[1]) * factor)
    if exact is not None and int(exact) != size:
        raise TaskError(f"task.toml: environment.{key} and environment.{key}_mb disagree")
    if not isinstance(value, str):
        notes.add(f"task.toml: environment.{key} {value} read as {key}_mb {size}")
    elif not re.fullmatch(r"\s*\d+(?:\.\d+)?[kmg]\s*", value, re.IGNORECASE):
        notes.repair(f'task.toml: environment.{key} "{value}" -> {key}_mb {size}')
    return size


def _gigabytes(env: Mapping[str, object], key: str, target: str, notes: Notes) -> int | None:
    value = None if notes.strict else number(env, key, "environment")
    if value is None:
        return None
    notes.add(f"task.toml: environment.{key} {value:g} -> {target} {int(value * 1024)}")
    return int(value * 1024)


def _image(env: Mapping[str, object], folder: Path, notes: Notes) -> str | None:
    image = str(env.get("docker_image") or "") or None
    if notes.strict:
        return image
    has_dockerfile = (folder / "Dockerfile").is_file()
    if image is None and env.get("image") and not has_dockerfile:
        notes.add(f"task.toml: environment.image {env['image']!r} -> docker_image")
        image = str(env["image"])
    if image and has_dockerfile and (image.lower() in _PLACEHOLDERS or not _IMAGE.match(image)):
        notes.add(f"task.toml: environment.docker_image {image!r} cannot be pulled: the Dockerfile is used")
        return None
    return image


def _network(env: Mapping[str, object], notes: Notes) -> bool:
    mode = env.get("network_mode")
    if mode == "allowlist":
        notes.add("task.toml: environment.network_mode allowlist is not supported: no network")
    if mode is not None:
        return mode == "public"
    allowed = env.get("allow_internet", True)
    return str(allowed).lower() not in ("false", "0", "no", "off")


def _variables(env: Mapping[str, object], where: str, notes: Notes) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in table(env, "env").items():
        if not isinstance(value, str):
            notes.repair(f'task.toml: {where}.env.{key} read as "{in_words(value)}"')
        found[key] = in_words(value)
    return found
