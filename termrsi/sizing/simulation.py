"""The training loop as events: engines, sandboxes, learner; the real `queues.buffer` between them, the real `queues.prefix_router`
before the engines (ours). No clock, no Ray.

An engine is shared evenly: each of its running turns gains one token a step, and a step takes what the law says of the batch and
its context. A prompt stops the others for as long as what is not cached takes. Turns wait while sequences or cache are full; an
idle episode's prefix leaves the cache, oldest use first, when a running one needs the room, and is computed again.
After each update the engines take the new weights: they wait for the turns in flight (`drain`), or these stop where they are and go
on once their keys and values are computed anew, as `actors.generator` does either. Draws depend on the seed and the place of an
episode alone, so that runs with other machines see the same episodes.
"""

import heapq
import itertools
import math
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from termrsi.queues.buffer import GroupBuffer
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import Flow


@dataclass(frozen=True, slots=True)
class Tail:
    """A lognormal: its median, the standard deviation of its logarithm (0: always the median), and where it is cut off."""

    median: float
    sigma: float = 0.0
    limit: float = math.inf

    @property
    def most(self) -> float:
        return self.limit if self.sigma else min(self.median, self.limit)

    def draw(self, source: random.Random) -> float:
        return min(self.limit, self.median * math.exp(self.sigma * source.gauss(0.0, 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one update is made of, and what an episode is. Tokens and seconds.

    `window`: no reply begins where the longest one would leave it. Then the episode ends, or, with `compacted` above 0, its
    history is rewritten to so many tokens and a new chunk begins, which is learned from as a sample of its own. `wall_s`: none
    begins either when an episode has had its sandbox for so long.
    """

    batch_groups: int
    group_size: int
    turns: Tail
    reply: Tail
    observation: Tail
    command_s: Tail
    prompt: int = 2048
    window: int = 65536
    compacted: int = 0
    verify_s: float = 0.0
    start_s: float = 0.0
    wall_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`step_s(batch, context tokens of it)`, `prefill_s(tokens, context)`, `learn_s(lengths of the samples)`, all in seconds.

    `cache_tokens`: of each engine. `routing`: how an episode comes to its engine when its sandbox is asked for, by a run's own
    router, or by what it is compared with: a hash of its group's name, or groups in turn.
    """

    engines: int
    step_s: Callable[[int, float], float]
    prefill_s: Callable[[int, int], float]
    learn_s: Callable[[Sequence[int]], float]
    load_s: float
    max_num_seqs: int = 256
    cache_tokens: float = math.inf
    sandboxes: float = math.inf
    drain: bool = True
    routing: Literal["router", "hash", "turn"] = "router"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the steps that were measured. Shares of time: an engine with a turn, the learner, weights on their way.

    `commands`, `verifications`: at work at once. `batch`: turns at once in an engine that has any. `tokens_s`: sampled, by all
    engines. `cached`: the share of prompt tokens that were. `staleness`: versions between a group's start and its training; `most`:
    the worst.
    """

    step_s: float
    generator: float
    learner: float
    weights: float
    commands: float
    verifications: float
    batch: float
    tokens_s: float
    cached: float
    staleness: float
    most: int


def simulate(
    work: Workload,
    machine: Machine,
    *,
    max_staleness: int,
    extra: int = -1,
    first: bool = False,
    steps: int = 8,
    warm_up: int = 3,
    seed: int = 0,
) -> Outcome:
    """`warm_up` steps that are not measured, then `steps` that are; rollouts go on until the last. `extra`, `first`: of the `Flow`.

    Raises ValueError if there is no engine, or room for no turn.
    """
    if min(machine.engines, machine.max_num_seqs, machine.sandboxes, steps) < 1:
        raise ValueError("engines, max_num_seqs, sandboxes and steps must be at least 1")
    return _Loop(work, machine, Flow(work.batch_groups, max_staleness, extra, first=first), seed).run(warm_up, steps)


@dataclass(slots=True, eq=False)
class _Episode:
    group: str
    number: int  # of the group
    source: random.Random
    turns: int
    context: int
    place: int = 0  # of its engine
    began: float = 0.0  # with its sandbox
    reply: int = 0
    turn: int = 0
    chunks: list[int] = field(default_factory=list)  # lengths of those that are closed


class _Engine:
    """One engine's running turns, those that wait, and whose prefixes it holds."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._at = self._clock = self._debt = 0.0  # seconds; decoding steps done; seconds of prompts still to be computed
        self._order = itertools.count()
        self._ends: list[tuple[float, int, _Episode]] = []  # in decoding steps
        self._running_tokens = 0.0
        self._pinned = 0
        self._held: OrderedDict[_Episode, int] = OrderedDict()  # tokens of each prefix, oldest use first
        self._total = 0
        self.waiting: deque[_Episode] = deque()
        self.open, self.stamp = True, 0
        self.busy_s = self.turn_s = self.sampled = self.prompted = self.cached = 0.0

    @property
    def running(self) -> int:
        return len(self._ends)

    def advance(self, now: float) -> None:
        dt, self._at = now - self._at, now
        if not self._ends:
            return
        self.busy_s += dt
        self.turn_s += dt * len(self._ends)
        paid = min(self._debt, dt)
        self._debt -= paid
        if dt > paid and (step := self._step()) > 0.0:
            self._clock += (dt - paid) / step

    def next_end(self) -> float:
        """When the next running turn is over, if nothing comes between."""
        return self._at + self._debt + max(0.0, self._ends[0][0] - self._clock) * self._step()

    def finish(self) -> _Episode:
        """The turn that is over: its episode stays in the cache."""
        self._clock, _, episode = heapq.heappop(self._ends)
        self._running_tokens -= episode.context + episode.reply / 2
        self._pinned -= episode.context + episode.reply
        self.sampled += episode.reply
        return episode

    def admit(self) -> None:
        while self.open and self.waiting and len(self._ends) < self._machine.max_num_seqs:
            episode = self.waiting[0]
            size = episode.context + episode.reply
            if self._ends and self._pinned + size > self._machine.cache_tokens:
                return
            self.waiting.popleft()
            self._begin(episode, size)

    def _begin(self, episode: _Episode, size: int) -> None:
        known = self._held.pop(episode, 0)
        self._total += size - known
        self._pinned += size
        if self._total > self._machine.cache_tokens:
            self._make_room()
        self._held[episode] = size
        self._debt += self._machine.prefill_s(episode.context - known, episode.context)
        self.prompted += episode.context
        self.cached += known
        self._running_tokens += episode.context + episode.reply / 2
        heapq.heappush(self._ends, (self._clock + episode.reply, next(self._order), episode))

    def _make_room(self) -> None:
        running = {episode for _, _, episode in self._ends}
        for episode in [one for one in self._held if one not in running]:
            self._total -= self._held.pop(episode)
            if self._total <= self._machine.cache_tokens:
                return

    def forget(self, episode: _Episode) -> None:
        self._total -= self._held.pop(episode, 0)

    def reset(self, *, stop_s: float = 0.0) -> None:
        """New weights: no prefix of the old ones counts. `stop_s`: turns in flight stand still for so long, and longer: what they
        have is computed anew."""
        running = {episode for _, _, episode in self._ends}
        for episode in [one for one in self._held if one not in running]:
            self._total -= self._held.pop(episode)
        if self._ends:
            had = [episode.context + max(0, round(episode.reply - end + self._clock)) for end, _, episode in self._ends]
            self._debt += stop_s + sum(self._machine.prefill_s(tokens, tokens) for tokens in had)

    def _step(self) -> float:
        return self._machine.step_s(len(self._ends), self._running_tokens)


class _Loop:
    """Whatever happens is an event; `run` takes them in order of time, and of their making where times are equal."""

    def __init__(self, work: Workload, machine: Machine, flow: Flow, seed: int) -> None:
        self._work, self._machine, self._seed = work, machine, seed
        self._now, self._order = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []  # Any: arguments of the event
        self._engines = [_Engine(machine) for _ in range(machine.engines)]
        self._buffer: GroupBuffer[list[int]] = GroupBuffer(flow)
        self._router = PrefixRouter(machine.engines, machine.max_num_seqs // 4)  # the slack of actors.cluster
        self._groups = 0
        self._left: dict[str, int] = {}  # episodes of a group that are not over
        self._lengths: dict[str, list[int]] = {}
        self._lobby: deque[_Episode] = deque()
        self._boxes = machine.sandboxes
        self._learning = False
        self._pulling = 0
        self._ends: list[float] = []
        self._learn_s = self._command_s = self._verify_s = self._pull_s = self._pull_began = 0.0
        self._stale: list[list[int]] = []  # of the groups of each batch

    def run(self, warm_up: int, steps: int) -> Outcome:
        self._fill()
        began, before = self._now, self._counts()
        while len(self._ends) < warm_up + steps:
            if len(self._ends) == warm_up > 0 and began < self._ends[-1]:
                began, before = self._now, self._counts()
            self._now, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)
        return self._outcome(before, began, steps, [one for batch in self._stale[warm_up : warm_up + steps] for one in batch])

    def _counts(self) -> list[float]:
        for engine in self._engines:
            engine.advance(self._now)
        names = ("busy_s", "turn_s", "sampled", "prompted", "cached")
        return [sum(getattr(engine, name) for engine in self._engines) for name in names] + [
            self._learn_s, self._pull_s, self._command_s, self._verify_s,
        ]  # fmt: skip

    def _outcome(self, before: list[float], began: float, steps: int, stale: list[int]) -> Outcome:
        busy, turns, sampled, prompted, cached, learned, pulled, commands, verified = (
            after - then for after, then in zip(self._counts(), before, strict=True)
        )
        window = self._now - began
        return Outcome(
            step_s=window / steps,
            generator=busy / window / len(self._engines),
            learner=learned / window,
            weights=pulled / window,
            commands=commands / window,
            verifications=verified / window,
            batch=turns / busy if busy else 0.0,
            tokens_s=sampled / window,
            cached=cached / prompted if prompted else 0.0,
            staleness=fmean(stale),
            most=max(stale),
        )

    def _after(self, seconds: float, event: Callable[..., None], *arguments: Any) -> None:  # Any: as of _events
        heapq.heappush(self._events, (self._now + seconds, next(self._order), event, arguments))

    # Sampling

    def _fill(self) -> None:
        while self._buffer.free:
            name = f"g{self._groups}"
            self._buffer.admit(name)
            self._left[name], self._lengths[name] = self._work.group_size, []
            for k in range(self._work.group_size):
                source = random.Random(f"{self._seed}/{name}/{k}")
                turns = max(1, round(self._work.turns.draw(source)))
                self._lobby.append(_Episode(name, self._groups, source, turns, self._work.prompt))
            self._groups += 1
        self._enter()

    def _enter(self) -> None:
        while self._lobby and self._boxes >= 1:
            self._boxes -= 1
            episode = self._lobby.popleft()
            episode.place = self._place(episode)
            episode.began = self._now + self._work.start_s
            self._after(self._work.start_s, self._ask, episode)

    def _place(self, episode: _Episode) -> int:
        if self._machine.routing == "router":
            return self._router.begin(episode.group)
        spread = zlib.crc32(episode.group.encode()) if self._machine.routing == "hash" else episode.number
        return spread % len(self._engines)

    def _ask(self, episode: _Episode) -> None:
        episode.reply = max(1, round(self._work.reply.draw(episode.source)))
        engine = self._engines[episode.place]
        engine.advance(self._now)
        engine.waiting.append(episode)
        self._turn_over(engine)

    def _turn_over(self, engine: _Engine) -> None:
        """Whoever may begin begins; the engine's next event is as it now stands, and those made before are void."""
        engine.admit()
        engine.stamp += 1
        if engine.running:
            heapq.heappush(self._events, (engine.next_end(), next(self._order), self._answered, (engine, engine.stamp)))

    def _answered(self, engine: _Engine, stamp: int) -> None:
        if stamp != engine.stamp:
            return
        engine.advance(self._now)
        episode = engine.finish()
        episode.context += episode.reply
        episode.turn += 1
        seconds = self._work.command_s.draw(episode.source)
        self._command_s += seconds
        self._after(seconds, self._observed, episode)
        self._turn_over(engine)
        if self._pulling and not engine.open and not engine.running:
            self._after(self._machine.load_s, self._loaded, engine)

    def _observed(self, episode: _Episode) -> None:
        work = self._work
        if episode.turn == episode.turns or self._now - episode.began > work.wall_s:
            return self._end(episode)
        episode.context += round(work.observation.draw(episode.source))
        longest = min(work.reply.most, work.window / 2)
        if episode.context + longest > work.window and episode.context > work.prompt + work.compacted:
            if not work.compacted:
                return self._end(episode)
            episode.chunks.append(episode.context)
            episode.context = work.prompt + work.compacted
            self._engines[episode.place].forget(episode)
        return self._ask(episode)

    def _end(self, episode: _Episode) -> None:
        self._engines[episode.place].forget(episode)
        self._verify_s += self._work.verify_s
        self._after(self._work.verify_s, self._verified, episode)

    def _verified(self, episode: _Episode) -> None:
        if self._machine.routing == "router":
            self._router.end(episode.place)
        self._boxes += 1
        self._enter()
        group = episode.group
        self._lengths[group] += [*episode.chunks, episode.context]
        self._left[group] -= 1
        if self._left[group] == 0:
            del self._left[group]
            self._buffer.put(group, self._lengths.pop(group))
            self._learn()

    # Learning

    def _learn(self) -> None:
        if self._learning or (batch := self._buffer.take()) is None:
            return
        self._learning = True
        self._stale.append([one.staleness for one in batch.groups])
        seconds = self._machine.learn_s([length for one in batch.groups for length in one.group])
        self._after(seconds, self._learned, seconds)

    def _learned(self, seconds: float) -> None:
        self._learn_s += seconds
        self._pulling, self._pull_began = len(self._engines), self._now
        for engine in self._engines:
            engine.advance(self._now)
            if not self._machine.drain:
                engine.reset(stop_s=self._machine.load_s)
                self._turn_over(engine)
                self._after(self._machine.load_s, self._pulled)
                continue
            engine.open = False
            if not engine.running:
                self._after(self._machine.load_s, self._loaded, engine)

    def _loaded(self, engine: _Engine) -> None:
        engine.advance(self._now)
        engine.reset()
        engine.open = True
        self._turn_over(engine)
        self._pulled()

    def _pulled(self) -> None:
        self._pulling -= 1
        if self._pulling:
            return
        self._pull_s += self._now - self._pull_began
        self._buffer.trained()
        self._learning = False
        self._ends.append(self._now)
        self._fill()
        self._learn()
