"""What the ratio of an update is taken against, and what that costs."""

from types import SimpleNamespace
from typing import Any

import pytest

from termrsi.config.schema import Loss, PolicyOptimConfig
from termrsi.records import Sample
from termrsi.stages.anchor import anchored, loss_arguments

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
        (Loss.dppo, 1, None, 0),
        (Loss.dppo, 2, None, 0),
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
    assert ("tis_cap" in arguments) == (kind is not Loss.dppo)  # its ratio is against the sampler already


def test_no_cap_no_correction() -> None:
    assert "tis_cap" not in loss_arguments(Loss.ppo, PolicyOptimConfig(tis_cap=0.0), 144)


def test_dr_grpo_gets_its_constant_length() -> None:
    assert loss_arguments(Loss.dr_grpo, PolicyOptimConfig(), 144)["max_tokens"] == 144
    assert "max_tokens" not in loss_arguments(Loss.grpo, PolicyOptimConfig(), 144)
