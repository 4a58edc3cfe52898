"""Credit assignment of a long batch against other people's ways: `python -m tests.bench.bench_advantage [--small]`.

8 rows of 65,536 tokens and 32 of 32,768, 40 turns a row, float32, on the CPU. The functions take turns in one process, but for
verl's, which its own interpreter times (see `tests/peer_side.py`; without .venv-peers it is left out). For each: the arm that it
claims to compute, median and least seconds, its median over that of ours on tensors (of the same arm, and of "tb"), and the
largest error at action tokens, of advantages and returns, against the arm's definition, a loop in float64. From verl only the
returns are compared, for it whitens the advantages.

TRL's and slime's ways and the masked scan are written here, from what they do: TRL has no GAE any more, slime is no package. The
masked scan runs over all positions, each with a weight of its own: in blocks, the form that won against doubling its reach pass
by pass. Ours leaves the observations out first.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from termrsi.algo.advantage import Credit, turn_boundary_gae_batch
from tests.unit.algo.test_advantage import Trajectory, loop

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
GAMMA, LAM = 0.99, 0.95
TURNS = 40
SLIME_BLOCK = 128  # slime's default
SCAN_BLOCK = 256  # near the root of 65,536: as many steps inside the blocks as between them

Compute = Callable[[], tuple[Any, Any]]  # advantages and returns [B, T], arrays or tensors


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays `[B, T]` of whole rows: a prompt, then turns of actions and what they caused, zeros after the last action."""

    rewards: np.ndarray  # float32, on the last action token
    values: np.ndarray  # float32, observations have some too
    turn_ids: np.ndarray  # int64; an observation has that of the turn before it
    mask: np.ndarray  # bool


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    arm: Credit
    seconds: tuple[float, ...]
    error: float


def make(rows: int, tokens: int, seed: int = 0) -> Batch:
    """Rows of 60 to 100 % of `tokens`, 2 % of it prompt; on average a third of the rest is sampled."""
    rng = np.random.default_rng(seed)
    batch = Batch(*(np.zeros((rows, tokens), dtype) for dtype in (np.float32, np.float32, np.int64, bool)))
    for row in range(rows):
        length = tokens - int(0.4 * tokens * row / max(1, rows - 1))
        shares = rng.dirichlet(np.tile([1.0, 2.0], TURNS)[:-1] * 2)  # actions, observation, actions, ..., actions
        prompt = max(1, length // 50)
        free = length - prompt - len(shares)  # each run has a token at least
        ends = prompt + np.cumsum(1 + np.diff(np.floor(np.cumsum(shares) * free), prepend=0)).astype(int)
        ends[-1] = length
        for turn, (start, end) in enumerate(zip([prompt, *ends[1::2]], ends[::2], strict=True)):
            batch.mask[row, start:end] = True
            batch.turn_ids[row, start:] = turn
        batch.values[row, :length] = rng.normal(0, 0.3, length)
        batch.rewards[row, length - 1] = rng.choice([-1.0, 1.0])
    return batch


def trl_like(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The loop of TRL's PPO trainer while there was one: each position of the response is a step."""
    last, reversed_advantages = torch.zeros(len(values)), []
    after = torch.zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + GAMMA * after - values[:, t]
        last = delta + GAMMA * LAM * last
        after = values[:, t]
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def slime_like(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each position a step, as in slime: a triangular product inside blocks, then from block to block in a loop."""
    rows, length = values.shape
    delta = torch.add(rewards, values, alpha=-1)
    delta[:, :-1].add_(values[:, 1:], alpha=GAMMA)
    blocks = -(-length // SLIME_BLOCK)
    padded = torch.nn.functional.pad(delta, (0, blocks * SLIME_BLOCK - length)).view(rows, blocks, SLIME_BLOCK)
    place = torch.arange(SLIME_BLOCK)
    ahead = place[:, None] - place[None, :]
    matrix = torch.where(ahead >= 0, (GAMMA * LAM) ** ahead.clamp(min=0), 0.0)
    reach = (GAMMA * LAM) ** (SLIME_BLOCK - place)
    sums = (padded @ matrix).unbind(1)
    for here, after in zip(sums[-2::-1], sums[:0:-1], strict=True):
        here.addcmul_(after[:, :1], reach)
    advantages = torch.stack(sums, 1).view(rows, -1)[:, :length]
    return advantages, advantages + values


def masked_scan(rewards: Tensor, values: Tensor, turn_ids: Tensor, mask: Tensor, *, tb: bool) -> tuple[Tensor, Tensor]:
    """Both arms over whole rows. D[t] is what a token before t adds to its reward: R = r + D of the next position.

    At a step (a turn's first token in "tb", each action token in "skip"): D[t] = gamma ((1 - lam) V[t] + lam (r[t] + D[t + 1]));
    at another action token r[t] + D[t + 1]; elsewhere D[t + 1].
    """
    steps = mask
    if tb:
        steps = mask.clone()
        steps[:, 1:] &= turn_ids[:, 1:] != turn_ids[:, :-1]
    on = mask.to(values.dtype)
    reward = rewards * on
    weight = torch.where(steps, torch.tensor(GAMMA * LAM, dtype=values.dtype), torch.tensor(1.0, dtype=values.dtype))
    added = torch.addcmul(reward * weight, steps.to(values.dtype), values, value=GAMMA * (1 - LAM))
    returns = reward
    returns[:, :-1] += suffix_scan(weight, added)[:, 1:]
    returns *= on
    return torch.addcmul(returns, on, values, value=-1.0), returns


def suffix_scan(weight: Tensor, added: Tensor) -> Tensor:
    """y[t] = added[t] + weight[t] y[t + 1], `[B, T]`: all blocks at once position by position, then from block to block."""
    rows, length = added.shape
    blocks = -(-length // SCAN_BLOCK)
    pad = (0, blocks * SCAN_BLOCK - length)
    # [SCAN_BLOCK, B * blocks]: each step works on memory that lies together.
    y, product = (torch.nn.functional.pad(x, pad).view(rows * blocks, SCAN_BLOCK).t().contiguous() for x in (added, weight))
    ys, products = y.unbind(0), product.unbind(0)
    for c in range(SCAN_BLOCK - 2, -1, -1):
        ys[c].addcmul_(products[c], ys[c + 1])
        products[c].mul_(products[c + 1])
    head, carried = (x[0].view(rows, blocks).t().contiguous() for x in (y, product))
    heads, carrieds = head.unbind(0), carried.unbind(0)
    for block in range(blocks - 2, -1, -1):
        heads[block].addcmul_(carrieds[block], heads[block + 1])
    after = torch.zeros_like(head)
    after[:-1] = head[1:]
    y.addcmul_(product, after.t().reshape(1, rows * blocks))
    return y.t().reshape(rows, blocks * SCAN_BLOCK)[:, :length]


def contenders(batch: Batch) -> dict[tuple[str, Credit], tuple[Compute, bool]]:
    """By name and arm: what to call, and whether it is a loop over tokens."""
    arrays = (batch.rewards, batch.values, batch.turn_ids, batch.mask)
    rewards, values, turn_ids, mask = tensors = tuple(map(torch.from_numpy, arrays))
    wide = (rewards.double(), values.double(), turn_ids, mask)
    found: dict[tuple[str, Credit], tuple[Compute, bool]] = {}
    arms: tuple[Credit, ...] = ("tb", "skip", "token")
    for arm in arms:
        for name, given in (("ours, torch", tensors), ("ours, numpy", arrays)):
            found[name, arm] = partial(turn_boundary_gae_batch, *given, gamma=GAMMA, lam=LAM, credit=arm), False
    for arm in arms[:2]:
        for name, given in (("masked scan", tensors), ("masked scan, float64", wide)):
            found[name, arm] = partial(masked_scan, *given, tb=arm == "tb"), False
    found["slime, restated", "token"] = partial(slime_like, rewards, values), False
    found["TRL, restated", "token"] = partial(trl_like, rewards, values), True
    return found


def verl(batch: Batch, repeats: int) -> tuple[list[float], np.ndarray]:
    """Seconds of each call of verl's own function, and its returns."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "batch.npz"
        np.savez(path, rewards=batch.rewards, values=batch.values, mask=batch.mask.astype(np.float32), gamma=GAMMA, lam=LAM)
        side = [str(PEERS), str(ROOT / "tests" / "peer_side.py"), "time", str(path), str(repeats)]
        subprocess.run(side, check=True, capture_output=True, timeout=600)
        with np.load(path.with_suffix(".time.npz")) as stored:
            return stored["seconds"].tolist(), stored["returns"]


def definition(batch: Batch, arm: Credit) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns `[B, T]` of the arm, in float64."""
    columns = (batch.rewards.astype(np.float64), batch.values.astype(np.float64), batch.turn_ids, batch.mask)
    rows = [loop(Trajectory(*row), GAMMA, LAM, arm) for row in zip(*columns, strict=True)]
    return np.stack([advantages for advantages, _ in rows]), np.stack([returns for _, returns in rows])


def measure(rows: int, tokens: int, *, repeats: int = 15, loops: int = 3) -> list[Figure]:
    """`repeats` calls of each, `loops` of those that loop over tokens; one before that does not count."""
    batch = make(rows, tokens)
    found = contenders(batch)
    seconds: dict[tuple[str, Credit], list[float]] = {key: [] for key in found}
    results = {key: compute() for key, (compute, _) in found.items()}
    for repeat in range(max(repeats, loops)):
        for key, (compute, is_loop) in found.items():
            if repeat < (loops if is_loop else repeats):
                start = time.perf_counter()
                compute()
                seconds[key].append(time.perf_counter() - start)
    exact = {arm: definition(batch, arm) for _, arm in found}
    figures = [
        Figure(name, arm, tuple(seconds[name, arm]), max(map(partial(_error, batch.mask), results[name, arm], exact[arm])))
        for name, arm in found
    ]
    if PEERS.is_file():
        times, returns = verl(batch, loops)
        figures.append(Figure("verl", "skip", tuple(times), _error(batch.mask, returns, exact["skip"][1])))
    return figures


def _error(mask: np.ndarray, got: Any, want: np.ndarray) -> float:  # Any: array or tensor
    return float(np.abs(np.asarray(got, np.float64) - want)[mask].max())


def table(figures: list[Figure]) -> str:
    middle = {(figure.name, figure.arm): statistics.median(figure.seconds) for figure in figures}
    lines = [f"{'':22} {'arm':6} {'median s':>10} {'least s':>10} {'x ours':>8} {'x tb':>8} {'error':>9}"]
    for figure in sorted(figures, key=lambda figure: ("tb", "skip", "token").index(figure.arm)):
        median_s = middle[figure.name, figure.arm]
        same, tb = (median_s / middle["ours, torch", arm] for arm in (figure.arm, "tb"))
        seconds = f"{median_s:10.5f} {min(figure.seconds):10.5f}"
        lines.append(f"{figure.name:22} {figure.arm:6} {seconds} {same:8.2f} {tb:8.2f} {figure.error:9.1e}")
    return "\n".join(lines)


if __name__ == "__main__":
    small = "--small" in sys.argv[1:]
    for num_rows, num_tokens in ((2, 1024), (3, 512)) if small else ((8, 65_536), (32, 32_768)):
        sys.stdout.write(f"{num_rows} rows of {num_tokens} tokens, {torch.get_num_threads()} threads\n")
        sys.stdout.write(table(measure(num_rows, num_tokens)) + "\n\n")
    if not PEERS.is_file():
        sys.stdout.write("verl is left out: launch/test.sh makes .venv-peers where it can\n")
