"""One episode: an agent, a sandbox, a harness; out comes a Rollout. The agent's failures are values, a machine's are raised.

Limits are checked before each generation call, in this order: wall time, turns, room in the context. What the engine was away is
not the agent's time. A command is bounded by `Limits.command_timeout_s`, a reply by `SamplingParams.max_tokens`; both are outcomes
that the agent sees and can react to.

The episode waits for its own completion and its own command only; the generator and the sandbox end those waits.
"""

import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from termrsi.errors import SandboxError, SandboxSpoiled
from termrsi.furnish import workdir_of
from termrsi.harness import observe, variants
from termrsi.harness.actions import Action, Command, without_thinking
from termrsi.harness.render import ChatFormat, Transcript
from termrsi.harness.terminal import Terminal
from termrsi.harness.variants import MARKER, WORKDIR, Carrier, Done, Machine
from termrsi.ports import Generator, Sandbox
from termrsi.records import CommandResult, Completion, EpisodeSpec, Message, Rollout, SamplingParams, StopReason, Turn

Check = Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class _Tally:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    sandbox_s: float = 0.0
    cost: float = 0.0
    model: str = ""
    versions: list[int] = field(default_factory=list)
    away_s: float = 0.0


class Episode:
    """Runs `spec` to its end. `check` answers a claim to be done, for harnesses that have the verifier in the loop."""

    def __init__(
        self, spec: EpisodeSpec, generator: Generator, sandbox: Sandbox, chat: ChatFormat, check: Check | None = None
    ) -> None:
        self.spec = spec
        self._generator = generator
        self._sandbox = sandbox
        self._chat = chat
        self._check = check
        self._variant = variants.get(spec.harness)
        self._transcript = Transcript(chat.tokenizer)
        self._turns: list[Turn] = []
        self._tally = _Tally()
        self._format_errors = 0
        self._claimed = False  # in the reply before, and asked to confirm it
        self._start_s = time.monotonic()
        self._stopped: StopReason | None = None
        self._saying = ""  # the last reply
        self._terminal = Terminal(sandbox) if self._variant.machine is Machine.terminal else None
        self._checks_left = self._variant.checks_on_done if check else 0

    async def run(self) -> Rollout:
        """Raises SandboxError or EngineError if a machine failed, RequestRefused too; then nothing of this episode is scored."""
        self._start_s = time.monotonic()
        self._transcript.prompt(first_prompt(self.spec, self._chat))
        stop = None
        while stop is None:
            try:
                stop = self._limit(time.monotonic() - self._start_s - self._tally.away_s) or await self._turn()
            except SandboxSpoiled:
                stop = StopReason.sandbox_spoiled
        return self._rollout(stop)

    def so_far(self) -> Rollout:
        """The record of an episode that somebody else ended, perhaps in a command: that turn has seen nothing."""
        if len(self._tally.versions) > 2 * len(self._turns):  # two for each call
            self._turns.append(Turn(self._saying, None, ""))
        return self._rollout(self._stopped or StopReason.time_limit)

    def _rollout(self, stop: StopReason) -> Rollout:
        self._stopped = stop
        tally, spec = self._tally, self.spec
        return Rollout(
            id=spec.id,
            group_id=spec.group_id,
            task_id=spec.task.id,
            family=spec.task.family,
            harness=spec.harness,
            chunks=tuple(self._transcript.chunks),
            turns=tuple(self._turns),
            stop=stop,
            recovery_id=spec.recovery.id if spec.recovery else "",
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            cached_tokens=tally.cached_tokens,
            version_low=min(tally.versions, default=0),
            version_high=max(tally.versions, default=0),
            sandbox_s=tally.sandbox_s,
            wall_s=time.monotonic() - self._start_s,
            cases=dict(self._transcript.cases),
            model=tally.model,
            cost=tally.cost,
        )

    def _limit(self, elapsed_s: float) -> StopReason | None:
        limits = self.spec.limits
        own = limits.task_time * (self.spec.task.agent_timeout_s or 0.0)
        if elapsed_s > min(limits.wall_s, own or limits.wall_s):
            return StopReason.time_limit
        if len(self._turns) >= limits.max_turns:
            return StopReason.turn_limit
        if len(self._transcript.ids) + self.spec.sampling.max_tokens > limits.max_context_tokens:
            return StopReason.context_limit
        return None

    async def _turn(self) -> StopReason | None:
        """One generation call and what it causes; a reason ends the episode."""
        started_s = time.monotonic()
        completion = await self._generator.generate(self._transcript.ids, self._sampling(), self.spec.group_id)
        if not completion.ids:  # not even an end of turn: nothing of the agent's
            raise SandboxError("a completion without a token", "generator")  # as a lost machine: tried again, or dropped
        generate_s = time.monotonic() - started_s
        self._record(completion)
        text = self._saying = self._chat.decode(completion.ids)
        action = self._variant.parse(self._chat.reply(text))
        measured = {"completion_tokens": len(completion.ids), "generate_s": generate_s, "weights": completion.weights}
        turn = Turn(text, action.command, "", **measured)
        if action.error:
            return self._complain(turn, action, completion)
        self._format_errors = 0
        try:
            results = await self._execute(action)
        except SandboxSpoiled:
            self._turns.append(turn)
            raise
        if results:
            seconds = sum(result.duration_s for result in results)
            self._tally.sandbox_s += seconds
            last = results[-1]
            turn = replace(turn, exit_code=last.exit_code, timed_out=last.timed_out, command_s=seconds)
        limit = min(self.spec.limits.observation_chars, self._variant.observation_chars)
        told = [observe.tell(self._variant.wording, result, limit) for result in results]
        if self._ends(action, results):
            return await self._claim(turn, told, action, completion)
        self._claimed = False
        return self._observe(turn, told, action.warnings, completion)

    async def _execute(self, action: Action) -> list[CommandResult]:
        """Results, one for each that is told by itself. What follows one that ends the episode is not executed."""
        if self._terminal is not None:
            return [await self._terminal.send(action.commands)]
        results: list[CommandResult] = []
        for command in action.commands:
            results.append(await self._run(command))
            if self._ends(action, results) and not action.done:
                break
        return results

    async def _run(self, command: Command) -> CommandResult:
        limit_s = self.spec.limits.command_timeout_s
        text = command.text
        if self._variant.machine is Machine.fresh:
            text = f"/bin/bash -c {shlex.quote(text)}"
        return await self._sandbox.run(text, limit_s if command.wait_s is None else min(command.wait_s, limit_s))

    def _ends(self, action: Action, results: list[CommandResult]) -> bool:
        """Whether the agent says by this that it is done."""
        match self._variant.done:
            case Done.printed:
                first = results[-1].output.lstrip().partition("\n")[0].strip() if results else ""
                return bool(results) and results[-1].exit_code == 0 and first == MARKER
            case Done.marked:
                return MARKER in (action.command or "") or any(MARKER in result.output for result in results)
            case _:
                return action.done

    async def _claim(self, turn: Turn, told: list[str], action: Action, completion: Completion) -> StopReason | None:
        if self._variant.done is Done.confirmed and not self._claimed:
            self._claimed = True
            return self._observe(turn, [*told, self._variant.confirm], action.warnings, completion)
        self._claimed = False
        try:
            ended = self._checks_left <= 0 or self._check is None or await self._check()
        except SandboxSpoiled:
            ended = True  # the verifier will say so too
        if ended:
            self._turns.append(turn)
            return StopReason.done
        self._checks_left -= 1
        return self._observe(turn, [*told, self._variant.failed_check], (), completion)

    def _complain(self, turn: Turn, action: Action, completion: Completion) -> StopReason | None:
        assert action.error is not None
        self._format_errors += 1
        turn = replace(turn, format_error=action.error.value)
        if self._format_errors >= self.spec.limits.max_format_errors:
            self._turns.append(turn)
            return StopReason.format_errors
        return self._observe(turn, [action.detail], (), completion, told_by_user=True)

    def _observe(
        self, turn: Turn, told: Sequence[str], warnings: Sequence[str], completion: Completion, *, told_by_user: bool = False
    ) -> None:
        """Appends what the agent is told: by a tool, where it called one, or by the user."""
        self._turns.append(replace(turn, observation=observe.together(told, warnings)))
        if self._variant.carrier is Carrier.tool_calls and not told_by_user:
            messages = [Message("tool", text) for text in (*told[:-1], observe.together(told[-1:], warnings))]
        else:
            messages = [Message("user", observe.together(told, warnings))]
        reply = self._chat.reply(turn.text)
        said = without_thinking(reply)
        if self._variant.thinking == "cut" and said != reply:  # another history: a chunk of its own
            before = self._chat.unopened(self._transcript.ids[: len(self._transcript.ids) - len(completion.ids)])
            glue = self._chat.bridge(messages, ended=True)
            self._transcript.next_prompt([*before, *self._chat.plain(said.lstrip("\n")), self._chat.end_of_turn, *glue])
            return
        self._transcript.follow(self._chat.bridge(messages, ended=completion.ids[-1:] == (self._chat.end_of_turn,)))

    def _record(self, completion: Completion) -> None:
        self._tally.prompt_tokens += len(self._transcript.ids)
        self._tally.completion_tokens += len(completion.ids)
        self._tally.cached_tokens += completion.cached_tokens
        self._tally.cost += completion.cost
        self._tally.model = completion.model
        self._tally.away_s += completion.away_s
        self._tally.versions += [completion.version_low, completion.version_high]
        self._transcript.sampled(completion.ids, completion.logprobs)
        if completion.routing is not None:
            self._transcript.routed(completion.routing)

    def _sampling(self) -> SamplingParams:
        """Each call of an episode draws from its own stream."""
        sampling = replace(self.spec.sampling, stop_ids=self._chat.stop_ids)
        return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + len(self._turns))


def first_prompt(spec: EpisodeSpec, chat: ChatFormat) -> list[int]:
    """The whole first prompt. A recovery goes on from the failed episode's own ids, then the recovery message (ReTerm 7.3).

    An assisting harness (a teacher's) shows its worked examples instead of the history, and the message as the task that follows.
    """
    variant = variants.get(spec.harness)
    show_tools = not chat.knows_tools
    tools = [tool.schema() for tool in variant.tools]
    workdir = workdir_of(spec.task.environment) or WORKDIR
    if spec.recovery is None:
        messages = variant.messages(spec.task.instruction, spec.guidance, show_tools=show_tools, workdir=workdir)
        return chat.prompt(messages, tools)
    if variant.assisting:
        return chat.prompt(variant.messages(spec.recovery_prompt, show_tools=show_tools, workdir=workdir), tools)
    history = spec.recovery.history_ids
    ended = history[-1:] == (chat.end_of_turn,)
    return [*history, *chat.bridge([Message("user", spec.recovery_prompt)], ended=ended)]
