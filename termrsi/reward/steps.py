"""Tasks of several steps (Harbor's `[[steps]]`): one machine, and for each step a new conversation and a verification of its own.

As Harbor 0.26: before a step its `workdir/` is laid into the working directory and `setup.sh` in it is run; a step whose reward is
below its `min_reward` is the last; the task's reward is the mean over the steps that were verified, or the last one's. Ours: the
agent's processes are ended by each verification, and success is that of every step, all of them reached.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from termrsi.errors import SandboxError, TaskError
from termrsi.furnish import unhealthy
from termrsi.ports import Sandbox
from termrsi.records import TaskSpec, Verdict

SETUP_S = 360.0  # as Harbor gives an agent's set-up


def only(task: TaskSpec, name: str) -> TaskSpec:
    """The task of one step: what its agent is told, and what a verifier is given. Raises TaskError if there is no such step."""
    for step in task.steps:
        if step.name == name:
            limit = step.agent_timeout_s or task.agent_timeout_s
            environment = dataclasses.replace(task.environment, healthcheck=step.healthcheck)
            own = {"instruction": step.instruction, "agent_timeout_s": limit, "environment": environment}
            return dataclasses.replace(task, **own, steps=(), step=name)
    raise TaskError(f"it has no step {name!r}", task.id)


def parts(task: TaskSpec) -> list[TaskSpec]:
    """What is verified on its own: the task of each step, or the task itself."""
    return [only(task, step.name) for step in task.steps] or [task]


async def prepare(sandbox: Sandbox, task: TaskSpec, *, first: bool) -> bool:
    """What one step's author wants to be there before its agent; False if its setup.sh failed or, save the first, its healthcheck.

    Raises SandboxError, also if the machine is not healthy before any agent was there.
    """
    if not await _set_up(sandbox, task):
        return False
    check = task.environment.healthcheck
    why = await unhealthy(sandbox, check) if check is not None else ""
    if why and first:
        raise SandboxError(why, task.id)
    return not why


async def _set_up(sandbox: Sandbox, task: TaskSpec) -> bool:
    folder = Path(task.path) / "steps" / task.step / "workdir"
    if not folder.is_dir():
        return True
    place = task.environment.workdir or (await sandbox.run("pwd")).output.strip()
    await sandbox.put(folder, place)
    if not (folder / "setup.sh").is_file():
        return True
    script = f"{place}/setup.sh"
    command = f"sed -i 's/\\r$//' {shlex.quote(script)}; cd {shlex.quote(place)} && bash {shlex.quote(script)} < /dev/null"
    return (await sandbox.run(f"( {command} )", SETUP_S)).exit_code == 0


def goes_on(task: TaskSpec, name: str, verdict: Verdict) -> bool:
    """Whether the step after `name` begins: there is one, the machine is fit for it, and `min_reward` is reached."""
    names = [step.name for step in task.steps]
    least = task.steps[names.index(name)].min_reward
    return name != names[-1] and verdict.source != "spoiled" and (least is None or verdict.reward >= least)


def judged(task: TaskSpec, verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict of the steps verified, in order. Ids of checks have their step's name before them."""
    names = [step.name for step in task.steps][: len(verdicts)]

    def ids(kind: str) -> tuple[str, ...]:
        return tuple(f"{name}: {check}" for name, one in zip(names, verdicts, strict=True) for check in getattr(one, kind))

    last = verdicts[-1]
    return Verdict(
        strict=len(verdicts) == len(task.steps) and all(one.strict for one in verdicts),
        reward=last.reward if task.last_step_counts else sum(one.reward for one in verdicts) / len(verdicts),
        passed=ids("passed"),
        failed=ids("failed"),
        skipped=ids("skipped"),
        source=last.source,
        duration_s=sum(one.duration_s for one in verdicts),
        replaced=tuple(dict.fromkeys(path for one in verdicts for path in one.replaced)),
        log=last.log,
        parts=tuple(verdicts),
    )
