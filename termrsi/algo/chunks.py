"""Credit over a trajectory that was cut into chunks: each is worked on alone, from the last to the first, and the parts are as if
there had been no cut (ours). No torch import: it runs on the driver.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from termrsi.algo.advantage import BootstrapAt, Credit, turn_boundary_gae


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """One chunk of a trajectory that was cut: arrays `[T]` as `turn_boundary_gae` takes them."""

    rewards: np.ndarray
    values: np.ndarray
    turn_ids: np.ndarray
    action_mask: np.ndarray


def chunk_carry(
    first_value: float,
    first_advantage: float,
    *,
    gamma: float,
    lam: float,
    same_turn: bool,
    linked_value: float | None = None,
) -> float:
    """What to add to the reward of the earlier chunk's last action token, then treated as terminal (ours).

    `first_*` are those of the later chunk's first action token: c = g (V + l A), with g = l = 1 if the cut lies inside a
    turn, else gamma and lam. Adding it gives exactly the result without the cut. `linked_value`: the value V' that a link
    to this turn reads, where that is not V (`bootstrap_at`): then c = gamma ((1 - lam) V' + lam (V + A)).
    """
    if same_turn:
        return first_value + first_advantage
    carry = gamma * (first_value + lam * first_advantage)
    return carry if linked_value is None else carry + gamma * (1.0 - lam) * (linked_value - first_value)


def turn_boundary_gae_chunks(
    chunks: Sequence[ChunkInput],
    *,
    gamma: float,
    lam: float,
    credit: Credit = "tb",
    linked: bool = True,
    truncated: bool = False,
    bootstrap_value: float = 0.0,
    bootstrap_at: BootstrapAt = "first",
) -> list[tuple[np.ndarray, np.ndarray]]:
    """`turn_boundary_gae` over a trajectory cut into chunks, in their order, linked by `chunk_carry` (ours).

    Turn ids go on from chunk to chunk: an equal id on both sides of a cut is one turn (a cut inside a turn). The terminal
    reward stands in one place, in the last chunk. A chunk without action tokens passes the carry on. `linked=False`: every chunk
    before another ends as if truncated, without trace, with the value that a link to that one's first turn reads (its first
    token's, or by `bootstrap_at` its last one's in that chunk).
    Raises ValueError if turn ids decrease, also across a cut.
    """
    outputs: list[tuple[np.ndarray, np.ndarray]] = []
    later: _Head | None = None  # of the next chunk that has action tokens
    for chunk in reversed(chunks):
        at = np.flatnonzero(chunk.action_mask)
        rewards, values, goes_on = np.array(chunk.rewards, np.float64), chunk.values, False
        if later is not None and len(at):
            end = at[-1]
            if later.turn < chunk.turn_ids[end]:
                raise ValueError("turn_ids must not decrease over the action tokens, chunk to chunk")
            same = credit == "tb" and later.turn == chunk.turn_ids[end]
            rewards[end] += later.carry(gamma, lam, same_turn=same) if linked else gamma * later.linked
            goes_on = same and linked and bootstrap_at == "last"
            if goes_on:  # the turn's last token stands in a later chunk: what links to the turn read is the value there
                values = np.array(values)
                values[end] = later.linked
        advantages, returns = turn_boundary_gae(
            rewards,
            values,
            chunk.turn_ids,
            chunk.action_mask,
            gamma=gamma,
            lam=lam,
            credit=credit,
            truncated=truncated and later is None,
            bootstrap_value=bootstrap_value,
            bootstrap_at=bootstrap_at,
        )
        if goes_on:  # the token's own value is another one, on which its return does not depend
            advantages[at[-1]] = returns[at[-1]] - chunk.values[at[-1]]
        if len(at):
            first = at[0]
            turn = at[chunk.turn_ids[at] == chunk.turn_ids[first]]
            read = turn[-1] if credit == "tb" and bootstrap_at == "last" else first
            later = _Head(int(chunk.turn_ids[first]), float(chunk.values[first]), float(advantages[first]), float(values[read]))
        outputs.append((advantages, returns))
    return outputs[::-1]


@dataclass(frozen=True, slots=True)
class _Head:
    """What the chunk before needs of a chunk: its first action token, and the value that links to this token's turn read."""

    turn: int
    value: float
    advantage: float
    linked: float

    def carry(self, gamma: float, lam: float, *, same_turn: bool) -> float:
        return chunk_carry(self.value, self.advantage, gamma=gamma, lam=lam, same_turn=same_turn, linked_value=self.linked)
