"""What the stages of a pipeline do, as counts: episodes, other replies, updates.

How many tasks a directory holds, which share of attempts is solved, and how long episodes are is not in a configuration: `Assumed`
says it, and every figure that follows from it is an estimate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from termrsi.config.choices import TO_SAMPLER, Loss
from termrsi.config.schema import Config
from termrsi.config.stages import (
    AnalyseConfig,
    AuditConfig,
    CollectRecoveryConfig,
    EvaluateConfig,
    GrpoConfig,
    PolicyOptimConfig,
    RetentionConfig,
    RetermConfig,
    RprConfig,
    RsrConfig,
    SftConfig,
    StageConfig,
    SynthesiseConfig,
    WarmupCriticConfig,
)

FAMILIES = 23  # of the bundled suite
BACKWARD = 2.0  # in forward passes; half of it is gradients of weights, which frozen ones have none of


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """`tasks`, `validation`, `heldout`: where the configuration does not cap them. `solved`: the share of attempts.

    The rest: of one episode, medians, and the standard deviation of the logarithm of lognormals that the limits cut off.
    """

    tasks: int = 1000
    validation: int = 100
    heldout: int = 100
    solved: float = 0.5
    prompt: int = 2048
    turns: float = 40.0
    turns_sigma: float = 1.0
    reply: float = 500.0
    reply_sigma: float = 1.2
    observation: float = 300.0
    observation_sigma: float = 1.0
    command_s: float = 1.0
    command_sigma: float = 1.5
    verify_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Updates:
    """Steps of a loop: `groups` of `size` episodes each.

    `policy`, `critic`, `reference`: forward passes over a step's samples, of which a backward pass is two.
    """

    steps: int
    groups: int
    size: int
    max_staleness: int = 0
    policy: float = 0.0
    critic: float = 0.0
    reference: float = 0.0
    extra: int = -1  # and `first`: as of `records.Flow`
    first: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """One stage. `episodes`: beside those of `updates`. `replies`: tokens of answers outside of episodes.

    `samples`: episodes that are learned from outside of a loop, times epochs.
    """

    name: str
    kind: str
    episodes: float = 0.0
    replies: float = 0.0
    samples: float = 0.0
    updates: Updates | None = None


def of(config: Config, assumed: Assumed) -> list[Work]:
    """The stages that a run would play, in order."""
    names = [config.only] if config.only else config.pipeline
    return [_KINDS[config.stages[name].kind](name, config.stages[name], config, assumed) for name in names]


def tasks(config: Config, split: str, assumed: Assumed) -> int:
    """Of one split: exact for the bundled suite, else its cap or what is assumed."""
    c = config.tasks
    number = {"train": c.train, "validation": c.validation, "heldout": c.heldout}[split]
    if c.path == "bundled":
        return number * len(c.levels) * (len(c.families) or FAMILIES)
    told = {"train": assumed.tasks, "validation": assumed.validation, "heldout": assumed.heldout}[split]
    return min(number, told) if number else told


def training_passes(config: Config, *, frozen: bool = False) -> float:
    """A forward and a backward pass, and with checkpointing one more forward. `frozen`: adapters alone are trained."""
    return 1.0 + (BACKWARD / 2 if frozen else BACKWARD) + (1.0 if config.model.gradient_checkpointing else 0.0)


def _policy_passes(config: Config, loss: Loss, optim: PolicyOptimConfig) -> tuple[float, float]:
    """Of the policy, and of the reference."""
    old = optim.minibatches > 1 and loss not in TO_SAMPLER and optim.sat == 0.0
    own = training_passes(config, frozen=config.model.lora_rank > 0)
    return own + (1.0 if old else 0.0), 1.0 if optim.kl > 0.0 else 0.0


def _validation(retention: RetentionConfig, steps: int, config: Config, assumed: Assumed) -> float:
    looks = 1 + steps // retention.every  # one before the first step
    return float(looks * retention.k * tasks(config, "validation", assumed))


def _evaluate(name: str, stage: EvaluateConfig, config: Config, assumed: Assumed) -> Work:
    return Work(name, stage.kind, float(stage.k * tasks(config, stage.split, assumed)))


def _rsr(name: str, stage: RsrConfig, config: Config, assumed: Assumed) -> Work:
    number = min(stage.tasks or 10**9, tasks(config, "train", assumed))
    found = number * (1.0 - (1.0 - assumed.solved) ** (len(stage.harnesses) * stage.attempts))
    planned = min(stage.sources or 10**9, found)
    episodes = number * len(stage.harnesses) * stage.attempts + planned * stage.runbooks * stage.executions
    replies = planned * stage.runbooks * (1 + stage.rounds / 2) * (stage.plan_tokens + stage.critic_tokens)
    return Work(name, stage.kind, float(episodes), float(replies))


def _sft(name: str, stage: SftConfig, config: Config, assumed: Assumed) -> Work:
    kept = _kept(config.stages.get(stage.data), config, assumed)
    samples = min(stage.max_samples or 10**9, kept) * stage.epochs
    looks = 2 * stage.validate_k * tasks(config, "validation", assumed)
    return Work(name, stage.kind, float(looks), samples=float(samples))


def _kept(source: StageConfig | None, config: Config, assumed: Assumed) -> float:
    number = min(getattr(source, "tasks", 0) or 10**9, tasks(config, "train", assumed))
    if isinstance(source, RsrConfig):
        found = number * (1.0 - (1.0 - assumed.solved) ** (len(source.harnesses) * source.attempts))
        return found * min(source.keep_per_task, source.runbooks * source.executions * assumed.solved)
    if isinstance(source, CollectRecoveryConfig):
        return number * source.attempts * (1.0 - assumed.solved) * assumed.solved
    return float(number)


def _warmup(name: str, stage: WarmupCriticConfig, config: Config, assumed: Assumed) -> Work:
    passes = stage.updates * training_passes(config) + 1.0  # and the values before them
    return Work(name, stage.kind, updates=Updates(stage.max_steps, stage.tasks_per_step, 1, critic=passes))


def _rpr(name: str, stage: RprConfig, config: Config, assumed: Assumed) -> Work:
    policy, reference = _policy_passes(config, stage.loss, stage.optim)
    critic = training_passes(config) + 1.0
    ahead = stage.flow(stage.tasks_per_step, stage.steps)
    passes = (policy, critic, reference)
    loop = Updates(
        stage.steps, stage.tasks_per_step, stage.samples_per_task, ahead.max_staleness, *passes, ahead.extra, ahead.first
    )
    return Work(name, stage.kind, _validation(stage.retention, stage.steps, config, assumed), updates=loop)


def _reterm(name: str, stage: RetermConfig, config: Config, assumed: Assumed) -> Work:
    policy, reference = _policy_passes(config, stage.loss, stage.optim)
    groups = stage.original_groups + stage.recovery_groups
    loop = Updates(stage.steps, groups, stage.group_size, stage.max_staleness, policy, 0.0, reference)
    return Work(name, stage.kind, _validation(stage.retention, stage.steps, config, assumed), updates=loop)


def _grpo(name: str, stage: GrpoConfig, config: Config, assumed: Assumed) -> Work:
    policy, reference = _policy_passes(config, stage.loss, stage.optim)
    ahead = stage.flow(stage.groups, stage.steps)
    passes = (policy, 0.0, reference)
    loop = Updates(stage.steps, stage.groups, stage.group_size, ahead.max_staleness, *passes, ahead.extra, ahead.first)
    return Work(name, stage.kind, _validation(stage.retention, stage.steps, config, assumed), updates=loop)


def _recovery(name: str, stage: CollectRecoveryConfig, config: Config, assumed: Assumed) -> Work:
    number = min(stage.tasks or 10**9, tasks(config, "train", assumed)) * stage.attempts
    failed = number * (1.0 - assumed.solved)
    judged = failed * stage.answer_tokens(config.model.max_model_len) if stage.judge else 0.0
    return Work(name, stage.kind, float(number + failed * stage.teacher_attempts), float(judged))


def _synthesise(name: str, stage: SynthesiseConfig, config: Config, assumed: Assumed) -> Work:
    items = sum(stage.corpora().values())
    return Work(name, stage.kind, replies=4.0 * items * stage.reply_tokens if stage.author.value == "policy" else 0.0)


def _analyse(name: str, stage: AnalyseConfig, config: Config, assumed: Assumed) -> Work:
    runs = [config.stages[source] for source in (stage.of, stage.against) if source]
    number = sum(one.k * tasks(config, one.split, assumed) for one in runs if isinstance(one, EvaluateConfig))
    return Work(name, stage.kind, replies=float(number * stage.max_tokens))


def _audit(name: str, stage: AuditConfig, config: Config, assumed: Assumed) -> Work:
    number = tasks(config, "train", assumed)
    return Work(name, stage.kind, replies=2.0 * number * stage.answer_tokens(config.model.max_model_len) if stage.judge else 0.0)


_KINDS: Mapping[str, Callable[[str, Any, Config, Assumed], Work]] = {  # Any: each takes its own configuration
    "evaluate": _evaluate,
    "rsr": _rsr,
    "sft": _sft,
    "warmup_critic": _warmup,
    "rpr": _rpr,
    "reterm": _reterm,
    "grpo": _grpo,
    "collect_recovery": _recovery,
    "synthesise": _synthesise,
    "analyse": _analyse,
    "audit": _audit,
}
