"""Who writes tasks: the bundled suite's generator, or a model, in Tmax's steps: template, initial-state test, final-state test,
environment, each a reply of its own.

The forms of the replies are `tasks.synthesis.parse`'s, and the words of the requests are ours. A reply at fault is asked for again
with the category of the fault. What is refused leaves as a category, never as an error.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from termrsi.errors import RequestRefused
from termrsi.harness.group import seed_of
from termrsi.ports import Writer
from termrsi.records import Message, SamplingParams
from termrsi.tasks.synthesis import procedural
from termrsi.tasks.synthesis.axes import Blueprint
from termrsi.tasks.synthesis.parse import FORMS, Fault, Section, sections, without_thought
from termrsi.tasks.synthesis.write import Draft, dockerfile

Values = dict[str, str | tuple[str, ...]]  # axis -> value

LEVELS = {"short": 1, "moderate": 2, "complex": 3, "intricate": 4}
AGENT_TIMEOUT_S = (600.0, 1200.0, 1800.0, 3600.0)  # by level

SYSTEM = (
    "You write tasks for an agent that works in a Linux terminal, and the tests that decide whether it succeeded. You are asked "
    "for one part after the other. Reply with the sections of the form that is shown and with nothing else: each heading on a line "
    "of its own, `=== end ===` last, no fences around a section."
)
_WANTED = {
    "short": "a few commands",
    "moderate": "about ten commands",
    "complex": "about twenty commands and decisions between them",
    "intricate": "about 30 to 60 commands",
    "bash": "shell commands suffice",
    "bash_code": "shell commands, and code that the agent writes",
    "bash_code_services": "shell commands, code, and a service that has to run",
    "text_only": "text files alone",
    "multi_service_compose": "several services in a compose file",
    "exact_text": "compare exact text",
    "metric_threshold": "compute a figure of quality and compare it with a threshold",
    "adversarial_corpus": "run the agent's work on inputs that are made to break it",
    "fuzz_equivalence": "compare the agent's work with a reference on random inputs",
    "multi_protocol": "talk to the agent's work over more than one protocol",
}
_FORM = {
    "template": (
        "=== instruction ===\n(what the agent reads)\n"
        "=== truth ===\n(what it does not read: values and states that the tests rely on)"
    ),
    "initial_test": ("=== initial_test ===\n(bash; exit code 0 if the machine is as the task expects it before the agent begins)"),
    "final_test": (
        "=== check NAME ===\n(bash; exit code 0 if this one demand is met; NAME is a word of small letters, digits and _; as many "
        "checks as there are demands)"
    ),
    "environment": (
        "=== file PATH ===\n(a file below /app; any number of them)\n"
        "=== setup ===\n(bash, run once as root when the image is built)\n"
        "=== dockerfile ===\n(only if one that copies the files and runs the setup on {image} is not enough)\n"
        "=== compose ===\n(only for several services)\n"
        "=== solution ===\n(bash, in /app; optional: commands that solve the task)"
    ),
}
_REQUEST = {
    "template": (
        "Write the instruction of a task, and its truth. The agent works in /app. Name paths and formats exactly; give no "
        "commands.\n{blueprint}"
    ),
    "initial_test": "Now a test of the initial state: what must be there, and what must not be there yet.",
    "final_test": (
        "Now the tests of the final state. They run in /app after the agent. All of them pass exactly if the task is done; on the "
        "untouched machine at least one fails."
    ),
    "environment": "Now the machine that the task begins on: sections that it does not need are left out.",
}
_AGAIN = "Your reply was refused ({fault}). Write it again."


@dataclass(slots=True)
class Authored:
    """What an author made of one blueprint: a draft, or the category of why there is none."""

    draft: Draft | None = None
    category: str = ""
    axes: Values = field(default_factory=dict)  # as the author could express them
    faults: Counter[str] = field(default_factory=Counter)  # of replies
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


class Author(Protocol):
    async def write(self, blueprint: Blueprint) -> Authored: ...


@dataclass(frozen=True, slots=True)
class ProceduralAuthor:
    """See `tasks.synthesis.procedural`. `admit`: as of ModelAuthor."""

    admit: Callable[[str], str]
    families: tuple[str, ...] = ()

    async def write(self, blueprint: Blueprint) -> Authored:
        draft, axes = procedural.compose(blueprint, self.families)
        category = self.admit(draft.instruction)
        return Authored(None if category else draft, category, axes)


@dataclass(frozen=True, slots=True)
class ModelAuthor:
    """`rounds`: how often a reply at fault is asked for again. `image`: what a machine is made from. `admit`: the category of why
    an instruction is refused, or "": asked before its tests are."""

    writer: Writer
    sampling: SamplingParams
    rounds: int
    image: str
    admit: Callable[[str], str]

    async def write(self, blueprint: Blueprint) -> Authored:
        """Raises EngineError if the model cannot be had."""
        made = Authored(axes=blueprint.axes())
        messages = [Message("system", SYSTEM)]
        parts: dict[str, tuple[Section, ...]] = {}
        for step in FORMS:
            try:
                found = await self._ask(step, blueprint, messages, made)
            except RequestRefused:
                made.category = f"refused_{step}"
                return made
            if found is None:
                made.category = f"malformed_{step}"
                return made
            parts[step] = found
            if step == "template" and (category := self.admit(_body(found, "instruction"))):
                made.category = category
                return made
        made.draft = _draft(blueprint, parts, self.image)
        return made

    async def _ask(self, step: str, blueprint: Blueprint, messages: list[Message], made: Authored) -> tuple[Section, ...] | None:
        """Appends request and reply to `messages`, but no refused reply; None if none had the form."""
        form = f"{_FORM[step].format(image=self.image)}\n=== end ==="
        messages.append(Message("user", f"{_REQUEST[step].format(blueprint=_told(blueprint))}\n\n{form}"))
        refused: list[Message] = []
        for attempt in range(self.rounds + 1):
            seed = seed_of(blueprint.seed, blueprint.index, step, attempt)
            writing = await self.writer.write([*messages, *refused], replace(self.sampling, seed=seed), "author")
            made.prompt_tokens += writing.prompt_tokens
            made.completion_tokens += writing.completion_tokens
            made.cost += writing.cost
            reply = Message("assistant", without_thought(writing.text))
            found = sections(writing.text, FORMS[step], cut=writing.cut)
            if not isinstance(found, Fault):
                messages.append(reply)
                return found
            made.faults[found.value] += 1
            refused = [reply, Message("user", f"{_AGAIN.format(fault=found.value)}\n\n{form}")]
        return None


def _told(blueprint: Blueprint) -> str:
    rows = {
        "Domain": blueprint.domain,
        "Kind of skill": blueprint.skill.rpartition("/")[2],
        "Skills it needs": "; ".join(blueprint.primitives),
        "Who asks": blueprint.persona,
        "Language": blueprint.language,
        "Size": f"{blueprint.complexity}: {_WANTED[blueprint.complexity]}",
        "Means": _WANTED[blueprint.commands],
        "Material": _WANTED.get(blueprint.fixture, blueprint.fixture.replace("_", " ")),
        "The tests": _WANTED[blueprint.verifier],
    }
    return "\n".join(f"{name}: {value}" for name, value in rows.items())


def _body(found: tuple[Section, ...], kind: str) -> str:
    return next((section.body for section in found if section.kind == kind), "")


def _draft(blueprint: Blueprint, parts: dict[str, tuple[Section, ...]], image: str) -> Draft:
    """Checks are scripts of their own: one that bash cannot read fails, and the others run."""
    checks = {section.name: section.body for section in parts["final_test"]}
    environment = parts["environment"]
    files = {section.name: section.body for section in environment if section.kind == "file"}
    setup = _body(environment, "setup")
    level = LEVELS[blueprint.complexity]
    return Draft(
        instruction=_body(parts["template"], "instruction"),
        truth=_body(parts["template"], "truth"),
        initial_test=_body(parts["initial_test"], "initial_test"),
        checks={name: f"bash /tests/checks/{name}.sh" for name in checks},
        scripts={f"checks/{name}.sh": body for name, body in checks.items()},
        dockerfile=_body(environment, "dockerfile") or dockerfile(image, files=bool(files), setup=bool(setup)),
        family=blueprint.domain,
        level=level,
        agent_timeout_s=AGENT_TIMEOUT_S[level - 1],
        files=files,
        setup=setup,
        compose=_body(environment, "compose"),
        solution=_body(environment, "solution"),
    )
