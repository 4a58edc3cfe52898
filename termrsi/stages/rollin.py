"""One batch of policy rollouts for an RL step: tasks from a seeded shuffle per epoch, so that no task pool order is learned."""

import random
from collections import Counter
from collections.abc import Sequence

from termrsi.harness.group import task_group
from termrsi.records import EpisodeSpec, TaskSpec
from termrsi.stages.base import Context

HARNESS = "react"


class TaskStream:
    """Endless train tasks: each epoch is a fresh shuffle of all of them."""

    def __init__(self, tasks: list[TaskSpec], seed: str) -> None:
        self._tasks = tasks
        self._seed = seed
        self._epoch = 0
        self._left: list[TaskSpec] = []

    def take(self, n: int) -> list[TaskSpec]:
        """n tasks, without repeats unless n exceeds the pool."""
        taken: list[TaskSpec] = []
        while len(taken) < n:
            if not self._left:
                self._left = self._tasks[:]
                random.Random(f"{self._seed}/{self._epoch}").shuffle(self._left)
                self._left.sort(
                    key=lambda task: task not in taken
                )  # those of the last epoch's end come last: none twice in one step
                self._epoch += 1
            taken.append(self._left.pop())
        return taken


def specs_of(
    ctx: Context, tasks: list[TaskSpec], step: int, samples: int, temperature: float, *, keep_snapshot: bool = False
) -> list[EpisodeSpec]:
    """Groups of `samples` episodes; a task that the step holds twice makes two groups, with ids and seeds of their own."""
    seen: Counter[str] = Counter()
    labels = []
    for task in tasks:
        labels.append(f"{ctx.name}/{step}" + (f"+{seen[task.id]}" if seen[task.id] else ""))
        seen[task.id] += 1
    return [
        spec
        for task, label in zip(tasks, labels, strict=True)
        for spec in task_group(
            task,
            samples,
            label=label,
            harness=HARNESS,
            sampling=ctx.sampling(temperature),
            limits=ctx.limits(),
            seed=ctx.config.seed,
            keep_snapshot=keep_snapshot,
        )
    ]


class StepTasks:
    """The train tasks of step 1, 2, ... of a stage: by the run's seed, the stage's name and the step's number alone."""

    def __init__(self, ctx: Context, tasks: int) -> None:
        self._stream, self._tasks = TaskStream(ctx.tasks.train, f"{ctx.config.seed}/{ctx.name}"), tasks
        self._step = 0
        self._taken: list[TaskSpec] = []

    def of(self, step: int) -> list[TaskSpec]:
        """Raises ValueError for a step before the last that was asked for."""
        if step < self._step:
            raise ValueError(f"step {step} comes after {self._step}")
        while self._step < step:
            self._taken, self._step = self._stream.take(self._tasks), self._step + 1
        return self._taken


class GroupDraw:
    """The episodes of slot 0, 1, ... of a `Sampler` whose slots are groups of one task: so many groups are a step."""

    def __init__(self, ctx: Context, groups: int, samples: int, temperature: float) -> None:
        self._ctx = ctx
        self._groups, self._samples, self._temperature = groups, samples, temperature
        self._steps = StepTasks(ctx, groups)
        self._specs: tuple[int, list[EpisodeSpec]] = (0, [])  # of the step that is being drawn

    async def __call__(self, number: int) -> Sequence[EpisodeSpec]:
        """Numbers ascend; a stage that goes on begins with a later one, and draws the same as it had."""
        step, place = number // self._groups + 1, number % self._groups
        if self._specs[0] != step:
            self._specs = (step, specs_of(self._ctx, self._steps.of(step), step, self._samples, self._temperature))
        return self._specs[1][place * self._samples : (place + 1) * self._samples]
