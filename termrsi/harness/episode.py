"""One episode: an agent, a sandbox, a harness; out comes a Rollout. The agent's failures are values, a machine's are raised.

Limits are checked before each generation call, in this order: wall time, turns, room in the context. A command is bounded by
`Limits.command_timeout_s`, a reply by `SamplingParams.max_tokens`; both are outcomes the agent sees and can react to.

The episode waits for its own completion and its own command only; the generator and the sandbox end those waits.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from termrsi.errors import SandboxSpoiled
from termrsi.harness import parse, variants
from termrsi.harness.render import ChatFormat, Transcript
from termrsi.ports import Generator, Sandbox
from termrsi.records import Completion, EpisodeSpec, Message, Rollout, SamplingParams, StopReason, Turn

Check = Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class _Tally:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    sandbox_s: float = 0.0
    versions: list[int] = field(default_factory=list)


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
        self._checks_left = self._variant.checks_on_done if check else 0

    async def run(self) -> Rollout:
        """Raises SandboxError or EngineError if a machine failed; then nothing of this episode is scored."""
        start_s = time.monotonic()
        self._transcript.prompt(first_prompt(self.spec, self._chat))
        stop = None
        while stop is None:
            try:
                stop = self._limit(time.monotonic() - start_s) or await self._turn()
            except SandboxSpoiled:
                stop = StopReason.sandbox_spoiled
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
            wall_s=time.monotonic() - start_s,
        )

    def _limit(self, elapsed_s: float) -> StopReason | None:
        limits = self.spec.limits
        if elapsed_s > limits.wall_s:
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
        generate_s = time.monotonic() - started_s
        self._record(completion)
        text = self._chat.decode(completion.ids)
        action = parse.parse(text)
        turn = Turn(text, action.command, "", completion_tokens=len(completion.ids), generate_s=generate_s)
        if action.done:
            return await self._claim(turn, completion)
        if action.error:
            return self._complain(turn, action.error, completion)
        assert action.command is not None, "an action is a command, done or an error"
        self._format_errors = 0
        try:
            result = await self._sandbox.run(action.command, self.spec.limits.command_timeout_s)
        except SandboxSpoiled:
            self._turns.append(turn)
            raise
        self._tally.sandbox_s += result.duration_s
        seen = variants.observation(
            result.output, result.exit_code, timed_out=result.timed_out, limit_chars=self.spec.limits.observation_chars
        )
        turn = replace(turn, exit_code=result.exit_code, timed_out=result.timed_out, command_s=result.duration_s)
        return self._observe(turn, seen, completion)

    async def _claim(self, turn: Turn, completion: Completion) -> StopReason | None:
        try:
            ended = self._checks_left <= 0 or self._check is None or await self._check()
        except SandboxSpoiled:
            ended = True  # the verifier will say so too
        if ended:
            self._turns.append(turn)
            return StopReason.done
        self._checks_left -= 1
        return self._observe(turn, self._variant.failed_check, completion)

    def _complain(self, turn: Turn, error: parse.FormatError, completion: Completion) -> StopReason | None:
        self._format_errors += 1
        turn = replace(turn, format_error=error.value)
        if self._format_errors >= self.spec.limits.max_format_errors:
            self._turns.append(turn)
            return StopReason.format_errors
        return self._observe(turn, parse.FEEDBACK[error], completion)

    def _observe(self, turn: Turn, text: str, completion: Completion) -> None:
        self._turns.append(replace(turn, observation=text))
        glue = self._chat.bridge(Message("user", text), ended=completion.ids[-1:] == (self._chat.end_of_turn,))
        self._transcript.next_prompt([*self._transcript.ids, *glue])

    def _record(self, completion: Completion) -> None:
        self._tally.prompt_tokens += len(self._transcript.ids)
        self._tally.completion_tokens += len(completion.ids)
        self._tally.cached_tokens += completion.cached_tokens
        self._tally.versions += [completion.version_low, completion.version_high]
        self._transcript.sampled(completion.ids, completion.logprobs)

    def _sampling(self) -> SamplingParams:
        """Each call of an episode draws from its own stream."""
        sampling = self.spec.sampling
        return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + len(self._turns))


def first_prompt(spec: EpisodeSpec, chat: ChatFormat) -> list[int]:
    """The whole first prompt. A recovery goes on from the failed episode's own ids, then the recovery message (ReTerm 7.3).

    An assisting harness (a teacher's) shows its worked examples instead of the history, and the message as the task that follows.
    """
    variant = variants.get(spec.harness)
    if spec.recovery is None:
        return chat.prompt(variant.messages(spec.task.instruction, spec.guidance))
    if variant.assisting:
        return chat.prompt(variant.messages(spec.recovery_prompt))
    history = spec.recovery.history_ids
    ended = history[-1:] == (chat.end_of_turn,)
    return [*history, *chat.bridge(Message("user", spec.recovery_prompt), ended=ended)]
