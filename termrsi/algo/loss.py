"""Policy, value and SFT losses over padded batches. Each takes its denominator, so no split of a batch changes a gradient.

Letters: B rows (one row is one rollout, or one chunk of it), T tokens of the padded row. The mask is 1 on action tokens;
whatever stands off the mask is never read, NaN included. The objective is maximised: loss = -sum / denominator.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from termrsi.algo.whole import quantile_of
from termrsi.errors import ConfigError

LossKind = Literal["ppo", "grpo", "dapo", "dr_grpo", "gspo", "dppo", "tvpo", "dis", "reterm"]
Anchor = Literal["old", "sampler"]
Correction = Literal["tis", "icepop", "sequence"]
KlKind = Literal["k1", "k2", "k3"]
DppoForm = Literal["ratio", "capped"]

# Kinds whose denominator counts rollouts; the others count action tokens.
ROLLOUT_KINDS: frozenset[str] = frozenset({"grpo", "reterm", "gspo", "dr_grpo"})
# Kinds whose one ratio is to the sampler: `old_logp` is the sampler's, and nothing is clipped.
SAMPLER_KINDS: frozenset[str] = frozenset({"dppo", "tvpo", "dis"})

MAX_LOG_RATIO = 20.0  # e^20 is far beyond every clip; it keeps a stray token from turning the loss into inf
MIN_LOGP = -30.0  # clamp of Tmax's code before exp
MAX_CAPPED_RATIO = 10.0  # of DPPO's own code
MAX_TVPO_RATIO = 20.0  # of Tmax's code: for the numbers' sake, the budget is what bounds


def policy_loss(
    kind: LossKind,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float = 0.1,
    max_tokens: int = 0,
    denominator: float | None = None,
    sampler_logp: Tensor | None = None,
    tis_cap: float = 0.0,
    correction: Correction = "tis",
    correction_low: float = 0.5,
    anchor: Anchor = "old",
    divergence: Literal["tv", "kl"] = "tv",
    dppo_form: DppoForm = "ratio",
    rollout_tokens: Tensor | None = None,
    prompt_tv: Tensor | None = None,
    sat: float = 0.0,
    sat_bound: float | None = None,
    kl: float = 0.0,
    kl_kind: KlKind = "k3",
    ref_logp: Tensor | None = None,
) -> Tensor:
    """The scalar loss of one (micro-)batch; `logp`, `old_logp`, `advantages`, `mask` are `[B, T]`.

    With rho = exp(logp - old_logp) and clip(rho) = clamp(rho, 1 - clip_low, 1 + clip_high):

    ========== ======================================================== ================================================
    kind       term                                                     denominator
    ========== ======================================================== ================================================
    `ppo`      min(rho A, clip(rho) A) (arXiv:1707.06347, eq. 7)        action tokens (ours)
    `dapo`     the same (arXiv:2503.14476, eq. 8)                       action tokens
    `dppo`     M r A, r not clipped; see `dppo_mask`, `dppo_form`       action tokens, masked ones included
    `tvpo`     r A log pi, r detached, at most 20; where `tvpo_mask`    action tokens, frozen ones included
               is 0 the value stays and no gradient flows
    `dis`      r A log pi, r detached, where 1 - clip_low < r <         action tokens, masked ones included
               1 + clip_high, else 0 (arXiv:2607.07508)
    `grpo`     mean of the ppo term over a rollout's tokens             rollouts (arXiv:2402.03300, eq. 3)
    `reterm`   the same, groups pooled (arXiv:2610.18484, eq. 6)        rollouts of original and recovery groups: their mean
                                                                        over groups, unless the machine lost some (ours)
    `dr_grpo`  sum of the ppo term over a rollout's tokens              rollouts x `max_tokens` (arXiv:2503.20783)
    `gspo`     the ppo term on exp(mean log rho), A the row's mean      rollouts (arXiv:2507.18071, eq. 5)
    ========== ======================================================== ================================================

    `denominator` is that count over the *whole* batch (for `dr_grpo` the number of rollouts); None counts this call's
    rows. A row without action tokens adds nothing and is not counted. Where a rollout is cut into several rows,
    `rollout_tokens` `[B]` is the action tokens of the row's whole rollout, and `denominator` must be given; in `gspo` each
    row is then a sequence of its own, weighted by its share of the rollout (ours).

    `tis_cap` > 0 multiplies each term by `correction_weights` of that `correction`. `anchor` says whose probabilities
    `old_logp` holds: in `dppo`, `tvpo` and `dis` always the sampler's, and r = exp(logp - old_logp). `dppo_form`: "ratio" has
    the gradient go through r (Tmax's code), "capped" takes r detached, at most 10, times log pi (DPPO's own code); up to that
    cap the gradients are one.

    Two things are of the whole batch and cannot be told from a part of it; `algo.whole` takes them from a forward pass before
    it is split. `prompt_tv` `[B]`, of `tvpo`: the divergence of each row's prompt (None: each row is a prompt of one rollout).
    `sat_bound`, where `sat` > 0: the quantile `sat` of |log rho| over its action tokens (None: over this call's), beyond which
    a token's clip radius contracts (`contraction`); of the kinds with a clip, their ratio taken to the sampler (`anchor`).

    `kl` > 0 adds that times `kl_terms(logp, ref_logp)`, under the same denominator: an average over tokens where the kind averages
    over a rollout's tokens (`gspo` too), else their sum.

    Raises ConfigError on an unknown kind, on `tis_cap` with a sampler anchor (the ratio would be corrected twice) or without
    `sampler_logp`, on `kl` without `ref_logp`, on `dr_grpo` without `max_tokens`, and on `sat` where no ratio to the sampler is
    clipped.
    """
    _check(kind, max_tokens, tis_cap, anchor, sampler_logp)
    _check_contraction(kind, sat, anchor)
    _check_choices(correction, kl, kl_kind, dppo_form, ref_logp)
    on = mask.bool()
    logp, old_logp, advantages = (torch.where(on, _wide(x), 0.0) for x in (logp, old_logp, advantages))
    row_tokens = on.sum(1)
    if kind == "dppo":
        keep = dppo_mask(logp, old_logp, advantages, delta=delta, divergence=divergence)
        ratio = torch.exp(logp - old_logp.clamp(MIN_LOGP, 0.0))
        if dppo_form == "capped":
            ratio = ratio.detach().clamp(max=MAX_CAPPED_RATIO) * logp
        terms = keep * ratio * advantages
    elif kind == "tvpo":
        keep = tvpo_mask(logp, old_logp, advantages, row_tv(logp, old_logp, on) if prompt_tv is None else prompt_tv, delta=delta)
        terms = _ratio(logp - old_logp).detach().clamp(max=MAX_TVPO_RATIO) * advantages * torch.where(keep, logp, logp.detach())
    elif kind == "dis":
        ratio = _ratio(logp - old_logp).detach()
        inside = (ratio > 1 - clip_low) & (ratio < 1 + clip_high)
        terms = torch.where(inside, ratio, 0.0) * advantages * logp
    else:
        length = row_tokens.clamp(min=1).unsqueeze(1)
        log_ratio = logp - old_logp
        if kind == "gspo":  # that of the row on each of its tokens, so that the mean over tokens is the row's term itself
            log_ratio, advantages = (x.sum(1, keepdim=True).div(length).expand_as(logp) for x in (log_ratio, advantages))
        if sat > 0.0:
            if sat_bound is None:
                sat_bound = quantile_of(log_ratio.detach()[on].double().cpu().numpy(), sat)
            below, above = contraction(log_ratio, sat_bound)
            terms = _clipped(_ratio(log_ratio), advantages, clip_low * below, clip_high * above)
        else:
            terms = _clipped(_ratio(log_ratio), advantages, clip_low, clip_high)
    if tis_cap > 0.0 and sampler_logp is not None:
        sampler_logp = torch.where(on, _wide(sampler_logp), 0.0)
        terms = terms * correction_weights(correction, old_logp, sampler_logp, mask, low=correction_low, high=tis_cap)
    if kl > 0.0 and ref_logp is not None:
        terms = terms - kl * kl_terms(logp, torch.where(on, _wide(ref_logp), 0.0), kl_kind)
    terms = torch.where(on, terms, 0.0)
    if kind in ROLLOUT_KINDS:
        if kind != "dr_grpo":
            whole = row_tokens if rollout_tokens is None else rollout_tokens
            terms = terms / whole.clamp(min=1).unsqueeze(1)
        count = float((row_tokens > 0).sum()) if denominator is None else denominator
        count *= max_tokens if kind == "dr_grpo" else 1
    else:
        count = float(row_tokens.sum()) if denominator is None else denominator
    return -terms.sum() / max(count, 1.0)


def dppo_mask(
    logp: Tensor,
    sampler_logp: Tensor,
    advantages: Tensor,
    *,
    delta: float = 0.1,
    divergence: Literal["tv", "kl"] = "tv",
) -> Tensor:
    """1 where a token may move the policy, 0 where it has left the trust region and moves away: same shape, detached.

    DPPO (arXiv:2602.04879) as the code of Tmax (arXiv:2606.23321) has it: mu the sampler's and pi the learner's
    probability, both log-probabilities clamped to [-30, 0]; D is |mu - pi| (`tv`) or the Bernoulli KL(mu || pi) (`kl`)
    over {the token, everything else}. Masked iff D > delta and the step would widen it:
    A > 0 with pi > mu, or A < 0 with pi < mu.
    """
    with torch.no_grad():
        # float64: 1 - 1e-9 is 1 in float32, and log(1 - pi) would be -inf.
        log_pi, log_mu = logp.double().clamp(MIN_LOGP, 0.0), sampler_logp.double().clamp(MIN_LOGP, 0.0)
        pi, mu = log_pi.exp(), log_mu.exp()
        if divergence == "tv":
            distance = (mu - pi).abs()
        else:
            p, q = pi.clamp(1e-9, 1 - 1e-9), mu.clamp(1e-9, 1 - 1e-9)
            distance = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        away = ((advantages > 0) & (log_pi > log_mu)) | ((advantages < 0) & (log_pi < log_mu))
        # D = delta is kept, and float32 log-probabilities reach it only to about 1e-7.
        return (~((distance > delta + 1e-6) & away)).to(logp.dtype)


def row_tv(logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> Tensor:
    """Mean of |r - 1| / 2 over the action tokens of each row, `[B]`, detached: what bounds the total variation to the sampler."""
    with torch.no_grad():
        on = mask.bool()
        distances = torch.where(on, (_ratio(torch.where(on, logp - sampler_logp, 0.0)) - 1.0).abs() / 2, 0.0)
        return distances.sum(1) / on.sum(1).clamp(min=1)


def tvpo_mask(logp: Tensor, sampler_logp: Tensor, advantages: Tensor, prompt_tv: Tensor, *, delta: float = 0.02) -> Tensor:
    """True where a token may move the policy: its prompt is within the budget, or the step leads back. `[B, T]`, detached.

    TVPO, as the code of Tmax (arXiv:2606.23321) has it: `prompt_tv` `[B]` is the divergence of each row's prompt, the mean over its
    rollouts of `row_tv`. Beyond `delta` the tokens with A (pi - mu) > 0 are frozen. (That nothing is, where every prompt is within
    the budget, follows.)
    """
    with torch.no_grad():
        within = (prompt_tv <= delta).unsqueeze(1)
        moved = torch.sign(logp.clamp(MIN_LOGP, 0.0) - sampler_logp.clamp(MIN_LOGP, 0.0))
        return within | (advantages * moved <= 0)


def contraction(log_ratio: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """What the clip radius below 1 and that above 1 are multiplied by, each of `log_ratio`'s shape, detached.

    SAT (jyyang26.github.io, stable_async_analysis, eqs. 3.2 to 3.4): 1 / (1 + (d / bound)^2) on the side to which a token with
    |d| > `bound` has moved, d its log ratio to the sampler; 1 on the other side, for every other token, and where `bound` is 0.
    Its quantile is of a micro-batch; ours of the whole batch. In `gspo` d is the sequence's mean (ours).
    """
    with torch.no_grad():
        d = log_ratio.detach()
        if bound <= 0.0:
            return torch.ones_like(d), torch.ones_like(d)
        # The bound is one of the values, which rounds differently in another padding.
        factor = torch.where(d.abs() > bound + 1e-5, 1.0 / (1.0 + (d / bound).square()), 1.0)
        return torch.where(d < 0, factor, 1.0), torch.where(d > 0, factor, 1.0)


def tis_weights(old_logp: Tensor, sampler_logp: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated importance weights clamp(pi_old / mu, 0, cap), same shape, detached (as in verl and slime: cap 2)."""
    with torch.no_grad():
        return _ratio(old_logp.detach() - sampler_logp.detach()).clamp(max=cap)


def correction_weights(
    kind: Correction, old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, *, low: float = 0.5, high: float = 2.0
) -> Tensor:
    """What each token's term is multiplied by, because another engine sampled it: `[B, T]`, detached. w = pi_old / mu.

    ========== =====================================================================================================
    `tis`      clamp(w, 0, `high`): truncated importance sampling (verl, slime: 2)
    `icepop`   w inside [`low`, `high`], 0 outside: a token that is far off says nothing (the bounds are ours). SAO's two-sided
               mask is this with the present policy in place of the old one: the loss `dis`; one update per batch makes them one
    `sequence` 1 for a row whose geometric mean of w lies inside [`low`, `high`], 0 for all of any other row
    ========== =====================================================================================================

    Raises ConfigError on another kind.
    """
    with torch.no_grad():
        if kind == "tis":
            return tis_weights(old_logp, sampler_logp, cap=high)
        difference = torch.where(mask.bool(), old_logp.detach() - sampler_logp.detach(), 0.0)
        if kind == "icepop":
            weights = _ratio(difference)
            return torch.where((weights >= low) & (weights <= high), weights, 0.0)
        if kind == "sequence":
            mean = _ratio(difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1))
            return ((mean >= low) & (mean <= high)).to(difference.dtype).expand_as(difference)
    raise ConfigError(f"unknown correction {kind!r}", "algo.loss", f"one of {', '.join(get_args(Correction))}")


def kl_terms(logp: Tensor, ref_logp: Tensor, kind: KlKind = "k3") -> Tensor:
    """Estimates of KL(pi || reference) from sampled tokens, same shape (Schulman, "Approximating KL divergence").

    With d = log pi - log ref: `k1` is d, unbiased as a value, with a gradient of 0 in expectation; `k2` is d^2 / 2, whose gradient
    is the divergence's, on policy; `k3` is e^-d - 1 + d, never negative, GRPO's (arXiv:2402.03300, eq. 4). Raises ConfigError on
    another kind.
    """
    difference = (logp - ref_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        return torch.expm1(-difference) + difference
    raise ConfigError(f"unknown estimate of the divergence {kind!r}", "algo.loss", f"one of {', '.join(get_args(KlKind))}")


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor, *, clip: float, denominator: float | None = None
) -> Tensor:
    """1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), summed over action tokens `[B, T]` (the common form).

    Denominator: action tokens of the whole batch (None: of this call). `clip` = 0 switches the clip off.
    """
    on = mask.bool()
    values, returns, old_values = (torch.where(on, _wide(x), 0.0) for x in (values, returns, old_values))
    errors = (values - returns).square()
    if clip > 0.0:
        near = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    count = float(on.sum()) if denominator is None else denominator
    return 0.5 * torch.where(on, errors, 0.0).sum() / max(count, 1.0)


def sft_loss(logp: Tensor, mask: Tensor, *, denominator: float | None = None) -> Tensor:
    """Cross-entropy: -sum of `logp` `[B, T]` over the action tokens.

    Denominator: action tokens of the whole batch (None: of this call).
    """
    on = mask.bool()
    count = float(on.sum()) if denominator is None else denominator
    return -torch.where(on, _wide(logp), 0.0).sum() / max(count, 1.0)


def _check(kind: str, max_tokens: int, tis_cap: float, anchor: str, sampler_logp: Tensor | None) -> None:
    kinds = get_args(LossKind)
    if kind not in kinds:
        raise ConfigError(f"unknown policy loss {kind!r}", "algo.loss", f"one of {', '.join(kinds)}")
    if anchor not in get_args(Anchor):
        raise ConfigError(f"unknown anchor {anchor!r}", "algo.loss", f"one of {', '.join(get_args(Anchor))}")
    if kind == "dr_grpo" and max_tokens < 1:
        raise ConfigError("dr_grpo divides by a constant length", "algo.loss", "max_tokens must be at least 1")
    if tis_cap > 0.0 and (anchor == "sampler" or kind in SAMPLER_KINDS):
        raise ConfigError("TIS on top of a ratio to the sampler corrects twice", "algo.loss", "tis_cap=0, or anchor=old")
    if tis_cap > 0.0 and sampler_logp is None:
        raise ConfigError("TIS needs the sampler's log-probabilities", "algo.loss", "pass sampler_logp, or tis_cap=0")


def _check_contraction(kind: str, sat: float, anchor: str) -> None:
    if not 0.0 <= sat < 1.0:
        raise ConfigError(f"sat={sat} is no quantile", "algo.loss", "valid: 0 (off) up to below 1")
    if sat > 0.0 and (kind in SAMPLER_KINDS or anchor != "sampler"):
        raise ConfigError("sat contracts the clip of a ratio to the sampler", "algo.loss", "a kind with a clip, and anchor=sampler")


def _check_choices(correction: str, kl: float, kl_kind: str, dppo_form: str, ref_logp: Tensor | None) -> None:
    choices = (("correction", correction, Correction), ("kl_kind", kl_kind, KlKind), ("dppo_form", dppo_form, DppoForm))
    for name, value, valid in choices:
        if value not in get_args(valid):
            raise ConfigError(f"unknown {name} {value!r}", "algo.loss", f"one of {', '.join(get_args(valid))}")
    if kl > 0.0 and ref_logp is None:
        raise ConfigError("a divergence needs the reference's log-probabilities", "algo.loss", "pass ref_logp, or kl=0")


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float | Tensor, clip_high: float | Tensor) -> Tensor:
    return torch.minimum(ratio * advantages, torch.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)  # pyright: ignore[reportArgumentType, reportCallIssue]: both may be tensors
