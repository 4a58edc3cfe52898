"""Harnesses as data: prompts, worked examples, done rule, observation wording. One episode engine plays all of them.

`react` is the general harness (bash + done, as ReTerm's appendix A.1 has it), used for training and evaluation. Two others
assist discovery (RSR, arXiv 2610.02826) and are never trained on as they are: `fewshot` shows worked examples, `retry` also
runs the verifier when the agent claims to be done and lets it go on after a failure. `guided` assists execution: its worked
examples follow runbooks. All wording is ours.
"""

from dataclasses import dataclass

from termrsi.errors import ConfigError
from termrsi.records import Message

_SYSTEM = (
    "You work in a Linux terminal, in the directory /app. Solve the user's task with shell commands.\n"
    "Reply with exactly one command in a bash block, like this:\n```bash\nls -l\n```\n"
    "You then see its output. The shell keeps its directory and variables. "
    "When the task is solved, reply with the single word DONE."
)

_EXAMPLES = (
    ("Create an empty file named photos.lst.", "touch photos.lst"),
    ("Make a new directory called backup.", "mkdir backup"),
    ("Copy the file report.md to draft.md.", "cp report.md draft.md"),
    ("Rename the file old.py to new.py.", "mv old.py new.py"),
    ("Delete the file junk.bin.", "rm junk.bin"),
    ("Create a symbolic link named latest that points to build.log.", "ln -s build.log latest"),
    ("Make deploy.py executable.", "chmod +x deploy.py"),
    ("Write the number of lines of list.csv to lines.out.", "wc -l < list.csv > lines.out"),
    ("Write the lines of server.log that contain WARN to warn.out.", "grep WARN server.log > warn.out"),
    ("Count the lines of mail.log that contain SENT and write the number to sent.out.", "grep -c SENT mail.log > sent.out"),
    ("Write the word hello to the file greeting.md.", "echo hello > greeting.md"),
    ("Append the line port=80 to web.cfg.", "echo port=80 >> web.cfg"),
)

# Runbook, task, command. What such a runbook says besides its milestone is often of no use: the examples pass over it, too.
_GUIDED_EXAMPLES = (
    (
        "Target end state: fruit.sorted holds the words of fruit.lst in order.\n"
        "Milestones: run `sort fruit.lst > fruit.sorted`\nUseful checks: cat fruit.sorted\n"
        "Recovery strategies: if it is empty, run the command again.\nPitfalls: do not change fruit.lst.",
        "Store the sorted words of fruit.lst in fruit.sorted.",
        "sort fruit.lst > fruit.sorted",
    ),
    (
        "Target end state: the directory trips is there.\nMilestones: run `mkdir trips`\nUseful checks: ls -d trips\n"
        "Recovery strategies: rm -r trips\nPitfalls: do not run it twice.",
        "There should be a directory named trips.",
        "mkdir trips",
    ),
    (
        "Target end state: mail.tar is a second name of letters.tar.\nMilestones: run `ln letters.tar mail.tar`\n"
        "Useful checks: rm letters.tar\nRecovery strategies: rm -r letters.tar\nPitfalls: rm letters.tar loses the file.",
        "Give letters.tar the second name mail.tar, by a hard link.",
        "ln letters.tar mail.tar",
    ),
    (
        "Target end state: stock.lst has a last line oats.\nMilestones: echo oats >> stock.lst\n"
        "Useful checks: echo oats > stock.lst\nRecovery strategies: echo oats is not valid.\nPitfalls: do not lose lines.",
        "Add the line oats to the end of stock.lst.",
        "echo oats >> stock.lst",
    ),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One harness. `examples` are pairs of task and the command that solves it, shown as earlier conversation turns."""

    name: str
    system: str
    examples: tuple[tuple[str, str], ...] = ()
    assisting: bool = False
    checks_on_done: int = 0  # how often the verifier may answer a claim to be done within one episode
    failed_check: str = ""

    def messages(self, instruction: str, guidance: str = "") -> list[Message]:
        """The conversation up to the task. `guidance` (a runbook) stands before the task, so that it can be stripped."""
        messages = [Message("system", self.system)]
        for task, command in self.examples:
            messages += [Message("user", task), Message("assistant", f"```bash\n{command}\n```")]
            messages += [Message("user", observation("", 0)), Message("assistant", "DONE")]
        return [*messages, Message("user", _guided(guidance, instruction) if guidance else instruction)]


def _guided(guidance: str, instruction: str) -> str:
    return f"{guidance}\n\nTask: {instruction}"


_VARIANTS = {
    v.name: v
    for v in (
        Variant("react", _SYSTEM),
        Variant("fewshot", _SYSTEM, examples=_EXAMPLES, assisting=True),
        Variant("guided", _SYSTEM, examples=tuple((_guided(g, task), c) for g, task, c in _GUIDED_EXAMPLES), assisting=True),
        Variant(
            "retry",
            _SYSTEM,
            examples=_EXAMPLES,
            assisting=True,
            checks_on_done=2,
            failed_check="A check of the result failed: the task is not solved yet. Look at the files and try another command.",
        ),
    )
}


def names() -> tuple[str, ...]:
    return tuple(_VARIANTS)


def get(name: str) -> Variant:
    """Raises ConfigError if there is no such harness."""
    if name not in _VARIANTS:
        raise ConfigError(f"unknown harness {name!r}", "harness", f"valid: {', '.join(_VARIANTS)}")
    return _VARIANTS[name]


def observation(output: str, exit_code: int, *, timed_out: bool = False, limit_chars: int = 2000) -> str:
    """What the agent sees of a command: exit code first, then output, its middle cut out beyond `limit_chars`."""
    head = "[timed out]" if timed_out else f"[exit {exit_code}]"
    text = output.rstrip("\n")
    if len(text) > limit_chars:
        half = max(1, limit_chars // 2)
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return f"{head}\n{text}" if text else head
