"""What each kind of stage may be told: one dataclass per kind, picked by its group file in `conf/stage/`.

Fields named `policy`, `critic`, `data`, `baseline`, `of`, `against` and `tasks_from` hold the names of the earlier stages whose
results it reads. What is out of range is refused here; what would do nothing beside the other settings, in `effects`.
"""

from dataclasses import dataclass, field, fields

from omegaconf import MISSING

from termrsi.config.axes import AxesConfig
from termrsi.config.bounds import above_zero, at_least, one_of
from termrsi.config.choices import (
    BY_FAMILY,
    Admission,
    Author,
    BootstrapAt,
    Calibration,
    Chunks,
    Correction,
    Credit,
    CriticInit,
    Divergence,
    DppoForm,
    JudgeUncertain,
    KlKind,
    LimitEnds,
    Loss,
    RefitValueHead,
    Reward,
    TokenSteps,
    Workflow,
)
from termrsi.errors import ConfigError
from termrsi.records import Flow


@dataclass(slots=True, kw_only=True)
class StageConfig:
    """What every stage has. `policy`: the stage whose retained weights are used, or `base`."""

    kind: str = MISSING
    policy: str = "base"


@dataclass(slots=True, kw_only=True)
class DrawsConfig(StageConfig):
    """What every stage has that draws train tasks. `tasks_from`: a synthesis or an audit; what it left is drawn then, alone."""

    tasks_from: str = ""


ANSWER_TOKENS = 4096  # of a judge's answer, what it thinks aloud before it included


@dataclass(slots=True, kw_only=True)
class JudgesConfig(DrawsConfig):
    """What every stage has where a model may judge: the policy of the stage, unless the role `judge` has another."""

    judge: bool = False
    judge_tokens: int = 0  # of one answer; 0: 4096, or a quarter of the policy's context where that is less
    judge_prompt_tokens: int = 0  # of the first question, by the policy's tokenizer; 0: what its context has room for

    def __post_init__(self) -> None:
        at_least("judge", 0, judge_tokens=self.judge_tokens, judge_prompt_tokens=self.judge_prompt_tokens)

    def answer_tokens(self, max_model_len: int) -> int:
        return self.judge_tokens or min(ANSWER_TOKENS, max_model_len // 4)

    def room(self, max_model_len: int) -> int:
        """Tokens of the first question. A second one also holds the first answer, and a sentence."""
        return self.judge_prompt_tokens or max_model_len - 2 * self.answer_tokens(max_model_len) - 64


@dataclass(slots=True, kw_only=True)
class AuditConfig(JudgesConfig):
    """Which train tasks are fit to be trained on: gates that need no model, and two judges where they are asked for."""

    kind: str = "audit"
    mutants: int = 8  # broken copies of each solution, that the verifier is to notice
    keep_flagged: bool = False  # what has a small fault stays
    judge: bool = False  # it reads each task that passes the gates

    def __post_init__(self) -> None:
        JudgesConfig.__post_init__(self)
        at_least("audit", 1, mutants=self.mutants)


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
        at_least("evaluate", 1, k=self.k)
        at_least("evaluate", 0.0, temperature=self.temperature)
        one_of("evaluate.split", self.split, "train", "validation", "heldout")


@dataclass(slots=True, kw_only=True)
class RsrConfig(DrawsConfig):
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
    critic_tokens: int = 16  # of the critic's answer; one that reasons first needs room for that, too
    plan_prompt_tokens: int = 0  # of a question for a runbook, by the policy's tokenizer; 0: what its context has room for
    plan_whole: bool = False  # a runbook in one reply; without it each heading is given, as a small model needs
    sources: int = 0  # solved tasks to plan for; 0: all
    execute_harness: str = "react"  # an assisting one shows worked examples as well; they are stripped like the runbook
    keep_per_task: int = 8

    def __post_init__(self) -> None:
        at_least(
            "rsr", 1, attempts=self.attempts, runbooks=self.runbooks, executions=self.executions, keep_per_task=self.keep_per_task
        )
        at_least("rsr", 1, critic_tokens=self.critic_tokens)
        at_least("rsr", 0, tasks=self.tasks, sources=self.sources, rounds=self.rounds, plan_temperature=self.plan_temperature)
        at_least("rsr", 0, plan_prompt_tokens=self.plan_prompt_tokens)
        if not self.harnesses:
            raise ConfigError("no harness to discover with", "rsr.harnesses", "name at least one")

    def plan_room(self, max_model_len: int) -> int:
        """Tokens of a question. Its answer, with the headings that are given, has the rest."""
        return self.plan_prompt_tokens or max_model_len - self.plan_tokens - 64


@dataclass(slots=True, kw_only=True)
class SftConfig(StageConfig):
    """Cross-entropy on the sampled tokens of a data set. `sources`: on what was rewritten, as it was, instead of the rewrites."""

    kind: str = "sft"
    data: str = MISSING
    sources: bool = False
    epochs: int = 2
    batch: int = 16
    lr: float = 2e-5
    warmup: float = 0.03
    max_samples: int = 0  # 0: all
    validate_k: int = 0  # attempts per validation task before and after; 0: not measured
    validate_temperature: float = 0.6
    validate_top_p: float = 0.95
    checkpoint_every: int = 1  # steps between two checkpoints that a stopped stage goes on from; 0: none, it begins again

    def __post_init__(self) -> None:
        at_least("sft", 1, epochs=self.epochs, batch=self.batch)
        at_least("sft", 0, validate_k=self.validate_k, max_samples=self.max_samples, checkpoint_every=self.checkpoint_every)
        above_zero("sft", lr=self.lr)


@dataclass(slots=True, kw_only=True)
class PolicyOptimConfig:
    """What the policy gradient stages share. `delta`, `divergence`, `dppo_form`: of the loss `dppo` alone; `tvpo_delta`: of `tvpo`.

    `correction`: of the sampler against the learner, with `tis_cap` as its upper bound (see `algo.loss.correction_weights`).
    `clip_low`, `clip_high`: of `dis` the range 1 - clip_low to 1 + clip_high of what it keeps. `sat`: of the losses with a clip.
    """

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    tis_cap: float = 2.0  # 0: no correction of sampler against trainer
    correction: Correction = Correction.tis
    correction_low: float = 0.5
    delta: float = 0.1
    tvpo_delta: float = 0.02  # the divergence that a prompt's rollouts may have from the sampler before their tokens are frozen
    divergence: Divergence = Divergence.tv
    dppo_form: DppoForm = DppoForm.ratio
    sat: float = (
        0.0  # above 0 the ratio is to the sampler, and the clip narrows for tokens beyond this quantile of its log (SAT: 0.9)
    )
    kl: float = 0.0  # weight of the divergence from the policy that the stage began with; 0: no reference is loaded
    kl_kind: KlKind = KlKind.k3
    lr: float = 1e-6
    minibatches: int = 1  # optimizer updates per step's batch; with 1 on-policy no ratio leaves 1, and nothing is clipped

    def __post_init__(self) -> None:
        at_least("optim", 1, minibatches=self.minibatches)
        at_least("optim", 0.0, tis_cap=self.tis_cap, clip_low=self.clip_low, clip_high=self.clip_high, kl=self.kl)
        at_least("optim", 0.0, correction_low=self.correction_low, delta=self.delta, tvpo_delta=self.tvpo_delta)
        if not 0.0 <= self.sat < 1.0:
            raise ConfigError(f"sat={self.sat}", "optim", "valid: 0 (off) up to below 1")
        above_zero("optim", lr=self.lr, temperature=self.temperature)


@dataclass(slots=True, kw_only=True)
class CreditConfig:
    """`lam_alpha`, `lam_critic_alpha`: above 0, lambda is 1 - 1 / (alpha x steps) of each trajectory; steps of `tb` are turns.

    `limit_ends`: an episode that met a limit is over, with the verifier's reward (`terminal`); or it goes on beyond what was seen,
    and the critic's value stands in (`truncate`). `chunks`: a trajectory whose history was rewritten is one (`link`) or several.
    `bootstrap_at`: the token of the next turn whose value `tb` links to.
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
    bootstrap_at: BootstrapAt = BootstrapAt.first
    whiten: bool = True

    def __post_init__(self) -> None:
        at_least("credit", 0.0, lam_alpha=self.lam_alpha, lam_critic_alpha=self.lam_critic_alpha)
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
        at_least("reward", 0.0, tau=self.tau)
        if self.kind is Reward.spr and self.beta + self.delta > 1.0:
            raise ConfigError(f"beta + delta = {self.beta + self.delta}", "reward", "at most 1, so that a reward is at most 1")
        if self.kind is Reward.spr and not self.beta < self.delta:
            raise ConfigError(
                f"beta={self.beta} is not below delta={self.delta}", "reward", "spr keeps partial below strict success"
            )


@dataclass(slots=True, kw_only=True)
class WarmupCriticConfig(DrawsConfig):
    """Fit a value model with the actor frozen until its explained variance is positive on held-out rollouts."""

    kind: str = "warmup_critic"
    tasks_per_step: int = 32
    max_steps: int = 6
    checks: int = 3  # consecutive positive checks that end the warm-up
    updates: int = 2  # critic updates per step
    lr: float = 3e-5
    value_clip: float = 0.2
    temperature: float = 1.0
    checkpoint_every: int = 1  # as in sft
    credit: CreditConfig = field(default_factory=CreditConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        at_least("warmup_critic", 0, checkpoint_every=self.checkpoint_every)
        at_least(
            "warmup_critic",
            1,
            tasks_per_step=self.tasks_per_step,
            max_steps=self.max_steps,
            checks=self.checks,
            updates=self.updates,
        )
        above_zero("warmup_critic", lr=self.lr, temperature=self.temperature)


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
    rollback: bool = False  # after a refused candidate the phase goes on from the retained one, with fresh optimizers (ours)

    def __post_init__(self) -> None:
        at_least("retention", 1, every=self.every, k=self.k)
        at_least("retention", 0.0, temperature=self.temperature)


@dataclass(slots=True, kw_only=True)
class AheadConfig(DrawsConfig):
    """What every stage has whose groups may be sampled ahead of the learner: `queues.buffer` has the laws.

    `oversample`: groups under way beyond a step's own; those that it does not take are the first of the next one.
    `admission`: a step takes the groups that were begun first (`fair`), or those that finish first (`first`): the learner waits
    less, and what it sees is biased: short episodes come in early steps, long ones later and from older weights.
    """

    max_staleness: int = 0  # updates that rollouts may be older than the actor they update; 0: strictly on-policy
    oversample: int = 0  # 0: as many as max_staleness allows
    admission: Admission = Admission.fair

    def flow(self, groups: int, steps: int, *, replace: int = 0) -> Flow:
        """Of `steps` batches of `groups`."""
        return Flow(groups, self.max_staleness, self.oversample or -1, replace, self.admission is Admission.first, steps)

    def check_ahead(self, owner: str, groups: int) -> None:
        at_least(owner, 0, max_staleness=self.max_staleness, oversample=self.oversample)
        most = groups * self.max_staleness
        if self.oversample > most:
            what = f"oversample={self.oversample}: max_staleness={self.max_staleness} allows {most}"
            raise ConfigError(what, owner, "fewer, or a larger max_staleness")
        if self.admission is Admission.first and not 0 < self.oversample < most:
            what = "admission=first: with all that max_staleness allows under way, the oldest have to be waited for"
            raise ConfigError(what, owner, f"oversample above 0 and below {most}" if most > 1 else "a larger max_staleness")


@dataclass(slots=True, kw_only=True)
class RprConfig(AheadConfig):
    """PPO with a critic: one sample per task, TB-GAE, four critic-only updates at the start of the phase."""

    kind: str = "rpr"
    critic: str = MISSING
    critic_init: CriticInit = CriticInit.inherit
    steps: int = 6
    tasks_per_step: int = 32
    samples_per_task: int = 1
    critic_only_updates: int = 4
    refit_value_head: RefitValueHead = RefitValueHead.off
    only_contrast: bool = False  # the actor learns from tasks whose samples got different rewards; the critic from all
    checkpoint_every: int = 1  # as in sft
    critic_lr: float = 3e-5
    value_clip: float = 0.2
    loss: Loss = Loss.ppo
    optim: PolicyOptimConfig = field(default_factory=PolicyOptimConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        at_least("rpr", 1, steps=self.steps, tasks_per_step=self.tasks_per_step, samples_per_task=self.samples_per_task)
        at_least("rpr", 0, critic_only_updates=self.critic_only_updates, checkpoint_every=self.checkpoint_every)
        self.check_ahead("rpr", self.tasks_per_step)
        above_zero("rpr", critic_lr=self.critic_lr)
        if self.only_contrast and self.samples_per_task < 2:
            raise ConfigError("one sample per task has no contrast", "rpr.only_contrast", "set samples_per_task to 2 or more")


@dataclass(slots=True, kw_only=True)
class CollectRecoveryConfig(JudgesConfig):
    """Failures of the policy, continued by an assisting teacher from the failure state; verified ones become SFT data."""

    kind: str = "collect_recovery"
    tasks: int = 0
    attempts: int = 1
    temperature: float = 0.6
    teacher_attempts: int = 2
    teacher_harness: str = "react"  # an assisting one shows worked examples as turns
    teacher_temperature: float = 0.6
    workflow: Workflow = Workflow.full
    judge: bool = True  # a model decides what the filters' rules flag; without one all of that is uncertain
    judge_uncertain: JudgeUncertain = JudgeUncertain.reject

    def __post_init__(self) -> None:
        JudgesConfig.__post_init__(self)
        at_least("collect_recovery", 1, attempts=self.attempts, teacher_attempts=self.teacher_attempts)
        at_least("collect_recovery", 0, tasks=self.tasks)


@dataclass(slots=True, kw_only=True)
class RetermConfig(DrawsConfig):
    """GRPO over original groups and recovery groups drawn from a queue of the policy's own failures."""

    kind: str = "reterm"
    steps: int = 6
    original_groups: int = 8
    recovery_groups: int = 2
    group_size: int = 4
    capacity: int = 16
    pop: bool = True  # a restart point is drawn once; false: it stays in the queue until newer ones push it out
    requeue_recovery_failures: bool = False  # a failed recovery rollout is a restart point too
    zero_std_in_denominator: bool = (
        True  # groups of equal rewards count in the mean that they add nothing to (eq. 6, read literally)
    )
    max_staleness: int = 0  # as in rpr
    checkpoint_every: int = 1  # as in sft
    loss: Loss = Loss.reterm
    optim: PolicyOptimConfig = field(default_factory=PolicyOptimConfig)
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(kind=Reward.binary))
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("steps", "capacity", "group_size", "original_groups")}
        at_least("reterm", 1, **sizes)
        at_least("reterm", 0, max_staleness=self.max_staleness, recovery_groups=self.recovery_groups)
        at_least("reterm", 0, checkpoint_every=self.checkpoint_every)


@dataclass(slots=True, kw_only=True)
class GrpoConfig(AheadConfig):
    """Group-relative policy gradient without a critic: GRPO, DAPO, Dr. GRPO, GSPO, DPPO, TVPO or DIS, by `loss`.

    Dr. GRPO and Tmax do not normalise; DAPO's own clip_high is 0.28, it replaces groups without contrast, as Tmax does, and
    `overlong` and `overlong_max` are its L_cache and L_max, in action tokens of a rollout.
    """

    kind: str = "grpo"
    steps: int = 6
    groups: int = 8  # per update
    group_size: int = 4
    normalise: bool = True  # by the group's standard deviation; without it the advantage is the reward less the mean
    replace_zero_variance: int = 0  # groups of equal rewards that a step replaces at most; then it has fewer. 0: they stay
    repetition_penalty: float = 0.0  # River's, on each turn that repeats one before it
    repetition_threshold: float = 0.8
    overlong: int = 0  # the last so many tokens before `overlong_max` cost up to 1, all beyond it 1; 0: length costs nothing
    overlong_max: int = 0  # 0: the most that the limits allow
    checkpoint_every: int = 1  # as in sft
    loss: Loss = Loss.grpo
    optim: PolicyOptimConfig = field(default_factory=PolicyOptimConfig)
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(kind=Reward.binary))
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        at_least("grpo", 1, steps=self.steps, groups=self.groups)
        at_least("grpo", 2, group_size=self.group_size)
        at_least("grpo", 0, replace_zero_variance=self.replace_zero_variance, repetition_penalty=self.repetition_penalty)
        self.check_ahead("grpo", self.groups)
        at_least("grpo", 0, overlong=self.overlong, overlong_max=self.overlong_max, checkpoint_every=self.checkpoint_every)
        if not 0.0 <= self.repetition_threshold <= 1.0:
            raise ConfigError(f"repetition_threshold={self.repetition_threshold}", "grpo", "valid: 0 to 1")
        if self.loss is Loss.dr_grpo and self.normalise:
            raise ConfigError("dr_grpo has no division by the standard deviation", "grpo.normalise", "set normalise=false")


@dataclass(slots=True, kw_only=True)
class AnalyseConfig(StageConfig):
    """A judge on the errors of an evaluation's runs. The policy of the stage is the judge, unless its role has another model."""

    kind: str = "analyse"
    of: str = MISSING  # an evaluate stage
    against: str = ""  # an evaluate stage to compare it with
    temperature: float = 0.0
    max_tokens: int = 1024  # of one answer
    rounds: int = 2  # an answer at fault is asked for again so often
    prompt_tokens: int = 0  # of the first question, by the policy's tokenizer; 0: what its context has room for
    text_chars: int = 2000  # of a command or an observation: its two ends; fewer where the turns would not fit
    concurrency: int = 8  # runs at once

    def __post_init__(self) -> None:
        at_least("analyse", 1, max_tokens=self.max_tokens, concurrency=self.concurrency, text_chars=self.text_chars)
        at_least("analyse", 0, rounds=self.rounds, prompt_tokens=self.prompt_tokens, temperature=self.temperature)

    def room(self, max_model_len: int) -> int:
        """Tokens of the first question. A second one also holds the first answer, and a sentence."""
        return self.prompt_tokens or max_model_len - 2 * self.max_tokens - 64


AUTHORS_REPLIES = 5  # in an author's longest conversation: four parts, and a refused reply
AUTHORS_REQUESTS = 1536  # tokens of what it is asked, a bound with room


@dataclass(slots=True, kw_only=True)
class SynthesiseConfig(StageConfig):
    """Tasks drawn from independent axes, written by an author, and kept if they build and their smoke test holds (Tmax).

    `legacy`, `sft_v2`, `rl_v2`: items of each corpus kind. `families`: of the bundled suite, for the procedural author; empty: all.
    What follows it, up to `image`, is for an author that is a model.
    """

    kind: str = "synthesise"
    author: Author = Author.procedural
    legacy: int = 16
    sft_v2: int = 0
    rl_v2: int = 0
    families: list[str] = field(default_factory=list)
    rounds: int = 2  # a reply at fault is asked for again so often
    temperature: float = 1.0
    top_p: float = 1.0
    reply_tokens: int = 4096  # of one reply; an item takes four
    image: str = "debian:bookworm-slim"  # where the author writes no Dockerfile
    concurrency: int = 0  # items at once; 0: sandbox.concurrency
    benchmarks: list[str] = field(default_factory=list)  # trees of tasks, .txt or .jsonl: a task that shares 13 words is refused
    axes: AxesConfig = field(default_factory=AxesConfig)

    def __post_init__(self) -> None:
        at_least("synthesise", 0, legacy=self.legacy, sft_v2=self.sft_v2, rl_v2=self.rl_v2, concurrency=self.concurrency)
        at_least("synthesise", 0, rounds=self.rounds, temperature=self.temperature)
        at_least("synthesise", 1, reply_tokens=self.reply_tokens)
        if not self.corpora():
            raise ConfigError("no items", "synthesise", "give legacy, sft_v2 or rl_v2 one or more")
        if self.author is Author.policy and self.families:
            raise ConfigError(
                "families are of the procedural author", "synthesise.families", "take them away, or author=procedural"
            )
        for name in ("rounds", "temperature", "top_p", "reply_tokens", "image") * (self.author is Author.procedural):
            if getattr(self, name) != _default(SynthesiseConfig, name):
                raise ConfigError(
                    f"{name} has no effect: the author is no model", f"synthesise.{name}", "take it away, or author=policy"
                )

    def corpora(self) -> dict[str, int]:
        """Items by corpus kind, in the order in which they are numbered."""
        return {name: number for name in ("legacy", "sft_v2", "rl_v2") if (number := getattr(self, name))}


def _default(owner: type[StageConfig], name: str) -> object:
    return next(one.default for one in fields(owner) if one.name == name)


STAGES: dict[str, type[StageConfig]] = {
    "audit": AuditConfig,
    "evaluate": EvaluateConfig,
    "rsr": RsrConfig,
    "sft": SftConfig,
    "warmup_critic": WarmupCriticConfig,
    "rpr": RprConfig,
    "collect_recovery": CollectRecoveryConfig,
    "reterm": RetermConfig,
    "grpo": GrpoConfig,
    "analyse": AnalyseConfig,
    "synthesise": SynthesiseConfig,
}

# What each kind of stage leaves behind for later ones.
WRITES: dict[str, frozenset[str]] = {
    "audit": frozenset({"tasks"}),
    "evaluate": frozenset({"scores"}),
    "rsr": frozenset({"data"}),
    "sft": frozenset({"policy"}),
    "warmup_critic": frozenset({"critic"}),
    "rpr": frozenset({"policy", "critic"}),
    "collect_recovery": frozenset({"data"}),
    "reterm": frozenset({"policy"}),
    "grpo": frozenset({"policy"}),
    "analyse": frozenset({"errors"}),
    "synthesise": frozenset({"tasks"}),
}
# The splits that each kind of stage takes tasks from; `evaluate` names its own.
USES: dict[str, tuple[str, ...]] = {
    "audit": ("train",),
    "evaluate": (),
    "rsr": ("train",),
    "sft": (),
    "warmup_critic": ("train",),
    "rpr": ("train", "validation"),
    "collect_recovery": ("train",),
    "reterm": ("train", "validation"),
    "grpo": ("train", "validation"),
    "analyse": (),
    "synthesise": (),
}
# The roles of models (`choices.ROLES`) that each kind of stage may have; those that it has as it is set: `effects.roles`.
PLAYS: dict[str, tuple[str, ...]] = {
    "evaluate": (),
    "rsr": ("solver", "planner", "critic"),
    "sft": (),
    "warmup_critic": (),
    "rpr": (),
    "collect_recovery": ("teacher", "judge"),
    "reterm": (),
    "grpo": (),
    "analyse": ("judge",),
    "synthesise": ("author",),
    "audit": ("judge",),
}
READS = {
    "policy": "policy",
    "critic": "critic",
    "data": "data",
    "baseline": "scores",
    "of": "scores",
    "against": "scores",
    "tasks_from": "tasks",
}
