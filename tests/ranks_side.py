"""What each of several learner processes does in `tests/contract/test_learner_ranks.py`: the same calls as one process alone."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from termrsi.model.critic import CriticModel
from termrsi.model.lora import Lora
from termrsi.model.policy import PolicyModel
from termrsi.model.ranks import ALONE, Ranks, find_store, join
from termrsi.records import Sample, UpdateMetrics

STEPS, LR = 2, 1e-3
HANDED: tuple[tuple[str, type, dict[str, Any]], ...] = (
    ("policy", PolicyModel, {}),
    ("critic", CriticModel, {}),
    ("adapters", PolicyModel, {"adapters": Lora(4)}),
)  # Any: arguments of the model


@dataclass(frozen=True)
class Case:
    """Two updates of a model on the same samples. `loss`: None for `fit`; `value_clip` is of a critic."""

    model: str
    samples: tuple[Sample, ...]
    loss: dict[str, object] | None = None
    critic: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # Any: arguments of the model


@dataclass(frozen=True)
class Outcome:
    """Of the first process; `weights` are its float32 masters, put together."""

    metrics: list[UpdateMetrics]
    before: list[list[float]]
    after: list[list[float]]
    weights: dict[str, torch.Tensor]
    checksum: str


def play(case: Case, ranks: Ranks = ALONE) -> Outcome:
    torch.set_num_threads(1)
    options = {"compute": "fp32", "micro_tokens": 40, **case.options}
    samples = list(case.samples)
    if case.critic:
        critic = CriticModel(case.model, ranks=ranks, **options)
        before = critic.values(samples)
        metrics = [critic.update(samples, LR, 0.2) for _ in range(STEPS)]
        return Outcome(metrics, before, critic.values(samples), critic.weights_only(), critic.checksum())
    policy = PolicyModel(case.model, ranks=ranks, **options)
    before = policy.logp(samples)
    metrics = [policy.fit(samples, LR) if case.loss is None else policy.update(samples, case.loss, LR) for _ in range(STEPS)]
    return Outcome(metrics, before, policy.logp(samples), policy._masters.weights(), policy.checksum())


@dataclass(frozen=True)
class Handed:
    """Checksums of what was found in the model's directory and in the training state beside it, and of what was left; weights."""

    saved: str
    found: str
    left: str
    weights: dict[str, torch.Tensor]


def hand_on(model: str, samples: tuple[Sample, ...], source: Path | None, target: Path, ranks: Ranks = ALONE) -> dict[str, Handed]:
    """Go on from what `source` holds (None: from the model), one update, and write it to `target`; policies and a critic."""
    handed = {}
    for name, kind, more in HANDED:
        learner: Any = kind(model, compute="fp32", micro_tokens=40, ranks=ranks, **more)  # Any: either
        saved = learner.load(source / name) if source else learner.checksum()
        found = learner.load_training(source / f"{name}_training") if source else ""
        if isinstance(learner, PolicyModel):
            learner.fit(list(samples), LR)
        else:
            learner.update(list(samples), LR, 0.0)
        left = learner.save(target / name)
        learner.save_training(target / f"{name}_training")
        handed[name] = Handed(saved, found, left, learner._masters.weights())
    return handed


def refit(model: str, samples: tuple[Sample, ...], ranks: Ranks = ALONE) -> list[list[list[float]]]:
    """A critic's values as they are, after a refit, and after taking over weights."""
    critic = CriticModel(model, compute="fp32", ranks=ranks)
    weights = ranks.gather_all(critic.weights_only())[0]
    values = [critic.values(list(samples))]
    critic.refit(-2.0, 0.5)
    values.append(critic.values(list(samples)))
    critic.load_weights(weights)
    values.append(critic.values(list(samples)))
    return values


def main(
    rank: int, size: int, port: int, folder: Path, refitted: tuple[str, tuple[Sample, ...]], source: Path, target: Path
) -> None:
    """One of `size` processes: plays the cases in `folder` and leaves the outcomes there."""
    torch.set_num_threads(1)
    ranks = join(find_store("127.0.0.1", port, 60.0), rank, size, torch.device("cpu"), 60.0)
    cases: dict[str, Case] = torch.load(folder / "cases.pt", weights_only=False)
    outcomes: dict[str, object] = {name: play(case, ranks) for name, case in cases.items()}
    outcomes["refit"] = refit(*refitted, ranks)
    outcomes["handed"] = hand_on(*refitted, source, target, ranks)
    outcomes["error"] = ranks.gather_all(_refusal(cases["ppo"], ranks))
    if rank == 0:
        torch.save(outcomes, folder / f"outcomes-{size}.pt")
    torch.distributed.barrier()
    os._exit(0)  # as these processes end in a run: nothing is unwound


def _refusal(case: Case, ranks: Ranks) -> str:
    """A sample that lacks what the loss needs is refused by every process, also by those that would not have computed it."""
    policy = PolicyModel(case.model, compute="fp32", ranks=ranks)
    try:
        policy.update([replace(case.samples[0], old_logp=()), *case.samples[1:]], {"kind": "ppo"}, LR)
    except ValueError as error:
        return str(error)
    return ""
