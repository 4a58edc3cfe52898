"""Credit assignment: rewards and values in, advantages and critic targets out. No torch import: it runs on the driver too.

One core works on [B, T] arrays of numpy or torch, whichever it is given; the single trajectory is a batch of one row. All
links of a trajectory are handled at once: turns (or tokens) are the steps of one discounted sum, taken in blocks by products
with a small triangular matrix. Never by dividing by (gamma lam)^u, which underflows within a few hundred turns.

Letters: B rows, T tokens of a whole sequence (prompt, observations, actions), K action tokens, U steps (turns in "tb"),
G rollouts of one task.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace, device

Credit = Literal["tb", "skip", "token"]
BootstrapAt = Literal["first", "last"]
Array = Any  # a numpy array or a torch tensor: naming the second here would import torch

BLOCK = 128  # steps summed by one matrix product
CACHE_TOKENS = 1 << 17  # positions handled at once on a CPU: their arrays stay near its cache

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_TIMESTAMP = re.compile(r"(?:\d{4}-\d{2}-\d{2}[t ])?\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?(?:z|[+-]\d{2}:?\d{2})?|\d{4}-\d{2}-\d{2}")
_DIGITS = re.compile(r"\d+")


def turn_boundary_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    turn_ids: np.ndarray,
    action_mask: np.ndarray,
    *,
    gamma: float,
    lam: float,
    credit: Credit = "tb",
    truncated: bool = False,
    bootstrap_value: float = 0.0,
    bootstrap_at: BootstrapAt = "first",
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and critic targets, both `[T]`, 0 off the mask: GAE (arXiv:1506.02438) that decays per turn (ours).

    `turn_ids` numbers the generation call of each token, `values` are those of the prefix before each token. Links inside
    a turn have weight 1, links to the next turn discount `gamma` and trace `lam`. Off the mask nothing is read: a NaN there
    reaches no output. `credit`: "tb" is this; "skip" decays on every action token and jumps over the rest; "token" makes
    every position from the first to the last action token a step, and reads it. `truncated`: no verifier scored the end,
    so the last step bootstraps from `bootstrap_value`, without trace; otherwise the end is terminal.

    `bootstrap_at`: the token of the next turn whose value "tb" links to. "first" (ours): what the environment left, before
    anything new was sampled. "last": as bi-level GAE does (RAGEN; with its inner gamma and lambda 1 it is this), where the
    luck of the next turn's own tokens is in this turn's target. The other arms have no turns: they are the same in both.

    Computed in float64; returned in float32 if `values` is, else in float64. No action token: zeros.
    Raises ValueError if the turn ids of the action tokens decrease, or on an unknown `credit` or `bootstrap_at`.
    """
    rewards, values, turn_ids, action_mask = (np.asarray(x)[None] for x in (rewards, values, turn_ids, action_mask))
    advantages, returns = turn_boundary_gae_batch(
        rewards,
        values,
        turn_ids,
        action_mask,
        gamma=gamma,
        lam=lam,
        credit=credit,
        truncated=[truncated],
        bootstrap_value=[bootstrap_value],
        bootstrap_at=bootstrap_at,
    )
    return advantages[0], returns[0]


def turn_boundary_gae_batch(
    rewards: Array,
    values: Array,
    turn_ids: Array,
    action_mask: Array,
    *,
    gamma: float,
    lam: float,
    credit: Credit = "tb",
    truncated: Sequence[bool] | bool = False,
    bootstrap_value: Sequence[float] | float = 0.0,
    bootstrap_at: BootstrapAt = "first",
) -> tuple[Array, Array]:
    """`turn_boundary_gae` of each row: arrays `[B, T]` of numpy or torch (CPU or GPU), two of the same kind out.

    `truncated` and `bootstrap_value` hold one entry per row, or one for all. Rows may be padded anywhere the mask is 0.
    No gradient flows. Raises ValueError as the single form.
    """
    if credit not in ("tb", "skip", "token"):
        raise ValueError(f"unknown credit {credit!r}: tb, skip or token")
    if bootstrap_at not in ("first", "last"):
        raise ValueError(f"unknown bootstrap_at {bootstrap_at!r}: first or last")
    xp = array_namespace(values)
    where = device(values)
    dtype = values.dtype if values.dtype in (xp.float32, xp.float64) else xp.float64
    rewards, values = (x if x.dtype in (xp.float32, xp.float64) else xp.astype(x, xp.float64) for x in (rewards, values))
    num_rows, num_tokens = values.shape
    results = tuple(xp.zeros((num_rows, num_tokens), dtype=dtype, device=where) for _ in range(2))
    cut_B = np.broadcast_to(np.asarray(truncated, bool), (num_rows,))
    # `where`, not a product: 0 times a NaN bootstrap of an ended row would be NaN.
    last_B = np.where(cut_B, np.asarray(bootstrap_value, np.float64), 0.0)
    arrays, at_once = (rewards, values, turn_ids, action_mask, *results), num_rows
    if hasattr(values, "detach"):
        arrays = tuple(x.detach() for x in arrays)
    if str(where) == "cpu":
        # The same memory as numpy arrays, whose operations cost less than torch's; and a few rows at a time, so that
        # what lies between stays in the cache.
        arrays = tuple(x if isinstance(x, np.ndarray) else x.numpy() for x in arrays)
        xp, where, at_once = array_namespace(arrays[0]), "cpu", max(1, CACHE_TOKENS // max(1, num_tokens))
    for start in range(0, num_rows, max(1, at_once)):
        rows = slice(start, start + at_once)
        after_B = xp.asarray(last_B[rows], device=where)
        parts = (x[rows] for x in arrays)
        _fill(xp, *parts, last_B=after_B, gamma=gamma, lam=lam, credit=credit, bootstrap_at=bootstrap_at)
    return results[0], results[1]


def adaptive_lambda(steps: int, alpha: float) -> float:
    """1 - 1 / (alpha x steps), not below 0: the longer a trajectory, the less its trace decays (VAPO, arXiv:2504.05118).

    VAPO's steps are tokens; those of turn-boundary credit are turns (ours). Without a step: 0. Raises ValueError unless alpha > 0.
    """
    if not alpha > 0.0:
        raise ValueError(f"alpha {alpha!r} must be above 0")
    return max(0.0, 1.0 - 1.0 / (alpha * steps)) if steps else 0.0


def group_relative(rewards: np.ndarray, *, std_floor: float = 1e-6, normalise: bool = True) -> np.ndarray:
    """Advantages `[G]` of one group: reward minus mean, over population std + floor (GRPO, arXiv:2402.03300; floor: ours).

    `normalise=False` leaves the division out. Equal rewards give exact zeros: rounding noise over the floor would look
    like signal.
    """
    rewards = np.asarray(rewards, np.float64)
    if len(rewards) == 0 or np.ptp(rewards) == 0.0:
        return np.zeros(len(rewards))
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + std_floor) if normalise else centred


def overlong_penalty(tokens: int, *, longest: int, cache: int) -> float:
    """DAPO's soft punishment of length (arXiv:2503.14476, eq. 13), to be added to the reward of a rollout of so many tokens.

    0 up to `longest` - `cache`, then linearly down to -1 at `longest`, -1 beyond. Raises ValueError unless 0 < cache <= longest.
    """
    if not 0 < cache <= longest:
        raise ValueError(f"cache {cache} must be above 0, and at most {longest}")
    return -min(1.0, max(0.0, (tokens - (longest - cache)) / cache))


def repetition_penalty(
    commands: Sequence[str | None], observations: Sequence[str], *, threshold: float = 0.8, penalty: float = 0.05
) -> list[float]:
    """Per turn, -`penalty` if its command *and* its observation both resemble those of one earlier turn, else 0.

    After River (arXiv:2608.22631); tokenisation ours: sets of words after lower-casing, without ANSI codes and time
    stamps, runs of digits as 0; Jaccard similarity strictly above `threshold`; two empty observations are equal;
    a turn without a command is skipped. Add it to the advantages after group normalisation, on the turn's action tokens.
    Legitimate polling is penalised as well. Raises ValueError if the lists differ in length.
    """
    seen: list[tuple[frozenset[str], frozenset[str]]] = []
    penalties: list[float] = []
    for command, observation in zip(commands, observations, strict=True):
        said = words(command or "")
        if not said:
            penalties.append(0.0)
            continue
        turn = said, words(observation)
        repeated = any(all(jaccard(a, b) > threshold for a, b in zip(turn, old, strict=True)) for old in seen)
        penalties.append(-penalty if repeated else 0.0)
        seen.append(turn)
    return penalties


def whiten(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray], *, std_floor: float = 1e-8) -> list[np.ndarray]:
    """Zero mean and unit population std over the action tokens of the whole batch; rows `[T]` of any lengths, 0 off the mask.

    For GAE advantages, as verl does; critic targets keep the unwhitened ones. Equal advantages become zeros.
    """
    on = [np.asarray(mask, bool) for mask in masks]
    pooled = np.concatenate([np.asarray(a, np.float64)[m] for a, m in zip(advantages, on, strict=True)] or [np.zeros(0)])
    if len(pooled) == 0 or np.ptp(pooled) == 0.0:
        return [np.zeros(len(m)) for m in on]
    mean, std = pooled.mean(), pooled.std()
    whitened = [np.zeros(len(m)) for m in on]
    for row, a, m in zip(whitened, advantages, on, strict=True):
        row[m] = (np.asarray(a, np.float64)[m] - mean) / (std + std_floor)
    return whitened


def whiten_batch(advantages: Array, action_mask: Array, *, std_floor: float = 1e-8) -> Array:
    """`whiten` of padded rows: `[B, T]` of numpy or torch in, the same kind and float type out. No gradient flows."""
    xp = array_namespace(advantages)
    on = xp.astype(action_mask, xp.bool)
    plain = advantages.detach() if hasattr(advantages, "detach") else advantages
    dtype = plain.dtype if plain.dtype in (xp.float32, xp.float64) else xp.float64
    wide = xp.where(on, xp.astype(plain, xp.float64), 0.0)
    count = int(xp.count_nonzero(on))
    whitened = xp.zeros(wide.shape, dtype=dtype, device=device(wide))
    pooled = wide[on]
    if count == 0 or bool(xp.max(pooled) == xp.min(pooled)):
        return whitened
    mean = xp.sum(pooled) / count
    std = xp.sqrt(xp.sum((pooled - mean) ** 2) / count)
    whitened[on] = xp.astype((pooled - mean) / (std + std_floor), dtype)
    return whitened


def _fill(
    xp: Any,
    rewards: Array,
    values: Array,
    turn_ids: Array,
    action_mask: Array,
    advantages: Array,
    returns: Array,
    *,
    last_B: Array,
    gamma: float,
    lam: float,
    credit: Credit,
    bootstrap_at: BootstrapAt,
) -> None:
    """Write the results of some rows into `advantages` and `returns` `[B, T]`; `last_B`: the value after each row's end."""
    actions = xp.astype(action_mask, xp.bool)
    (at,) = xp.nonzero(xp.reshape(actions, (-1,)))  # [K]: positions in the rows laid end to end
    if at.shape[0] == 0:
        return
    rows = _Rows.of(xp, actions)
    turn_K = xp.take(xp.reshape(turn_ids, (-1,)), at)
    lower = turn_K[1:] < turn_K[:-1]
    lower[rows.first_B[1:] - 1] = False  # from row to row they may
    if bool(xp.any(lower)):
        raise ValueError("turn_ids must not decrease over the action tokens")
    on = actions
    if credit == "token":
        taken = xp.cumulative_sum(xp.astype(actions, xp.int64), axis=1)
        # From the first action token (count 1) to the last one (count still short of the total just before it).
        on = (taken > 0) & (actions | (taken < taken[:, -1:]))
        (at,) = xp.nonzero(xp.reshape(on, (-1,)))
        rows = _Rows.of(xp, on)
    value_K = xp.astype(xp.take(xp.reshape(values, (-1,)), at), xp.float64)
    reward_K = xp.astype(xp.take(xp.reshape(rewards, (-1,)), at), xp.float64)
    if credit == "tb":
        return_K = _turn_returns(xp, rows, reward_K, value_K, turn_K, last_B, gamma, lam, bootstrap_at)
    else:
        return_K = _step_returns(xp, rows, reward_K, value_K, last_B, gamma, lam)
    # Slices of whole rows of a fresh array: these are views.
    xp.reshape(advantages, (-1,))[at] = xp.astype(return_K - value_K, advantages.dtype)
    xp.reshape(returns, (-1,))[at] = xp.astype(return_K, returns.dtype)
    if credit == "token":  # observations were steps, but take no loss
        advantages[~actions] = 0.0
        returns[~actions] = 0.0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where rows lie in a list of tokens (or steps) of several rows, one after another. Rows without any are left out."""

    index_B: Array  # which row
    first_B: Array  # place of its first token in the list
    count_B: Array  # number of its tokens, at least 1

    @staticmethod
    def of(xp: Any, on: Array) -> "_Rows":
        count = xp.sum(xp.astype(on, xp.int64), axis=1)
        (index,) = xp.nonzero(count)
        count = xp.take(count, index)
        return _Rows(index, xp.cumulative_sum(count) - count, count)


def _turn_returns(
    xp: Any,
    rows: _Rows,
    reward_K: Array,
    value_K: Array,
    turn_K: Array,
    last_B: Array,
    gamma: float,
    lam: float,
    bootstrap_at: BootstrapAt,
) -> Array:
    """The return A + V `[K]` of each token: that of its turn, less the rewards booked earlier in the turn."""
    starts_K = xp.ones(turn_K.shape, dtype=xp.bool, device=device(turn_K))
    starts_K[1:] = turn_K[1:] != turn_K[:-1]
    starts_K[rows.first_B] = True
    turn_at = xp.cumulative_sum(xp.astype(starts_K, xp.int64)) - 1  # [K]
    (first,) = xp.nonzero(starts_K)  # [W]: turns of all rows, one after another
    last = xp.concat([first[1:] - 1, xp.asarray([turn_K.shape[0] - 1], device=device(first))])
    turns_first = xp.take(turn_at, rows.first_B)
    count = xp.take(turn_at, rows.first_B + rows.count_B - 1) + 1 - turns_first
    turns = _Rows(rows.index_B, turns_first, count)
    value_W, reward_W = xp.take(value_K, first if bootstrap_at == "first" else last), xp.take(reward_K, last)
    if int(xp.count_nonzero(reward_W)) == int(xp.count_nonzero(reward_K)):  # rewards on last tokens only, as they are booked
        return xp.take(_step_returns(xp, turns, reward_W, value_W, last_B, gamma, lam), turn_at)
    before_K = _sums_before(xp, rows, reward_K)
    before_W = xp.take(before_K, first)
    reward_W = xp.take(before_K, last) + reward_W - before_W
    return xp.take(_step_returns(xp, turns, reward_W, value_W, last_B, gamma, lam) + before_W, turn_at) - before_K


def _sums_before(xp: Any, rows: _Rows, reward_K: Array) -> Array:
    """Rewards `[K]` booked before each token. Sums run inside each row, so that no row's rewards round another's."""
    places = _places(xp, rows)
    dense = xp.zeros((int(rows.count_B.shape[0]), int(xp.max(rows.count_B))), dtype=xp.float64, device=device(reward_K))
    dense[places] = reward_K
    return xp.cumulative_sum(dense, axis=1)[places] - reward_K


def _step_returns(xp: Any, rows: _Rows, reward_S: Array, value_S: Array, last_B: Array, gamma: float, lam: float) -> Array:
    """The return A + V of each step, steps of all rows one after another: gamma and lam on each link, `last_B` after it."""
    next_S = xp.concat([value_S[1:], value_S[:1]])
    next_S[rows.first_B + rows.count_B - 1] = xp.take(last_B, rows.index_B)
    places = _places(xp, rows)
    delta = xp.zeros((int(rows.count_B.shape[0]), int(xp.max(rows.count_B))), dtype=xp.float64, device=device(value_S))
    delta[places] = reward_S + gamma * next_S - value_S
    return _suffix_sums(xp, delta, gamma * lam)[places] + value_S


def _places(xp: Any, rows: _Rows) -> Any:
    """Where the tokens of the list go in an array `[B, longest]`: an index of it."""
    longest = xp.arange(int(xp.max(rows.count_B)), device=device(rows.count_B))
    return longest[None, :] < rows.count_B[:, None]


def _suffix_sums(xp: Any, x: Array, decay: float) -> Array:
    """y[b, i] = sum over j >= i of decay^(j - i) x[b, j], `[B, U]`: inside blocks by one product, between them by recursion."""
    rows, length = x.shape
    size = min(length, BLOCK)
    exponent = np.arange(size)[:, None] - np.arange(size)[None, :]  # j - i
    matrix = np.where(exponent >= 0, float(decay) ** np.maximum(exponent, 0), 0.0)
    weights = xp.asarray(matrix, device=device(x))
    if length <= BLOCK:
        return x @ weights
    blocks = -(-length // BLOCK)
    padded = xp.zeros((rows, blocks * BLOCK), dtype=x.dtype, device=device(x))
    padded[:, :length] = x
    y = xp.reshape(xp.reshape(padded, (rows * blocks, BLOCK)) @ weights, (rows, blocks, BLOCK))
    heads = _suffix_sums(xp, y[:, :, 0], float(decay) ** BLOCK)
    reach = xp.asarray(float(decay) ** np.arange(BLOCK, 0, -1), device=device(x))  # from the next block's head to here
    y[:, :-1, :] += heads[:, 1:, None] * reach
    return xp.reshape(y, (rows, blocks * BLOCK))[:, :length]


def words(text: str) -> frozenset[str]:
    """What two texts are compared by: see `repetition_penalty`."""
    return frozenset(_DIGITS.sub("0", _TIMESTAMP.sub(" ", _ANSI.sub("", text.lower()))).split())


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """Size of what both have over that of what either has; of two empty sets 1."""
    return len(a & b) / len(a | b) if a | b else 1.0
