"""Settings that would do nothing beside the others, or that contradict them: refused, of each stage as the arms have left it.

Raises ConfigError with what to set instead.
"""

from termrsi.config.choices import (
    TO_SAMPLER,
    Author,
    BootstrapAt,
    Correction,
    Credit,
    CriticInit,
    Loss,
    RefitValueHead,
    TokenSteps,
)
from termrsi.config.schema import Config
from termrsi.config.stages import (
    PLAYS,
    CreditConfig,
    GrpoConfig,
    JudgesConfig,
    PolicyOptimConfig,
    RetentionConfig,
    RetermConfig,
    RprConfig,
    StageConfig,
    SynthesiseConfig,
    WarmupCriticConfig,
)
from termrsi.errors import ConfigError


def check(config: Config, name: str) -> None:
    """Of the stage of that name."""
    stage, where = config.stages[name], f"stages.{name}"
    if isinstance(stage, RprConfig | WarmupCriticConfig):
        _credit(where, stage.credit)
    if isinstance(stage, RprConfig | GrpoConfig | RetermConfig):
        _optim(f"{where}.optim", stage.loss, stage.optim)
        _retention(f"{where}.retention", stage.retention, stage.steps, stage.max_staleness)
    if isinstance(stage, RprConfig) and stage.refit_value_head is not RefitValueHead.off and stage.critic_init is CriticInit.reset:
        raise ConfigError("a new critic has no scale to refit", f"{where}.refit_value_head", "off, or critic_init=inherit")
    if isinstance(stage, RetermConfig) and stage.recovery_groups == 0:
        own = RetermConfig()
        for key in ("pop", "requeue_recovery_failures"):
            if getattr(stage, key) != getattr(own, key):
                raise ConfigError(f"{key} without recovery groups", f"{where}.{key}", "set recovery_groups to 1 or more")
    if isinstance(stage, JudgesConfig) and not stage.judge:
        for key in ("judge_tokens", "judge_prompt_tokens"):
            if getattr(stage, key):
                raise ConfigError(f"{key} without a judge", f"{where}.{key}", "take it away, or judge=true")
    if isinstance(stage, GrpoConfig):
        _overlong(where, stage, min(config.limits.max_turns * config.sampling.max_tokens, config.limits.max_context_tokens))


def roles(stage: StageConfig) -> tuple[str, ...]:
    """The roles of models that it has as it is set: without a judge, or an author that is a model, a model for it would be idle."""
    idle = set()
    if isinstance(stage, JudgesConfig) and not stage.judge:
        idle.add("judge")
    if isinstance(stage, SynthesiseConfig) and stage.author is Author.procedural:
        idle.add("author")
    return tuple(role for role in PLAYS[stage.kind] if role not in idle)


def _optim(where: str, loss: Loss, optim: PolicyOptimConfig) -> None:
    own, to_sampler = PolicyOptimConfig(), loss in TO_SAMPLER or optim.sat > 0.0

    def changed(*names: str) -> str:
        return next((name for name in names if getattr(optim, name) != getattr(own, name)), "")

    if loss in TO_SAMPLER and optim.sat > 0.0:
        raise ConfigError(f"{loss.value} has no clip for sat to narrow", where, "set sat=0, or a loss with a clip")
    if to_sampler and optim.tis_cap > 0.0:
        ratio = "sat's" if optim.sat > 0.0 else f"{loss.value}'s"
        raise ConfigError(f"{ratio} ratio is to the sampler: TIS on top corrects twice", where, "set tis_cap=0")
    off = optim.tis_cap == 0.0
    if off and (key := changed("correction", "correction_low")):
        raise ConfigError(f"{key} without a correction", where, "take it away" if to_sampler else "set tis_cap above 0")
    if not off and optim.correction is not Correction.tis and optim.correction_low >= optim.tis_cap:
        raise ConfigError(f"no weight is in [{optim.correction_low}, {optim.tis_cap}]", where, "correction_low < tis_cap")
    if loss is not Loss.dppo and (key := changed("delta", "divergence", "dppo_form")):
        raise ConfigError(f"{key} is of the loss dppo", where, f"take it away: the loss is {loss.value}")
    if loss is not Loss.tvpo and changed("tvpo_delta"):
        raise ConfigError("tvpo_delta is of the loss tvpo", where, f"take it away: the loss is {loss.value}")
    if optim.kl == 0.0 and (key := changed("kl_kind")):
        raise ConfigError(f"{key} without a divergence", where, "set kl above 0")
    if key := changed("clip_low", "clip_high"):
        if loss is Loss.dppo:
            raise ConfigError(f"{key} has no effect in dppo", where, "it masks at delta")
        if loss is Loss.tvpo:
            raise ConfigError(f"{key} has no effect in tvpo", where, "it freezes at tvpo_delta")
        if optim.minibatches == 1 and not to_sampler:
            raise ConfigError(f"{key}: a clip has no effect on one update per batch", where, "set minibatches to 2 or more")


def _credit(where: str, credit: CreditConfig) -> None:
    if credit.bootstrap_at is BootstrapAt.last and credit.credit is not Credit.tb:
        raise ConfigError(f"bootstrap_at: credit={credit.credit.value} links no turns", f"{where}.credit", "bootstrap_at=first")
    if credit.token_steps is TokenSteps.action and credit.credit is not Credit.token:
        raise ConfigError("token_steps is of credit=token", f"{where}.credit", f"take it away: credit is {credit.credit.value}")


def _retention(where: str, retention: RetentionConfig, steps: int, max_staleness: int) -> None:
    if not retention.rollback:
        return
    if retention.every >= steps:
        raise ConfigError("rollback: no step comes after the only candidate", where, f"every below steps, which is {steps}")
    if max_staleness > 0:
        raise ConfigError("rollback: what is sampled ahead is the refused candidate's", where, "max_staleness=0")


def _overlong(where: str, stage: GrpoConfig, most: int) -> None:
    """`most`: the action tokens that the limits let one conversation have."""
    longest = stage.overlong_max or most
    if stage.overlong == 0:
        if stage.overlong_max:
            raise ConfigError("overlong_max without overlong", f"{where}.overlong_max", "set overlong above 0")
        return
    if stage.overlong > longest:
        raise ConfigError(f"overlong={stage.overlong} exceeds the longest rollout", f"{where}.overlong", f"valid: up to {longest}")
    if longest - stage.overlong >= most:
        what = f"overlong: the limits allow {most} tokens, and {longest - stage.overlong} cost nothing"
        raise ConfigError(what, f"{where}.overlong", "a smaller overlong_max, or a larger overlong")
