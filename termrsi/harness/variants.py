"""Harnesses as data: prompts, what carries an action, the shell behind it, how results are told, and what counts as done.

One episode engine plays all of them, and every one only appends to its history. `react` is the general harness (bash + done, as
ReTerm's appendix A.1 has it), used for training and evaluation. Others speak the protocols of agents in use, so that a model can be
trained and measured under more than one: `terminus_json` and `terminus_xml` (Harbor's Terminus-2), `mini_text` and `mini_tool`
(mini-swe-agent 2), `openhands`, `vanillux` (Tmax). `state` has the agent write down its state in each reply (after what is told of
StateM, arXiv 2610.02826). Some assist discovery and are never trained on as they are: `fewshot` and `guided` show worked examples,
`retry` and `reflect` run the verifier when the agent claims to be done, and let it go on after a failure. All wording is ours.

Known differences: `mini_*` start each command in a shell of its own, as there; `vanillux` keeps one shell, where the original saves
directory and variables between commands; `openhands` has no input to a running program, since a command that takes too long is
ended and not left running, and a reply without a call is a format error, not the end.
"""

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from termrsi.errors import ConfigError
from termrsi.harness import parse, parse_terminus
from termrsi.harness.actions import Action, FormatError, refuse, without_thinking
from termrsi.harness.observe import Wording
from termrsi.harness.parse_tools import Many, Parameter, Tool, parse_calls
from termrsi.records import Message

MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MINI_TAG = "mswea_bash_command"


class Carrier(enum.StrEnum):
    """What an action is written in."""

    fenced = "fenced"
    stated = "stated"  # fenced, behind a <state> block
    mini = "mini"  # fenced, with mini-swe-agent's tag and no word for done
    terminus_json = "terminus_json"
    terminus_xml = "terminus_xml"
    tool_calls = "tool_calls"


class Machine(enum.StrEnum):
    """What executes commands."""

    shell = "shell"  # one bash, whose state lasts
    fresh = "fresh"  # a bash of its own for each command, in the task's directory
    terminal = "terminal"  # keystrokes into a pseudo-terminal


class Done(enum.StrEnum):
    """What ends an episode by the agent's will."""

    said = "said"  # a word, a flag or a call
    confirmed = "confirmed"  # said in two replies in a row; the first is answered with `Variant.confirm`
    printed = "printed"  # MARKER is the first line of a command's output, and its exit code is 0
    marked = "marked"  # MARKER stands in a command, which is executed first, or in its output


WORKDIR = "/app"  # unless the task says another
_SYSTEM = (
    "You work in a Linux terminal, in the directory /app. Solve the user's task with shell commands.\n"
    "Reply with exactly one command in a bash block, like this:\n```bash\nls -l\n```\n"
    "You then see its output. The shell keeps its directory and variables. "
    "When the task is solved, reply with the single word DONE."
)

_THINKING = (
    f"{_SYSTEM}\nYou may think first, between <think> and </think>: only what follows is read, and what you thought is not shown "
    "to you again."
)

_STATED = (
    "You work in a Linux terminal, in the directory /app. Solve the user's task with shell commands.\n"
    "Begin each reply with your state, written anew and whole: the goal, what you have found out, what is done, what comes next. "
    "Then give exactly one command in a bash block, like this:\n"
    "<state>\nGoal: ...\nKnown: ...\nDone: ...\nNext: list the files\n</state>\n```bash\nls -l\n```\n"
    "You then see its output. The shell keeps its directory and variables. "
    "When the task is solved, give your state and then the single word DONE."
)

_MINI_TEXT = (
    "You solve tasks on a Linux machine by running shell commands, one per reply.\n"
    f"Write down what you think, then give exactly one command in a block like this:\n```{MINI_TAG}\nls -l\n```\n"
    "Each command runs in a new shell in the task's directory: a change of directory or a variable is gone afterwards, so put it "
    "into the same command, as in `cd build && make`.\n"
    f"When the task is solved, run `echo {MARKER}` alone; nothing can be done after that."
)

_MINI_TOOL = (
    "You solve tasks on a Linux machine by running shell commands with the tool bash.\n"
    "Each reply must call it at least once; calls run in order. Each command runs in a new shell in the task's directory: a change "
    "of directory or a variable is gone afterwards, so put it into the same command, as in `cd build && make`.\n"
    f"When the task is solved, run `echo {MARKER}` alone; nothing can be done after that."
)

_OPENHANDS = (
    "You are an agent at the terminal of a Linux machine. Use execute_bash to run commands; the shell keeps its directory and "
    "variables. Look before you change anything, and check your work. When the task is solved, call finish with a short summary."
)

_VANILLUX = (
    "You work at the terminal of a Linux machine and solve the task that the user gives you.\n"
    "Each reply has two parts: THOUGHT, in which you say what you see and what you will do, and then exactly one call of the tool "
    "bash. Its directory and exported variables last.\n"
    f"When you have checked that the task is solved, run `echo {MARKER}`; the work is handed in with that."
)

_TERMINUS = (
    "You are given a task to solve at the terminal of a Linux machine. You type keystrokes, and see what the terminal prints.\n\n"
    "{form}\n\n"
    "Keystrokes are typed as they stand: a command needs a newline at its end to be run. Keystrokes that are just C-c, C-d, Enter, "
    "Escape, Tab, Up, Down, Left or Right press that key. The duration is how many seconds to wait for output: short for quick "
    "commands, at most {longest}; to wait longer, send empty keystrokes.\n"
    "Programs that wait for input go on running in the terminal until you end them.\n\n"
    "Task:\n{task}\n\nThe terminal is open and shows a prompt."
)
_JSON_RULES = (
    "Reply with one JSON object and nothing else:\n{example}\n"
    '"analysis" says what you see, "plan" what comes next, "commands" is a list that may be empty. Set "task_complete" to true '
    "when the task is solved. Write line breaks in a text as \\n."
)
_XML_RULES = (
    "Reply in this form and with nothing else:\n{example}\n"
    "<analysis> says what you see, <plan> what comes next. The text in <keystrokes> is taken raw: do not write &lt; for <. "
    "Put <task_complete>true</task_complete> into the response when the task is solved."
)
_CONFIRM = (
    "Is the task solved? What you leave behind is judged as it is now, and you cannot change it any more. "
    "To confirm, reply in the same form, once more with task_complete true. Otherwise go on."
)


def _bash(description: str) -> Tool:
    return Tool("bash", description, (Parameter("command", "string", "the command"),))


_EXECUTE = Tool(
    "execute_bash",
    "Runs a command in the terminal and waits for its end.",
    (
        Parameter("command", "string", "the command; several are joined by && or ;"),
        Parameter("timeout", "number", "seconds after which it is ended", required=False),
    ),
)
_FINISH = Tool("finish", "Ends the work on the task.", (Parameter("message", "string", "a summary", required=False),), ends=True)

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
    system: str  # "": none
    task: str = "{task}"  # the user's first message
    carrier: Carrier = Carrier.fenced
    machine: Machine = Machine.shell
    wording: Wording = Wording.exit_first
    done: Done = Done.said
    tools: tuple[Tool, ...] = ()
    many: Many = "all"
    observation_chars: int = 1 << 30  # the harness's own limit; the episode's holds beside it
    confirm: str = ""
    thinking: Literal["kept", "cut"] = "kept"  # in the history; cut, each reply with reasoning begins a new chunk
    examples: tuple[tuple[str, str], ...] = ()
    assisting: bool = False
    checks_on_done: int = 0  # how often the verifier may answer a claim to be done within one episode
    failed_check: str = ""

    def messages(self, instruction: str, guidance: str = "", *, show_tools: bool = True, workdir: str = WORKDIR) -> list[Message]:
        """The conversation up to the task. `guidance` (a runbook) stands before the task, so that it can be stripped.

        `show_tools`: name the tools in the system message, for a chat template that does not. `workdir`: where the shell starts.
        """
        system = self.system.replace(f"in the directory {WORKDIR}.", f"in the directory {workdir}.") + (
            _shown(self.tools) if self.tools and show_tools else ""
        )
        messages = [Message("system", system)] if system else []
        for task, command in self.examples:
            messages += [Message("user", task), Message("assistant", f"```bash\n{command}\n```")]
            messages += [Message("user", "[exit 0]"), Message("assistant", "DONE")]
        task = _guided(guidance, instruction) if guidance else instruction
        return [*messages, Message("user", self.task.replace("{task}", task))]  # not format(): a task may hold braces

    def parse(self, text: str) -> Action:
        """A reply's action: of what follows its reasoning. No text raises, or is taken for done by mistake."""
        text = without_thinking(text)
        if text.lstrip().startswith("<think>"):  # cut off in it: what it drafts there is no action
            return refuse(FormatError.unclosed_thinking, "Your <think> was not closed. End it with </think>, then act.")
        if self.carrier is Carrier.tool_calls:
            return parse_calls(text, self.tools, self.many)
        return _PARSERS[self.carrier](text)


def _guided(guidance: str, instruction: str) -> str:
    return f"{guidance}\n\nTask: {instruction}"


def _shown(tools: tuple[Tool, ...]) -> str:
    """Tools as Hermes and Qwen show them, for models that know that form, and others."""
    lines = "\n".join(json.dumps(tool.schema()) for tool in tools)
    return (
        f"\n\nThese are your tools:\n<tools>\n{lines}\n</tools>\nTo call one, write its name and arguments as JSON, like this:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
    )


def _mini(text: str) -> Action:
    return parse.parse(text, tags={MINI_TAG}, tag=MINI_TAG, word="")


_PARSERS: dict[Carrier, Callable[[str], Action]] = {
    Carrier.fenced: parse.parse,
    Carrier.stated: parse.parse_with_state,
    Carrier.mini: _mini,
    Carrier.terminus_json: parse_terminus.parse_json,
    Carrier.terminus_xml: parse_terminus.parse_xml,
}


def _terminus(name: str, carrier: Carrier, rules: str, example: str, **more: Any) -> Variant:  # Any: fields of Variant
    task = _TERMINUS.replace("{form}", rules.replace("{example}", example)).replace(
        "{longest}", f"{parse_terminus.LONGEST_WAIT_S:g}"
    )
    return Variant(
        name,
        "",
        task,
        carrier,
        Machine.terminal,
        Wording.screen,
        Done.confirmed,
        observation_chars=10_000,
        confirm=_CONFIRM,
        **more,
    )


_VARIANTS = {
    v.name: v
    for v in (
        Variant("react", _SYSTEM),
        Variant("thinking", _THINKING, thinking="cut"),
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
        _terminus("terminus_json", Carrier.terminus_json, _JSON_RULES, parse_terminus.JSON_FORM),
        _terminus("terminus_xml", Carrier.terminus_xml, _XML_RULES, parse_terminus.XML_FORM),
        _terminus(
            "reflect",
            Carrier.terminus_json,
            _JSON_RULES,
            parse_terminus.JSON_FORM,
            assisting=True,
            checks_on_done=2,
            failed_check=(
                "A check of the result failed: the task is not solved yet. Before you type anything, say in your analysis what you "
                "took for granted, what you did not check, and what the task asks for that is not there. Then go on."
            ),
        ),
        Variant(
            "mini_text",
            _MINI_TEXT,
            carrier=Carrier.mini,
            machine=Machine.fresh,
            wording=Wording.tags,
            done=Done.printed,
            observation_chars=10_000,
        ),
        Variant(
            "mini_tool",
            _MINI_TOOL,
            carrier=Carrier.tool_calls,
            machine=Machine.fresh,
            wording=Wording.json,
            done=Done.printed,
            tools=(_bash("Runs a command in a new shell."),),
            observation_chars=10_000,
        ),
        Variant(
            "openhands",
            _OPENHANDS,
            carrier=Carrier.tool_calls,
            wording=Wording.footer,
            tools=(_EXECUTE, _FINISH),
            observation_chars=30_000,
        ),
        Variant(
            "vanillux",
            _VANILLUX,
            carrier=Carrier.tool_calls,
            wording=Wording.exit_last,
            done=Done.marked,
            tools=(_bash("Runs a command in the terminal."),),
            many="first",
            observation_chars=10_000,
        ),
        Variant("state", _STATED, carrier=Carrier.stated),
    )
}


def names() -> tuple[str, ...]:
    return tuple(_VARIANTS)


def get(name: str) -> Variant:
    """Raises ConfigError if there is no such harness."""
    if name not in _VARIANTS:
        raise ConfigError(f"unknown harness {name!r}", "harness", f"valid: {', '.join(_VARIANTS)}")
    return _VARIANTS[name]
