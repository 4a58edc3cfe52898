"""Adapters for Harbor (0.26, Python 3.12 on): our agent in its environments, its agents in our local sandbox.

    harbor run -p TASKS -a termrsi.interop.harbor:Agent -m termrsi/NAME \
        --ak url=http://127.0.0.1:8000/v1 --ak tokenizer=CHECKPOINT --ak harness=terminus_json
    harbor run -p TASKS -a oracle -e termrsi.interop.harbor:Environment [--ek network=host]

Harbor must be installed beside termrsi; nothing else of termrsi imports this module.
"""

import shlex
from pathlib import Path
from typing import Any, override  # pyright: ignore[reportAttributeAccessIssue]  # Harbor needs Python 3.12 itself

from harbor.agents.base import BaseAgent  # pyright: ignore[reportMissingImports]
from harbor.agents.capabilities import AgentCapabilities  # pyright: ignore[reportMissingImports]
from harbor.environments.base import BaseEnvironment, ExecResult  # pyright: ignore[reportMissingImports]
from harbor.environments.capabilities import (  # pyright: ignore[reportMissingImports]
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.agent.context import AgentContext  # pyright: ignore[reportMissingImports]

from termrsi import __version__
from termrsi.errors import ConfigError, SandboxError
from termrsi.harness import variants
from termrsi.harness.episode import Episode
from termrsi.harness.render import ChatFormat
from termrsi.interop import atif
from termrsi.interop.endpoint import EndpointGenerator
from termrsi.places import cache_dir
from termrsi.ports import Sandbox
from termrsi.records import CommandResult, EnvironmentSpec, EpisodeSpec, Limits, Rollout, SamplingParams, Snapshot, TaskSpec
from termrsi.reward.apart import as_user
from termrsi.sandbox import image, layers
from termrsi.sandbox.local import LocalOptions, LocalSandbox

STATE = "/tmp/.termrsi-harbor"
NO_LIMIT_S = 24 * 3600.0


class Agent(BaseAgent):
    """Plays one of our harnesses with a served checkpoint. Options: `url`, `tokenizer`, `harness`, `temperature`, `top_p`,
    `max_tokens`, `max_turns`, `max_context_tokens`, `command_timeout_s`, `observation_chars`, `seed`."""

    capabilities = AgentCapabilities(atif=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: Harbor's, which grow from version to version
        super().__init__(*args, **kwargs)
        given = self._model_connection_kwargs
        self._harness = str(given.get("harness", "react"))
        variants.get(self._harness)  # a wrong name is told before a trial begins
        for name in ("url", "tokenizer"):
            if not given.get(name):
                raise ConfigError(
                    f"needs --ak {name}=...", "termrsi.interop.harbor:Agent", "url of the server, directory of the tokenizer"
                )
        self._url, self._tokenizer = str(given["url"]), str(given["tokenizer"])
        seed = given.get("seed")
        self._sampling = SamplingParams(
            temperature=float(given.get("temperature", 1.0)),
            top_p=float(given.get("top_p", 1.0)),
            max_tokens=int(given.get("max_tokens", 512)),
            seed=None if seed is None else int(seed),
        )
        self._limits = Limits(
            max_turns=int(given.get("max_turns", 64)),
            max_context_tokens=int(given.get("max_context_tokens", 8192)),
            command_timeout_s=float(given.get("command_timeout_s", 120.0)),
            wall_s=NO_LIMIT_S,  # Harbor's own limit ends it
            observation_chars=int(given.get("observation_chars", 10_000)),
        )

    @staticmethod
    @override
    def name() -> str:
        return "termrsi"

    @override
    def version(self) -> str:
        return __version__

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises EngineError if the server fails; what was done until then is in the trajectory all the same."""
        from transformers import AutoTokenizer

        chat = ChatFormat(AutoTokenizer.from_pretrained(self._tokenizer))
        workdir = environment.task_env_config.workdir or ((await environment.exec("pwd")).stdout or "").strip() or None
        task = TaskSpec("task", "", instruction, "", EnvironmentSpec(workdir=workdir))
        spec = EpisodeSpec(str(self.session_id or "trial"), "", task, self._harness, self._sampling, self._limits)
        model = (self.model_name or "").rpartition("/")[2]
        generator = EndpointGenerator(self._url, model)
        episode = Episode(spec, generator, HarborSandbox(environment), chat)
        try:
            await episode.run()
        finally:
            await generator.close()
            self._tell(spec, episode.so_far(), context, model)

    def _tell(self, spec: EpisodeSpec, rollout: Rollout, context: AgentContext, model: str) -> None:
        """Also of an episode that Harbor's limit ended."""
        context.n_input_tokens = rollout.prompt_tokens
        context.n_output_tokens = rollout.completion_tokens
        context.n_cache_tokens = rollout.cached_tokens
        calls = list(atif.tokens(rollout.chunks))
        context.rollout_details = [
            {
                "prompt_token_ids": [prompt for prompt, _, _ in calls],
                "completion_token_ids": [ids for _, ids, _ in calls],
                "logprobs": [logprobs for _, _, logprobs in calls],
            }
        ]
        context.metadata = {"stop": rollout.stop.value, "turns": len(rollout.turns)}
        atif.dump(Path(self.logs_dir) / "trajectory.json", atif.trajectory(spec, rollout, model=model))


class HarborSandbox:
    """`ports.Sandbox` over a Harbor environment, as far as an agent needs one: directory and exported variables last."""

    def __init__(self, environment: BaseEnvironment) -> None:
        self._environment = environment

    @property
    def id(self) -> str:
        return str(self._environment.session_id)

    async def start(self) -> None:
        """Harbor has started it."""

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        """Ended inside the environment when its time is over, partial output kept."""
        limit_s = NO_LIMIT_S if timeout_s is None else timeout_s
        script = (
            f'[ -f {STATE}/env ] && . {STATE}/env; [ -f {STATE}/cwd ] && cd "$(cat {STATE}/cwd)"\n{command}\n'
            f"__status=$?; mkdir -p {STATE}; export -p > {STATE}/env; pwd > {STATE}/cwd; exit $__status"
        )
        inner = f"timeout --kill-after=5 {limit_s:g} bash -c {shlex.quote(script)}"
        result = await self._environment.exec(inner, timeout_sec=int(limit_s) + 30)
        output = (result.stdout or "") + (result.stderr or "")
        late = result.return_code in (124, 137)
        return CommandResult(124 if late else result.return_code, output, timed_out=late)

    async def put(self, source: Path | str, target: str) -> None:
        await (self._environment.upload_dir if Path(source).is_dir() else self._environment.upload_file)(source, target)

    async def get(self, source: str, target: Path | str) -> None:
        await self._environment.download_file(source, target)

    async def snapshot(self) -> Snapshot:
        raise SandboxError("Harbor's environments have no snapshots", self.id)

    async def fork(self, n: int) -> list[Sandbox]:
        raise SandboxError("Harbor's environments cannot be forked", self.id)

    async def kill_processes(self) -> int:
        raise SandboxError("Harbor ends no processes", self.id)

    async def replaced(self) -> list[str]:
        return []

    async def close(self) -> None:
        """Harbor closes it."""


class Environment(BaseEnvironment):
    """Our local sandbox: namespaces and overlays, no daemon. A Dockerfile's FROM stands for the host's programs, or an unpacked
    root file system.

    There is no network unless `--ek network=host`, also where a task allows one."""

    _box: LocalSandbox | None = None

    def __init__(self, *args: Any, network: str = "none", **kwargs: Any) -> None:  # Any: Harbor's
        self._network = network
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "termrsi-local"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @override
    def _validate_definition(self) -> None:
        folder = Path(self.environment_dir)
        if not (folder / "Dockerfile").is_file() and not self.task_env_config.docker_image:
            raise FileNotFoundError(f"{folder} has no Dockerfile, and docker_image is unset")

    @override
    async def start(self, force_build: bool) -> None:
        folder = Path(self.environment_dir)
        spec = EnvironmentSpec(
            context=str(folder) if (folder / "Dockerfile").is_file() else "",
            docker_image=self.task_env_config.docker_image,
            workdir=self.task_env_config.workdir,
            build_timeout_s=float(self.task_env_config.build_timeout_sec),
        )
        state = layers.state_dir(None)
        built = await image.build(spec, cache_dir(), state_dir=state)
        options = LocalOptions(
            image=built,
            state_dir=state,
            workdir=self.task_env_config.workdir,
            env=self._merge_env(None) or {},
            memory_mb=self._effective_memory_mb or 2048,
            disk_mb=min(self._effective_storage_mb or 1024, 4096),
            cpus=float(self._effective_cpus) if self._effective_cpus else None,
            network=self._network == "host" and self.network_policy.network_mode.value == "public",
            owner="harbor",
            start_timeout_s=60.0,
        )
        self._box = LocalSandbox(options)
        await self._box.start()
        await self._upload_environment_dir_after_start()
        await self.ensure_dirs(self._mount_targets(writable_only=True))

    @override
    async def stop(self, delete: bool) -> None:
        if self._box is not None:
            await self._box.close()

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._started().put(source_path, target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._started().put(source_dir, target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._started().get(source_path, target_path)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._started().get(source_dir, target_dir)

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """In a shell of its own. Its time over, its whole process tree is ended, and what it printed is returned with code 124."""
        place = cwd or self.task_env_config.workdir
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in (self._merge_env(env) or {}).items())
        inner = f"env {settings} /bin/bash -c {shlex.quote(command)}"
        who = self._resolve_user(user)
        inner = as_user(None if who is None else str(who), inner)
        box = self._started()
        result = await box.run(f"( {f'cd {shlex.quote(place)}; ' if place else ''}{inner} )", timeout_sec)
        return ExecResult(stdout=result.output, stderr=None, return_code=result.exit_code)

    def _started(self) -> LocalSandbox:
        if self._box is None:
            raise RuntimeError("the environment is not started")
        return self._box
