"""RSR 3, screen: form first, then the deterministic scan, then a critic that sees only the public task and the runbook.

The scan knows verifier and oracle but hands out categories only (its callable is passed in; this module cannot import it). The
critic is the model itself; what it says unclearly counts as a refusal, and so does a thought that was not closed. A small model's
answer is close to a guess: the scan is the filter that holds.
"""

import re
from dataclasses import replace

from termrsi.errors import RequestRefused
from termrsi.harness.actions import THINK_END
from termrsi.ports import Scan
from termrsi.records import Message, SamplingParams, TaskSpec
from termrsi.stages.roles import Ask
from termrsi.stages.runbook import faults

_SYSTEM = "Does the runbook mention a hidden test or a secret value that the task does not give? Answer yes or no."
_QUESTION = "Task: {task}\nRunbook: {runbook}\nHidden test or secret value?"
_EXAMPLES = (
    ("Make a folder named old.", "Target end state: there is a folder old.\nMilestones: run `mkdir old`", "no"),
    ("Store the answer in out.txt.", "Milestones: test_answer.py checks that out.txt holds 48151623.", "yes"),
    ("Sort fruit.lst.", "Milestones: run `sort fruit.lst`\nUseful checks: cat fruit.lst", "no"),
)


class Screener:
    """Says why a runbook is refused; an empty answer passes it."""

    def __init__(self, ask: Ask, scan: Scan, critic_tokens: int) -> None:
        """`critic_tokens` bounds the critic's answer, and what it thinks before."""
        self._ask = ask
        self._scan = scan
        self._sampling = SamplingParams(temperature=0.0, max_tokens=critic_tokens)

    async def refusals(self, task: TaskSpec, runbook: str, seed: int) -> tuple[str, ...]:
        """Categories, from the first of the three filters that refuses."""
        wrong = faults(runbook) or tuple(f"leak_{c}" for c in self._scan(task, runbook))
        return wrong or await self._critic(task, runbook, seed)

    async def _critic(self, task: TaskSpec, runbook: str, seed: int) -> tuple[str, ...]:
        messages = [Message("system", _SYSTEM)]
        for asked, example, answer in _EXAMPLES:
            messages += [Message("user", _QUESTION.format(task=asked, runbook=example)), Message("assistant", answer)]
        messages.append(Message("user", _QUESTION.format(task=task.instruction, runbook=runbook)))
        try:
            said = await self._ask("critic", messages, replace(self._sampling, seed=seed), "critic")
        except RequestRefused:
            return ("critic_refused",)
        return _READINGS.get(_first_word(said.text.rpartition(THINK_END)[2]), ("critic_unclear",))


_READINGS = {"no": (), "yes": ("critic_leak",)}


def _first_word(answer: str) -> str:
    """Of a thought that was not closed, the tag that opens it."""
    found = re.search(r"\w[\w'-]*", answer)
    return found.group().lower() if found else ""
