"""Tasks of several steps: what of a task a step is, when the next begins, and what the whole is worth."""

import pytest

from termrsi.errors import TaskError
from termrsi.records import EnvironmentSpec, StepSpec, TaskSpec, Verdict
from termrsi.reward import steps

TASK = TaskSpec(
    "t", "f", "One.\n\nTwo.\n\nThree.", "/tasks/t", EnvironmentSpec(), agent_timeout_s=60.0,
    steps=(StepSpec("a", "One.", 30.0, 0.5), StepSpec("b", "Two."), StepSpec("c", "Three.", min_reward=1.0)),
)  # fmt: skip


def verdict(reward: float, **other: object) -> Verdict:
    return Verdict(reward == 1.0, reward, **other)  # type: ignore[arg-type]


def test_the_task_of_one_step() -> None:
    one, two, _ = steps.parts(TASK)
    assert (one.step, one.instruction, one.agent_timeout_s, one.steps) == ("a", "One.", 30.0, ())
    assert (two.step, two.instruction, two.agent_timeout_s) == ("b", "Two.", 60.0)
    assert steps.parts(one) == [one], "a task of one step is its own"
    with pytest.raises(TaskError, match="no step 'd'"):
        steps.only(TASK, "d")


@pytest.mark.parametrize(
    ("name", "given", "on"),
    [
        ("a", verdict(0.5), True),
        ("a", verdict(0.4), False),
        ("b", verdict(0.0), True),
        ("b", verdict(0.0, source="spoiled"), False),
        ("c", verdict(1.0), False),
    ],
)
def test_when_the_next_step_begins(name: str, given: Verdict, on: bool) -> None:
    assert steps.goes_on(TASK, name, given) == on


def test_the_whole() -> None:
    parts = (
        verdict(1.0, passed=("x",), source="ctrf", duration_s=1.0),
        verdict(0.5, passed=("x",), failed=("y",), source="ctrf", duration_s=2.0, log="second"),
    )  # the third was not reached
    assert steps.judged(TASK, parts) == Verdict(
        False, 0.75, ("a: x", "b: x"), ("b: y",), (), source="ctrf", duration_s=3.0, log="second", parts=parts
    )


def test_success_is_that_of_every_step() -> None:
    assert not steps.judged(TASK, [verdict(1.0)]).strict, "an early end, though its mean is 1"
    assert steps.judged(TASK, [verdict(1.0)] * 3).strict
    last = TaskSpec("t", "f", "", "", EnvironmentSpec(), steps=TASK.steps, last_step_counts=True)
    whole = steps.judged(last, [verdict(0.0), verdict(0.0), verdict(1.0)])
    assert (whole.reward, whole.strict) == (1.0, False)
