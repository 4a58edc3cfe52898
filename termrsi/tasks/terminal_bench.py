"""One Terminal-Bench 1.x task directory (task.yaml) to a `TaskSpec`.

Compose files are read for notes; the image is the Dockerfile beside task.yaml. The verifier's side is `reward.terminal_bench`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from termrsi.errors import TaskError
from termrsi.records import EnvironmentSpec, LoadResult, SkippedTask, TaskSpec
from termrsi.reward import terminal_bench
from termrsi.tasks.harbor import LEVELS, Notes, number, unforeseen, without_canary

DEFAULT_AGENT_TIMEOUT_S = 360.0

_KNOWN = frozenset(
    [
        "instruction",
        "difficulty",
        "author_name",
        "author_email",
        "category",
        "tags",
        "parser_name",
        "max_agent_timeout_sec",
        "max_test_timeout_sec",
        "run_tests_in_same_shell",
        "disable_asciinema",
        "estimated_duration_sec",
        "expert_time_estimate_min",
        "junior_time_estimate_min",
        "descriptions",
    ]
)


def load(path: Path | str, *, strict: bool = False) -> LoadResult:
    """The task of one directory: one `TaskSpec`, or one `SkippedTask` with the reason. `strict`: as terminal-bench 0.2.18."""
    root = Path(path)
    notes = Notes(str(root), strict)
    try:
        task = _task(root, notes)
    except TaskError as error:
        return LoadResult((), (SkippedTask(str(root), str(error)),), tuple(notes.lines))
    except Exception as error:  # noqa: BLE001 as in `harbor.load`
        return LoadResult((), (SkippedTask(str(root), unforeseen(error)),), tuple(notes.lines))
    return LoadResult((task,), (), tuple(notes.lines))


def _task(root: Path, notes: Notes) -> TaskSpec:
    data = _config(root, notes)
    strict = notes.strict
    missing = [name for name in ("docker-compose.yaml", "run-tests.sh") if not (root / name).is_file()]
    if missing and not strict:
        raise TaskError(f"{' and '.join(missing)} missing")
    for key in data:
        if key not in _KNOWN:
            notes.add(f"task.yaml: unknown key {key}")
    if strict and "difficulty" not in data:
        raise TaskError("task.yaml: difficulty is missing")
    difficulty = data.get("difficulty", "unknown")
    if difficulty not in (*LEVELS, "unknown"):
        notes.repair(f"task.yaml: difficulty {difficulty} -> unknown")
    if (root / "docker-compose.yaml").is_file():
        _compose_notes(root, notes)
    if data.get("parser_name", "pytest") == "pytest" and not _prints_summary(root):
        notes.add("run-tests.sh calls pytest without -rA: it is added for the summary")
    if "parser_name" in data and data["parser_name"] not in terminal_bench.PARSERS and not strict:
        valid = ", ".join(terminal_bench.PARSERS)
        raise TaskError(f"task.yaml: parser_name {data['parser_name']!r} is not known; valid: {valid}")
    for script in sorted({*root.glob("*.sh"), *root.glob("tests/*.sh")}):
        if b"\r\n" in script.read_bytes():
            notes.add(f"CRLF {'stays' if strict else '-> LF'} in {script.relative_to(root).as_posix()}")
    if data.get("run_tests_in_same_shell"):
        notes.add("task.yaml: not carried out: run_tests_in_same_shell; the tests have a shell of their own")
    timeout_s = number(data, "max_agent_timeout_sec", "task.yaml")
    number(data, "max_test_timeout_sec", "task.yaml")
    return TaskSpec(
        id=root.resolve().name,
        family=str(data.get("category") or "default"),
        instruction=_instruction(data, notes),
        path=str(root),
        environment=EnvironmentSpec(context=str(root), docker_image=_image(root, notes), cpus=1.0, memory_mb=2048, network=True),
        level=LEVELS.get(str(difficulty), 1),
        split="",
        agent_timeout_s=DEFAULT_AGENT_TIMEOUT_S if timeout_s is None else timeout_s,
    )


def _config(root: Path, notes: Notes) -> dict[str, object]:
    file = root / "task.yaml"
    if not file.is_file():
        raise TaskError("task.yaml is missing")
    if file.read_bytes().startswith(b"\xef\xbb\xbf"):
        notes.add("task.yaml: byte-order mark removed")
    try:
        data = yaml.safe_load(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TaskError(f"task.yaml is not UTF-8 at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise TaskError(f"task.yaml: {' '.join(str(error).split())}") from error
    if data is None:
        raise TaskError("task.yaml is empty")
    if not isinstance(data, dict):
        raise TaskError("task.yaml is not a mapping")
    return data


def _instruction(data: Mapping[str, object], notes: Notes) -> str:
    """The instruction; in the old form it names the entry of `descriptions` that comes first, the others follow."""
    instruction = data.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise TaskError("task.yaml: instruction is missing")
    entries = data.get("descriptions")
    texts: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            texts[str(entry.get("key"))] = str(entry.get("description", "")).strip("\n")
    first = instruction.strip()
    if first not in texts or notes.strict:
        return without_canary(instruction)
    others = [key for key in texts if key != first]
    notes.add(f'task.yaml: instruction "{first}" -> text of descriptions[{first}], followed by {others}')
    return "\n\n".join([texts[first], *(texts[key] for key in others)])


def _image(root: Path, notes: Notes) -> str | None:
    """The client's ready image, where no Dockerfile makes one. Raises TaskError if there is neither, but in strict mode."""
    if (root / "Dockerfile").is_file() or notes.strict:
        return None
    try:
        data = yaml.safe_load((root / "docker-compose.yaml").read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise TaskError(f"docker-compose.yaml: {' '.join(str(error).split())}") from error
    services = data.get("services") if isinstance(data, dict) else None
    client = services.get("client") if isinstance(services, dict) else None
    image = client.get("image") if isinstance(client, dict) else None
    if isinstance(client, dict) and _builds_elsewhere(client.get("build")):
        return None  # from a Dockerfile of another place: where compose files are run
    if not isinstance(image, str) or "$" in image:
        raise TaskError("no image: there is no Dockerfile, and docker-compose.yaml names none for the client")
    return image


def _builds_elsewhere(build: object) -> bool:
    """Whether a service's build names another directory or another Dockerfile than the one that is not there."""
    if isinstance(build, dict):
        return build.get("context", ".") not in (".", "./") or "dockerfile" in build
    return isinstance(build, str) and build not in (".", "./")


def _compose_notes(root: Path, notes: Notes) -> None:
    text = (root / "docker-compose.yaml").read_text(encoding="utf-8", errors="replace")
    if re.search(r"^\s*-\s*[\"']?\.(?:/tests)?/?:", text, re.MULTILINE):
        notes.add("docker-compose.yaml mounts the task directory or its tests: the agent could read them")
    if "COMPOSE_PROJECT_NAME" in text:
        notes.add("docker-compose.yaml names its container after ${COMPOSE_PROJECT_NAME}")
    if len(re.findall(r"^ {2}[\w-]+:\s*$", text.split("services:", 1)[-1].split("\nvolumes:", 1)[0], re.MULTILINE)) > 1:
        notes.add("docker-compose.yaml has several services; only the client's image is read")


def _prints_summary(root: Path) -> bool:
    scripts = [root / "run-tests.sh", *sorted((root / "tests").glob("*.sh"))]
    text = "\n".join(script.read_text(encoding="utf-8", errors="replace") for script in scripts if script.is_file())
    return "pytest" not in text or bool(re.search(r"-\w*rA|-ra\b|--ctrf|short test summary", text))
