"""What the policy-gradient stages share: what the ratio of an update is taken against, and the arguments of its loss."""

from collections.abc import Sequence
from dataclasses import replace

from termrsi.config.schema import Loss, PolicyOptimConfig
from termrsi.records import Sample
from termrsi.stages.base import Context


def anchor_of(kind: Loss, optim: PolicyOptimConfig) -> str:
    """`sampler` for DPPO; `current` for one update per batch (old weights = present ones: no extra pass); else `old`."""
    if kind is Loss.dppo:
        return "sampler"
    return "current" if optim.minibatches == 1 else "old"


async def anchored(ctx: Context, samples: Sequence[Sample], kind: Loss, optim: PolicyOptimConfig) -> list[Sample]:
    """Samples with `old_logp` under the weights before the batch's first update, where the updates need it."""
    if anchor_of(kind, optim) != "old":
        return list(samples)
    old = await ctx.policy.logp(samples)
    return [replace(s, old_logp=tuple(o)) for s, o in zip(samples, old, strict=True)]


def loss_arguments(kind: Loss, optim: PolicyOptimConfig, max_tokens: int) -> dict[str, object]:
    """Arguments of `ports.Policy.update`; a cap of 0 leaves the sampler correction out.

    `max_tokens`: the most action tokens that a rollout can have, the constant length of Dr. GRPO.
    """
    arguments: dict[str, object] = {"kind": kind.value, "clip_low": optim.clip_low, "clip_high": optim.clip_high}
    if kind is Loss.dr_grpo:
        arguments["max_tokens"] = max_tokens
    anchor = anchor_of(kind, optim)
    if anchor == "sampler":  # the ratio itself is against the sampler: a second correction would count twice
        return arguments
    return arguments | {"anchor": anchor} | ({"tis_cap": optim.tis_cap} if optim.tis_cap > 0 else {})
