"""The records on the arrows of the loop: frozen, slotted, plain Python. Arrays begin in `algo`.

tasks -TaskSpec-> sandbox pool -lease-> episode -Rollout-> verify -ScoredRollout-> advantage -Sample-> learner
"""

import enum
from dataclasses import dataclass, field


class StopReason(enum.StrEnum):
    """Why an episode ended. All of these are the agent's doing and are scored by the verifier."""

    done = "done"  # the agent said that it is done
    turn_limit = "turn_limit"  # `Limits.max_turns` generation calls were made
    context_limit = "context_limit"  # the next prompt would leave no room for a reply
    time_limit = "time_limit"  # `Limits.wall_s` passed
    format_errors = "format_errors"  # `Limits.max_format_errors` replies in a row held no action
    sandbox_spoiled = "sandbox_spoiled"  # what it ran left its sandbox unusable (`errors.SandboxSpoiled`)


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """What tells that a machine is ready, as Docker has it: its command exits with 0. Times in seconds."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0  # in which a failure does not count
    start_interval_s: float = 5.0
    retries: int = 3  # so many failures in a row, and it is not ready


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """How the agent's machine is made. `context` is the build context directory ("" if there is only an image)."""

    context: str = ""
    docker_image: str | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: bool = False
    env: dict[str, str] = field(default_factory=dict)
    build_timeout_s: float = 600.0
    healthcheck: Healthcheck | None = None


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step of a task of several. Its agent begins a new conversation on the machine as the step before left it."""

    name: str  # of its folder under steps/
    instruction: str
    agent_timeout_s: float | None = None
    min_reward: float | None = None  # the next step begins only if this one's reward reaches it
    healthcheck: Healthcheck | None = None


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What an agent may know of a task. The verifier's side is loaded by `reward` from `path`, and only there."""

    id: str
    family: str
    instruction: str  # of a task of several steps: all of theirs, joined
    path: str  # the task directory
    environment: EnvironmentSpec
    level: int = 1
    split: str = "train"
    agent_timeout_s: float | None = None
    touches: tuple[str, ...] = ()  # watched paths that its own solution replaces: an agent may too
    steps: tuple[StepSpec, ...] = ()
    last_step_counts: bool = False  # the task's reward is its last step's, not the mean of all that were verified
    step: str = ""  # name of the one step that this is the task of (`reward.steps.only`)


@dataclass(frozen=True, slots=True)
class SkippedTask:
    """A task directory that was refused: where and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Tasks of one directory tree, what was refused, and what was repaired or ignored (one line each)."""

    tasks: tuple[TaskSpec, ...]
    skipped: tuple[SkippedTask, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandResult:
    """One command in the persistent shell. stdout and stderr are merged in the order of arrival."""

    exit_code: int  # 124 if `timed_out`
    output: str  # decoded with replacement; head and tail if longer than the limit, with a note between
    timed_out: bool = False
    duration_s: float = 0.0
    omitted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sandbox's file tree and shell state at rest. `handle` is the backend's own (a directory for `local`)."""

    id: str
    backend: str
    handle: str
    digest: str  # of the file tree; checked on restore
    lost_processes: tuple[str, ...] = ()  # command lines that were running and are not in the snapshot
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the generator samples. `max_tokens` bounds one completion."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()  # tokens that end a turn beside the model's own


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a mixture-of-experts model used: of each token, in each such layer from the bottom up, `top_k` ids.

    `data`: `[tokens, layers, top_k]` in row-major order, unsigned little-endian integers of `width` bytes (1 or 2).
    """

    data: bytes
    layers: int
    top_k: int
    width: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.width

    @property
    def tokens(self) -> int:
        return len(self.data) // self.row_bytes


Spans = tuple[tuple[int, int], ...]  # of a completion's tokens, in order: (weights version, how many it sampled)


@dataclass(frozen=True, slots=True)
class Completion:
    """What the sampler returned: exact ids (end-of-turn token included), their log-probabilities, weights versions seen.

    Of a model that speaks text the ids are that text's, and no log-probability is known: `logprobs` is then ().
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str  # "stop" or "length"
    version_low: int = 0
    version_high: int = 0
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    routing: Routing | None = None  # of prompt and completion but its last token, which no layer has seen
    weights: Spans = ()  # which version sampled which of the ids; (): not known
    model: str = ""  # as its endpoint calls it; "": the policy
    cost: float = 0.0  # in the currency of the configured prices
    away_s: float = 0.0  # in which its engine was started again or stood still for weights: the machine's time, not the agent's


@dataclass(frozen=True, slots=True)
class Calls:
    """What calls of a model took."""

    prompt_tokens: int = 0  # sum over calls of prompt length
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0  # in the currency of the configured prices

    def __add__(self, other: "Calls") -> "Calls":
        return Calls(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cost + other.cost,
        )


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message as text; only used to build prompts."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Writing:
    """What a model in a role (planner, critic, teacher, judge) answered, and what it took."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0  # in the currency of the configured prices
    model: str = ""  # as its endpoint calls it; "": the policy
    cut: bool = False  # a length limit ended it


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation call and what it caused."""

    text: str  # decoded completion
    command: str | None  # None: done, or a format error
    observation: str
    exit_code: int | None = None
    timed_out: bool = False
    format_error: str = ""  # category of the error; "" if the reply was well formed
    completion_tokens: int = 0
    generate_s: float = 0.0
    command_s: float = 0.0
    weights: Spans = ()  # which versions sampled the completion's tokens; more than one: they came while it was under way


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of append-only tokens. `mask` is 1 exactly on sampled ids; `logprobs` has one entry per 1, in order,
    or none at all where they are not known.

    `turn_ids[i]` is the index of the generation call that token i belongs to (prompt: 0; an observation: the call before it).
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    turn_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    routing: Routing | None = None  # of the tokens before the last sampled one; of what follows nothing is known


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one episode. Order in which they are checked: see `harness.episode`."""

    max_turns: int = 8
    max_context_tokens: int = 2048  # prompt and completions of one episode
    command_timeout_s: float = 30.0
    wall_s: float = 600.0
    task_time: float = 0.0  # times the time that a task gives its agent is a bound too; 0: it is none
    max_format_errors: int = 3
    observation_chars: int = 2000


@dataclass(frozen=True, slots=True)
class RecoveryPoint:
    """A failure of the policy to start from: instruction, failed history, failure state (ReTerm, arXiv 2610.18484)."""

    id: str
    task: TaskSpec
    snapshot: Snapshot
    history_ids: tuple[int, ...]  # every token of the failed episode, as sampled; context, never trained
    num_turns: int
    born_step: int = 0
    commands: tuple[str, ...] = ()
    group_id: str = ""  # of the failed rollout: its engine has the history cached


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to run. `id` is unique in its stage; `group_id` joins the rollouts of one task or restart point."""

    id: str
    group_id: str
    task: TaskSpec
    harness: str
    sampling: SamplingParams
    limits: Limits
    guidance: str = ""  # shown to the agent beside the task (a runbook); stripped before training
    recovery: RecoveryPoint | None = None
    recovery_prompt: str = ""
    keep_snapshot: bool = False
    model: str = ""  # the role (`config.choices.ROLES`) that plays it; "": the policy


@dataclass(frozen=True, slots=True)
class Rollout:
    """The record of one episode."""

    id: str
    group_id: str
    task_id: str
    family: str
    harness: str
    chunks: tuple[Chunk, ...]
    turns: tuple[Turn, ...]
    stop: StopReason
    snapshot: Snapshot | None = None
    recovery_id: str = ""  # the restart point it began from; "" for the task's initial state
    prompt_tokens: int = 0  # sum over calls of prompt length
    completion_tokens: int = 0
    cached_tokens: int = 0
    version_low: int = 0
    version_high: int = 0
    sandbox_s: float = 0.0
    wall_s: float = 0.0
    attempt: int = 1  # 2 and more: earlier attempts were lost to a machine fault
    step: str = ""  # of a task of several: the last that was begun
    step_starts: tuple[int, ...] = ()  # the index of the first chunk of each of its steps that was begun
    cases: dict[str, int] = field(default_factory=dict)  # how each later prompt matched what was recorded (`render.Case`)
    model: str = ""  # that played it, as its endpoint calls it; "": the policy
    cost: float = 0.0  # of its calls, in the currency of the configured prices
    lost: Calls = Calls()  # of the attempts before this one

    @property
    def step_chunk(self) -> int:
        """The index of the last step's first chunk."""
        return self.step_starts[-1] if self.step_starts else 0


@dataclass(frozen=True, slots=True)
class CollectedArtifact:
    """What became of one artifact that a task declares, as Harbor's manifest has it."""

    source: str
    destination: str  # below the trial's directory
    type: str  # "file" or "directory"; of one that is not there, what its name looks like
    status: str  # "ok", "failed" (it could not be had), "empty" or "skipped" (one inside another, or over the bound)
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """What a verification left, for a trial's directory: relative paths and contents."""

    logs: tuple[tuple[str, bytes], ...] = ()
    artifacts: tuple[tuple[str, bytes], ...] = ()
    manifest: tuple[CollectedArtifact, ...] = ()
    left_out: tuple[str, ...] = ()  # paths of files over the bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier found. `strict`: the task's official reward is full. Ids of checks, each once."""

    strict: bool
    reward: float  # the official scalar, in [0, 1]
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    source: str = "reward"  # which report the ids came from; "reward" if there was none
    duration_s: float = 0.0
    replaced: tuple[str, ...] = ()  # what the agent replaced of what a verifier runs through (`watched`)
    log: str = ""  # the end of what the tests printed
    parts: tuple["Verdict", ...] = ()  # of a task of several steps: those of the steps verified, in order
    kept: KeptFiles | None = None  # where the verifier was asked to keep them


class Outcome(enum.StrEnum):
    """What a gate of an audit says of a task. `unmeasured`: the machine, not the task, kept it from saying anything."""

    passed = "passed"
    flag = "flag"
    reject = "reject"
    unmeasured = "unmeasured"


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one gate, or of the judges on one facet. `evidence`: lines that the task's author can act on."""

    gate: str
    outcome: Outcome
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskAudit:
    """What an audit found of one task, up to the gate that it left at; its facets, if it was judged, stand last."""

    task_id: str
    path: str
    findings: tuple[Finding, ...]
    sandbox_s: float = 0.0  # what it took this time: of what was found before, nothing
    prompt_tokens: int = 0  # of the judges
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def verdict(self) -> str:
        """clean, flagged, not measured or rejected: the worst of its findings."""
        found = {finding.outcome for finding in self.findings}
        words = {Outcome.reject: "rejected", Outcome.unmeasured: "not measured", Outcome.flag: "flagged"}
        return next((word for outcome, word in words.items() if outcome in found), "clean")


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout the verifier has scored. Rewards are shaped later, by the stage that knows the calibration."""

    rollout: Rollout
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Flow:
    """How groups go through the buffer from sampler to learner; `queues.buffer` has the laws.

    `extra`: groups under way beyond a batch; -1: as many as `max_staleness` allows. `replace`: groups of no use that each batch
    replaces at most. `first`: a batch is of those that finish first, not of the oldest. `batches`: after so many the run ends;
    0: never. Raises ValueError for what cannot be.
    """

    batch_groups: int
    max_staleness: int = 0
    extra: int = -1
    replace: int = 0
    first: bool = False
    batches: int = 0

    def __post_init__(self) -> None:
        if self.batch_groups < 1 or self.max_staleness < 0 or self.replace < 0:
            raise ValueError(f"{self}: batch_groups is 1 or more, max_staleness and replace are 0 or more")
        if not -1 <= self.extra <= self.batch_groups * self.max_staleness:
            raise ValueError(f"extra={self.extra}: max_staleness allows {self.batch_groups * self.max_staleness}")

    @property
    def capacity(self) -> int:
        """Slots."""
        return self.batch_groups + (self.batch_groups * self.max_staleness if self.extra < 0 else self.extra)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The rollouts of one slot of the buffer: the learner's version when they were admitted, and how many it has moved since."""

    group_id: str
    rollouts: tuple[ScoredRollout, ...]
    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    """What one step learns from. `refused`: ids of the groups of no use that it looked at; `missing`: those not replaced."""

    groups: tuple[FinishedGroup, ...]
    refused: tuple[str, ...] = ()
    missing: int = 0


@dataclass(frozen=True, slots=True)
class DroppedRollout:
    """An episode lost to a machine fault after all its retries: counted, never scored."""

    id: str
    group_id: str
    task_id: str
    reason: str
    attempts: int = 1
    lost: Calls = Calls()  # of all its attempts


@dataclass(frozen=True, slots=True)
class Sample:
    """One chunk ready for the learner. Per-token lists are as long as `ids`; entries off the mask are 0 and never read."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    turn_ids: tuple[int, ...]
    rollout_id: str = ""
    group_id: str = ""
    sampler_logp: tuple[float, ...] = ()
    old_logp: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    ref_logp: tuple[float, ...] = ()  # of the reference, where the loss holds the policy near one
    returns: tuple[float, ...] = ()
    old_values: tuple[float, ...] = ()
    routing: Routing | None = None  # of the first tokens, those before the last action token at least
    temperature: float = 1.0  # of the sampler: its log-probabilities, and the learner's beside them, are of this distribution


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What one optimizer update (or one forward pass over a batch) reported."""

    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A published set of weights: who, which version, its checksum, and where it lies (an opaque handle)."""

    name: str
    version: int
    checksum: str
    handle: object = None
    size_bytes: int = 0
