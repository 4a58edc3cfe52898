"""What the ratio of an update is taken against, and what that costs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from termrsi.config.choices import Correction, Divergence, KlKind, Loss
from termrsi.config.stages import PolicyOptimConfig
from termrsi.errors import StageError
from termrsi.records import Sample, UpdateMetrics
from termrsi.stages.anchor import anchored, learn, loss_arguments

SAMPLE = Sample((1, 2, 3), (0, 1, 1), (0, 0, 0))


class _Policy:
    calls = 0

    async def logp(self, samples: list[Sample]) -> list[list[float]]:
        self.calls += 1
        return [[0.0, -1.0, -2.0] for _ in samples]


@pytest.mark.parametrize(
    ("kind", "minibatches", "anchor", "passes"),
    [
        (Loss.ppo, 1, "current", 0),
        (Loss.ppo, 2, "old", 1),
        (Loss.dapo, 3, "old", 1),
        (Loss.dppo, 1, "sampler", 0),
        (Loss.dppo, 2, "sampler", 0),
        (Loss.tvpo, 2, "sampler", 0),
        (Loss.dis, 2, "sampler", 0),
        (Loss.reterm, 1, "current", 0),
    ],
)
async def test_a_pass_for_old_log_probabilities_only_where_they_differ(
    kind: Loss, minibatches: int, anchor: str | None, passes: int
) -> None:
    policy, optim = _Policy(), PolicyOptimConfig(minibatches=minibatches)
    ctx: Any = SimpleNamespace(policy=policy)
    (sample,) = await anchored(ctx, [SAMPLE], kind, optim)
    assert policy.calls == passes
    assert sample.old_logp == ((0.0, -1.0, -2.0) if passes else ())
    arguments = loss_arguments(kind, optim, 144)
    assert arguments.get("anchor") == anchor
    assert ("tis_cap" in arguments) == (anchor != "sampler")  # that ratio needs no correction


async def test_a_divergence_is_from_the_reference() -> None:
    policy, reference = _Policy(), _Policy()
    ctx: Any = SimpleNamespace(policy=policy, reference=reference, name="grpo")
    optim = PolicyOptimConfig(kl=0.1, kl_kind=KlKind.k2)
    (sample,) = await anchored(ctx, [SAMPLE], Loss.grpo, optim)
    assert (policy.calls, reference.calls) == (0, 1)
    assert sample.ref_logp == (0.0, -1.0, -2.0)
    arguments = loss_arguments(Loss.grpo, optim, 144)
    assert (arguments["kl"], arguments["kl_kind"]) == (0.1, "k2")
    assert "kl" not in loss_arguments(Loss.grpo, PolicyOptimConfig(), 144)
    ctx.reference = None
    with pytest.raises(StageError, match="no reference host"):
        await anchored(ctx, [SAMPLE], Loss.grpo, optim)


def test_each_loss_gets_its_own_arguments() -> None:
    dppo = loss_arguments(Loss.dppo, PolicyOptimConfig(tis_cap=0.0, delta=0.05, divergence=Divergence.kl), 144)
    assert (dppo["delta"], dppo["divergence"], dppo["dppo_form"]) == (0.05, "kl", "ratio")
    ppo = loss_arguments(Loss.ppo, PolicyOptimConfig(correction=Correction.icepop, correction_low=0.7, tis_cap=3.0), 144)
    assert (ppo["correction"], ppo["correction_low"], ppo["tis_cap"]) == ("icepop", 0.7, 3.0)
    assert "delta" not in ppo
    assert loss_arguments(Loss.tvpo, PolicyOptimConfig(tis_cap=0.0, tvpo_delta=0.03), 144)["delta"] == 0.03
    narrowed = loss_arguments(Loss.grpo, PolicyOptimConfig(tis_cap=0.0, sat=0.9), 144)
    assert (narrowed["sat"], narrowed["anchor"]) == (0.9, "sampler")
    assert "sat" not in ppo


async def test_metrics_of_a_batch_are_over_its_updates() -> None:
    parts: list[int] = []

    class Learner(_Policy):
        async def update(self, samples: list[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
            parts.append(len(samples))
            n = len(parts)
            return UpdateMetrics(n, 2.0 * n, 5, 0.5, {"ratio_max": 10.0 - n, "entropy": n} | ({"rare": 7.0} if n > 1 else {}))

    costs = SimpleNamespace(trained_tokens=0, learn_s=0.0)
    config = SimpleNamespace(seed=0)
    ctx: Any = SimpleNamespace(policy=Learner(), name="grpo", costs=costs, config=config, max_action_tokens=lambda: 9)
    samples = [replace(SAMPLE, rollout_id=f"{i}") for i in range(5)]
    found = await learn(ctx, samples, Loss.grpo, PolicyOptimConfig(minibatches=2), 1)
    assert parts == [3, 2]
    assert found == {"loss": 1.5, "grad_norm": 3.0, "ratio_max": 9.0, "entropy": 1.5, "rare": 7.0}
    assert (costs.trained_tokens, costs.learn_s) == (10, 1.0)


@pytest.mark.parametrize("kind", [Loss.grpo, Loss.tvpo])
async def test_the_rollouts_of_a_prompt_are_in_one_update_of_tvpo(kind: Loss) -> None:
    parts: list[set[str]] = []

    class Learner(_Policy):
        async def update(self, samples: list[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
            parts.append({sample.group_id for sample in samples})
            return UpdateMetrics(0.0, 0.0, 1, 0.0)

    costs, config = SimpleNamespace(trained_tokens=0, learn_s=0.0), SimpleNamespace(seed=0)
    ctx: Any = SimpleNamespace(policy=Learner(), name="grpo", costs=costs, config=config, max_action_tokens=lambda: 9)
    samples = [replace(SAMPLE, rollout_id=f"{i}", group_id=f"g{i % 4}") for i in range(16)]
    await learn(ctx, samples, kind, PolicyOptimConfig(minibatches=2, tis_cap=0.0), 1)
    assert set().union(*parts) == {"g0", "g1", "g2", "g3"}
    assert sum(map(len, parts)) == 4 if kind is Loss.tvpo else sum(map(len, parts)) > 4


def test_no_cap_no_correction() -> None:
    assert "tis_cap" not in loss_arguments(Loss.ppo, PolicyOptimConfig(tis_cap=0.0), 144)


def test_dr_grpo_gets_its_constant_length() -> None:
    assert loss_arguments(Loss.dr_grpo, PolicyOptimConfig(), 144)["max_tokens"] == 144
    assert "max_tokens" not in loss_arguments(Loss.grpo, PolicyOptimConfig(), 144)
