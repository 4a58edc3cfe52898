"""What the policy-gradient stages share: what the ratio of an update is taken against, the arguments of its loss, its steps."""

from collections.abc import Sequence
from dataclasses import replace

from termrsi.config.choices import TO_SAMPLER, Loss
from termrsi.config.stages import PolicyOptimConfig
from termrsi.errors import StageError
from termrsi.records import Sample
from termrsi.stages.base import Context
from termrsi.stages.credit import minibatches


def anchor_of(kind: Loss, optim: PolicyOptimConfig) -> str:
    """`sampler` for the losses whose one ratio it is; `current` for one update per batch (old weights = present ones: no extra
    pass); else `old`."""
    if kind in TO_SAMPLER or optim.sat > 0.0:
        return "sampler"
    return "current" if optim.minibatches == 1 else "old"


async def anchored(ctx: Context, samples: Sequence[Sample], kind: Loss, optim: PolicyOptimConfig) -> list[Sample]:
    """Samples with `old_logp` under the weights before the batch's first update, and the reference's, where the updates need them.

    Raises StageError if the loss has a reference and the run has none.
    """
    made = list(samples)
    if anchor_of(kind, optim) == "old":
        made = [replace(s, old_logp=tuple(o)) for s, o in zip(made, await ctx.policy.logp(made), strict=True)]
    if optim.kl > 0.0:
        if ctx.reference is None:
            raise StageError("no reference host", ctx.name)
        made = [replace(s, ref_logp=tuple(r)) for s, r in zip(made, await ctx.reference.logp(made), strict=True)]
    return made


def loss_arguments(kind: Loss, optim: PolicyOptimConfig, max_tokens: int) -> dict[str, object]:
    """Arguments of `ports.Policy.update`; a cap of 0, and a ratio to the sampler, leave the sampler correction out.

    `max_tokens`: the most action tokens that a rollout can have, the constant length of Dr. GRPO.
    """
    arguments: dict[str, object] = {"kind": kind.value, "clip_low": optim.clip_low, "clip_high": optim.clip_high}
    if kind is Loss.dr_grpo:
        arguments["max_tokens"] = max_tokens
    if kind is Loss.dppo:
        arguments |= {"delta": optim.delta, "divergence": optim.divergence.value, "dppo_form": optim.dppo_form.value}
    if kind is Loss.tvpo:
        arguments["delta"] = optim.tvpo_delta
    if optim.sat > 0.0:
        arguments["sat"] = optim.sat
    if optim.kl > 0.0:
        arguments |= {"kl": optim.kl, "kl_kind": optim.kl_kind.value}
    arguments["anchor"] = anchor = anchor_of(kind, optim)
    if optim.tis_cap > 0.0 and anchor != "sampler":  # there a second correction would count twice
        arguments |= {"tis_cap": optim.tis_cap, "correction": optim.correction.value, "correction_low": optim.correction_low}
    return arguments


async def learn(ctx: Context, samples: Sequence[Sample], kind: Loss, optim: PolicyOptimConfig, step: int) -> dict[str, float]:
    """The updates of one batch, each on a part of its rollouts; metrics are means over them, those named `_max` the largest.

    `tvpo` compares the divergence of whole prompts: their rollouts stay together in one part.
    """
    anchored_samples = await anchored(ctx, samples, kind, optim)
    loss = loss_arguments(kind, optim, ctx.max_action_tokens())
    reports: list[dict[str, float]] = []
    seed = f"{ctx.config.seed}/{ctx.name}/minibatch/{step}"
    for part in minibatches(anchored_samples, optim.minibatches, seed, whole_prompts=kind is Loss.tvpo):
        metrics = await ctx.policy.update(part, loss, optim.lr)
        ctx.costs.trained_tokens += metrics.tokens
        ctx.costs.learn_s += metrics.seconds
        reports.append({"loss": metrics.loss, "grad_norm": metrics.grad_norm, **metrics.extra})
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [report[name] for report in reports if name in report]
        found[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return found
