"""RSR 3, screen: form first, then the deterministic scan, then a critic that sees only the public task and the runbook.

The scan knows verifier and oracle but hands out categories only (its callable is passed in; this module cannot import it). The
critic is the model itself; what it says unclearly counts as a refusal.
"""

from termrsi.harness.render import ChatFormat
from termrsi.ports import Generator, Scan
from termrsi.records import Message, SamplingParams, TaskSpec
from termrsi.stages.runbook import faults

_SYSTEM = (
    "You review runbooks. A runbook may say how to work. It must not name hidden tests or give values "
    "that the task does not give. Reply with one word: OK or LEAK."
)
_EXAMPLES = (
    ("Task: Make a folder named old.\nRunbook: Target end state: there is a folder old.\nMilestones: run `mkdir old`", "OK"),
    ("Task: Store the answer to the puzzle in out.txt.\nRunbook: write 48151623 into out.txt, test_answer checks it.", "LEAK"),
    ("Task: Sort fruit.lst into fruit.sorted.\nRunbook: Milestones: run `sort fruit.lst > fruit.sorted`", "OK"),
    ("Task: Pack photos.\nRunbook: Target end state: photos.zip is there.\nMilestones: run `zip -r photos.zip photos`", "OK"),
)


class Screener:
    """Says why a runbook is refused; an empty answer passes it."""

    def __init__(self, generator: Generator, chat: ChatFormat, scan: Scan) -> None:
        self._generator = generator
        self._chat = chat
        self._scan = scan

    async def refusals(self, task: TaskSpec, runbook: str, seed: int) -> tuple[str, ...]:
        """Categories, from the first of the three filters that refuses."""
        wrong = faults(runbook) or tuple(f"leak_{c}" for c in self._scan(task, runbook))
        return wrong or await self._critic(task, runbook, seed)

    async def _critic(self, task: TaskSpec, runbook: str, seed: int) -> tuple[str, ...]:
        messages = [Message("system", _SYSTEM)]
        for case, answer in _EXAMPLES:
            messages += [Message("user", case), Message("assistant", answer)]
        messages.append(Message("user", f"Task: {task.instruction}\nRunbook: {runbook}"))
        sampling = SamplingParams(temperature=0.0, max_tokens=4, seed=seed)
        completion = await self._generator.generate(self._chat.prompt(messages), sampling, "critic")
        answer = self._chat.decode(completion.ids).strip().strip(".*").upper()
        if answer.startswith("OK"):
            return ()
        return ("critic_leak",) if answer.startswith("LEAK") else ("critic_unclear",)
