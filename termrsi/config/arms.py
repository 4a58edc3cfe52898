"""Arms of an ablation as one word each (the axes of Terminal-RSI's Table 5; what each does to a pipeline is ours).

credit=token|skip|tb           of every stage that has credit
reward=fdr|saturation|...      of the last RPR phase, which is where FDR gives way to SPR
calibration=global|family      of every warm-up and RPR phase; a count has one constant, and binary none
critic_init=reset              the later RPR phases begin with a new critic, instead of the one that the phase before retained
warmup=off                     no warm-up stage; the phase that read its critic begins with a new one
schedule=continue_rpr          no rewriting between the phases: each goes on with the policy of the one before
schedule=rollback              so too, and with the critic of the one before; after a refused candidate the later phases go on from
                               the retained actor and critic (`retention.rollback`). What the paper means by the word is not told
"""

from collections.abc import Callable
from itertools import pairwise

from termrsi.config.choices import CriticInit, Reward, Schedule, Warmup
from termrsi.config.schema import Config
from termrsi.config.stages import RprConfig, StageConfig, WarmupCriticConfig
from termrsi.errors import ConfigError


def apply(config: Config) -> None:
    """Changes the stages, and for some arms the pipeline. Raises ConfigError for an arm that no stage here has."""
    arms: list[tuple[str, object, Callable[[Config], int]]] = [
        ("schedule", config.schedule, _schedule),
        ("warmup", config.warmup, _warmup),
        ("critic_init", config.critic_init, _critic_init),
        ("credit", config.credit, _credit),
        ("reward", config.reward, _reward),
        ("calibration", config.calibration, _calibration),
    ]
    for name, value, change in arms:
        if value is not None and not change(config):
            raise ConfigError(f"{name}={value}: no stage of this pipeline has it", name, "take it away, or another experiment")


def _stages(config: Config) -> list[tuple[str, StageConfig]]:
    """Of the pipeline, in its order; names without a stage are refused later."""
    return [(name, config.stages[name]) for name in config.pipeline if name in config.stages]


def _phases(config: Config) -> list[tuple[str, RprConfig]]:
    return [(name, stage) for name, stage in _stages(config) if isinstance(stage, RprConfig)]


def _credit(config: Config) -> int:
    found = [stage for _, stage in _stages(config) if isinstance(stage, RprConfig | WarmupCriticConfig)]
    for stage in found:
        stage.credit.credit = config.credit or stage.credit.credit
    return len(found)


def _reward(config: Config) -> int:
    phases = _phases(config)
    if phases and config.reward is not None:
        stage = phases[-1][1]
        stage.reward.kind = config.reward
        stage.reward.cap = stage.reward.cap or config.reward is not Reward.count
    return len(phases)


def _calibration(config: Config) -> int:
    found = [stage for _, stage in _stages(config) if isinstance(stage, RprConfig | WarmupCriticConfig)]
    found = [stage for stage in found if stage.reward.kind not in (Reward.count, Reward.binary)]
    for stage in found:
        stage.reward.calibration = config.calibration or stage.reward.calibration
    return len(found)


def _critic_init(config: Config) -> int:
    phases = _phases(config)
    names = {name for name, _ in phases}
    later = [stage for _, stage in phases if stage.critic in names]
    for stage in later:
        stage.critic_init = config.critic_init or stage.critic_init
    return len(later)


def _warmup(config: Config) -> int:
    warm = {name for name, stage in _stages(config) if isinstance(stage, WarmupCriticConfig)}
    readers = [stage for _, stage in _phases(config) if stage.critic in warm]
    if config.warmup is Warmup.off:
        for stage in readers:
            stage.critic_init, stage.critic = CriticInit.reset, ""
        _drop(config, warm)
    return len(readers)


def _schedule(config: Config) -> int:
    """Drops what stands between two phases; the later one reads the earlier one's policy."""
    phases = _phases(config)
    if len(phases) < 2:
        return 0
    if config.schedule in (Schedule.continue_rpr, Schedule.rollback):
        for (before, _), (name, stage) in pairwise(phases):
            places = config.pipeline.index(before), config.pipeline.index(name)
            _drop(config, set(config.pipeline[places[0] + 1 : places[1]]))
            stage.policy = before
            if config.schedule is Schedule.rollback:
                stage.critic, stage.retention.rollback = before, True
    return len(phases)


def _drop(config: Config, names: set[str]) -> None:
    config.pipeline = [name for name in config.pipeline if name not in names]
    for name in names:
        config.stages.pop(name, None)
