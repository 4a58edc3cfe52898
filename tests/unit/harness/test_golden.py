"""Whole episodes of every harness, as text: what is said, what is seen, in which order, and what ends them.

The first prompt is `Variant.messages`; what follows it is written out here in full. `|` stands where a token of the template begins
or ends a turn, `A:` and `U:` for its roles; sampled tokens alone have a mask of 1.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from termrsi.harness import variants
from termrsi.harness.episode import Check, Episode, first_prompt
from termrsi.harness.render import ChatFormat
from termrsi.harness.variants import MARKER
from termrsi.records import (
    CommandResult,
    Completion,
    EnvironmentSpec,
    EpisodeSpec,
    Limits,
    Rollout,
    SamplingParams,
    Snapshot,
    StopReason,
    TaskSpec,
    WeightsVersion,
)

TASK = TaskSpec("t1", "files", "Make a {file}.", "/tasks/t1", EnvironmentSpec(workdir="/app"))
LIMITS = Limits(max_turns=9, max_context_tokens=100_000, wall_s=600.0, max_format_errors=3, observation_chars=60)


@dataclass
class Script:
    chat: ChatFormat
    lines: list[str]

    async def generate(self, prompt_ids: object, params: SamplingParams, prefix_key: str = "") -> Completion:
        ids = [*self.chat.encode(self.lines.pop(0)), self.chat.end_of_turn]
        return Completion(tuple(ids), (-1.0,) * len(ids), "stop", 1, 1)

    async def pull(self, weights: WeightsVersion) -> None:
        raise NotImplementedError


@dataclass
class Machine:
    """Answers from a list; a terminal's scripts are told apart by their end, and answered as a terminal would."""

    answers: list[CommandResult]
    ran: list[tuple[str, float | None]] = field(default_factory=list)
    id: str = "m"

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        terminal = command.startswith("(\nstart=")
        self.ran.append(("keys" if terminal else command, timeout_s))
        answer = self.answers.pop(0)
        return CommandResult(0, f"{len(answer.output)} 0\n{answer.output}", duration_s=0.1) if terminal else answer

    async def start(self) -> None: ...

    async def snapshot(self) -> Snapshot:
        raise NotImplementedError

    async def fork(self, n: int) -> list:
        raise NotImplementedError

    async def put(self, source: Path | str, target: str) -> None: ...

    async def get(self, source: str, target: Path | str) -> None: ...

    async def kill_processes(self) -> int:
        return 0

    async def replaced(self) -> list[str]:
        return []

    async def close(self) -> None: ...


def ok(output: str, code: int = 0) -> CommandResult:
    return CommandResult(code, output)


async def checked(
    chat: ChatFormat, harness: str, lines: list[str], answers: list[CommandResult], verdicts: list[bool]
) -> tuple[Rollout, str, int]:
    """As `play`, with a verifier in the loop; last, how often it was asked."""
    left = list(verdicts)

    async def check() -> bool:
        return left.pop(0)

    rollout, text, _ = await play(chat, harness, lines, answers, check)
    return rollout, text, len(verdicts) - len(left)


async def play(
    chat: ChatFormat, harness: str, lines: list[str], answers: list[CommandResult], check: Check | None = None
) -> tuple[Rollout, str, Machine]:
    """The rollout, all that follows the first prompt as text, and the machine."""
    spec = EpisodeSpec("e", "g", TASK, harness, SamplingParams(max_tokens=64), LIMITS)
    machine = Machine(answers)
    rollout = await Episode(spec, Script(chat, list(lines)), machine, chat, check).run()
    (chunk,) = rollout.chunks
    begin = first_prompt(spec, chat)
    assert list(chunk.ids[: len(begin)]) == begin
    text = chat.tokenizer.decode(list(chunk.ids[len(begin) :]))
    for role, short in (("assistant", "A"), ("user", "U"), ("tool", "T")):
        text = text.replace(f"<|im_start|>{role}\n", f"|{short}:")
    sampled = chat.tokenizer.decode([i for i, m in zip(chunk.ids, chunk.mask, strict=True) if m]).split("<|im_end|>")
    assert sampled == [*(turn.text for turn in rollout.turns), ""]
    return rollout, text.replace("<|im_end|>\n", "|").replace("<|im_end|>", "|"), machine


def call(name: str = "bash", **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def keys(*texts: str, **more: object) -> str:
    return json.dumps({"analysis": "a", "plan": "p", "commands": [{"keystrokes": text} for text in texts]} | more)


async def test_react(chat: ChatFormat) -> None:
    rollout, text, machine = await play(chat, "react", ["```bash\nls\n```", "DONE"], [ok("a\n")])
    assert text == "```bash\nls\n```||U:[exit 0]\na||A:DONE|"
    assert machine.ran == [("ls", 30.0)]
    assert rollout.stop is StopReason.done


async def test_react_in_another_directory(chat: ChatFormat) -> None:
    task = replace(TASK, environment=EnvironmentSpec(workdir="/srv/shop"))
    spec = EpisodeSpec("e", "g", task, "react", SamplingParams(), LIMITS)
    prompt = chat.tokenizer.decode(first_prompt(spec, chat))
    assert "in the directory /srv/shop. " in prompt
    assert "/app" not in prompt


async def test_thinking(chat: ChatFormat) -> None:
    """What was thought is sampled and trained on, and not shown again: each such reply ends a chunk."""
    lines = ["<think>look first</think>\n```bash\nls\n```", "<think>seen</think>\nDONE"]
    spec = EpisodeSpec("e", "g", TASK, "thinking", SamplingParams(max_tokens=64), LIMITS)
    machine = Machine([ok("a\n")])
    rollout = await Episode(spec, Script(chat, list(lines)), machine, chat).run()
    first, second = (chat.tokenizer.decode(list(chunk.ids)) for chunk in rollout.chunks)
    begin = chat.tokenizer.decode(first_prompt(spec, chat))
    assert first == f"{begin}{lines[0]}<|im_end|>"
    assert second.startswith(f"{begin}```bash\nls\n```<|im_end|>")
    assert "look first" not in second
    assert second.endswith(f"[exit 0]\na<|im_end|>\n<|im_start|>assistant\n{lines[1]}<|im_end|>")
    assert (machine.ran, rollout.stop, rollout.cases) == ([("ls", 30.0)], StopReason.done, {"split": 1})


@pytest.mark.parametrize("harness", ["fewshot", "guided"])
async def test_worked_examples_stand_before_the_task(chat: ChatFormat, harness: str) -> None:
    _, text, machine = await play(chat, harness, ["```bash\nls\n```", "DONE"], [ok("a\n")])
    assert text == "```bash\nls\n```||U:[exit 0]\na||A:DONE|"
    assert machine.ran == [("ls", 30.0)]
    spec = EpisodeSpec("e", "g", TASK, harness, SamplingParams(), LIMITS, guidance="1. look" if harness == "guided" else "")
    prompt = chat.tokenizer.decode(first_prompt(spec, chat))
    examples = variants.get(harness).examples
    assert prompt.count("<|im_start|>assistant\nDONE<|im_end|>") == len(examples) > 0
    asked = f"1. look\n\nTask: {TASK.instruction}" if spec.guidance else TASK.instruction
    assert prompt.endswith(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")


async def test_retry(chat: ChatFormat) -> None:
    """The verifier answers two claims; the third ends it, whatever it is."""
    lines = ["DONE", "```bash\nls\n```", "DONE", "DONE"]
    rollout, text, asked = await checked(chat, "retry", lines, [ok("a\n")], [False, False])
    failed = variants.get("retry").failed_check
    assert text == f"DONE||U:{failed}||A:{lines[1]}||U:[exit 0]\na||A:DONE||U:{failed}||A:DONE|"
    assert (asked, rollout.stop) == (2, StopReason.done)
    rollout, text, asked = await checked(chat, "retry", ["DONE"], [], [True])
    assert (text, asked, rollout.stop) == ("DONE|", 1, StopReason.done)


async def test_reflect(chat: ChatFormat) -> None:
    """A claim is confirmed first; what its commands printed is told with the check's result."""
    done = keys(task_complete=True)
    lines = [done, keys("ls\n", task_complete=True), keys("ls\n"), done, done]
    answers = [ok(""), ok("$ ls\na"), ok("$ ls\nb"), ok(""), ok("")]
    rollout, text, asked = await checked(chat, "reflect", lines, answers, [False, True])
    variant = variants.get("reflect")
    quiet = "New terminal output: none"
    assert text == (
        f"{done}||U:{quiet}\n{variant.confirm}||A:{lines[1]}||U:New terminal output:\n$ ls\na\n{variant.failed_check}||"
        f"A:{lines[2]}||U:New terminal output:\n$ ls\nb||A:{done}||U:{quiet}\n{variant.confirm}||A:{done}|"
    )
    assert (asked, rollout.stop) == (2, StopReason.done)


async def test_state(chat: ChatFormat) -> None:
    lines = ["```bash\nls\n```", "<state>look</state>\n```bash\nls\n```", "<state>seen</state>\nDONE"]
    rollout, text, machine = await play(chat, "state", lines, [ok("a\n")])
    complaint = (
        "Your reply had no state. Begin with <state>, what you know and plan, </state>; then one ```bash block, or DONE alone."
    )
    assert text == f"{lines[0]}||U:{complaint}||A:{lines[1]}||U:[exit 0]\na||A:{lines[2]}|"
    assert machine.ran == [("ls", 30.0)]
    assert rollout.turns[0].format_error == "missing_state"


async def test_terminus_json(chat: ChatFormat) -> None:
    lines = [
        keys("ls\n", "pwd\n", mood=1),
        "no",
        keys(task_complete=True),
        keys("ls\n"),
        keys(task_complete=True),
        keys(task_complete=True),
    ]
    rollout, text, machine = await play(
        chat, "terminus_json", lines, [ok("$ ls\n"), ok("a\n"), ok(""), ok("$ ls\n"), ok(""), ok("")]
    )
    confirm, refused = variants.get("terminus_json").confirm, rollout.turns[1].observation
    assert refused.startswith("Your reply had no JSON object. Reply with one JSON object like {")
    assert text == (
        f"{lines[0]}||U:Note: unknown field 'mood' was ignored.\nNew terminal output:\n$ ls\na||A:no||U:{refused}||A:{lines[2]}||"
        f"U:New terminal output: none\n{confirm}||A:{lines[3]}||U:New terminal output:\n$ ls||A:{lines[4]}||"
        f"U:New terminal output: none\n{confirm}||A:{lines[5]}|"
    )
    assert [what for what, _ in machine.ran] == ["keys"] * 6  # one for each command, one to look where there is none
    assert rollout.stop is StopReason.done


async def test_terminus_xml(chat: ChatFormat) -> None:
    body = "<analysis>a</analysis><plan>p</plan><commands>{}</commands>"
    done = f"<response>{body.format('')}<task_complete>true</task_complete></response>"
    lines = [f"<response>{body.format('<keystrokes>ls</keystrokes>')}</response>", done, done]
    rollout, text, _ = await play(chat, "terminus_xml", lines, [ok("$ ls"), ok("\na\n"), ok("")])
    confirm = variants.get("terminus_xml").confirm
    assert text == (f"{lines[0]}||U:New terminal output:\n$ ls||A:{done}||U:New terminal output:\n\na\n{confirm}||A:{done}|")
    assert rollout.stop is StopReason.done


async def test_mini_text(chat: ChatFormat) -> None:
    lines = [
        f"I look.\n```mswea_bash_command\n{command}\n```" for command in ("cd /; ls", f"echo {MARKER}; false", f"echo {MARKER}")
    ]
    answers = [ok("x" * 100), ok(f"{MARKER}\n", 1), ok(f" {MARKER}\nresult\n")]
    rollout, text, machine = await play(chat, "mini_text", lines, answers)
    long = (
        "<returncode>0</returncode>\n<warning>The output is long: look at parts of it with head, tail, grep or sed.</warning>\n"
        f"<output_head>\n{'x' * 30}\n</output_head>\n<elided_chars>40</elided_chars>\n<output_tail>\n{'x' * 30}\n</output_tail>"
    )
    failed = f"<returncode>1</returncode>\n<output>\n{MARKER}\n</output>"
    assert text == f"{lines[0]}||U:{long}||A:{lines[1]}||U:{failed}||A:{lines[2]}|"
    assert machine.ran[0] == ("/bin/bash -c 'cd /; ls'", 30.0)
    assert rollout.stop is StopReason.done


async def test_mini_tool(chat: ChatFormat) -> None:
    lines = [call(command="a") + call(command="b"), "DONE", call(command=f"echo {MARKER}") + call(command="rm x")]
    rollout, text, machine = await play(chat, "mini_tool", lines, [ok("1\n"), ok("", 2), ok(f"{MARKER}\n")])
    first, second = '{"returncode": 0, "output": "1"}', '{"returncode": 2, "output": ""}'
    refused = rollout.turns[1].observation
    assert refused.startswith("Your reply had no tool call. Call bash, like this: <tool_call>")
    told = f"<tool_response>\n{first}\n</tool_response>\n<tool_response>\n{second}\n</tool_response>"
    assert text == f"{lines[0]}||U:{told}||A:DONE||U:{refused}||A:{lines[2]}|"
    assert [command for command, _ in machine.ran] == ["/bin/bash -c a", "/bin/bash -c b", f"/bin/bash -c 'echo {MARKER}'"]
    assert rollout.stop is StopReason.done


async def test_openhands(chat: ChatFormat) -> None:
    lines = [call("execute_bash", command="make", timeout=5), "All is done.", call("finish", message="all done")]
    rollout, text, machine = await play(chat, "openhands", lines, [CommandResult(124, "half\n", timed_out=True)])
    refused = rollout.turns[1].observation
    told = "<tool_response>\nhalf\n[the command took too long and was ended]\n</tool_response>"
    assert text == f"{lines[0]}||U:{told}||A:All is done.||U:{refused}||A:{lines[2]}|"
    assert machine.ran == [("make", 5.0)]
    assert rollout.stop is StopReason.done
    assert rollout.turns[1].format_error == "no_action"


async def test_vanillux(chat: ChatFormat) -> None:
    lines = [f"THOUGHT: look\n{call(command='ls')}{call(command='rm x')}", call(command=f"echo {MARKER}")]
    rollout, text, machine = await play(chat, "vanillux", lines, [ok(""), ok(f"{MARKER}\n")])
    told = "<tool_response>\nNote: only the first of 2 calls was executed.\n(no output)\n\n(exit_code=0)\n</tool_response>"
    assert text == f"{lines[0]}||U:{told}||A:{lines[1]}|"
    assert [command for command, _ in machine.ran] == ["ls", f"echo {MARKER}"]
    assert rollout.stop is StopReason.done


@pytest.mark.parametrize("name", variants.names())
async def test_a_task_with_braces_is_shown_as_it_is_and_no_harness_takes_nothing_for_done(chat: ChatFormat, name: str) -> None:
    variant = variants.get(name)
    assert variant.messages("Make a {file} of {task}.")[-1].content.count("Make a {file} of {task}.") == 1
    for text in (
        "",
        " ",
        "I am done.",
        "\n\n",
        "{}",
        "<response></response>",
        "finish",
        "exit",
        "\ud800",
        "```",
        "<tool_call></tool_call>",
    ):
        action = variant.parse(text)
        assert action.error is not None
        assert action.detail
        assert not action.done


@pytest.mark.parametrize("name", variants.names())
async def test_three_bad_replies_end_it(chat: ChatFormat, name: str) -> None:
    rollout, _, machine = await play(chat, name, ["bad"] * 3, [])
    assert rollout.stop is StopReason.format_errors
    assert machine.ran == []
