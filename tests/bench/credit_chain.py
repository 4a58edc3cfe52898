"""What each credit arm makes of one decisive early turn, by horizon: `python -m tests.bench.credit_chain [--out FIGURE.svg]`.

A chain of U turns, each a random number of action tokens and then of observation tokens. The first action token of each turn is a
choice between two; that of the first turn alone decides the reward, 1 or 0 on the last action token. No language model: a table
of one logit per turn is the policy, a table of values the critic. Advantages are those of `termrsi.algo.advantage`, whitened over
the batch and with critic targets at lambda 1, which are the defaults of `CreditConfig`.

Two critics, the ends of what a real one may know: "blind" learns one value per turn, so that the reward alone tells the choice;
"seeing" learns one per turn and first choice, which it knows from the second turn on. Both err at every token, by fresh normal
noise. The arms share everything else: lengths, luck and errors are drawn once for all learners.

Letters: S seeds, R rollouts (those of all seeds, one seed after another), U turns, T tokens.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from termrsi.algo.advantage import Credit, turn_boundary_gae_batch, whiten

Critic = Literal["blind", "seeing"]

ARMS: tuple[Credit, ...] = ("tb", "skip", "token")
CRITICS: tuple[Critic, ...] = ("blind", "seeing")
HORIZONS = (2, 3, 5, 10, 20, 40)  # turns
CONTROL = 10  # turns of the settings beside the main one
GAMMA, LAM = 1.0, 0.95
VALUE_ERROR = 0.1  # standard deviation of the critic's error at a token; rewards are 0 and 1
POLICY_LR, CRITIC_LR = 0.5, 0.5
BATCH = 16  # rollouts of one update
SUCCESS = 0.9  # probability of the good choice, read from the table
SEEDS, LIMIT, ROLLOUTS = 15, 200, 4000  # LIMIT: updates; ROLLOUTS: those behind a signal


@dataclass(frozen=True, slots=True)
class Chain:
    """Turns, and the most tokens of one: actions are uniform on 1 to `longest`, observations on 0 to `longest_seen`."""

    turns: int
    longest: int = 8
    longest_seen: int = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of R rollouts lie, and what chance gives them. Rows are padded at their end."""

    turn_ids: np.ndarray  # [R, T]
    mask: np.ndarray  # [R, T]
    starts: np.ndarray  # [R, U]: first action token of each turn
    last: np.ndarray  # [R]: last action token
    error: np.ndarray  # [R, T]: of the critic
    luck: np.ndarray  # [R, U]: uniform; a turn chooses 1 where it lies below the policy's probability


@dataclass(frozen=True, slots=True)
class Signal:
    """Mean advantage of the good first choice less that of the bad one, and the same over its spread within a choice."""

    size: float
    to_noise: float


@dataclass(frozen=True, slots=True)
class Updates:
    """Updates until the success rate: median over seeds, with its 95 % bootstrap interval; inf: not within the limit."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a setting under one critic, and what each arm made of it."""

    setting: str
    critic: Critic
    turns: int
    signals: dict[Credit, Signal]
    updates: dict[Credit, Updates]


@dataclass(slots=True)
class Learner:
    """Policy and critic of S seeds under one arm."""

    critic: Critic
    arm: Credit
    logit: np.ndarray  # [S, U]: of choice 1
    table: np.ndarray  # [S, U, 2]: value by turn and by what is known of the first choice
    reached: np.ndarray = field(init=False)  # [S]: the first update after which the success rate held

    def __post_init__(self) -> None:
        self.reached = np.full(len(self.logit), math.inf)


def lay(rng: np.random.Generator, chain: Chain, rollouts: int, value_error: float = VALUE_ERROR) -> Layout:
    lengths = np.empty((rollouts, 2 * chain.turns), int)
    lengths[:, ::2] = rng.integers(1, chain.longest + 1, (rollouts, chain.turns))
    lengths[:, 1::2] = rng.integers(0, chain.longest_seen + 1, (rollouts, chain.turns))
    lengths[:, -1] = 0  # nothing is seen after the last turn
    ends = lengths.cumsum(axis=1)
    filled = np.arange(ends.max()) < ends[:, -1:]
    part = np.zeros(filled.shape, int)  # 2u in the actions of turn u, 2u + 1 in its observations
    part[filled] = np.repeat(np.tile(np.arange(2 * chain.turns), rollouts), lengths.ravel())
    return Layout(
        turn_ids=part // 2,
        mask=filled & (part % 2 == 0),
        starts=(ends - lengths)[:, ::2],
        last=ends[:, -1] - 1,
        error=value_error * rng.standard_normal(filled.shape),
        luck=rng.random((rollouts, chain.turns)),
    )


def advantages(layout: Layout, known: np.ndarray, rewards: np.ndarray, arm: Credit, lam: float) -> np.ndarray:
    """Advantages `[R, T]` before whitening. `known` `[R, U]`: what the critic's table says at each turn; `rewards` `[R]`."""
    booked = np.zeros(layout.turn_ids.shape)
    booked[np.arange(len(rewards)), layout.last] = rewards
    values = np.take_along_axis(known, layout.turn_ids, axis=1) + layout.error
    found, _ = turn_boundary_gae_batch(booked, values, layout.turn_ids, layout.mask, gamma=GAMMA, lam=lam, credit=arm)
    return found


def signal(
    chain: Chain, critic: Critic, arm: Credit, *, lam: float = LAM, value_error: float = VALUE_ERROR, rollouts: int = ROLLOUTS
) -> Signal:
    """At the decisive token, where both choices are as likely and the critic's table is exact. Without noise: inf."""
    layout = lay(np.random.default_rng((0, chain.turns)), chain, rollouts, value_error)
    good = layout.luck[:, 0] < 0.5
    known = np.full((rollouts, chain.turns), 0.5)
    if critic == "seeing":
        known[:, 1:] = good[:, None]
    at_choice = advantages(layout, known, good.astype(float), arm, lam)[:, 0]
    size = float(at_choice[good].mean() - at_choice[~good].mean())
    spread = math.sqrt((at_choice[good].var() + at_choice[~good].var()) / 2)
    return Signal(size, size / spread if spread else math.inf)


def chance(logit: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logit))


def update(learner: Learner, layout: Layout, lam: float) -> None:
    """One policy gradient step of each seed, and then one of its critic: the advantages are from before it."""
    seeds, turns = learner.logit.shape
    seed_R = np.repeat(np.arange(seeds), len(layout.luck) // seeds)
    p = chance(learner.logit)[seed_R]
    choice = layout.luck < p
    rewards = choice[:, 0].astype(float)
    cell = (seed_R[:, None] * turns + np.arange(turns)) * 2  # [R, U]: places in the table laid flat
    if learner.critic == "seeing":
        cell[:, 1:] += choice[:, :1]
    raw = advantages(layout, learner.table.ravel()[cell], rewards, learner.arm, lam)
    gradient = _at_starts(raw, layout, seeds) * (choice - p)  # of the log-probability of what was chosen, by its logit
    learner.logit += POLICY_LR * gradient.reshape(seeds, -1, turns).mean(axis=1)
    size = learner.table.size
    visits, sums = np.bincount(cell.ravel(), minlength=size), np.bincount(cell.ravel(), rewards.repeat(turns), size)
    step = np.where(visits > 0, sums / np.maximum(visits, 1) - learner.table.ravel(), 0.0)
    learner.table += CRITIC_LR * step.reshape(learner.table.shape)


def _at_starts(raw: np.ndarray, layout: Layout, seeds: int) -> np.ndarray:
    """Advantages `[R, U]` of the choices, whitened over all action tokens of their own seed's batch."""
    parts = (np.split(x, seeds) for x in (raw, layout.mask, layout.starts))
    return np.concatenate(
        [
            np.take_along_axis(whiten([a.ravel()], [mask.ravel()])[0].reshape(a.shape), starts, axis=1)
            for a, mask, starts in zip(*parts, strict=True)
        ]
    )


def learn(chain: Chain, *, lam: float = LAM, seeds: int = SEEDS, limit: int = LIMIT) -> list[Learner]:
    """One learner per critic and arm, from policies of one half and values of one half; each stops when all its seeds are there."""
    rng = np.random.default_rng((1, chain.turns))
    shape = seeds, chain.turns
    learners = [Learner(critic, arm, np.zeros(shape), np.full((*shape, 2), 0.5)) for critic in CRITICS for arm in ARMS]
    for step in range(1, limit + 1):
        going = [one for one in learners if np.isinf(one.reached).any()]
        if not going:
            break
        layout = lay(rng, chain, seeds * BATCH)
        for one in going:
            update(one, layout, lam)
            one.reached[np.isinf(one.reached) & (chance(one.logit[:, 0]) >= SUCCESS)] = step
    return learners


def over_seeds(reached: np.ndarray) -> Updates:
    """Of `[S]`; seeds are resampled 10,000 times. Bounds are among the medians, since between a number and inf lies nothing."""
    drawn = np.random.default_rng(2).choice(reached, (10_000, len(reached)))
    low, high = np.percentile(np.sort(drawn, axis=1)[:, (len(reached) - 1) // 2], (2.5, 97.5), method="nearest")
    return Updates(float(statistics.median_low(reached.tolist())), float(low), float(high))


def measure(
    horizons: Sequence[int] = HORIZONS, control: int = CONTROL, *, seeds: int = SEEDS, limit: int = LIMIT, rollouts: int = ROLLOUTS
) -> list[Row]:
    """The rows of every horizon, and of `control` turns: with longer turns, and twice where the arms may not differ."""
    settings = [(f"lambda {LAM}", Chain(turns), LAM) for turns in horizons]
    settings += [
        ("1-32, 0-32 tokens", Chain(control, 32, 32), LAM),
        ("one token per turn", Chain(control, 1, 0), LAM),
        ("lambda 1", Chain(control), 1.0),
    ]
    rows = []
    for name, chain, lam in settings:
        learners = learn(chain, lam=lam, seeds=seeds, limit=limit)
        for critic in CRITICS:
            signals: dict[Credit, Signal] = {arm: signal(chain, critic, arm, lam=lam, rollouts=rollouts) for arm in ARMS}
            updates: dict[Credit, Updates] = {one.arm: over_seeds(one.reached) for one in learners if one.critic == critic}
            rows.append(Row(name, critic, chain.turns, signals, updates))
    return rows


def table(rows: Iterable[Row], limit: int = LIMIT) -> str:
    def said(found: Updates) -> str:
        median, low, high = (f"{x:.0f}" if math.isfinite(x) else f">{limit}" for x in (found.median, found.low, found.high))
        return f"{median} [{low}, {high}]"

    lines = [f"{'':21} {'':6} {'':5}" + "".join(f" | {arm:^33}" for arm in ARMS)]
    lines += [f"{'setting':21} {'critic':6} {'turns':>5}" + f" | {'signal':>7} {'to noise':>8} {'updates':>16}" * len(ARMS)]
    for row in rows:
        cells = ((row.signals[arm], said(row.updates[arm])) for arm in ARMS)
        said_cells = "".join(f" | {s.size:7.4f} {s.to_noise:8.2f} {updates:>16}" for s, updates in cells)
        lines.append(f"{row.setting:21} {row.critic:6} {row.turns:5d}{said_cells}")
    return "\n".join(lines) + "\n"


STYLE = """
text { font: 12px sans-serif; fill: #1f2328 }
.paper { fill: #ffffff } .frame { stroke: #59636e; fill: none } .grid { stroke: #e3e6ea }
.line { fill: none; stroke-width: 2 } .dash { stroke-dasharray: 4 3; stroke-width: 1.5 } .open { fill: #ffffff; stroke-width: 1.5 }
.tb { stroke: #0b62c4 } .skip { stroke: #c2410c } .token { stroke: #16794c } .tb.dot { fill: #0b62c4 } .skip.dot { fill: #c2410c }
.token.dot { fill: #16794c }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .paper { fill: #0d1117 } .frame { stroke: #9198a1 } .grid { stroke: #2a313a } .open { fill: #0d1117 }
.tb { stroke: #58a6ff } .skip { stroke: #f0883e } .token { stroke: #3fb950 } .tb.dot { fill: #58a6ff } .skip.dot { fill: #f0883e }
.token.dot { fill: #3fb950 }
}
"""
WIDTH, HEIGHT, TOP, BASE = 760, 360, 70, 300  # TOP and BASE: of the panels' frames


@dataclass(frozen=True, slots=True)
class Panel:
    """A frame and its axes: turns from left to right on a log scale, upwards the values of `ticks`, the last one at the top."""

    left: float
    right: float
    label: str
    turns: Sequence[int]
    ticks: dict[float, str]
    log: bool

    def x(self, turns: float) -> float:
        low, high = math.log(self.turns[0]), math.log(self.turns[-1])
        return self.left + 14 + (self.right - self.left - 28) * (math.log(turns) - low) / ((high - low) or 1.0)

    def y(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (min(self.ticks), max(self.ticks), value))
        return BASE - 8 - (BASE - TOP - 16) * (value - low) / (high - low)

    def axes(self) -> list[str]:
        middle, centre = (self.left + self.right) / 2, (TOP + BASE) / 2
        parts = [f'<rect class="frame" x="{self.left}" y="{TOP}" width="{self.right - self.left}" height="{BASE - TOP}"/>']
        for value, said in self.ticks.items():
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{self.left + 1}" x2="{self.right - 1}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(self.left - 6, y + 4, said, "end"))
        parts += [_text(self.x(turns), BASE + 17, str(turns), "middle") for turns in self.turns]
        parts.append(_text(middle, BASE + 38, "horizon (turns, log scale)", "middle"))
        parts.append(_text(0, 0, self.label, "middle", f' transform="translate({self.left - 44} {centre}) rotate(-90)"'))
        return parts

    def curve(self, arm: Credit, critic: Critic, points: Sequence[tuple[int, float]], shift: float = 0.0) -> list[str]:
        """A line through the finite points, each marked for a blind critic; an infinite one is an open mark at the top."""
        line = " ".join(f"{self.x(turns) + shift:.1f},{self.y(v):.1f}" for turns, v in points if math.isfinite(v))
        if critic == "seeing":
            return [f'<polyline class="line dash {arm}" points="{line}"/>']
        marks = [_mark(arm, self.x(turns) + shift, self.y(min(v, max(self.ticks))), is_open=math.isinf(v)) for turns, v in points]
        return [f'<polyline class="line {arm}" points="{line}"/>', *marks]

    def whisker(self, arm: Credit, turns: int, found: Updates, shift: float) -> str:
        """The interval as a line with caps, up to the top where it has no upper bound; nothing where it has no lower one."""
        if math.isinf(found.low):
            return ""
        low, high = self.y(found.low), self.y(min(found.high, max(self.ticks)))
        x = self.x(turns) + shift
        return f'<path class="line {arm}" d="M{x - 6:.1f},{high:.1f} h12 m-6,0 V{low:.1f} m-6,0 h12"/>'


def _text(x: float, y: float, said: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{said}</text>'


def _mark(arm: Credit, x: float, y: float, *, is_open: bool = False) -> str:
    """A circle, square or triangle, so that the arms are told apart without colour."""
    look = f'class="{arm} {"open" if is_open else "dot"}"'
    if arm == "tb":
        return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    if arm == "skip":
        return f'<rect {look} x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'
    return f'<polygon {look} points="{x:.1f},{y - 5:.1f} {x - 4.5:.1f},{y + 3.5:.1f} {x + 4.5:.1f},{y + 3.5:.1f}"/>'


def _legend(limit: int) -> list[str]:
    parts = []
    for arm, x, said in zip(ARMS, (70.0, 240.0, 470.0), ("per turn", "per action token", "per token"), strict=True):
        parts += [_mark(arm, x, 22), _text(x + 10, 26, f"{arm}: decay {said}")]
    parts += [
        '<line class="line frame" x1="62" x2="90" y1="46" y2="46"/>',
        _text(96, 50, "critic blind to the choice"),
        '<line class="line dash frame" x1="272" x2="300" y1="46" y2="46"/>',
        _text(306, 50, "critic that sees it from the second turn on"),
        _mark("skip", 580, 46, is_open=True),
        _text(590, 50, f"not within {limit} updates"),
    ]
    return parts


def figure(rows: Iterable[Row], limit: int = LIMIT) -> str:
    """An SVG of the rows of the main setting: signal to noise at the decisive turn, and updates until it is learned."""
    rows = [row for row in rows if row.setting == f"lambda {LAM}"]
    turns = sorted({row.turns for row in rows})
    highest = max(row.signals[arm].to_noise for row in rows for arm in ARMS)
    noise_ticks = {float(v): str(v) for v in range(0, math.ceil(highest / 2) * 2 + 1, 2)}
    update_ticks = {float(v): str(v) for v in (2, 5, 10, 20, 50, 100, 200, 500) if v < limit} | {float(limit): str(limit)}
    left = Panel(70, 365, "signal / noise at the decisive turn", turns, noise_ticks, log=False)
    right = Panel(450, 745, f"updates to {100 * SUCCESS:.0f} % success (log scale)", turns, update_ticks, log=True)
    parts = [*left.axes(), *right.axes()]
    for critic in reversed(CRITICS):
        lines = sorted((row for row in rows if row.critic == critic), key=lambda row: row.turns)
        for arm, shift in zip(ARMS, (-6.0, 0.0, 6.0), strict=True):  # apart, where they share a place at the top
            parts += left.curve(arm, critic, [(row.turns, row.signals[arm].to_noise) for row in lines])
            if critic == "blind":
                parts += [right.whisker(arm, row.turns, row.updates[arm], shift) for row in lines]
            parts += right.curve(arm, critic, [(row.turns, row.updates[arm].median) for row in lines], shift)
    said = (
        f"Credit of one decisive early turn by horizon, gamma {GAMMA:g}, lambda {LAM}. Left: signal to noise of its advantage. "
        f"Right: updates of {BATCH} rollouts until {100 * SUCCESS:.0f} % success, median over seeds with 95 % intervals."
    )
    body = "\n".join([f"<title>{said}</title>", f"<style>{STYLE}</style>", '<rect class="paper" width="100%" height="100%"/>'])
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
    return f"<svg {box}>\n{body}\n" + "\n".join(filter(None, [*_legend(limit), *parts])) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figure there, as SVG")
    out = parser.parse_args().out
    rows = measure()
    sys.stdout.write(table(rows))
    if out is not None:
        out.write_text(figure(rows))


if __name__ == "__main__":
    main()
