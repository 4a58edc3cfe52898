"""What a run tells a monitor while it goes on: the names, what each is of, and its labels. Who passes them on is a `ports.Meter`.

`run` is a label of all of them, given by the meter.
"""

from dataclasses import dataclass
from enum import StrEnum

SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)  # upper bounds of the histograms' buckets


class Kind(StrEnum):
    counter = "counter"  # values are added up
    gauge = "gauge"  # the last value counts
    histogram = "histogram"  # of seconds


@dataclass(frozen=True, slots=True)
class Instrument:
    kind: Kind
    what: str
    labels: tuple[str, ...] = ()


INSTRUMENTS = {
    "rollouts_finished": Instrument(Kind.counter, "Episodes that were scored, by what ended them", ("stage", "stop")),
    "rollouts_dropped": Instrument(Kind.counter, "Episodes that a machine fault or a refusal cost", ("stage", "reason")),
    "rollout_seconds": Instrument(Kind.histogram, "From an episode's first prompt to its end", ("stage",)),
    "tokens": Instrument(Kind.counter, "Tokens of the generator: prompt, cached (of these), generated", ("kind",)),
    "sandbox_leases": Instrument(Kind.counter, "Sandboxes handed out"),
    "sandboxes_leased": Instrument(Kind.gauge, "Sandboxes in use on this node, forks not counted"),
    "sandbox_lease_wait_seconds": Instrument(Kind.histogram, "From the request of a sandbox to its first prompt"),
    "sandbox_faults": Instrument(Kind.counter, "Calls on a sandbox that a machine fault ended", ("call",)),
    "step": Instrument(Kind.gauge, "The step that was trained last", ("stage",)),
    "step_seconds": Instrument(Kind.histogram, "A training step, with the wait for its rollouts", ("stage",)),
    "staleness": Instrument(Kind.gauge, "Updates between the weights that sampled the last batch and those it trained", ("stage",)),
    "busy": Instrument(Kind.gauge, "Share of the last step in which a part was at work", ("stage", "part")),
    "learner_tokens_per_second": Instrument(Kind.gauge, "Tokens trained in the last step per second of updates", ("stage",)),
    "figure": Instrument(Kind.gauge, "Every figure of metrics.jsonl, as it was last", ("stage", "figure")),
}


def check(name: str, labels: dict[str, str]) -> Instrument:
    """Raises ValueError for a name that is none, or other labels than it has: a mistake of ours."""
    instrument = INSTRUMENTS.get(name)
    if instrument is None or set(instrument.labels) != labels.keys():
        raise ValueError(f"{name}({', '.join(labels)}) is no instrument")
    return instrument


def silent(name: str, value: float = 1.0, **labels: str) -> None:
    """A `ports.Meter` that nobody reads. Mistakes show all the same."""
    check(name, labels)
