"""The tables of task.toml as Harbor 0.26 reads them: which keys have a meaning, at any depth, and which values it rejects.

Pydantic in its lax mode, for that is what Harbor itself validates with: "60" is a number of seconds, 10.5 is none of MB, and an
unknown key is passed over. Sentences and structure are ours; the rules are those of formats and behaviour of that version.
"""

import ipaddress
import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError, model_validator

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*)+")
_NO_FOLDER = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICE = re.compile(r"CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³]", re.IGNORECASE)
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SECRET = re.compile(r"KEY|SECRET|TOKEN(?!S)|PASSWORD|CREDENTIAL|AUTH|^(?:set-)?cookie$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_ONLY_VARIABLES = re.compile(
    r"\s*(?:[A-Za-z]+\s+)?\$\{[A-Za-z_]\w*(?::-)?\}(?:[\s:-]*\$\{[A-Za-z_]\w*(?::-)?\})*\s*", re.ASCII
)  # and the name of an authentication scheme


def _host(given: str) -> str:
    host = given.strip().lower().rstrip(".")
    if "/" in host:
        ipaddress.ip_network("%" if "%" in host else host)  # raises, of a URL too
    elif ":" in host:
        ipaddress.IPv6Address("%" if "%" in host else host)
    else:
        name = host.removeprefix("*.")
        if name != host and _is_address(name):
            raise ValueError("a wildcard stands for host names, not addresses")
        if not all(_LABEL.fullmatch(label) for label in name.split(".")):
            raise ValueError("not a host name, an address or a range of addresses")
    return host


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _matching(pattern: re.Pattern[str], what: str) -> AfterValidator:
    """Space around it is passed over."""

    def check(text: str) -> str:
        if not pattern.fullmatch(text.strip()):
            raise ValueError(what)
        return text.strip()

    return AfterValidator(check)


def _package(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError("not org/name")
    return name


def _folder(name: str) -> str:
    if not name.strip() or name.endswith((".", " ")) or _NO_FOLDER.search(name) or len(name.encode()) > 255:
        raise ValueError("not a name that a directory can have everywhere")
    if _DEVICE.fullmatch(name.partition(".")[0].rstrip(" ")):
        raise ValueError("the name of a device on Windows")
    return name


def _no_way_up(path: str) -> str:
    if ".." in PurePosixPath(path).parts:
        raise ValueError("'..' leads out of its directory")
    return path


def _destination(path: str) -> str:
    if path and ("\\" in path or path.startswith("/") or not PurePosixPath(path).parts):
        raise ValueError("a relative path with / names a place for an artifact")
    if path.rstrip("/") == "manifest.json":
        raise ValueError("manifest.json is the manifest's")
    return _no_way_up(path)


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _transport(value: object) -> object:
    return "streamable-http" if value == "http" else value


def checked_headers(headers: dict[str, str]) -> dict[str, str]:
    """Of an MCP server. Raises ValueError for a literal secret, and for what is no header."""
    for name, value in headers.items():
        if not _HEADER.fullmatch(name) or "\r" in value or "\n" in value:
            raise ValueError(f"{name} is no HTTP header, or its value {value!r} none of one")
        defaults = _VARIABLE.findall(value)
        if "${" in _VARIABLE.sub(" ", value) or any("${" in default for _, default in defaults):
            raise ValueError(f"{name} has a variable that is neither ${{VAR}} nor ${{VAR:-default}}")
        secret = bool(_SECRET.search(name))
        literal = any(default and (secret or _SECRET.search(variable)) for variable, default in defaults)
        if literal or (secret and value.strip() and not _ONLY_VARIABLES.fullmatch(value)):
            raise ValueError(f"{name} must be a ${{VAR}} reference")
    return headers


def _megabytes(size: object) -> int | None:
    """Of text like 2G; None of what is no text, which Harbor passes over. Raises ValueError for other text."""
    if not isinstance(size, str):
        return None
    factor = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}.get(size.strip().upper()[-1:])
    if factor is None:
        raise ValueError(f"{size!r} is not a size like 2G")
    return int(float(size.strip()[:-1]) * factor)


Mode = Literal["public", "no-network", "allowlist"]
Service = Annotated[str, _matching(_SERVICE, "not the name of a service")]
Variables = dict[str, str]
User = str | int | None


class Phase(BaseModel):
    """What an agent's or a verifier's network is, where it differs from the environment's."""

    network_mode: Mode | None = None
    allowed_hosts: list[Annotated[str, AfterValidator(_host)]] | None = None

    @model_validator(mode="after")
    def _hosts_need_a_list(self) -> "Phase":
        # An empty list says nothing, but only where a mode is given.
        if self.network_mode != "allowlist" and (self.allowed_hosts or (self.allowed_hosts == [] and self.network_mode is None)):
            raise ValueError("allowed_hosts needs network_mode allowlist")
        return self


class Agent(Phase):
    timeout_sec: float | None = None
    user: User = None


class Healthcheck(BaseModel):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class Tpu(BaseModel):
    type: str = Field(min_length=1)
    topology: Annotated[str, _matching(_TOPOLOGY, "not a topology like 2x4")]


class McpServer(BaseModel):
    name: str
    transport: Annotated[Literal["stdio", "sse", "streamable-http"], BeforeValidator(_transport)] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: Annotated[dict[str, str], AfterValidator(checked_headers)] = {}

    @model_validator(mode="after")
    def _has_what_its_transport_needs(self) -> "McpServer":
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport {self.transport} needs {needed}")
        if self.transport == "stdio" and self.headers:
            raise ValueError("transport stdio has no headers")
        return self


class Environment(Phase):
    network_mode: Mode = "public"  # pyright: ignore[reportIncompatibleVariableOverride]
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Annotated[Literal["linux", "windows"], BeforeValidator(_lower)] = "linux"
    cpus: int | FiniteFloat | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: Any = None  # older than the two above: text, or passed over
    storage: Any = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Tpu | None = None
    mcp_servers: list[McpServer] = []
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _sizes_as_text(cls, data: Any) -> Any:  # Any: as TOML has it
        if isinstance(data, dict):
            data = dict(data)
            for key in ("memory", "storage"):
                size = _megabytes(data.get(key))
                if size is not None and data.setdefault(f"{key}_mb", size) != size:
                    raise ValueError(f"{key} and {key}_mb disagree")
        return data


class Collect(BaseModel):
    command: str
    service: Service = "main"
    timeout_sec: float = 60.0
    user: User = None


class Verifier(Phase):
    timeout_sec: float = 600.0
    env: Variables = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[Collect] = []

    @model_validator(mode="after")
    def _shared_has_no_environment(self) -> "Verifier":
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode is shared, so environment has no place")
        return self


class Artifact(BaseModel):
    source: Annotated[str, AfterValidator(_no_way_up)]
    destination: Annotated[str, AfterValidator(_destination)] | None = None
    exclude: list[str] = []
    service: Service | None = None

    @model_validator(mode="after")
    def _is_absolute_elsewhere(self) -> "Artifact":
        if self.service not in (None, "main") and not re.match(r"/|[A-Za-z]:[/\\]", self.source):
            raise ValueError("the source of another service must be an absolute path")
        return self


def _artifact(entry: object) -> object:
    return {"source": entry} if isinstance(entry, str) else entry


Artifacts = list[Annotated[Artifact, BeforeValidator(_artifact)]]


class Step(BaseModel):
    name: Annotated[str, AfterValidator(_folder)]
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: Artifacts = []


class Author(BaseModel):
    name: str
    email: str | None = None


class Package(BaseModel):
    name: Annotated[str, AfterValidator(_package)]
    version: Annotated[str, Field(min_length=1)] | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []


class Solution(BaseModel):
    env: Variables = {}


class Task(BaseModel):
    """A whole task.toml."""

    schema_version: str = "1.4"
    version: Any = None  # its older name
    source: str | None = None
    task: Package | None = None
    metadata: dict[str, Any] = {}
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[Step] | None = None
    artifacts: Artifacts = []

    @model_validator(mode="before")
    @classmethod
    def _older_name(cls, data: Any) -> Any:  # Any: as TOML has it
        return {"schema_version": data["version"], **data} if isinstance(data, dict) and "version" in data else data

    @model_validator(mode="after")
    def _steps_differ(self) -> "Task":
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in self.steps or []]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return self


def fault(data: Mapping[str, object]) -> str | None:
    """What Harbor would reject in a parsed task.toml, in one line with the key; None if nothing."""
    return next((line for _, line in faults(data)), None)


def faults(data: Mapping[str, object]) -> list[tuple[str, str]]:
    """All of that: the place, dotted, and a line that names it."""
    try:
        Task.model_validate(data)
    except ValidationError as error:
        return [_told(one) for one in error.errors(include_url=False)]
    except RecursionError:
        return [("", "task.toml: nested too deep")]
    return []


def _told(error: Any) -> tuple[str, str]:  # Any: pydantic's table of one error
    place = ".".join(str(part) for part in error["loc"] if part not in _KINDS)
    said = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    shown = f" is {given!r}"[:80] if isinstance(given, str | int | float) else ""
    return place, f"task.toml: {place}{shown}: {said}" if place else f"task.toml: {said}"


def unknown(data: Mapping[str, object], model: type[BaseModel] = Task, place: str = "") -> Iterator[str]:
    """Dotted names of keys that have no meaning to Harbor, in file order; of tables in an array once."""
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            yield f"{place}{key}"
            continue
        inner = _model_in(field.annotation)
        if inner is None:
            continue
        if isinstance(value, dict):
            yield from unknown(value, inner, f"{place}{key}.")
        elif isinstance(value, list):
            found = (name for one in value if isinstance(one, dict) for name in unknown(one, inner, f"{place}{key}[]."))
            yield from dict.fromkeys(found)


_KINDS = ("str", "int", "float", "constrained-float", "dict[str,float]", "function-after[_destination(), str]")


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)
