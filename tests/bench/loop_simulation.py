"""The loop on A100 nodes, simulated: seconds of a step, who is busy, what bounds it, and what `max_staleness` changes.

`python -m tests.bench.loop_simulation [--steps N] [--case N]` prints the tables of termrsi/sizing/README.md. Nothing in them is a
measurement on a GPU: the laws and their figures are `termrsi.sizing.rates`', the episodes are drawn as `EPISODE` says (ours).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from termrsi.sizing import memory, rates, shapes
from termrsi.sizing.memory import GIB, Engine
from termrsi.sizing.rates import Rates
from termrsi.sizing.shapes import ModelShape
from termrsi.sizing.simulation import Machine, Outcome, Tail, Workload, simulate

# Qwen3.5's text models, as transformers' configurations describe them: of four layers one looks back.
NINE = shapes.of(
    {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }
)  # fmt: skip
TWENTY_SEVEN = shapes.of(
    {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }
)  # fmt: skip

# Replies of up to 8,192 tokens, up to 300 turns, both heavy-tailed: a hundredth of the replies and a fiftieth of the episodes meet
# their limit. A history that fills its window is rewritten to 8,192 tokens.
EPISODE = Workload(
    batch_groups=16, group_size=16, turns=Tail(40, 1.0, 300), reply=Tail(500, 1.2, 8192), observation=Tail(300, 1.0, 4096),
    command_s=Tail(1.0, 1.5, 120), prompt=2048, window=65536, compacted=8192, verify_s=10.0, start_s=Rates().start_s,
)  # fmt: skip
MEAN_TURNS, MEAN_REPLY = 62, 983  # of these tails


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster: engines of `tensor` GPUs, and GPUs of the policy and of the critic (0: there is none)."""

    name: str
    shape: ModelShape
    engines: int
    tensor: int
    policy: int
    critic: int
    work: Workload
    others: tuple["Case", ...] = ()  # other splits of the same devices
    max_num_seqs: int = 64

    def machine(self, figures: Rates) -> Machine:
        engine = Engine(self.work.window, self.max_num_seqs, tensor=self.tensor)

        def learn_s(lengths: Sequence[int]) -> float:
            """Forward, backward, a forward for checkpointing, one for old log-probabilities or values; critic, then policy."""
            seconds = rates.learn_s(self.shape, figures, self.policy, lengths, passes=5.0)
            if self.critic:
                seconds += rates.learn_s(self.shape, figures, self.critic, lengths, passes=5.0, head=False)
            return seconds

        return Machine(
            engines=self.engines,
            step_s=rates.step_s(self.shape, figures, self.tensor),
            prefill_s=rates.prefill_s(self.shape, figures, self.tensor),
            learn_s=learn_s,
            load_s=rates.move_s(self.shape, figures),
            max_num_seqs=self.max_num_seqs,
            cache_tokens=memory.cache_tokens(self.shape, engine, 80 * GIB),
        )


PPO = replace(EPISODE, batch_groups=256, group_size=1, window=32768)
CASES = [
    Case(
        "9B, 16 A100: 8 engines, policy 8; GRPO, 16 groups of 16", NINE, 8, 1, 8, 0, EPISODE,
        (Case("6 engines, policy 10", NINE, 6, 1, 10, 0, EPISODE), Case("10 engines, policy 6", NINE, 10, 1, 6, 0, EPISODE)),
    ),
    Case(
        "27B, 64 A100: 16 engines of 2, policy 16, critic 16; PPO, 256 tasks, windows of 32,768", TWENTY_SEVEN, 16, 2, 16, 16, PPO,
        (
            Case("8 engines of 2, policy 24, critic 24", TWENTY_SEVEN, 8, 2, 24, 24, PPO),
            Case("6 engines of 2, policy 26, critic 26", TWENTY_SEVEN, 6, 2, 26, 26, PPO),
        ),
    ),
]  # fmt: skip


def by_staleness(case: Case, staleness: Sequence[int], *, steps: int) -> Iterator[str]:
    """As it is; with the sandboxes of `scale=full`; with groups that are given to engines in turn, or by a hash of their name."""
    made, first = case.machine(Rates()), 0.0
    ways = {
        "": made, ", 256 sandboxes": replace(made, sandboxes=256), ", in turn": replace(made, routing="turn"),
        ", by a hash": replace(made, routing="hash"),
    }  # fmt: skip
    for name, machine in ways.items():
        for s in staleness:
            one = simulate(case.work, machine, max_staleness=s, steps=steps, warm_up=s + 2)
            first = first or one.step_s
            yield _row(f"{s}{name}", one, first)


def without(case: Case, *, steps: int) -> Iterator[str]:
    """At a staleness of 1 each part for nothing: the largest gain is the bottleneck."""
    made, work = case.machine(Rates()), case.work
    nothing = lambda *_: 0.0  # noqa: E731 - a law of no time
    free = {
        "generation": (work, replace(made, step_s=nothing, prefill_s=nothing)),
        "learning": (work, replace(made, learn_s=nothing)),
        "weights": (work, replace(made, load_s=0.0)),
        "sandboxes": (replace(work, command_s=Tail(0.0), verify_s=0.0, start_s=0.0), made),
    }
    first = simulate(work, made, max_staleness=1, steps=steps, warm_up=3).step_s
    for part, (w, m) in free.items():
        yield _row(f"{part} for nothing", simulate(w, m, max_staleness=1, steps=steps, warm_up=3), first)


def arms(case: Case, *, steps: int) -> Iterator[str]:
    """What else could be changed, likewise, one thing at a time."""
    made, work = case.machine(Rates()), case.work
    even = replace(work, turns=Tail(MEAN_TURNS), reply=Tail(MEAN_REPLY))
    changed = {
        "turns in flight stop for new weights": (work, replace(made, drain=False)),
        f"no tails: {MEAN_TURNS} turns of {MEAN_REPLY} tokens, all": (even, made),
    } | {other.name: (other.work, other.machine(Rates())) for other in case.others}
    first = simulate(work, made, max_staleness=1, steps=steps, warm_up=3).step_s
    for name, (w, m) in changed.items():
        yield _row(name, simulate(w, m, max_staleness=1, steps=steps, warm_up=3), first)


def worst(case: Case) -> str:
    """Every episode at both limits: 300 turns of 8,192 tokens."""
    work = replace(case.work, turns=Tail(300), reply=Tail(8192), observation=Tail(300))
    return _row(
        "300 turns of 8,192 tokens, all",
        simulate(work, case.machine(Rates()), max_staleness=1, steps=1, warm_up=1),
        0.0,
    )


def _row(name: str, one: Outcome, first: float) -> str:
    cells = [
        name, f"{one.step_s:,.0f}", f"{one.step_s / first:.2f}" if first else "", f"{one.generator:.0%}", f"{one.batch:.1f}",
        f"{one.learner:.0%}", f"{one.weights:.1%}", f"{one.commands:.1f} + {one.verifications:.1f}", f"{one.tokens_s:,.0f}",
        f"{one.cached:.0%}", f"{one.staleness:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    "s per step", "ratio", "engines busy", "turns in one", "learner busy", "weights", "commands + verifications at once",
    "tokens/s", "prompt cached", "versions old",
)  # fmt: skip


def header(first: str) -> str:
    cells = (first, *COLUMNS)
    return f"| {' | '.join(cells)} |\n|{' --- |' * len(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="one alone")
    given = parser.parse_args()
    steps = given.steps
    for case in CASES if given.case is None else [CASES[given.case]]:
        say(f"\n{case.name}\n\n{header('max_staleness')}")
        for row in by_staleness(case, (0, 1, 2, 4), steps=steps):
            say(row)
        say(f"\n{header('max_staleness=1')}")
        for rows in (without(case, steps=steps // 2), arms(case, steps=steps // 2), [worst(case)]):
            for row in rows:
                say(row)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 what a benchmark is for


if __name__ == "__main__":
    main()
