"""One episode against scripted parts: what is sampled is what is trained, limits in order, the verifier in the loop, recovery."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from termrsi.errors import EngineError, SandboxError, SandboxSpoiled
from termrsi.harness import group, variants
from termrsi.harness.episode import Check, Episode, first_prompt
from termrsi.harness.parse import parse
from termrsi.harness.render import ChatFormat
from termrsi.records import (
    CommandResult,
    Completion,
    EnvironmentSpec,
    EpisodeSpec,
    Limits,
    RecoveryPoint,
    Rollout,
    Routing,
    SamplingParams,
    Snapshot,
    StopReason,
    TaskSpec,
    WeightsVersion,
)

LS = "```bash\nls\n```"
TASK = TaskSpec("t1", "files", "Make a file.", "/tasks/t1", EnvironmentSpec())
LIMITS = Limits(max_turns=8, max_context_tokens=100_000, wall_s=600.0, max_format_errors=2, observation_chars=40)


@dataclass
class Script:
    """A generator that says its lines. A line that ends in `…` is cut by the length limit: no end-of-turn token."""

    chat: ChatFormat
    lines: list[str]
    prompts: list[list[int]] = field(default_factory=list)
    asked: list[SamplingParams] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    said: list[int] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        self.prompts.append(list(prompt_ids))
        self.asked.append(params)
        self.keys.append(prefix_key)
        if not self.lines:
            raise EngineError("the script is over")
        text = self.lines.pop(0)
        cut = text.endswith("…")
        ids = self.chat.encode(text.removesuffix("…")) + ([] if cut else [self.chat.end_of_turn])
        self.said += ids
        call = len(self.prompts)
        logprobs = tuple(-call - i / 1000 for i in range(len(ids)))
        spans = ((call, 1), (call + 1, len(ids) - 1))
        return Completion(tuple(ids), logprobs, "length" if cut else "stop", call, call + 1, 10 * call, weights=spans)

    async def pull(self, weights: WeightsVersion) -> None:
        raise NotImplementedError


@dataclass
class Machine:
    """A sandbox that answers from a list and notes what was run. Lost once the list holds an error."""

    answers: list[CommandResult | SandboxError] = field(default_factory=list)
    ran: list[tuple[str, float | None]] = field(default_factory=list)
    id: str = "m"

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        self.ran.append((command, timeout_s))
        answer = self.answers.pop(0) if self.answers else CommandResult(0, "ok\n", duration_s=0.25)
        if isinstance(answer, SandboxError):
            raise answer
        return answer

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


def spec(harness: str = "react", limits: Limits = LIMITS, **more: object) -> EpisodeSpec:
    base = EpisodeSpec("e", "g", TASK, harness, SamplingParams(max_tokens=64, seed=5), limits)
    return replace(base, **more)


async def play(
    chat: ChatFormat, lines: list[str], what: EpisodeSpec | None = None, machine: Machine | None = None, check: Check | None = None
) -> tuple[Rollout, Script]:
    script = Script(chat, list(lines))
    return await Episode(what or spec(), script, machine or Machine(), chat, check).run(), script


def trained(rollout: Rollout) -> list[int]:
    return [i for c in rollout.chunks for i, m in zip(c.ids, c.mask, strict=True) if m]


async def test_a_command_then_done(chat: ChatFormat) -> None:
    machine = Machine([CommandResult(3, "file\n", duration_s=0.5)])
    rollout, _ = await play(chat, [LS, "DONE"], machine=machine)
    assert rollout.stop is StopReason.done
    assert machine.ran == [("ls", LIMITS.command_timeout_s)]
    first, last = rollout.turns
    assert (first.text, first.command, first.observation, first.exit_code) == (LS, "ls", "[exit 3]\nfile", 3)
    assert (last.text, last.command, last.observation, last.exit_code) == ("DONE", None, "", None)
    assert (rollout.task_id, rollout.family, rollout.group_id, rollout.harness) == ("t1", "files", "g", "react")
    assert rollout.sandbox_s == 0.5


async def test_what_is_trained_is_what_was_sampled(chat: ChatFormat) -> None:
    rollout, script = await play(chat, [LS, "no action", "```bash\nmake…", LS, "DONE"])
    (chunk,) = rollout.chunks
    assert trained(rollout) == script.said
    assert len(chunk.logprobs) == sum(chunk.mask)
    assert [int(-p) for p in chunk.logprobs] == [u + 1 for u, m in zip(chunk.turn_ids, chunk.mask, strict=True) if m]
    conversation = variants.get("react").messages(TASK.instruction)
    assert list(chunk.ids[: len(chat.prompt(conversation))]) == chat.prompt(conversation)


async def test_the_experts_of_each_call_reach_the_rollout(chat: ChatFormat) -> None:
    """Each call tells of its whole prompt and its reply: one row for each token before the last that was sampled."""

    class Routed(Script):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
            completion = await super().generate(prompt_ids, params, prefix_key)
            tokens = len(prompt_ids) + len(completion.ids) - 1
            return replace(completion, routing=Routing(bytes([len(self.prompts)] * tokens), 1, 1))

    script = Routed(chat, [LS, "DONE"])
    (chunk,) = (await Episode(spec(), script, Machine(), chat).run()).chunks
    assert chunk.routing is not None
    sampled = [i for i, m in enumerate(chunk.mask) if m]
    assert chunk.routing.tokens == sampled[-1]
    said = len(script.prompts[0]) + len(chat.encode(LS))  # the end of turn is computed by the next call
    assert list(chunk.routing.data) == [1] * said + [2] * (sampled[-1] - said)


async def test_each_prompt_continues_the_one_before_and_ids_are_sent(chat: ChatFormat) -> None:
    rollout, script = await play(chat, [LS, "talk…", "DONE"])
    (chunk,) = rollout.chunks
    for earlier, later in zip(script.prompts, script.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
        assert later == list(chunk.ids[: len(later)])
    assert script.keys == ["g", "g", "g"], "a group goes to the engine that holds its prefix"


async def test_a_cut_reply_gets_its_end_of_turn_as_glue(chat: ChatFormat) -> None:
    rollout, script = await play(chat, ["talk…", "DONE"])
    (chunk,) = rollout.chunks
    end = len(script.prompts[0]) + len(chat.encode("talk"))
    assert (chunk.ids[end], chunk.mask[end], chunk.mask[end - 1]) == (chat.end_of_turn, 0, 1)
    ended, _ = await play(chat, ["talk", "DONE"])
    assert ended.chunks[0].ids == chunk.ids
    assert ended.chunks[0].mask != chunk.mask


async def test_the_tally(chat: ChatFormat) -> None:
    rollout, script = await play(chat, [LS, LS, "DONE"])
    assert rollout.prompt_tokens == sum(len(p) for p in script.prompts)
    assert rollout.completion_tokens == len(script.said) == sum(t.completion_tokens for t in rollout.turns)
    assert rollout.cached_tokens == 10 + 20 + 30
    assert (rollout.version_low, rollout.version_high) == (1, 4)
    assert [turn.weights for turn in rollout.turns] == [
        ((k, 1), (k + 1, turn.completion_tokens - 1)) for k, turn in zip((1, 2, 3), rollout.turns, strict=True)
    ]
    assert rollout.sandbox_s == 0.5


async def test_each_call_draws_from_its_own_stream(chat: ChatFormat) -> None:
    _, script = await play(chat, [LS, LS, "DONE"])
    assert [p.seed for p in script.asked] == [5, 6, 7]
    _, script = await play(chat, [LS, "DONE"], spec(sampling=SamplingParams(max_tokens=64)))
    assert [p.seed for p in script.asked] == [None, None]


@pytest.mark.parametrize(("times", "own", "ends"), [(0.0, 1e-9, False), (1.0, 1e-9, True), (1.0, None, False), (1e12, 1e-9, False)])
async def test_the_tasks_own_time_bounds_it_if_asked_for(chat: ChatFormat, times: float, own: float | None, ends: bool) -> None:
    late = replace(spec(limits=replace(LIMITS, task_time=times)), task=replace(TASK, agent_timeout_s=own))
    rollout, _ = await play(chat, ["DONE"], late)
    assert (rollout.stop is StopReason.time_limit) is ends


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (Limits(wall_s=-1.0, max_turns=0, max_context_tokens=0), StopReason.time_limit),
        (Limits(wall_s=600.0, max_turns=0, max_context_tokens=0), StopReason.turn_limit),
        (Limits(wall_s=600.0, max_turns=1, max_context_tokens=0), StopReason.context_limit),
    ],
)
async def test_limits_are_checked_in_order_before_a_call(chat: ChatFormat, limits: Limits, stop: StopReason) -> None:
    rollout, script = await play(chat, ["DONE"], spec(limits=limits))
    assert (rollout.stop, rollout.turns, rollout.chunks, script.prompts) == (stop, (), (), [])


@pytest.mark.parametrize(("away_s", "stop"), [(0.0, StopReason.time_limit), (1e6, StopReason.done)])
async def test_time_in_which_the_engine_was_away_is_not_the_agents(chat: ChatFormat, away_s: float, stop: StopReason) -> None:
    """Here its first answer takes longer than it has: by itself, or because the engine was started again."""

    class Slow(Script):
        async def generate(self, *arguments: Any, **named: Any) -> Completion:
            said = await super().generate(*arguments, **named)
            await asyncio.sleep(0.02)
            return replace(said, away_s=away_s)

    script = Slow(chat, [LS, "DONE"])
    rollout = await Episode(spec(limits=replace(LIMITS, wall_s=0.01)), script, Machine(), chat).run()
    assert rollout.stop is stop


async def test_the_turn_limit_counts_calls(chat: ChatFormat) -> None:
    rollout, script = await play(chat, [LS] * 9, spec(limits=replace(LIMITS, max_turns=3)))
    assert (rollout.stop, len(rollout.turns), len(script.prompts)) == (StopReason.turn_limit, 3, 3)
    rollout, _ = await play(chat, [LS, LS, "DONE"], spec(limits=replace(LIMITS, max_turns=3)))
    assert rollout.stop is StopReason.done, "done on the last turn is done"


async def test_the_context_limit_leaves_room_for_a_reply(chat: ChatFormat) -> None:
    start = len(first_prompt(spec(), chat))
    exact = replace(LIMITS, max_context_tokens=start + 64)
    rollout, script = await play(chat, [LS, LS], spec(limits=exact))
    assert (rollout.stop, len(script.prompts)) == (StopReason.context_limit, 1)
    rollout, script = await play(chat, [LS], spec(limits=replace(exact, max_context_tokens=start + 63)))
    assert (rollout.stop, len(script.prompts)) == (StopReason.context_limit, 0)


async def test_format_errors_in_a_row_end_the_episode(chat: ChatFormat) -> None:
    rollout, _ = await play(chat, ["talk", "```bash\nls", LS])
    assert rollout.stop is StopReason.format_errors
    assert [t.format_error for t in rollout.turns] == ["no_action", "unclosed_block"]
    assert [t.observation for t in rollout.turns] == [parse("").detail, ""]


async def test_a_command_starts_the_count_again(chat: ChatFormat) -> None:
    rollout, _ = await play(chat, ["talk", LS, "talk", LS, "talk", "DONE"])
    assert rollout.stop is StopReason.done
    assert len(rollout.turns) == 6


async def test_the_agent_is_told_what_was_wrong(chat: ChatFormat) -> None:
    _, script = await play(chat, [f"{LS}\nDONE", "DONE"])
    assert parse(f"{LS}\nDONE").detail in chat.decode(script.prompts[1])


async def test_long_output_is_cut_for_the_agent(chat: ChatFormat) -> None:
    machine = Machine([CommandResult(0, "a" * 500 + "z" * 500)])
    rollout, script = await play(chat, [LS, "DONE"], machine=machine)
    assert rollout.turns[0].observation == f"[exit 0]\n{'a' * 20}\n[... 960 characters left out ...]\n{'z' * 20}"
    assert rollout.turns[0].observation in chat.decode(script.prompts[1])


async def test_a_timed_out_command_is_an_observation(chat: ChatFormat) -> None:
    machine = Machine([CommandResult(124, "half\n", timed_out=True, duration_s=30.0)])
    rollout, _ = await play(chat, [LS, "DONE"], machine=machine)
    assert (rollout.turns[0].timed_out, rollout.turns[0].observation) == (True, "[timed out]\nhalf")
    assert rollout.stop is StopReason.done


async def test_a_machine_fault_is_raised(chat: ChatFormat) -> None:
    with pytest.raises(SandboxError, match="lost"):
        await play(chat, [LS], machine=Machine([SandboxError("lost")]))
    with pytest.raises(EngineError, match="over"):
        await play(chat, [])


async def test_a_sandbox_that_the_agent_spoiled_ends_the_episode(chat: ChatFormat) -> None:
    rollout, _ = await play(chat, [LS, LS, "DONE"], machine=Machine([CommandResult(0, "ok\n"), SandboxSpoiled("no bash")]))
    assert rollout.stop is StopReason.sandbox_spoiled
    assert [(turn.command, turn.observation) for turn in rollout.turns] == [("ls", "[exit 0]\nok"), ("ls", "")]
    assert sum(len(chunk.ids) for chunk in rollout.chunks) > 0  # what led there is trained on


class Verdicts:
    """A verifier's answers to claims; complains if asked once too often."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    async def __call__(self) -> bool:
        return self.answers.pop(0)


async def test_the_verifier_in_the_loop_sends_the_agent_on(chat: ChatFormat) -> None:
    check, machine = Verdicts(False, True), Machine()
    rollout, script = await play(chat, ["DONE", LS, "DONE"], spec("retry"), machine, check)
    assert (rollout.stop, check.answers, len(machine.ran)) == (StopReason.done, [], 1)
    assert rollout.turns[0].observation == variants.get("retry").failed_check
    assert trained(rollout) == script.said


async def test_its_answers_are_counted(chat: ChatFormat) -> None:
    check = Verdicts(False, False)
    rollout, _ = await play(chat, ["DONE"] * 3, spec("retry"), check=check)
    assert (rollout.stop, len(rollout.turns), check.answers) == (StopReason.done, 3, []), "the third claim is not looked at"


async def test_the_first_claim_may_be_right(chat: ChatFormat) -> None:
    check = Verdicts(True)
    rollout, _ = await play(chat, ["DONE"], spec("retry"), check=check)
    assert (rollout.stop, len(rollout.turns), check.answers) == (StopReason.done, 1, [])


@pytest.mark.parametrize("harness", ["react", "fewshot"])
async def test_other_harnesses_never_ask(chat: ChatFormat, harness: str) -> None:
    rollout, _ = await play(chat, ["DONE"], spec(harness), check=Verdicts())
    assert rollout.stop is StopReason.done


async def test_retry_without_a_verifier_takes_the_word(chat: ChatFormat) -> None:
    rollout, _ = await play(chat, ["DONE"], spec("retry"))
    assert (rollout.stop, len(rollout.turns)) == (StopReason.done, 1)


async def test_guidance_is_shown(chat: ChatFormat) -> None:
    _, script = await play(chat, ["DONE"], spec(guidance="1. touch it"))
    assert "1. touch it\n\nTask: Make a file." in chat.decode(script.prompts[0])


@pytest.mark.parametrize("last", ["DONE", "talk…"])
async def test_a_recovery_goes_on_from_the_failed_ids(chat: ChatFormat, last: str) -> None:
    limits = replace(LIMITS, max_turns=2)
    _, script = await play(chat, [LS, last], spec(limits=limits))
    cut = last.endswith("…")
    history = tuple(script.prompts[1] + chat.encode(last.removesuffix("…")) + ([] if cut else [chat.end_of_turn]))
    point = RecoveryPoint("p", TASK, Snapshot("s", "local", "/s", "d"), history, num_turns=2)
    (recovery,) = group.recovery_group(point, 1, label="r", harness="react", sampling=SamplingParams(), limits=LIMITS, seed=0)
    rollout, script = await play(chat, [LS, "DONE"], recovery)
    prompt = script.prompts[0]
    assert tuple(prompt[: len(history)]) == history, "as sampled, not encoded again"
    glue = prompt[len(history) :]
    assert (glue[0] == chat.end_of_turn) == cut
    text = group.RECOVERY_PROMPT.format(instruction=TASK.instruction)
    assert chat.tokenizer.decode(glue).removeprefix("<|im_end|>") == (
        f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trained(rollout) == script.said, "the failed history is context and is never trained"
    assert (rollout.recovery_id, len(rollout.turns)) == ("p", 2)


def test_a_history_that_leaves_no_room_is_told_before(chat: ChatFormat) -> None:
    point = RecoveryPoint("p", TASK, Snapshot("s", "local", "/s", "d"), tuple(range(90)), num_turns=1)
    assert group.fits(point, replace(LIMITS, max_context_tokens=100), reserve_tokens=10)
    assert not group.fits(point, replace(LIMITS, max_context_tokens=100), reserve_tokens=11)
