"""Arms of an ablation: each changes what it names and nothing else, or is refused."""

from dataclasses import asdict
from typing import Any

import pytest

from termrsi.config import choices, stages
from termrsi.config.load import load
from termrsi.errors import ConfigError

BASE = ("experiment=terminal_rsi", "scale=laptop")
WHOLE = ["base_eval", "rsr_1", "sft_1", "warmup", "rpr_1", "rsr_2", "sft_2", "rpr_2", "final_eval"]
ICEPOP = "stages.grpo.optim.correction=icepop"
OWN = ("credit", "reward", "calibration", "critic_init", "warmup", "schedule")  # the words themselves


def flat(value: Any, name: str = "") -> dict[str, object]:  # Any: a tree of settings
    if isinstance(value, dict):
        return {key: leaf for part, below in value.items() for key, leaf in flat(below, f"{name}.{part}" if name else part).items()}
    return {name: value}


def changed(*overrides: str) -> dict[str, object]:
    """Settings that differ from the experiment's own, with their new values; None for those that are gone."""
    before, after = (flat(asdict(load((*BASE, *more)))) for more in ((), overrides))
    return {key: after.get(key) for key in {**before, **after} if before.get(key) != after.get(key) and key not in OWN}


def test_credit_is_of_every_stage_that_has_it() -> None:
    assert changed("credit=skip") == {f"stages.{name}.credit.credit": "skip" for name in ("warmup", "rpr_1", "rpr_2")}


@pytest.mark.parametrize("kind", ["fdr", "saturation", "offset"])
def test_reward_is_of_the_second_phase(kind: str) -> None:
    assert changed(f"reward={kind}") == {"stages.rpr_2.reward.kind": kind}


def test_another_reward_than_a_count_has_a_cap() -> None:
    stage = load(("experiment=t1", "scale=laptop", "reward=fdr")).stages["t1"]
    assert isinstance(stage, stages.RprConfig)
    assert (stage.reward.kind, stage.reward.cap) == (choices.Reward.fdr, True)
    counted = load((*BASE, "reward=count", "stages.rpr_2.reward.cap=false")).stages["rpr_2"]
    assert isinstance(counted, stages.RprConfig)
    assert (counted.reward.kind, counted.reward.cap) == (choices.Reward.count, False)


def test_calibration_is_of_every_reward() -> None:
    names = [f"stages.{name}.reward.calibration" for name in ("warmup", "rpr_1", "rpr_2")]
    assert changed("calibration=global") == dict.fromkeys(names, "global")


def test_a_new_critic_for_the_second_phase() -> None:
    assert changed("critic_init=reset") == {"stages.rpr_2.critic_init": "reset"}


def test_without_a_warm_up_the_first_phase_has_a_new_critic() -> None:
    found = {key: value for key, value in changed("warmup=off").items() if not key.startswith("stages.warmup.")}
    assert found == {
        "pipeline": [name for name in WHOLE if name != "warmup"],
        "stages.rpr_1.critic_init": "reset",
        "stages.rpr_1.critic": "",
    }


def test_phases_without_rewriting_between_them() -> None:
    gone = ("stages.rsr_2.", "stages.sft_2.")
    found = {key: value for key, value in changed("schedule=continue_rpr").items() if not key.startswith(gone)}
    assert found == {
        "pipeline": [name for name in WHOLE if name not in ("rsr_2", "sft_2")],
        "stages.rpr_2.policy": "rpr_1",
    }


def test_a_rollback_is_of_the_later_phases_and_goes_on_with_actor_and_critic_of_the_one_before() -> None:
    gone = ("stages.rsr_2.", "stages.sft_2.")
    found = {key: value for key, value in changed("schedule=rollback").items() if not key.startswith(gone)}
    assert found == {
        "pipeline": [name for name in WHOLE if name not in ("rsr_2", "sft_2")],
        "stages.rpr_2.policy": "rpr_1",
        "stages.rpr_2.retention.rollback": True,
    }
    stage = load((*BASE, "schedule=rollback")).stages["rpr_2"]
    assert isinstance(stage, stages.RprConfig)
    assert (stage.critic, stage.critic_init) == ("rpr_1", choices.CriticInit.inherit)


@pytest.mark.parametrize(
    "override",
    ["credit=tb", "reward=spr", "calibration=family", "critic_init=inherit", "warmup=on", "schedule=alternate"],
)
def test_the_experiments_own_arms_change_nothing(override: str) -> None:
    assert changed(override) == {}


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("experiment=reterm", "credit=skip"), "credit=skip: no stage of this pipeline has it"),
        (("experiment=rsr", "reward=fdr"), "reward=fdr"),
        (("experiment=t1", "critic_init=reset"), "critic_init=reset"),
        (("experiment=t1", "schedule=continue_rpr"), "schedule=continue_rpr"),
        (("experiment=tmax", "warmup=off"), "warmup=off"),
        (("experiment=terminal_rsi", "calibration=globl"), "expected one of [family, global]"),
        (("experiment=terminal_rsi", "stages.rpr_2.reward.cap=false"), "only a count may exceed 1"),
        (("experiment=t1", "calibration=family"), "calibration=family: no stage"),
        (("experiment=river", "stages.grpo.loss=dr_grpo"), "no division by the standard deviation"),
        (("experiment=river", "stages.grpo.optim.delta=0.2"), "delta is of the loss dppo"),
        (
            ("experiment=river", "stages.grpo.optim.correction=icepop", "stages.grpo.optim.tis_cap=0"),
            "correction without a correction",
        ),
        (
            ("experiment=river", "stages.grpo.optim.correction=icepop", "stages.grpo.optim.tis_cap=0.4"),
            "no weight is in [0.5, 0.4]",
        ),
        (("experiment=river", "stages.grpo.optim.kl_kind=k1"), "kl_kind without a divergence"),
        (("experiment=river", "stages.grpo.optim.minibatches=1", "stages.grpo.optim.clip_high=0.3"), "no effect on one update"),
        (("experiment=tmax", "stages.dppo.optim.clip_high=0.3"), "no effect in dppo"),
        (("experiment=terminal_rsi", "stages.rpr_1.loss=dppo"), "TIS on top corrects twice"),
        (("experiment=tmax", "stages.dppo.optim.tis_cap=2"), "TIS on top corrects twice"),
        (("experiment=tmax", "stages.dppo.loss=tvpo", "stages.dppo.optim.tis_cap=2"), "tvpo's ratio is to the sampler"),
        (("experiment=tmax", "stages.dppo.loss=tvpo", "stages.dppo.optim.delta=0.2"), "delta is of the loss dppo"),
        (("experiment=tmax", "stages.dppo.loss=tvpo", "stages.dppo.optim.clip_high=0.3"), "no effect in tvpo"),
        (("experiment=tmax", "stages.dppo.optim.tvpo_delta=0.03"), "tvpo_delta is of the loss tvpo"),
        (("experiment=tmax", "stages.dppo.optim.sat=0.9"), "dppo has no clip for sat to narrow"),
        (("experiment=river", "stages.grpo.optim.sat=0.9"), "sat's ratio is to the sampler"),
        (("experiment=river", "stages.grpo.optim.sat=1"), "sat=1.0"),
        (
            ("experiment=river", "stages.grpo.optim.sat=0.9", "stages.grpo.optim.tis_cap=0", ICEPOP),
            "correction without a correction",
        ),
        (("experiment=terminal_rsi", "credit=skip", "stages.rpr_1.credit.bootstrap_at=last"), "credit=skip links no turns"),
        (("experiment=terminal_rsi", "stages.rpr_1.credit.token_steps=action"), "token_steps is of credit=token"),
        (("experiment=terminal_rsi", "critic_init=reset", "stages.rpr_2.refit_value_head=affine"), "no scale to refit"),
        (("experiment=terminal_rsi", "stages.rpr_1.retention.rollback=true", "stages.rpr_1.retention.every=8"), "only candidate"),
        (("experiment=terminal_rsi", "stages.rpr_1.retention.rollback=true", "stages.rpr_1.max_staleness=1"), "max_staleness=0"),
        (("experiment=terminal_rsi", "schedule=rollback", "stages.rpr_2.retention.every=8"), "only candidate"),
        (("experiment=t1", "schedule=rollback"), "schedule=rollback: no stage"),
        (("experiment=reterm", "stages.reterm.recovery_groups=0", "stages.reterm.pop=false"), "pop without recovery groups"),
        (
            ("experiment=reterm", "stages.reterm.recovery_groups=0", "stages.reterm.requeue_recovery_failures=true"),
            "requeue_recovery_failures without recovery groups",
        ),
        (("experiment=river", "stages.grpo.overlong_max=100"), "overlong_max without overlong"),
        (("experiment=river", "stages.grpo.overlong=200", "stages.grpo.overlong_max=100"), "exceeds the longest rollout"),
        (("experiment=river", "stages.grpo.overlong=50", "stages.grpo.overlong_max=99999"), "cost nothing"),
        (("experiment=river", "stages.grpo.overlong=-1"), "overlong=-1"),
    ],
)
def test_refusals(overrides: tuple[str, ...], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(("scale=laptop", *overrides))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("experiment=tmax", "stages.dppo.loss=tvpo", "stages.dppo.optim.tvpo_delta=0.03"),
        ("experiment=river", "stages.grpo.loss=dis", "stages.grpo.optim.tis_cap=0", "stages.grpo.optim.clip_high=2"),
        ("experiment=river", "stages.grpo.optim.sat=0.9", "stages.grpo.optim.tis_cap=0", "stages.grpo.optim.minibatches=1"),
        ("experiment=river", "stages.grpo.overlong=40"),
        ("experiment=river", "stages.grpo.overlong=40", "stages.grpo.overlong_max=120"),
        ("experiment=terminal_rsi", "stages.rpr_1.credit.bootstrap_at=last", "stages.rpr_2.refit_value_head=affine"),
        ("experiment=terminal_rsi", "stages.rpr_1.retention.rollback=true"),
        ("experiment=reterm", "stages.reterm.pop=false", "stages.reterm.requeue_recovery_failures=true"),
        ("experiment=reterm", "stages.reterm.zero_std_in_denominator=false"),
    ],
)
def test_settings_that_have_an_effect_are_taken(overrides: tuple[str, ...]) -> None:
    load(("scale=laptop", *overrides))


# What papers state, and nothing else: methods of training at full scale.
PUBLISHED: dict[str, dict[str, object]] = {
    "terminal_rsi": {
        "stages.rpr_1.optim.lr": 5e-7,
        "stages.rpr_2.optim.lr": 1e-7,
        "stages.rpr_1.critic_lr": 1.5e-5,
        "stages.rpr_2.critic_lr": 1.5e-5,
        "stages.rpr_1.critic_only_updates": 4,
        "stages.rpr_2.critic_only_updates": 4,
        "stages.rpr_1.reward.kind": "fdr",
        "stages.rpr_2.reward.kind": "spr",
        "stages.rpr_1.credit.credit": "tb",
        "stages.final_eval.k": 3,
        "stages.final_eval.temperature": 0.6,
        "stages.final_eval.top_p": 0.95,
        "sampling.max_tokens": 8192,
    },
    "t1": {
        "stages.t1.samples_per_task": 1,
        "stages.t1.reward.kind": "count",
        "stages.t1.reward.calibration": "global",
        "stages.t1.reward.cap": False,
        "stages.t1.critic_only_updates": 0,
        "stages.t1.max_staleness": 1,
        "stages.t1.optim.kl": 0.0,
        "stages.t1.loss": "ppo",
        "limits.max_turns": 300,
    },
    "reterm": {
        "stages.reterm.original_groups": 8,
        "stages.reterm.recovery_groups": 2,
        "stages.reterm.group_size": 16,
        "stages.reterm.optim.lr": 5e-7,
        "stages.reterm.reward.kind": "binary",
        "stages.reterm.optim.kl": 0.0,
        "stages.sft.lr": 5e-6,
        "stages.final_eval.k": 1,
        "stages.final_eval.temperature": 1.0,
        "stages.final_eval.top_p": 1.0,
        "stages.sft.batch": 16,
        "limits.max_turns": 32,
        "limits.max_context_tokens": 65536,
        "sampling.max_tokens": 8192,
    },
    "tmax": {
        "stages.synthesise.legacy": 10000,
        "stages.synthesise.rl_v2": 5000,
        "stages.synthesise.sft_v2": 0,
        "stages.synthesise.axes.language.python": 0.35,
        "stages.synthesise.axes.language.c": 0.15,
        "stages.dppo.tasks_from": "synthesise",
        "stages.dppo.steps": 500,
        "stages.dppo.groups": 8,
        "stages.dppo.group_size": 32,
        "stages.dppo.normalise": False,
        "stages.dppo.replace_zero_variance": 80,
        "stages.dppo.max_staleness": 4,
        "stages.dppo.loss": "dppo",
        "stages.dppo.optim.lr": 1e-6,
        "stages.dppo.optim.tis_cap": 0.0,
        "stages.dppo.optim.delta": 0.1,
        "stages.dppo.optim.divergence": "tv",
        "stages.dppo.optim.temperature": 1.0,
        "stages.dppo.retention.every": 100,
        "stages.dppo.reward.kind": "official",
        "stages.final_eval.k": 5,
        "limits.max_turns": 64,
        "limits.max_context_tokens": 2048 + 65536,
        "sampling.max_tokens": 16384,
    },
    "river": {
        "stages.grpo.repetition_penalty": 0.05,
        "stages.grpo.repetition_threshold": 0.8,
        "stages.grpo.normalise": True,
        "stages.grpo.loss": "grpo",
        "stages.grpo.steps": 400,
        "stages.grpo.reward.kind": "binary",
    },
    "rsr": {
        "stages.final_eval.k": 3,
        "stages.sft.lr": 2e-5,
        "stages.sft.batch": 128,
        "stages.sft.epochs": 2,
        "stages.sft.warmup": 0.03,
    },
}


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_what_papers_state_is_what_full_scale_has(experiment: str) -> None:
    found = flat(asdict(load((f"experiment={experiment}", "scale=full"))))
    assert {key: found[key] for key in PUBLISHED[experiment]} == PUBLISHED[experiment]


def test_the_critics_rate_of_t1_is_thirty_times_the_actors() -> None:
    stage = load(("experiment=t1", "scale=full")).stages["t1"]
    assert isinstance(stage, stages.RprConfig)
    assert stage.critic_lr / stage.optim.lr == pytest.approx(30)
    assert stage.optim.clip_low == stage.optim.clip_high
