"""Retention: the best checkpoint of a phase by validation strict success, with a worst-suite guard (rule ours).

`decide` is a pure function of the logged scores. Ties go to the earlier step, so a candidate must gain more than `min_gain`.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from termrsi.algo import metrics
from termrsi.config.stages import EvaluateConfig, RetentionConfig
from termrsi.errors import StageError
from termrsi.stages.base import Context
from termrsi.stages.scoring import score


@dataclass(frozen=True, slots=True)
class Candidate:
    """Strict success per suite at one step. A suite is a difficulty level of the validation split."""

    step: int
    suites: dict[str, float]
    passes: dict[str, list[int]] = field(default_factory=dict)  # attempts of each task: what a comparison pairs

    @property
    def mean(self) -> float:
        return sum(self.suites.values()) / len(self.suites)


def decide(incumbent: Candidate, candidate: Candidate, config: RetentionConfig) -> tuple[bool, str]:
    """Whether the candidate replaces the incumbent, and the reason in words."""
    if set(candidate.suites) != set(incumbent.suites):
        return False, f"suites {sorted(candidate.suites)} were measured, not {sorted(incumbent.suites)}: no comparison"
    gain = candidate.mean - incumbent.mean
    if gain <= config.min_gain:
        return False, f"mean {candidate.mean:.3f} does not exceed {incumbent.mean:.3f} of step {incumbent.step}"
    drops = {s: incumbent.suites[s] - candidate.suites[s] for s in incumbent.suites}
    worst = max(drops, key=lambda s: drops[s])
    if drops[worst] > config.max_drop:
        return False, f"mean rises by {gain:.3f}, but suite {worst} falls by {drops[worst]:.3f}"
    low = paired(incumbent, candidate).get("gain_low")
    if config.significant and (low is None or low <= 0.0):
        told = "unknown" if low is None else f"down to {low:+.3f}"
        return False, f"mean rises by {gain:.3f}, but its 95 % interval reaches {told}"
    return True, f"mean {candidate.mean:.3f} exceeds {incumbent.mean:.3f} of step {incumbent.step}"


def paired(incumbent: Candidate, candidate: Candidate) -> dict[str, float]:
    """Whether a gain is real: its 95 % bootstrap interval over tasks in pairs, and the p-value of a sign test over them.

    Of the tasks that both have (the gain here is over tasks, where the rule's mean is over suites); empty without any.
    """
    both = [task for task in candidate.passes if task in incumbent.passes]
    if not both:
        return {}
    before, after = [incumbent.passes[t] for t in both], [candidate.passes[t] for t in both]
    gain = metrics.paired_bootstrap_interval(before, after)
    return {"gain": gain.estimate, "gain_low": gain.low, "gain_high": gain.high, "sign_p": metrics.sign_test(before, after)}


async def measure(ctx: Context, step: int, config: RetentionConfig) -> Candidate:
    """Validation scores of the weights that the generator serves now. Seeds do not depend on the step: differences are paired."""
    tasks = ctx.tasks.validation
    sampling = EvaluateConfig(k=config.k, temperature=config.temperature, top_p=config.top_p)
    scores = await score(ctx, tasks, sampling, label=f"{ctx.name}/validation", file=f"validation_{step}.jsonl")
    levels = {task.id: f"level-{task.level}" for task in tasks}
    suites: dict[str, list[float]] = {}
    for task_id, entry in scores.items():
        suites.setdefault(levels[task_id], []).append(sum(entry["strict"]) / len(entry["strict"]))
    if not suites:
        raise StageError("no validation task could be scored", ctx.name, "see the dropped episodes")
    means = {name: sum(v) / len(v) for name, v in sorted(suites.items())}
    return Candidate(step, means, {task: list(entry["strict"]) for task, entry in scores.items()})


class Keeper:
    """Holds the incumbent of a phase: its scores, and where its checkpoints lie. `retention.json` is its log."""

    def __init__(self, ctx: Context, config: RetentionConfig, start: Candidate) -> None:
        self._ctx = ctx
        self._config = config
        self.before = start.mean
        self.best = start
        self.log: list[dict[str, object]] = [{"step": start.step, "mean": start.mean, "suites": start.suites, "why": "start"}]

    async def start(self) -> None:
        await self._save()

    def state(self) -> dict[str, Any]:
        """JSON, for `restored`. The weights are not in it: they lie where they were saved."""
        return {"before": self.before, "best": asdict(self.best), "log": list(self.log)}

    @classmethod
    def restored(cls, ctx: Context, config: RetentionConfig, state: dict[str, Any]) -> "Keeper":
        keeper = cls(ctx, config, Candidate(**state["best"]))
        keeper.before, keeper.log = state["before"], state["log"]
        return keeper

    async def offer(self, candidate: Candidate) -> bool:
        """Keep the candidate's weights, actor and critic of the same step, if it replaces the incumbent."""
        kept, why = decide(self.best, candidate, self._config)
        told = paired(self.best, candidate)
        scores = {"step": candidate.step, "mean": candidate.mean, "suites": candidate.suites}
        self.log.append({**scores, "against": self.best.step, **told, "kept": kept, "why": why})
        logged = {f"validation_{name}": value for name, value in told.items()}
        self._ctx.log(self._ctx.name, {"step": candidate.step, "validation": candidate.mean, "kept": float(kept)} | logged)
        if kept:
            self.best = candidate
            await self._save()
        return kept

    async def roll_back(self) -> None:
        """Actor and critic are the incumbent's again, as they were saved, with fresh optimizers; the generator serves them.

        What a refused candidate has learned is forgotten (`retention.rollback`; ours).
        """
        ctx = self._ctx
        await ctx.policy.load(str(ctx.out / "policy"))
        if ctx.critic is not None:
            await ctx.critic.load(str(ctx.out / "critic"))
        await ctx.sync()
        self.log[-1]["rolled_back"] = self.best.step
        ctx.log(ctx.name, {"rolled_back": float(self.best.step)})

    async def _save(self) -> None:
        await self._ctx.policy.save(str(self._ctx.out / "policy"))
        if self._ctx.critic is not None:
            await self._ctx.critic.save(str(self._ctx.out / "critic"))
