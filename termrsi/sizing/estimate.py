"""Time of a pipeline on a cluster: the counts of `work`, the laws of `rates`, the loop of `simulation` for stages that have one.

A stage without a loop takes what its episodes and replies take at the pace that the engines keep when nothing waits for a learner.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from termrsi.config.schema import Config
from termrsi.errors import ConfigError
from termrsi.sizing import layout, memory, rates
from termrsi.sizing.known import CHARS_PER_TOKEN
from termrsi.sizing.memory import GIB
from termrsi.sizing.rates import Rates
from termrsi.sizing.shapes import ModelShape
from termrsi.sizing.simulation import Machine, Outcome, Tail, Workload, simulate
from termrsi.sizing.work import Assumed, Updates, Work, training_passes

WARM_UP, STEPS = 2, 3  # of the simulation
SHORT = 0.9  # of a step: one that would be shorter with a sandbox for every episode is bound by sandboxes


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a stage, and of one of its steps where it has a loop: `parts` of it that overlap, and what bounds it.

    `sandboxes`: how many are in use at most. `unbound_s`: of such a step with a sandbox for every episode.
    """

    work: Work
    seconds: float
    step: Outcome | None = None
    sandboxes: int = 1
    unbound_s: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step in which each part was at work: the mean engine, the learner, weights, the mean sandbox, whose share
        is commands and verifications; and these two added up over all sandboxes."""
        if self.step is None:
            return {}
        s = self.step
        inside = (s.commands + s.verifications) / self.sandboxes
        shares = {"generation": s.generator, "learning": s.learner, "weights": s.weights, "sandboxes": inside}
        return {name: share * s.step_s for name, share in shares.items()} | {
            "commands": s.commands * s.step_s,
            "verification": s.verifications * s.step_s,
        }

    @property
    def bottleneck(self) -> str:
        """Sandboxes, if a tenth of a step is spent for want of them; else what is at work for most of it. "" without a step."""
        if self.step is None:
            return ""
        if self.unbound_s < SHORT * self.step.step_s:
            return "sandboxes"
        parts = self.parts
        return max(("generation", "learning", "weights", "sandboxes"), key=lambda name: parts[name])


def stages(config: Config, shape: ModelShape, figures: Rates, assumed: Assumed, todo: list[Work]) -> list[StageTime]:
    """Raises ConfigError if the roles have no GPUs: nothing is assumed of processors."""
    c = config.cluster
    if not (c.nodes and c.gpus_generator and c.gpus_learner):
        raise ConfigError("no speed is assumed of processors", "cluster", "valid: cluster=node, a100x16 or another with GPUs")
    known: dict[Updates, tuple[Outcome, float]] = {}
    places = sandboxes(config)
    half = max(1, places // 2)  # two batches of them are under way
    pace = loop(config, shape, figures, assumed, Updates(1, half, 1))
    episodes_s = half / pace.step_s
    found = []
    for one in todo:
        seconds = one.episodes / episodes_s + one.replies / pace.tokens_s
        step, unbound_s, used = None, 0.0, places
        if one.samples:
            seconds += one.samples * _sample_s(config, shape, figures, assumed)
        if (updates := one.updates) is not None:
            same = Updates(0, updates.groups, updates.size, *_rest(updates))
            if same not in known:
                bound = loop(config, shape, figures, assumed, same)
                free = loop(config, shape, figures, assumed, same, places=_wanted(same)) if places < _wanted(same) else bound
                known[same] = bound, free.step_s
            step, unbound_s = known[same]
            used = min(places, _wanted(same))
            seconds += updates.steps * step.step_s
        found.append(StageTime(one, seconds, step, used, unbound_s))
    return found


def _wanted(updates: Updates) -> int:
    """Episodes that may be under way at once."""
    return updates.groups * updates.size * (1 + updates.max_staleness)


def sandboxes(config: Config) -> int:
    """At most at once, on all nodes that have them."""
    return config.sandbox.concurrency * config.cluster.sandbox_nodes


def _rest(updates: Updates) -> tuple[int, float, float, float, int, bool]:
    return updates.max_staleness, updates.policy, updates.critic, updates.reference, updates.extra, updates.first


def loop(config: Config, shape: ModelShape, figures: Rates, assumed: Assumed, updates: Updates, *, places: int = 0) -> Outcome:
    """Without any pass to learn there is no update, and the next batch is under way while one ends. `places`: for so many
    sandboxes; 0: those of the configuration."""
    learns = updates.policy + updates.critic > 0.0
    work = workload(config, figures, assumed, updates.groups, updates.size)
    staleness, extra, first = (updates.max_staleness, updates.extra, updates.first) if learns else (1, -1, False)
    made = replace(machine(config, shape, figures, updates), sandboxes=places or sandboxes(config))
    return simulate(work, made, max_staleness=staleness, extra=extra, first=first, warm_up=WARM_UP, steps=STEPS)


def workload(config: Config, figures: Rates, assumed: Assumed, groups: int, size: int) -> Workload:
    a, limits = assumed, config.limits
    window = min(limits.max_context_tokens, config.model.max_model_len)
    return Workload(
        batch_groups=groups,
        group_size=size,
        turns=Tail(a.turns, a.turns_sigma, limits.max_turns),
        reply=Tail(a.reply, a.reply_sigma, config.sampling.max_tokens),
        observation=Tail(a.observation, a.observation_sigma, limits.observation_chars / CHARS_PER_TOKEN),
        command_s=Tail(a.command_s + figures.turn_s, a.command_sigma, limits.command_timeout_s),
        prompt=min(a.prompt, window // 2),
        window=window,
        verify_s=a.verify_s,
        start_s=figures.start_s,
        wall_s=limits.wall_s,
    )


def machine(config: Config, shape: ModelShape, figures: Rates, updates: Updates) -> Machine:
    """Engines as they are configured; those of one actor that are copies of each other count one by one."""
    c, engine = config.cluster, layout.engine(config)
    gpus = engine.tensor if c.gpus_generator >= 1 else 1
    copies = max(1, int(c.gpus_generator) // gpus) if c.gpus_generator >= 1 else 1
    share = min(1.0, c.gpus_generator)  # of a device's speed, where roles share it
    learners = c.learner_processes * min(1.0, c.gpus_learner)
    layers = config.model.critic_layers
    learns = updates.policy + updates.critic > 0.0
    step_s, prefill_s = rates.step_s(shape, figures, gpus), rates.prefill_s(shape, figures, gpus)

    def learn_s(lengths: Sequence[int]) -> float:
        whole = updates.policy + updates.reference
        seconds = rates.learn_s(shape, figures, learners, lengths, passes=whole) if whole else 0.0
        if updates.critic:
            seconds += rates.learn_s(shape, figures, learners, lengths, passes=updates.critic, layers=layers, head=False)
        return seconds

    return Machine(
        engines=c.generators * copies,
        step_s=lambda batch, tokens: step_s(batch, tokens) / share,
        prefill_s=lambda tokens, context: prefill_s(tokens, context) / share,
        learn_s=learn_s,
        load_s=rates.move_s(shape, figures) if learns and updates.policy else 0.0,
        max_num_seqs=config.model.max_num_seqs,
        cache_tokens=memory.cache_tokens(shape, engine, int(c.gpu_memory_gib * GIB)),
        drain=c.weight_update != "pause",
    )


def uncounted(config: Config) -> list[str]:
    """What a run would do that takes time, or saves some, and is in no figure here."""
    found = []
    for name in [config.only] if config.only else config.pipeline:
        most = getattr(config.stages[name], "replace_zero_variance", 0)
        if most:
            found.append(f"{name} samples up to {most} groups of a step again where all rewards are equal, how often is not known")
    if config.limits.task_time:
        found.append("limits.task_time ends episodes by the time of their own tasks, which is not read here")
    return found


def _sample_s(config: Config, shape: ModelShape, figures: Rates, assumed: Assumed) -> float:
    """Learning from one episode of a mean length, once."""
    length = mean_length(config, assumed)
    learners = config.cluster.learner_processes * min(1.0, config.cluster.gpus_learner)
    return rates.learn_s(shape, figures, learners, [length], passes=training_passes(config, frozen=config.model.lora_rank > 0))


def mean_length(config: Config, assumed: Assumed) -> int:
    """Tokens of an episode: its draws, without the simulation's machines."""
    work = workload(config, Rates(), assumed, 1, 1)
    source, lengths = random.Random(0), []
    for _ in range(200):
        context = work.prompt
        for _ in range(max(1, round(work.turns.draw(source)))):
            context += work.reply.draw(source) + work.observation.draw(source)
            if context + work.reply.most > work.window:
                break
        lengths.append(min(context, work.window))
    return round(sum(lengths) / len(lengths))


def gpus(config: Config) -> int:
    """That are paid for: all of the nodes."""
    return config.cluster.nodes * config.cluster.gpus_per_node
