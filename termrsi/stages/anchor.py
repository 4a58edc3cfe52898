"""What the policy-gradient stages share: old log-probabilities as anchors, and the arguments of the loss."""

from collections.abc import Sequence
from dataclasses import replace

from termrsi.records import Sample
from termrsi.stages.base import Context


async def anchored(ctx: Context, samples: Sequence[Sample]) -> list[Sample]:
    """Samples with `old_logp` under the weights before the update."""
    old = await ctx.policy.logp(samples)
    return [replace(s, old_logp=tuple(o)) for s, o in zip(samples, old, strict=True)]


def loss_arguments(kind: str, clip_low: float, clip_high: float, tis_cap: float) -> dict[str, object]:
    """Arguments of `ports.Policy.update`; a cap of 0 leaves the sampler correction out."""
    arguments: dict[str, object] = {"kind": kind, "clip_low": clip_low, "clip_high": clip_high}
    return arguments | ({"tis_cap": tis_cap} if tis_cap > 0 and kind != "dppo" else {})
